"""One HTTP/1.1 connection: receives requests and sends answers, in the connection's own thread.

Theory of operation: the parser reads every head and every chunked body. The connection reads a body with a stated
length directly into a buffer, so a large tensor is copied once. The connection reads the next request only after it has
answered the last request, so a client cannot queue work. Every wait has a limit. The connection notes in its `Place`
when it waits for the client, because a waiting connection can lose its place (edgert/http/admission.py).
"""

from __future__ import annotations

import contextlib
import mmap
import socket
import time
import zlib
from collections.abc import Callable, Sequence
from http import HTTPStatus

from edgert.http.admission import Admission, Place, busy
from edgert.http.limits import NEXT_HEAD_S, Limits
from edgert.http.messages import HttpError, HttpRequest, HttpResponse
from edgert.http.request_parser import ParsedRequest, RequestParser
from edgert.protocol.local_socket import timeval

RECEIVE_BYTES = 64 * 1024
BODY_BUFFER_BYTES_MAX = 2 * 1024**2  # the largest buffer that a connection keeps for its next body
INFLATE_BYTES = 256 * 1024  # the largest piece that is unpacked at a time
LINGER_S = 3.0  # the longest time in which a client that still sends can read why its connection ends
LINGER_SILENT_S_MAX = 0.2  # the longest time between two receptions of such a client
LINGER_BYTES_MAX = 16 * 1024**2
LINGER_POLL_S = 0.02
SEND_PARTS_MAX = 64
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_TCP_ESTABLISHED = 1  # of the kernel's tcp_states.h
_INFLATE_BITS = {"gzip": 31, "deflate": 15}

Handler = Callable[[HttpRequest], HttpResponse]


