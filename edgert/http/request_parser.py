"""The requests of one connection, parsed by httptools (the parser of Node.js).

Most clients send the same head with each request, before a different tensor. So the parser stores the last head with
its parsed form. Between two requests, the same bytes have the same meaning, so the parser does not parse them again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import TYPE_CHECKING

from edgert.errors import ConfigInvalid
from edgert.http.limits import HEAD_BYTES_MAX, HEADERS_MAX
from edgert.http.messages import HttpError

if TYPE_CHECKING:
    from httptools import HttpRequestParser


@dataclass(slots=True)
class ParsedRequest:
    """The parts of a request that have arrived. The callbacks of `RequestParser` add the parts."""

    method: str = ""
    url: str = ""
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    head_bytes: int = 0
    body_bytes: int = 0
    head_complete: bool = False
    complete: bool = False
    keep_alive: bool = False
    version: str = ""


class RequestParser:
    """Collects requests in the order of arrival; the last request may be incomplete."""

    def __init__(self) -> None:
        self.requests: deque[ParsedRequest] = deque()
        self._last_head = b""
        self._last_head_parsed = ParsedRequest()
        self.skip_body()

    def feed(self, data: memoryview) -> None:
        """Parse `data`. Raises HttpError (400, 431) if it is not HTTP, or a head is too long."""
        between_requests = self._last.complete and not self._unparsed_bytes
        if between_requests and self._last_head and self._reuse_head(data):
            return
        self._parse(data)
        if between_requests:
            self._store_head(data)

    def next_request(self) -> ParsedRequest | None:
        """Return the first request once its head is complete."""
        return self.requests.popleft() if self.requests and self.requests[0].head_complete else None

    def skip_body(self) -> None:
        """Expect the next request, because the caller itself reads the rest of the current request's body."""
        from httptools import HttpRequestParser

        self._parser: HttpRequestParser = HttpRequestParser(self)
        self._last = ParsedRequest(complete=True)
        self._continued: ParsedRequest | None = None  # the request whose rest a new parser parses
        self._unparsed_bytes = 0

    def _store_head(self, data: memoryview) -> None:
        """Store the head in `data`, if only bytes of a body with a stated length follow the head."""
        request = self._last
        head = bytes(data[: len(data) - request.body_bytes])
        if (
            len(self.requests) == 1
            and request.keep_alive
            and "transfer-encoding" not in request.headers
            and head.find(b"\r\n\r\n") == len(head) - 4
        ):
            self._last_head = head
            self._last_head_parsed = replace(request, parts=[])

    def _reuse_head(self, data: memoryview) -> bool:
        """Add a request without parsing if `data` is the stored head and body bytes; return whether it is."""
        parsed, at = self._last_head_parsed, len(self._last_head)
        size_bytes = int(parsed.headers.get("content-length", 0))
        body_bytes = len(data) - at
        if body_bytes > size_bytes or bytes(data[:at]) != self._last_head:
            return False
        self._last = ParsedRequest(
            parsed.method, parsed.url, parsed.headers, [bytes(data[at:])] if body_bytes else [], parsed.head_bytes,
            body_bytes, head_complete=True, complete=body_bytes == size_bytes, keep_alive=True, version=parsed.version,
        )  # fmt: skip
        self.requests.append(self._last)
        return True

    def _parse(self, data: memoryview) -> None:
        from httptools import HttpParserError, HttpParserUpgrade

        before, rest = self._progress(), data
        try:
            while rest:
                try:
                    self._parser.feed_data(rest)
                    break
                except HttpParserUpgrade as upgrade:
                    if self._last.method == "CONNECT":  # what follows is not HTTP: the server answers, then closes
                        self._last.keep_alive = False
                        break
                    rest = rest[upgrade.args[0] :]
                    self._ignore_upgrade()
        except HttpParserError as error:
            raise HttpError(HTTPStatus.BAD_REQUEST, f"not HTTP/1.1: {error}") from error
        # httptools keeps a field, a trailer or a chunk's extension until it is complete, and reports nothing before.
        self._unparsed_bytes = self._unparsed_bytes + len(data) if self._progress() == before else 0
        for request in self.requests or (ParsedRequest(),):
            head_bytes = max(request.head_bytes, self._unparsed_bytes)
            if head_bytes > HEAD_BYTES_MAX or len(request.headers) > HEADERS_MAX:
                raise HttpError(
                    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                    f"the request's head is too long: send at most {HEAD_BYTES_MAX} bytes and {HEADERS_MAX} fields",
                )

    def _ignore_upgrade(self) -> None:
        """Parse the rest of a request with the field `Upgrade` as HTTP/1.1, the only protocol here.

        At the end of such a head, httptools ends the request without its body. So a new parser gets a head that only
        states the length of the body. Java's HttpClient sends `Upgrade: h2c` with each request.
        """
        from httptools import HttpRequestParser

        request = self._last
        framing = [name for name in ("content-length", "transfer-encoding") if name in request.headers]
        fields = "".join(f"{name}: {request.headers[name]}\r\n" for name in framing)
        self._parser = HttpRequestParser(self)
        self._continued = request
        self._parser.feed_data(f"POST / HTTP/{request.version}\r\n{fields}\r\n".encode("latin-1"))

    def _progress(self) -> tuple[int, int, int, bool, bool]:
        last = self._last
        return len(self.requests), last.head_bytes, last.body_bytes, last.head_complete, last.complete

    # --- called by httptools ------------------------------------------------------------------

    def on_message_begin(self) -> None:
        if self._continued is not None:
            self._last, self._continued = self._continued, None
            self._last.complete = False
            return
        self._last = ParsedRequest()
        self.requests.append(self._last)

    def on_url(self, url: bytes) -> None:
        request = self._last
        if request.head_complete:
            return  # the head of `_ignore_upgrade`
        request.url += url.decode("latin-1")
        request.head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        request = self._last
        request.head_bytes += len(name) + len(value) + 4
        if request.head_complete:
            return  # a trailer, or the head of `_ignore_upgrade`, must not change the head
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        # A repeated field is a list (RFC 9110, 5.3), so a second value does not replace the first.
        request.headers[key] = f"{request.headers[key]}, {text}" if key in request.headers else text

    def on_headers_complete(self) -> None:
        request = self._last
        if request.head_complete:
            return
        request.method = self._parser.get_method().decode("latin-1")
        request.keep_alive = self._parser.should_keep_alive()
        request.version = self._parser.get_http_version()
        request.head_complete = True

    def on_body(self, body: bytes) -> None:
        request = self._last
        request.parts.append(body)
        request.body_bytes += len(body)

    def on_message_complete(self) -> None:
        self._last.complete = True


def check_installed() -> None:
    """Raise ConfigInvalid if httptools is missing."""
    try:
        import httptools  # noqa: F401  # only to learn whether it can be imported
    except ImportError as error:
        raise ConfigInvalid(
            "[http] needs the package httptools. From the host: edgert bootstrap DEVICE --upgrade; "
            "or here: pip install 'edgert[http]'"
        ) from error
