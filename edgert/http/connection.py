"""One HTTP/1.1 connection: bytes in, requests out, answers back, in the connection's own thread.

Theory of operation: httptools (the parser of Node.js) reads every head and every chunked body. A body whose
length the head states is read straight into its place instead, so that a large tensor is copied once. Nothing
is read ahead of the answer to the request before, so a client cannot pile up work, and every wait has an end.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from email.utils import formatdate
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import unquote

from edgert.errors import ConfigInvalid
from edgert.http.limits import (
    HEAD_BYTES_MAX,
    HEAD_S_MAX,
    HEADERS_MAX,
    IDLE_S_MAX,
    STALL_S,
    BodyBudget,
    Limits,
)
from edgert.http.messages import HttpError, HttpRequest, HttpResponse

if TYPE_CHECKING:
    from httptools import HttpRequestParser

RECEIVE_BYTES = 64 * 1024
KEPT_BODY_BYTES_MAX = 2 * 1024**2  # what a connection keeps for its next body
INFLATE_BYTES = 256 * 1024  # at a time
LINGER_S = 1.0
LINGER_BYTES_MAX = 16 * 1024**2
SEND_PARTS_MAX = 64
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_INFLATE_BITS = {"gzip": 31, "deflate": 15}

Handler = Callable[[HttpRequest], HttpResponse]


class _Incoming:
    """A request on its way in. httptools calls the methods of `_Inbox`, which fill this."""

    __slots__ = (
        "body_bytes",
        "complete",
        "head_bytes",
        "head_complete",
        "headers",
        "keep_alive",
        "method",
        "parts",
        "url",
    )

    def __init__(self) -> None:
        self.method = self.url = ""
        self.headers: dict[str, str] = {}
        self.parts: list[bytes] = []
        self.head_bytes = self.body_bytes = 0
        self.head_complete = self.complete = self.keep_alive = False


class _Inbox:
    """The requests of one connection in the order they came; the last one may be incomplete."""

    def __init__(self) -> None:
        from httptools import HttpRequestParser

        self.requests: deque[_Incoming] = deque()
        self._parser: HttpRequestParser = HttpRequestParser(self)

    def feed(self, data: memoryview) -> None:
        """Raises HttpError (400, 431) where the bytes are no HTTP, or too much of it."""
        from httptools import HttpParserError, HttpParserUpgrade

        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade:  # no other protocol is spoken here: the request is answered, then it ends
            self.requests[-1].keep_alive = False
        except HttpParserError as error:
            raise HttpError(HTTPStatus.BAD_REQUEST, f"not HTTP/1.1: {error}") from error
        for request in self.requests:
            if request.head_bytes > HEAD_BYTES_MAX or len(request.headers) > HEADERS_MAX:
                raise HttpError(
                    HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
                    f"a request's head may have {HEAD_BYTES_MAX} bytes and {HEADERS_MAX} fields",
                )

    def take(self) -> _Incoming | None:
        """The first request, where its head is complete."""
        return self.requests.popleft() if self.requests and self.requests[0].head_complete else None

    def on_message_begin(self) -> None:
        self.requests.append(_Incoming())

    def on_url(self, url: bytes) -> None:
        request = self.requests[-1]
        request.url += url.decode("latin-1")
        request.head_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        request = self.requests[-1]
        request.head_bytes += len(name) + len(value) + 4
        request.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        request = self.requests[-1]
        request.method = self._parser.get_method().decode("latin-1")
        request.keep_alive = self._parser.should_keep_alive()
        request.head_complete = True

    def on_body(self, body: bytes) -> None:
        request = self.requests[-1]
        request.parts.append(body)
        request.body_bytes += len(body)

    def on_message_complete(self) -> None:
        self.requests[-1].complete = True


class HttpConnection:
    """Serves `sock` with `handle`. `idle_since_s` is when it began to wait for a request; None during one."""

    def __init__(self, sock: socket.socket, handle: Handler, limits: Limits, budget: BodyBudget) -> None:
        self._sock, self._handle, self._limits, self._budget = sock, handle, limits, budget
        self.idle_since_s: float | None = time.monotonic()
        self._stopping = False
        self._inbox = _Inbox()
        self._received = memoryview(bytearray(RECEIVE_BYTES))
        self._kept = memoryview(b"")
        self._taken_bytes = 0
        stall = struct.pack("ll", int(STALL_S), 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, stall)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, stall)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def serve(self) -> None:
        """Answer requests until the client is gone, is to go, or breaks the rules. Raises OSError."""
        keep = True
        while keep and not self._stopping:
            try:
                incoming = self._next()
                if incoming is None:
                    return
                keep = self._answer(incoming)
            except HttpError as error:  # what follows in the stream cannot be told apart any more
                self._send(error.response(), keep_alive=False, with_body=True)
                self._linger()
                return
            finally:
                self._budget.give_back(self._taken_bytes)
                self._taken_bytes = 0
                self.idle_since_s = time.monotonic()

    def close_when_idle(self) -> None:
        """No further request is read. May be called from any thread."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)

    def _next(self) -> _Incoming | None:
        """The next request with a complete head; None when the client has gone or stays silent."""
        idle_until_s = time.monotonic() + IDLE_S_MAX
        head_until_s: float | None = None
        while (incoming := self._inbox.take()) is None:
            if head_until_s is None and self._inbox.requests:
                head_until_s = time.monotonic() + HEAD_S_MAX
            try:
                count = self._sock.recv_into(self._received)
            except BlockingIOError:
                count = -1
            now_s = time.monotonic()
            if head_until_s is not None and now_s > head_until_s:
                raise HttpError(
                    HTTPStatus.REQUEST_TIMEOUT, f"the request's head did not come within {HEAD_S_MAX:.0f} s"
                )
            silent = count < 0 or not self._inbox.requests  # blank lines are no request
            if not count or (silent and (self._stopping or now_s > idle_until_s)):
                return None
            if count > 0:
                self.idle_since_s = None
                self._inbox.feed(self._received[:count])
        self.idle_since_s = None
        return incoming

    def _answer(self, incoming: _Incoming) -> bool:
        """Whether the connection may go on afterwards. Raises HttpError where the rest of it makes no sense."""
        if "host" not in incoming.headers and incoming.keep_alive:
            raise HttpError(HTTPStatus.BAD_REQUEST, "the request has no Host field")
        body = self._body(incoming)
        # What was read whole may be refused without harm to what follows.
        try:
            encoding = incoming.headers.get("content-encoding", "identity").strip().lower()
            if encoding != "identity":
                body = self._inflated(body, encoding)
            path = unquote(incoming.url.partition("?")[0])
            response = self._handle(HttpRequest(incoming.method, path, incoming.headers, body))
        except HttpError as error:
            response = error.response()
        keep_alive = incoming.keep_alive and not self._stopping
        self._send(response, keep_alive, with_body=incoming.method != "HEAD")
        return keep_alive

    # --- bodies -------------------------------------------------------------------------------

    def _body(self, incoming: _Incoming) -> memoryview:
        if incoming.complete:
            self._check_size(incoming.body_bytes)
            return memoryview(incoming.parts[0] if len(incoming.parts) == 1 else b"".join(incoming.parts))
        if incoming.headers.get("expect", "").lower() == "100-continue" and not incoming.parts:
            self._check_size(int(incoming.headers.get("content-length", 0)))
            self._sock.sendall(_CONTINUE)
        if "content-length" in incoming.headers:
            return self._body_of_length(incoming, int(incoming.headers["content-length"]))
        return self._chunked_body(incoming)

    def _body_of_length(self, incoming: _Incoming, size_bytes: int) -> memoryview:
        """Read the rest past the parser, which ends here: the next request gets a new one."""
        self._check_size(size_bytes)
        self._take(size_bytes)
        if size_bytes > len(self._kept):
            place = memoryview(bytearray(size_bytes))
            self._kept = place if size_bytes <= KEPT_BODY_BYTES_MAX else self._kept
        else:
            place = self._kept
        body = place[:size_bytes]
        at = 0
        for part in incoming.parts:
            body[at : at + len(part)] = part
            at += len(part)
        until_s = time.monotonic() + self._limits.body_s_max(size_bytes)
        while at < size_bytes:
            at += self._receive(body[at:], until_s)
        self._inbox = _Inbox()
        return body

    def _chunked_body(self, incoming: _Incoming) -> memoryview:
        until_s = time.monotonic() + self._limits.body_s_max(self._limits.body_bytes_max)
        # The parser goes on to fill the request that it began, wherever the queue stands.
        self._inbox.requests.appendleft(incoming)
        while not incoming.complete:
            before = incoming.body_bytes
            self._inbox.feed(self._received[: self._receive(self._received, until_s)])
            self._check_size(incoming.body_bytes)
            self._take(incoming.body_bytes - before)
        self._inbox.requests.popleft()
        return memoryview(b"".join(incoming.parts))

    def _receive(self, place: memoryview, until_s: float) -> int:
        try:
            count = self._sock.recv_into(place)
        except BlockingIOError as error:
            raise HttpError(HTTPStatus.REQUEST_TIMEOUT, f"no more of the body came within {STALL_S:.0f} s") from error
        if not count:
            raise ConnectionError("the client went away inside a request")
        if time.monotonic() > until_s:
            raise HttpError(HTTPStatus.REQUEST_TIMEOUT, "the body came too slowly")
        return count

    def _inflated(self, body: memoryview, encoding: str) -> memoryview:
        bits = _INFLATE_BITS.get(encoding)
        if bits is None:
            raise HttpError(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"Content-Encoding {encoding[:40]!r} is not known; gzip and deflate are",
            )
        inflater = zlib.decompressobj(bits)
        parts: list[bytes] = []
        size = 0
        try:
            rest: bytes | memoryview = body
            while rest and not inflater.eof:
                part = inflater.decompress(rest, INFLATE_BYTES)
                rest = inflater.unconsumed_tail
                parts.append(part)
                size += len(part)
                self._check_size(size)
                self._take(len(part))
        except zlib.error as error:
            raise HttpError(HTTPStatus.BAD_REQUEST, f"the body is not {encoding}: {error}") from error
        if not inflater.eof:
            raise HttpError(HTTPStatus.BAD_REQUEST, f"the body's {encoding} data ends in the middle")
        return memoryview(b"".join(parts))

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._limits.body_bytes_max:
            raise HttpError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"a body may have {self._limits.body_bytes_max} bytes ([serving] frame_mb): send less at once",
            )

    def _take(self, size_bytes: int) -> None:
        self._budget.take(size_bytes)
        self._taken_bytes += size_bytes

    # --- answers ------------------------------------------------------------------------------

    def _send(self, response: HttpResponse, keep_alive: bool, *, with_body: bool) -> None:
        size = sum(map(len, response.parts))
        fields = "".join(f"{name}: {value}\r\n" for name, value in response.headers)
        head = (
            f"HTTP/1.1 {response.status} {_REASONS.get(response.status, '')}\r\nDate: {_date()}\r\n"
            f"Content-Type: {response.content_type}\r\nContent-Length: {size}\r\n{fields}"
            f"{'' if keep_alive else _CLOSE}\r\n"
        ).encode("latin-1")
        parts: Sequence[bytes | memoryview] = [head, *response.parts] if with_body else [head]
        total = sum(map(len, parts))
        if len(parts) > SEND_PARTS_MAX:
            parts = [b"".join(parts)]
        try:
            sent = self._sock.sendmsg(parts)
            if sent < total:
                self._send_rest(parts, sent)
        except BlockingIOError as error:
            raise ConnectionError("the client takes no answer") from error

    def _send_rest(self, parts: Sequence[bytes | memoryview], sent: int) -> None:
        """Send what is left of `parts` after their first `sent` bytes."""
        until_s = time.monotonic() + self._limits.body_s_max(sum(map(len, parts)))
        for part in parts:
            rest, sent = memoryview(part)[sent:], max(0, sent - len(part))
            while rest:
                rest = rest[self._sock.send(rest) :]
                if time.monotonic() > until_s:
                    raise ConnectionError("the client takes its answer too slowly")

    def _linger(self) -> None:
        """Let the client read the answer: to close with bytes unread would have the kernel throw it away."""
        until_s, read = time.monotonic() + LINGER_S, 0
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 200_000))
            while read < LINGER_BYTES_MAX and time.monotonic() < until_s:
                count = self._sock.recv_into(self._received)
                if not count:
                    return
                read += count


_CLOSE = "Connection: close\r\n"
_REASONS = {status.value: status.phrase for status in HTTPStatus}
_dated: tuple[int, str] = (0, "")


def _date() -> str:
    """The Date field, made once a second."""
    global _dated
    now_s = int(time.time())
    if _dated[0] != now_s:
        _dated = (now_s, formatdate(now_s, usegmt=True))
    return _dated[1]


def check_installed() -> None:
    """Raises ConfigInvalid where the parser's package is missing."""
    try:
        import httptools  # noqa: F401
    except ImportError as error:
        raise ConfigInvalid(
            "[http] needs the package httptools: from the host, edgert bootstrap DEVICE --upgrade; "
            "or here, pip install 'edgert[http]'"
        ) from error