class HttpConnection:
    """Answers the requests on `sock` with `handle`. `clock` is monotonic seconds."""

    def __init__(
        self,
        sock: socket.socket,
        handle: Handler,
        limits: Limits,
        admission: Admission,
        place: Place,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sock = sock
        self._handle = handle
        self._limits = limits
        self._clock = clock
        self._admission = admission
        self._place = place
        self._parser = RequestParser()
        self._received = memoryview(bytearray(RECEIVE_BYTES))
        self._body_buffer = memoryview(b"")
        stall = timeval(limits.stall_s)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, stall)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, stall)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def serve(self) -> None:
        """Answer requests until the client closes, must end, or breaks the protocol. Raises OSError."""
        keep = True
        while keep:  # also if the connection must end: a request may have arrived before
            try:
                request = self._next_request()
                if request is None:
                    return
                keep = self._answer(request)
            except HttpError as error:  # after this error, the start of the next request in the stream is unknown
                self.refuse(error)
                return
            finally:
                self._admission.release_bytes(self._place)
                self._place.was_answered = True
                self._place.due_s = self._clock() + (NEXT_HEAD_S if keep else 0)

    def refuse(self, error: HttpError) -> None:
        """Answer with `error`, whatever the client sends, and let the client read the answer. Raises OSError."""
        self._send(error.response(), keep_alive=False, with_body=True)
        self._linger()

    def _next_request(self) -> ParsedRequest | None:
        """Return the next request with a complete head; None if the client has gone or was silent too long."""
        began_s, place = self._clock(), self._place
        idle_s_max = self._limits.idle_s_max if place.was_answered else self._limits.head_s_max
        head_until_s: float | None = None
        while (request := self._parser.next_request()) is None:
            if head_until_s is None and self._parser.requests:
                head_until_s = self._clock() + self._limits.head_s_max
                if place.was_answered:  # the time of a new client started when it connected
                    place.due_s = self._clock() + NEXT_HEAD_S
            try:
                count = self._sock.recv_into(self._received)
            except BlockingIOError:
                count = -1
            if count > 0:
                self._parser.feed(self._received[:count])
            now_s = self._clock()
            if head_until_s is not None and now_s > head_until_s:
                raise HttpError(
                    HTTPStatus.REQUEST_TIMEOUT,
                    f"the request's head did not arrive within {self._limits.head_s_max:g} s",
                )
            begun = bool(self._parser.requests)  # blank lines are not a request
            if place.end_reason and begun and count <= 0:
                raise busy(place.end_reason)
            silent = count < 0 or not begun
            if not count or (silent and (place.end_reason or now_s - began_s > idle_s_max)):
                return None
        return request

    def _answer(self, request: ParsedRequest) -> bool:
        """Answer a request; return whether the connection continues. Raises HttpError for a bad stream."""
        _check_head(request)
        body = self._body(request)
        self._place.due_s = None
        # The request was read completely, so after a refusal the next request can still be read.
        try:
            encoding = request.headers.get("content-encoding", "identity").strip().lower()
            if encoding != "identity":
                body = self._inflated(body, encoding)
            response = self._handle(HttpRequest(request.method, request.url, request.headers, body))
        except HttpError as error:
            response = error.response()
        keep_alive = request.keep_alive and not (self._place.end_reason or response.stream or response.closes)
        if keep_alive and request.version == "1.0":
            # Without this field, the client waits for the end of the connection.
            response = response._replace(headers=(*response.headers, ("Connection", "keep-alive")))
        self._send(response, keep_alive, with_body=request.method != "HEAD")
        return keep_alive

    # --- bodies -------------------------------------------------------------------------------

    def _body(self, request: ParsedRequest) -> memoryview:
        if request.complete:
            self._add_checked(request.body_bytes)
            return memoryview(request.parts[0] if len(request.parts) == 1 else b"".join(request.parts))
        self._place.due_s = self._clock()
        self._place.note_progress(request.body_bytes, self._clock())
        expects = request.version == "1.1" and request.headers.get("expect", "").lower() == "100-continue"
        if expects and not request.parts:
            self._check_size(int(request.headers.get("content-length", 0)))
            self._sock.sendall(_CONTINUE)
        if "content-length" in request.headers:
            return self._body_of_length(request, int(request.headers["content-length"]))
        return self._chunked_body(request)

    def _body_of_length(self, request: ParsedRequest, size_bytes: int) -> memoryview:
        """Read the rest of a body without the parser."""
        self._check_size(size_bytes)
        if size_bytes > len(self._body_buffer):
            buffer = _memory(size_bytes)
            if size_bytes <= BODY_BUFFER_BYTES_MAX:
                self._body_buffer = buffer
        else:
            buffer = self._body_buffer
        body = buffer[:size_bytes]
        filled = 0
        for part in request.parts:
            body[filled : filled + len(part)] = part
            filled += len(part)
        self._admission.add_bytes(self._place, filled)
        until_s = self._clock() + self._limits.body_s_max(size_bytes)
        while filled < size_bytes:
            count = self._receive(body[filled:], until_s)
            self._admission.add_bytes(self._place, count)
            filled += count
        self._parser.skip_body()
        return body

    def _chunked_body(self, request: ParsedRequest) -> memoryview:
        until_s = self._clock() + self._limits.body_s_max(self._limits.body_bytes_max)
        self._add_checked(request.body_bytes)
        # The request stays in the parser's queue, so that the bytes of its trailers are counted too.
        self._parser.requests.appendleft(request)
        parts: list[bytes] = []
        while not request.complete:
            # The parser makes an object of each chunk, and short chunks would need many times their own size.
            parts.append(b"".join(request.parts))
            request.parts.clear()
            before = request.body_bytes
            self._parser.feed(self._received[: self._receive(self._received, until_s)])
            self._check_size(request.body_bytes)
            self._admission.add_bytes(self._place, request.body_bytes - before)
        self._parser.requests.popleft()
        return memoryview(b"".join(parts + request.parts))

    def _receive(self, buffer: memoryview, until_s: float) -> int:
        try:
            count = self._sock.recv_into(buffer)
        except BlockingIOError as error:
            raise HttpError(HTTPStatus.REQUEST_TIMEOUT, f"the body stopped for {self._limits.stall_s:g} s") from error
        if self._place.end_reason:  # this connection must end: the server answers only completely received requests
            raise busy(self._place.end_reason)
        if not count:
            raise ConnectionError("the client closed the connection inside a request")
        now_s = self._clock()
        self._place.note_progress(count, now_s)
        if now_s > until_s:
            raise HttpError(
                HTTPStatus.REQUEST_TIMEOUT, "the body arrived too slowly; at least 256 KiB/s are expected after 10 s"
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
                self._admission.add_bytes(self._place, len(part))
        except zlib.error as error:
            raise HttpError(HTTPStatus.BAD_REQUEST, f"the body is not {encoding}: {error}") from error
        if not inflater.eof:
            raise HttpError(HTTPStatus.BAD_REQUEST, f"the {encoding} data of the body is incomplete: send all of it")
        return memoryview(b"".join(parts))

    def _check_size(self, size_bytes: int) -> None:
        if size_bytes > self._limits.body_bytes_max:
            raise HttpError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body is too large: send at most {self._limits.body_bytes_max} bytes at once, or raise frame_mb in [serving]",
            )

    def _add_checked(self, size_bytes: int) -> None:
        self._check_size(size_bytes)
        self._admission.add_bytes(self._place, size_bytes)

    # --- answers ------------------------------------------------------------------------------

    def _send(self, response: HttpResponse, keep_alive: bool, *, with_body: bool) -> None:
        parts = [response.head(keep_alive), *response.parts] if with_body else [response.head(keep_alive)]
        if response.stream is None:
            return self._send_parts(parts)
        with contextlib.closing(response.stream) as stream:
            for part in stream:
                self._send_parts([*parts, part])
                if self._place.end_reason:
                    return
                self._place.due_s = None
                parts = []

    def _send_parts(self, parts: Sequence[bytes | memoryview]) -> None:
        if len(parts) > SEND_PARTS_MAX:
            parts = [b"".join(parts)]
        sent = 0
        with contextlib.suppress(BlockingIOError):
            sent = self._sock.sendmsg(parts, (), socket.MSG_DONTWAIT)
        if sent < sum(map(len, parts)):
            self._send_rest(parts, sent)

    def _send_rest(self, parts: Sequence[bytes | memoryview], sent: int) -> None:
        """Send `parts` without the first `sent` bytes, at the rate at which the client reads."""
        began_s, place = self._clock(), self._place
        until_s = began_s + self._limits.body_s_max(sum(map(len, parts)))
        place.is_sending = True  # before `due_s`, from which on another thread may end the connection
        place.due_s = began_s  # now the client must read: bytes in the kernel's buffer wait for it
        for part in parts:
            rest, sent = memoryview(part)[sent:], max(0, sent - len(part))
            while rest:
                try:
                    count = self._sock.send(rest)
                except BlockingIOError as error:
                    raise ConnectionError("the client does not read its answer") from error
                rest, now_s = rest[count:], self._clock()
                place.note_progress(count, now_s)
                if now_s > until_s:
                    raise ConnectionError("the client reads its answer too slowly")
        place.is_sending = False

    def _linger(self) -> None:
        """Let the client read the answer. If the socket closed with unread bytes, the kernel would drop it."""
        until_s, read = self._clock() + LINGER_S, 0
        with contextlib.suppress(OSError):
            if not self._place.end_reason:  # after `Place.end`, the kernel would reset a client that still sends
                self._sock.shutdown(socket.SHUT_WR)
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(LINGER_SILENT_S_MAX))
            while read < LINGER_BYTES_MAX and self._clock() < until_s and not self._admission.closes_at_once:
                count = self._sock.recv_into(self._received)
                read += count
                if not count and not self._client_may_send():
                    return
                if not count:
                    time.sleep(LINGER_POLL_S)

    def _client_may_send(self) -> bool:
        """Return whether the client can still send. After `Place.end`, an empty read does not show this."""
        if self._sock.family == socket.AF_UNIX:
            return False
        return self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_ESTABLISHED


def _check_head(request: ParsedRequest) -> None:
    """Raise HttpError if another server could find the end of this request at another place."""
    host, coding = request.headers.get("host"), request.headers.get("transfer-encoding")
    if request.version not in ("1.0", "1.1"):
        raise HttpError(HTTPStatus.BAD_REQUEST, f"HTTP/{request.version[:8]} is not supported: use HTTP/1.1")
    if host is None and request.version == "1.1":
        raise HttpError(HTTPStatus.BAD_REQUEST, "the request has no Host field: send one")
    if host is not None and "," in host:
        raise HttpError(HTTPStatus.BAD_REQUEST, "the request has two Host fields: send one")
    if coding is not None and (request.version == "1.0" or coding.lower() != "chunked"):
        raise HttpError(
            HTTPStatus.BAD_REQUEST,
            f"Transfer-Encoding {coding[:40]!r} in HTTP/{request.version} is refused: send Content-Length, or 'chunked' in HTTP/1.1",
        )


def _memory(size_bytes: int) -> memoryview:
    """Return private memory, which costs half as much as shared memory. Only written pages use memory."""
    if size_bytes <= mmap.PAGESIZE:
        return memoryview(bytearray(size_bytes))
    return memoryview(mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
