"""One HTTP/1.1 connection: bytes in, requests out, answers back, in the connection's own thread.

Theory of operation: the parser reads every head and every chunked body. A body whose length the head states is read
directly into its place instead, so a large tensor is copied once. The connection reads nothing ahead of the answer to
the request before, so a client cannot pile up work, and every wait has a limit.
"""

from __future__ import annotations

import contextlib
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from http import HTTPStatus
from urllib.parse import unquote

from edgert.http.limits import BodyBudget, Limits
from edgert.http.messages import HttpError, HttpRequest, HttpResponse
from edgert.http.request_parser import ParsedRequest, RequestParser
from edgert.protocol.local_socket import timeval

RECEIVE_BYTES = 64 * 1024
KEPT_BODY_BYTES_MAX = 2 * 1024**2  # what a connection keeps for its next body
INFLATE_BYTES = 256 * 1024  # at a time
LINGER_S = 1.0
LINGER_BYTES_MAX = 16 * 1024**2
SEND_PARTS_MAX = 64
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_INFLATE_BITS = {"gzip": 31, "deflate": 15}

Handler = Callable[[HttpRequest], HttpResponse]


class HttpConnection:
    """Serves `sock` with `handle`. `idle_since_s` is when the wait for a request began; None during one."""

    def __init__(self, sock: socket.socket, handle: Handler, limits: Limits, budget: BodyBudget) -> None:
        self._sock, self._handle, self._limits, self._budget = sock, handle, limits, budget
        self.idle_since_s: float | None = time.monotonic()
        self._stopping = False
        self._parser = RequestParser()
        self._received = memoryview(bytearray(RECEIVE_BYTES))
        self._kept = memoryview(b"")
        self._taken_bytes = 0
        stall = timeval(limits.stall_s)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, stall)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, stall)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def serve(self) -> None:
        """Answer requests until the client leaves, must leave, or breaks the rules. Raises OSError."""
        keep = True
        while keep and not self._stopping:
            try:
                request = self._next()
                if request is None:
                    return
                keep = self._answer(request)
            except HttpError as error:  # the next request in the stream cannot be found any more
                self._send(error.response(), keep_alive=False, with_body=True)
                self._linger()
                return
            finally:
                self._budget.give_back(self._taken_bytes)
                self._taken_bytes = 0
                self.idle_since_s = time.monotonic()

    def close_when_idle(self) -> None:
        """Read no further request. Any thread may call this."""
        self._stopping = True
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)

    def _next(self) -> ParsedRequest | None:
        """Return the next request with a complete head; None if the client is gone or silent for too long."""
        idle_until_s = time.monotonic() + self._limits.idle_s_max
        head_until_s: float | None = None
        while (request := self._parser.take()) is None:
            if head_until_s is None and self._parser.requests:
                head_until_s = time.monotonic() + self._limits.head_s_max
            try:
                count = self._sock.recv_into(self._received)
            except BlockingIOError:
                count = -1
            now_s = time.monotonic()
            if head_until_s is not None and now_s > head_until_s:
                raise HttpError(
                    HTTPStatus.REQUEST_TIMEOUT, f"the request's head did not come within {self._limits.head_s_max:g} s"
                )
            silent = count < 0 or not self._parser.requests  # blank lines are not a request
            if not count or (silent and (self._stopping or now_s > idle_until_s)):
                return None
            if count > 0:
                self.idle_since_s = None
                self._parser.feed(self._received[:count])
        self.idle_since_s = None
        return request

    def _answer(self, request: ParsedRequest) -> bool:
        """Answer one request; return whether the connection goes on. Raises HttpError if the stream is unreadable."""
        if "host" not in request.headers and request.keep_alive:
            raise HttpError(HTTPStatus.BAD_REQUEST, "the request has no Host field")
        body = self._body(request)
        # A request that was read whole can be refused, and the next one is still found.
        try:
            encoding = request.headers.get("content-encoding", "identity").strip().lower()
            if encoding != "identity":
                body = self._inflated(body, encoding)
            path = unquote(request.url.partition("?")[0])
            response = self._handle(HttpRequest(request.method, path, request.headers, body))
        except HttpError as error:
            response = error.response()
        keep_alive = request.keep_alive and not self._stopping
        self._send(response, keep_alive, with_body=request.method != "HEAD")
        return keep_alive

    # --- bodies -------------------------------------------------------------------------------

    def _body(self, request: ParsedRequest) -> memoryview:
        if request.complete:
            self._check_size(request.body_bytes)
            return memoryview(request.parts[0] if len(request.parts) == 1 else b"".join(request.parts))
        if request.headers.get("expect", "").lower() == "100-continue" and not request.parts:
            self._check_size(int(request.headers.get("content-length", 0)))
            self._sock.sendall(_CONTINUE)
        if "content-length" in request.headers:
            return self._body_of_length(request, int(request.headers["content-length"]))
        return self._chunked_body(request)

    def _body_of_length(self, request: ParsedRequest, size_bytes: int) -> memoryview:
        """Read the rest of a body without the parser; the next request gets a new one."""
        self._check_size(size_bytes)
        self._take(size_bytes)
        place = self._kept if size_bytes <= len(self._kept) else memoryview(bytearray(size_bytes))
        if size_bytes <= KEPT_BODY_BYTES_MAX:
            self._kept = place
        body = place[:size_bytes]
        at = 0
        for part in request.parts:
            body[at : at + len(part)] = part
            at += len(part)
        until_s = time.monotonic() + self._limits.body_s_max(size_bytes)
        while at < size_bytes:
            at += self._receive(body[at:], until_s)
        self._parser = RequestParser()
        return body

    def _chunked_body(self, request: ParsedRequest) -> memoryview:
        until_s = time.monotonic() + self._limits.body_s_max(self._limits.body_bytes_max)
        # The parser fills the request at the end of its queue.
        self._parser.requests.appendleft(request)
        while not request.complete:
            before = request.body_bytes
            self._parser.feed(self._received[: self._receive(self._received, until_s)])
            self._check_size(request.body_bytes)
            self._take(request.body_bytes - before)
        self._parser.requests.popleft()
        return memoryview(b"".join(request.parts))

    def _receive(self, place: memoryview, until_s: float) -> int:
        try:
            count = self._sock.recv_into(place)
        except BlockingIOError as error:
            raise HttpError(HTTPStatus.REQUEST_TIMEOUT, f"the body stopped for {self._limits.stall_s:g} s") from error
        if not count:
            raise ConnectionError("the client closed the connection inside a request")
        if time.monotonic() > until_s:
            raise HttpError(
                HTTPStatus.REQUEST_TIMEOUT, "the body came too slowly; at least 256 KiB/s are expected after 10 s"
            )
        return count

    def _inflated(self, body: memoryview, encoding: str) -> memoryview:
        bits = _INFLATE_BITS.get(encoding)
        if bits is None:
            raise HttpError(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                f"Content-Encoding {encoding[:40]!r} is not supported; use gzip or deflate",
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
            raise HttpError(HTTPStatus.BAD_REQUEST, f"the {encoding} data of the body is incomplete")
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
        head = response.head(keep_alive)
        parts: Sequence[bytes | memoryview] = [head, *response.parts] if with_body else [head]
        total = sum(map(len, parts))
        if len(parts) > SEND_PARTS_MAX:
            parts = [b"".join(parts)]
        try:
            sent = self._sock.sendmsg(parts)
            if sent < total:
                self._send_rest(parts, sent)
        except BlockingIOError as error:
            raise ConnectionError("the client does not read its answer") from error

    def _send_rest(self, parts: Sequence[bytes | memoryview], sent: int) -> None:
        """Send the rest of `parts` after their first `sent` bytes."""
        until_s = time.monotonic() + self._limits.body_s_max(sum(map(len, parts)))
        for part in parts:
            rest, sent = memoryview(part)[sent:], max(0, sent - len(part))
            while rest:
                rest = rest[self._sock.send(rest) :]
                if time.monotonic() > until_s:
                    raise ConnectionError("the client reads its answer too slowly")

    def _linger(self) -> None:
        """Let the client read the answer: if the socket closed with bytes unread, the kernel would drop the answer."""
        until_s, read = time.monotonic() + LINGER_S, 0
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(0.2))
            while read < LINGER_BYTES_MAX and time.monotonic() < until_s:
                count = self._sock.recv_into(self._received)
                if not count:
                    return
                read += count
