"""The parser of a connection's requests: the result does not depend on the pieces of bytes."""

from __future__ import annotations

import pytest

from edgert.http.messages import HttpError
from edgert.http.request_parser import ParsedRequest, RequestParser

SMALL = b"POST /a HTTP/1.1\r\nHost: localhost\r\nContent-Length: 3\r\n\r\n"
OTHER = b"POST /b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4\r\n\r\n"
PLAIN = b"GET /c HTTP/1.1\r\nHost: localhost\r\n\r\n"
CHUNKED = b"POST /d HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
# Bodies that look like the end of a head, and requests of which one head begins the other.
STREAM = [
    (SMALL, b"abc"),
    (SMALL, b"\r\n\r"),
    (SMALL, b"xyz"),
    (OTHER, b"\r\n\r\n"),
    (OTHER, b"0123"),
    (SMALL, b"end"),
    (PLAIN, b""),
    (PLAIN, b""),
    (CHUNKED, b"2\r\nhi\r\n0\r\n\r\n"),
    (CHUNKED, b"1\r\n!\r\n0\r\nX-Trailer: 1\r\n\r\n"),
    (b"\r\n" + SMALL, b"odd"),
    (SMALL, b"two"),
]
BODIES = [body for _, body in STREAM[:8]] + [b"hi", b"!", b"odd", b"two"]


def read_all(pieces: list[bytes]) -> list[tuple[str, bytes]]:
    """Return each request's target and body. Bodies of stated length bypass the parser."""
    parser, found = RequestParser(), []
    waiting = [piece for piece in pieces if piece]

    def feed(request: ParsedRequest | None) -> None:
        piece = waiting.pop(0)
        if request is None or "content-length" not in request.headers:
            return parser.feed(memoryview(piece))
        lacks = int(request.headers["content-length"]) - request.body_bytes
        request.parts.append(piece[:lacks])
        request.body_bytes += len(piece[:lacks])
        request.complete = len(piece) >= lacks
        if request.complete:
            parser.skip_body()
            waiting[:0] = [piece[lacks:]] if piece[lacks:] else []

    while waiting or parser.requests:
        request = parser.next_request()
        if request is None:
            feed(None)
            continue
        chunked = not request.complete and "content-length" not in request.headers
        if chunked:
            parser.requests.appendleft(request)
        while not request.complete:
            feed(request)
        if chunked:
            parser.requests.popleft()
        found.append((request.url, b"".join(request.parts)))
    return found


WANTED = [(head.split()[1].decode(), body) for (head, _), body in zip(STREAM, BODIES, strict=True)]


@pytest.mark.parametrize("cut", range(len(SMALL) + 3))
def test_requests_are_the_same_wherever_each_is_cut(cut: int) -> None:
    pieces = [part for head, body in STREAM for part in ((head + body)[:cut], (head + body)[cut:])]
    assert read_all(pieces) == WANTED


@pytest.mark.parametrize("size", [1, 7, 50, 64, 65, 200, 4096])
def test_requests_are_the_same_in_pieces_of_any_size(size: int) -> None:
    data = b"".join(head + body for head, body in STREAM)
    assert read_all([data[at : at + size] for at in range(0, len(data), size)]) == WANTED


def test_a_repeated_head_is_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    parser = RequestParser()
    requests = []
    for body in (b"abc", b"xyz"):
        parser.feed(memoryview(SMALL + body))
        requests.append(parser.next_request())
        monkeypatch.setattr(parser, "_parse", None)
    first, second = requests
    assert first is not None
    assert second is not None
    assert (second.method, second.url, second.headers) == (first.method, first.url, first.headers)
    assert (first.parts, second.parts) == ([b"abc"], [b"xyz"])


@pytest.mark.parametrize("size", [1, 7, 64, 200, 4096])
def test_a_request_that_offers_another_protocol_is_read_as_http_1_1(size: int) -> None:
    """The offers of Java's HttpClient, for HTTP/2."""
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAAB\r\nUpgrade: h2c\r\n"
    stream = [(head[:-2] + offer + b"\r\n", body) for head, body in STREAM]
    data = b"".join(head + body for head, body in [*stream, STREAM[0], *stream])
    assert read_all([data[at : at + size] for at in range(0, len(data), size)]) == [*WANTED, WANTED[0], *WANTED]


def test_a_request_that_offers_another_protocol_keeps_its_head_and_the_connection() -> None:
    parser = RequestParser()
    parser.feed(memoryview(SMALL[:-2] + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\nabc"))
    request = parser.next_request()
    assert request is not None
    assert (request.method, request.url, request.parts, request.keep_alive) == ("POST", "/a", [b"abc"], True)
    assert sorted(request.headers) == ["connection", "content-length", "host", "upgrade"]


@pytest.mark.parametrize(
    "data", [PLAIN[:-2] + b"Connection: close\r\n\r\n", b"CONNECT localhost:1 HTTP/1.1\r\nHost: localhost\r\n\r\n"]
)
def test_a_head_that_ends_the_connection_is_not_reused_for_a_next_request(data: bytes) -> None:
    parser = RequestParser()
    parser.feed(memoryview(data))
    request = parser.next_request()
    assert request is not None
    assert not request.keep_alive
    try:
        parser.feed(memoryview(data))
    except HttpError:
        return
    again = parser.next_request()
    assert again is None or not again.keep_alive
