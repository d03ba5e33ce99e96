"""The web server of `edgert fleet ui`: the page's files, its API, and a stream of events for each open page.

It changes nothing: it answers only GET and HEAD. The files of `assets/` are read once; no request leads to a look-up on
disk. Connections, open streams and every wait have a limit.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import threading
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from edgert.errors import EdgeRTError
from edgert_deploy.fleet.store.schema import StoreFailed
from edgert_deploy.fleet.ui.access import Access
from edgert_deploy.fleet.ui.answers import Answers, NotHere
from edgert_deploy.fleet.ui.hub import View
from edgert_deploy.fleet.web import WebServer

ASSETS = Path(__file__).parent / "assets"
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml"}
PAGES = ("", "devices", "events", "rollouts", "device")  # one file: the script shows the page
STREAMS_MAX = 32
READ_TIMEOUT_S = 30.0
KEEP_ALIVE_S = 15.0
RETRY_MS = 2000
GZIP_ABOVE_BYTES = 2048
QUERY_FIELDS_MAX = 20
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class PageServer:
    """Serves `answers` on `host`:`port` from threads; port 0 takes a free one. Raises ConfigInvalid."""

    def __init__(self, answers: Answers, access: Access, host: str, port: int) -> None:
        files = {path.name: _File.of(path) for path in ASSETS.iterdir() if path.suffix in TYPES}
        streams = threading.BoundedSemaphore(STREAMS_MAX)

        class Handler(_Handler):
            pass

        Handler.answers, Handler.access, Handler.files, Handler.streams = answers, access, files, streams
        self._server = WebServer(Handler, host, port, f"--host {host} --port {port}", "ui")
        self.port, self.close = self._server.port, self._server.close


class _File:
    """One of the page's files."""

    def __init__(self, name: str, body: bytes) -> None:
        self.kind = TYPES[Path(name).suffix] + "; charset=utf-8"
        self.body = body
        self.tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'

    @classmethod
    def of(cls, path: Path) -> _File:
        return cls(path.name, path.read_bytes())


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    answers: Answers
    access: Access
    files: Mapping[str, _File]
    streams: threading.BoundedSemaphore
    timeout = READ_TIMEOUT_S
    protocol_version = "HTTP/1.1"
    server_version = "edgert"
    sys_version = ""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if "Content-Length" in self.headers or "Transfer-Encoding" in self.headers:
            self.close_connection = True  # a body is not read, and must not be taken for the next request
        refusal = self.access.refusal(self.headers)  # type: ignore[arg-type]  # a Message reads like a Mapping
        if refusal is not None:
            return self._words(HTTPStatus.FORBIDDEN, refusal)
        try:
            url = urlsplit(self.path)
            asked = dict(parse_qsl(url.query, max_num_fields=QUERY_FIELDS_MAX))
        except ValueError:
            return self._words(HTTPStatus.BAD_REQUEST, "invalid address, or too many fields in it")
        if self.access.is_token(asked.get("token", "")):
            return self._let_in(url.path)
        if not self.access.knows_token(self.headers):  # type: ignore[arg-type]
            return self._words(
                HTTPStatus.UNAUTHORIZED, "open the address that `edgert fleet ui` printed: it holds the token"
            )
        parts = [unquote(part) for part in url.path.split("/")[1:]]
        if parts[0] == "assets" and len(parts) == 2 and parts[1] in self.files:
            return self._file(self.files[parts[1]])
        if parts == ["api", "live"] and self.command == "GET":
            return self._stream(asked)
        if parts[0] == "api":
            return self._api("/".join(parts[1:]), asked)
        if parts[0] in PAGES:
            return self._file(self.files["index.html"])
        return self._words(HTTPStatus.NOT_FOUND, "no such page: open /")

    # --- answers ----------------------------------------------------------------------------

    def _api(self, path: str, asked: Mapping[str, str]) -> None:
        try:
            self._json(HTTPStatus.OK, self.answers.answer(path, asked))
        except EdgeRTError as error:
            code = (
                HTTPStatus.NOT_FOUND
                if isinstance(error, NotHere)
                else HTTPStatus.SERVICE_UNAVAILABLE
                if isinstance(error, StoreFailed)
                else HTTPStatus.BAD_REQUEST
            )
            self._json(code, {"error": {"code": error.code, "message": error.message}})

    def _json(self, code: HTTPStatus, value: Any) -> None:
        self._send(code, "application/json", json.dumps(value, separators=(",", ":")).encode())

    def _words(self, code: HTTPStatus, words: str) -> None:
        self._send(code, "text/plain; charset=utf-8", f"{words}\n".encode())

    def _file(self, file: _File) -> None:
        if self.headers.get("If-None-Match") == file.tag:
            return self._send(HTTPStatus.NOT_MODIFIED, file.kind, b"", {"ETag": file.tag})
        self._send(HTTPStatus.OK, file.kind, file.body, {"ETag": file.tag, "Cache-Control": "no-cache"})

    def _let_in(self, path: str) -> None:
        """Make the token a cookie and remove it from the address, which people copy and browsers remember."""
        cookie = f"{self.access.cookie}={self.access.token}; Path=/; HttpOnly; SameSite=Lax; Max-Age=2592000"
        here = "/" + path.lstrip("/\\")
        self._send(HTTPStatus.SEE_OTHER, "text/plain", b"", {"Set-Cookie": cookie, "Location": here})

    def _send(self, code: HTTPStatus, kind: str, body: bytes, more: Mapping[str, str] | None = None) -> None:
        self.send_response(code)
        headers = {"Content-Type": kind, "Cache-Control": "no-store", **HEADERS, **(more or {})}
        if len(body) > GZIP_ABOVE_BYTES and "gzip" in self.headers.get("Accept-Encoding", ""):
            body, headers["Content-Encoding"] = gzip.compress(body, 1), "gzip"
        for name, value in headers.items():
            self.send_header(name, value)
        if code != HTTPStatus.NOT_MODIFIED:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    # --- the stream -------------------------------------------------------------------------

    def _stream(self, asked: Mapping[str, str]) -> None:
        if not self.streams.acquire(blocking=False):
            return self._words(HTTPStatus.SERVICE_UNAVAILABLE, f"{STREAMS_MAX} pages are open: close one")
        try:
            self._send_events(asked)
        except EdgeRTError as error:
            self._words(HTTPStatus.BAD_REQUEST, error.message)
        except OSError:
            pass  # the page was closed, or receives nothing
        finally:
            self.streams.release()
            self.close_connection = True

    def _send_events(self, asked: Mapping[str, str]) -> None:
        """Send the fleet, then its changes, until the page or the server ends."""
        hub, chosen = self.answers.hub, self.answers.filter(asked)
        self.send_response(HTTPStatus.OK)
        for name, said in {"Content-Type": "text/event-stream", "Cache-Control": "no-store", **HEADERS}.items():
            self.send_header(name, said)
        self.end_headers()
        self.wfile.write(f"retry: {RETRY_MS}\n".encode())
        told: View | None = None
        number: int | None = -1
        while number is not None:
            view = hub.view(chosen)
            if told is None or view.is_news(told):
                change = None if told is None else view.since(told)
                kind, value = ("fleet", view.whole()) if change is None else ("change", change)
                self.wfile.write(f"event: {kind}\ndata: {json.dumps(value, separators=(',', ':'))}\n\n".encode())
                told = view
            before = number
            number = hub.wait(before, KEEP_ALIVE_S)
            if number == before:
                self.wfile.write(b": still here\n\n")

    def log_message(self, format: str, *args: object) -> None:
        return  # requests of pages are not logged
