"""The web server of the exporter and of the fleet's page. It runs the device's HTTP code in a thread."""

from __future__ import annotations

import gzip
import socket
import threading

from edgert.errors import ConfigInvalid
from edgert.http.address import BACKLOG
from edgert.http.connection import Handler
from edgert.http.limits import Limits
from edgert.http.messages import HttpRequest, HttpResponse
from edgert.http.server import HttpServer
from edgert.printable import endpoint

GZIP_ABOVE_BYTES = 2048
LIMITS = Limits(body_bytes_max=0, connections_max=256)  # every request is a GET or a HEAD, without a body


class WebServer:
    """Serves HTTP from its own thread, called `name`; port 0 means a free port. Raises ConfigInvalid."""

    def __init__(self, handle: Handler, host: str, port: int, name: str) -> None:
        import httptools  # noqa: F401  # a missing package fails here, not at the first connection

        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
        except (OSError, OverflowError) as error:
            # Python appends a note to the message: ` (while ...)`
            reason, _, _ = str(getattr(error, "strerror", None) or error).partition(" (while ")
            raise ConfigInvalid(
                f"--listen {endpoint(host, port)} cannot be used: {reason}; choose another address or port"
            ) from error
        listener.setblocking(False)
        self.port = int(listener.getsockname()[1])
        self._stop, stop = socket.socketpair()
        server = HttpServer(listener, lambda request: _packed(request, handle(request)), LIMITS)
        self._thread = threading.Thread(target=server.run, args=(stop,), name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Accept no more requests. Wait a few seconds for the requests in progress."""
        self._stop.close()
        self._thread.join()


def _packed(request: HttpRequest, response: HttpResponse) -> HttpResponse:
    size_bytes = sum(map(len, response.parts))
    if size_bytes <= GZIP_ABOVE_BYTES or "gzip" not in request.headers.get("accept-encoding", ""):
        return response
    body = gzip.compress(b"".join(response.parts), 1)
    return response._replace(parts=(body,), headers=(*response.headers, ("Content-Encoding", "gzip")))
