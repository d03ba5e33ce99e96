"""The server that Prometheus scrapes: `/metrics` in the requested format, and `/healthz`."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler

from edgert_deploy.fleet.export.prometheus import PROTOBUF, TEXT, Exposition
from edgert_deploy.fleet.web import WebServer

READ_TIMEOUT_S = 10.0
GZIP_ABOVE_BYTES = 4096


class ScrapeServer:
    """Serves an exposition on `host`:`port` from a thread; port 0 takes a free one. Raises ConfigInvalid."""

    def __init__(self, exposition: Exposition, host: str, port: int) -> None:
        # One scrape at a time: a second one would render the same again.
        drawing = threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            timeout = READ_TIMEOUT_S
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    accepts = self.headers.get("Accept", "")
                    with drawing:
                        if "application/vnd.google.protobuf" in accepts and "MetricFamily" in accepts:
                            self._answer(200, PROTOBUF, exposition.protobuf())
                        else:
                            self._answer(200, TEXT, exposition.text().encode())
                elif path == "/healthz":
                    self._answer(200, "text/plain", b"ok\n")
                else:
                    self._answer(404, "text/plain", b"this is an edgert exporter: see /metrics\n")

            def _answer(self, code: int, kind: str, body: bytes) -> None:
                packed = len(body) > GZIP_ABOVE_BYTES and "gzip" in self.headers.get("Accept-Encoding", "")
                body = gzip.compress(body, 1) if packed else body
                self.send_response(code)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                if packed:
                    self.send_header("Content-Encoding", "gzip")
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                return  # scrapes are not logged

        self._server = WebServer(Handler, host, port, f"--listen {host}:{port}", "scrape")
        self.port, self.close = self._server.port, self._server.close
