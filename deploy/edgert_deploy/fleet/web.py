"""The web server of the exporter and of the fleet's page: threads with a limit, quiet about disconnects."""

from __future__ import annotations

import socket
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from edgert.errors import ConfigInvalid

CONNECTIONS_MAX = 256


class WebServer(ThreadingHTTPServer):
    """Serves from a thread of its own on `host`:`port`; port 0 takes a free one. Raises ConfigInvalid.

    `asked` is the address as the user gave it, for the message.
    """

    daemon_threads = True

    def __init__(self, handler: type[BaseHTTPRequestHandler], host: str, port: int, asked: str, name: str) -> None:
        self._room = threading.BoundedSemaphore(CONNECTIONS_MAX)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host.strip("[]"), port), handler)
        except (OSError, OverflowError) as error:
            raise ConfigInvalid(
                f"{asked} cannot be used: {getattr(error, 'strerror', None) or error}; choose another port"
            ) from error
        threading.Thread(target=self.serve_forever, name=name, daemon=True).start()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def close(self) -> None:
        self.shutdown()
        self.server_close()

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # a client that disconnects is not logged
            super().handle_error(request, client_address)
