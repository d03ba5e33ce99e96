"""The web server of `edgert fleet ui`: the page's files, its API, and an event stream for each page.

The server changes nothing: it answers only GET and HEAD. The files of `assets/` are read once, so no request reads from
the disk. Connections, open streams and every wait have a limit.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Generator, Mapping
from html import escape
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from edgert.errors import ConfigInvalid, EdgeRTError
from edgert.http.browsers import READING
from edgert.http.messages import HttpRequest, HttpResponse
from edgert_deploy.fleet.store.database import StoreFailed
from edgert_deploy.fleet.store.results import csv_text
from edgert_deploy.fleet.ui.access import Access
from edgert_deploy.fleet.ui.answers import Answers, NotFound
from edgert_deploy.fleet.ui.fleet_state import Filter
from edgert_deploy.fleet.ui.live_views import View
from edgert_deploy.fleet.web import WebServer

ASSETS = Path(__file__).parent / "assets"
TYPES = {
    ".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".svg": "image/svg+xml", ".json": "application/json"
}  # fmt: skip
DESCRIPTION = "openapi.json"
# All these pages have one file. Its script shows the right page.
PAGES = ("", "devices", "events", "rollouts", "device")
STREAMS_MAX = 32
KEEP_ALIVE_S = 15.0
RETRY_MS = 2000
QUERY_FIELDS_MAX = 20
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class PageServer:
    """Serves the page from threads; port 0 means a free port. Raises ConfigInvalid.

    `alerts` is the address of an Alertmanager, to which the page links; "" for none.
    """

    def __init__(self, answers: Answers, access: Access, host: str, port: int, alerts: str = "") -> None:
        self._answers, self._access = answers, access
        self._files = {
            path.name: _File(path.name, path.read_bytes()) for path in ASSETS.iterdir() if path.suffix in TYPES
        }
        if alerts:
            page = self._files["index.html"].body
            link = f'<a class="alerts" href="{escape(alerts)}">Alerts</a>'
            self._files["index.html"] = _File("index.html", page.replace(b"<!-- alerts -->", link.encode()))
        self._streams = threading.BoundedSemaphore(STREAMS_MAX)
        self._server = WebServer(self._answer, host, port, "ui")
        self.port, self.close = self._server.port, self._server.close

    def _answer(self, request: HttpRequest) -> HttpResponse:
        headers = request.headers
        refusal = self._access.refusal(request.method, headers)
        if refusal is not None:
            return _text(HTTPStatus.FORBIDDEN, refusal)
        if request.method not in READING:
            return _text(
                HTTPStatus.METHOD_NOT_ALLOWED, "this page changes nothing: use GET", {"Allow": ", ".join(READING)}
            )
        try:
            url = urlsplit(request.target)
            query = dict(parse_qsl(url.query, max_num_fields=QUERY_FIELDS_MAX))
        except ValueError:
            return _text(HTTPStatus.BAD_REQUEST, "invalid address, or too many fields in it")
        if self._access.is_token(query.get("token", "")):
            return self._accept_token(url.path)
        if not self._access.knows_token(headers):
            return _text(HTTPStatus.UNAUTHORIZED, "open the address that `edgert fleet ui` printed: it holds the token")
        return self._page(request, [unquote(part) for part in url.path.split("/")[1:]], query)

    def _page(self, request: HttpRequest, parts: list[str], query: Mapping[str, str]) -> HttpResponse:
        """Answer an allowed request. `parts` are the parts of its path."""
        match parts:
            case ["assets", name] if name in self._files:
                return self._files[name].response(request.headers)
            case ["api", "v1", name] if name == DESCRIPTION:
                return self._files[DESCRIPTION].response(request.headers)
            case ["api", "v1", "live"] if request.method == "GET":
                return self._live(query)
            case ["api", "v1", *rest]:
                return self._api("/".join(rest), query)
            case ["api", *_]:
                return self._api("", query)
            case [name, *_] if name in PAGES:
                return self._files["index.html"].response(request.headers)
        return _text(HTTPStatus.NOT_FOUND, "no such page: open /")

    def _api(self, path: str, query: Mapping[str, str]) -> HttpResponse:
        """Answer as JSON. With the parameter `format`, the answer is a download, in JSON or CSV."""
        file_format = query.get("format", "")
        try:
            if file_format not in ("", "csv", "json"):
                raise ConfigInvalid(f"format={file_format[:20]!r} is unknown; known: json, csv")
            name = f'attachment; filename="edgert-{path}.{file_format}"'
            headers = {"Content-Disposition": name} if file_format else {}
            if file_format == "csv":
                body = csv_text(self._answers.rows(path, query)).encode()
                return _response(HTTPStatus.OK, "text/csv; charset=utf-8; header=present", body, headers)
            return _json(HTTPStatus.OK, self._answers.answer(path, query), headers)
        except NotFound as error:
            return _json(HTTPStatus.NOT_FOUND, {"error": error.as_json()})
        except StoreFailed as error:
            return _json(HTTPStatus.SERVICE_UNAVAILABLE, {"error": error.as_json()})
        except EdgeRTError as error:
            return _json(HTTPStatus.BAD_REQUEST, {"error": error.as_json()})

    def _accept_token(self, path: str) -> HttpResponse:
        """Move the token from the address to a cookie, because people copy and browsers store addresses."""
        cookie = f"{self._access.cookie}={self._access.token}; Path=/; HttpOnly; SameSite=Lax; Max-Age=2592000"
        location = "/" + path.lstrip("/\\")
        return _response(HTTPStatus.SEE_OTHER, "text/plain", b"", {"Set-Cookie": cookie, "Location": location})

    def _live(self, query: Mapping[str, str]) -> HttpResponse:
        try:
            chosen = self._answers.filter(query)
        except EdgeRTError as error:
            return _text(HTTPStatus.BAD_REQUEST, error.message)
        if not self._streams.acquire(blocking=False):
            return _text(
                HTTPStatus.SERVICE_UNAVAILABLE, f"{STREAMS_MAX} pages are open; the server allows no more: close one"
            )
        return HttpResponse(HTTPStatus.OK, (), "text/event-stream", tuple(HEADERS.items()), self._events(chosen))

    def _events(self, chosen: Filter) -> Generator[bytes, None, None]:
        """Yield the whole fleet, then its changes, until the page or the server closes."""
        live_views = self._answers.live_views
        try:
            yield f"retry: {RETRY_MS}\n".encode()
            sent: View | None = None
            number: int | None = -1
            while number is not None:
                view = live_views.view(chosen)
                if sent is None or view.differs_from(sent):
                    change = None if sent is None else view.changes_since(sent)
                    kind, value = ("fleet", view.as_json()) if change is None else ("change", change)
                    yield f"event: {kind}\ndata: {_dumped(value)}\n\n".encode()
                    sent = view
                before = number
                number = live_views.wait(before, KEEP_ALIVE_S)
                if number == before:
                    yield b": still here\n\n"
        finally:
            self._streams.release()


class _File:
    """One of the page's files."""

    def __init__(self, name: str, body: bytes) -> None:
        self.kind = TYPES[Path(name).suffix] + "; charset=utf-8"
        self.body = body
        self.tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'

    def response(self, headers: Mapping[str, str]) -> HttpResponse:
        if headers.get("if-none-match") == self.tag:
            return _response(HTTPStatus.NOT_MODIFIED, self.kind, b"", {"ETag": self.tag})
        return _response(HTTPStatus.OK, self.kind, self.body, {"ETag": self.tag, "Cache-Control": "no-cache"})


def _json(code: HTTPStatus, value: Any, more: Mapping[str, str] | None = None) -> HttpResponse:
    return _response(code, "application/json", _dumped(value).encode(), more)


def _dumped(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _text(code: HTTPStatus, text: str, more: Mapping[str, str] | None = None) -> HttpResponse:
    return _response(code, "text/plain; charset=utf-8", f"{text}\n".encode(), more)


def _response(code: HTTPStatus, kind: str, body: bytes, more: Mapping[str, str] | None = None) -> HttpResponse:
    return HttpResponse(code, (body,), kind, tuple({**HEADERS, **(more or {})}.items()))
