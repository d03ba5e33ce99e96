"""One HTTP connection without a daemon: what slow and wrong clients get, with short limits."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus

import pytest

from edgert.http.limits import BodyBudget, Limits
from edgert.http.messages import HttpError, HttpRequest, HttpResponse

pytest.importorskip("httptools", reason="the HTTP server needs the extra edgert[http]")

from edgert.http.connection import HttpConnection

HEAD = b"POST /echo HTTP/1.1\r\nHost: localhost\r\n"
SHORT = Limits(body_bytes_max=1000, connections_max=8, head_s_max=0.1, stall_s=0.05, idle_s_max=0.1)


def echo(request: HttpRequest) -> HttpResponse:
    if request.path == "/refused":
        raise HttpError(HTTPStatus.NOT_FOUND, "nothing here")
    return HttpResponse(200, (bytes(request.body),), "text/plain")


@contextmanager
def served(limits: Limits = SHORT, budget: BodyBudget | None = None) -> Iterator[socket.socket]:
    """The client's end of a connection that a thread serves until it ends."""
    ours, theirs = socket.socketpair()
    ours.settimeout(10)
    connection = HttpConnection(theirs, echo, limits, budget or BodyBudget(2 * limits.body_bytes_max))

    def serve() -> None:
        with theirs, suppress(OSError):
            connection.serve()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with ours:
        yield ours
    thread.join(10)
    assert not thread.is_alive()


def all_of(sock: socket.socket) -> bytes:
    """Everything that comes until the connection ends."""
    data = b""
    while part := sock.recv(65536):
        data += part
    return data


def test_an_idle_connection_is_closed_without_an_answer() -> None:
    with served() as sock:
        assert all_of(sock) == b""


def test_a_head_that_does_not_end_is_answered_408() -> None:
    with served() as sock:
        sock.sendall(HEAD)
        assert all_of(sock).startswith(b"HTTP/1.1 408 ")


def test_a_body_that_stops_is_answered_408() -> None:
    with served() as sock:
        sock.sendall(HEAD + b"Content-Length: 10\r\n\r\nhalf")
        assert b"the body stopped for 0.05 s" in all_of(sock)


def test_requests_sent_together_are_answered_in_their_order() -> None:
    with served() as sock:
        sock.sendall(b"".join(HEAD + b"Content-Length: 1\r\n\r\n%d" % i for i in range(3)))
        sock.shutdown(socket.SHUT_WR)
        bodies = [answer.rpartition(b"\r\n\r\n")[2] for answer in all_of(sock).split(b"HTTP/1.1 200 OK")[1:]]
    assert bodies == [b"0", b"1", b"2"]


def test_an_error_of_the_handler_leaves_the_connection_usable() -> None:
    with served() as sock:
        sock.sendall(HEAD.replace(b"/echo", b"/refused") + b"\r\n" + HEAD + b"Content-Length: 2\r\n\r\nok")
        sock.shutdown(socket.SHUT_WR)
        data = all_of(sock)
    assert data.startswith(b"HTTP/1.1 404 ")
    assert data.endswith(b"ok")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (HEAD + b"Content-Length: 1001\r\n\r\n", b"413"),
        (HEAD + b"Expect: 100-continue\r\nContent-Length: 1001\r\n\r\n", b"413"),
        (HEAD + b"Content-Encoding: br\r\nContent-Length: 1\r\n\r\nx", b"415"),
        (HEAD + b"".join(b"X-%d: 1\r\n" % i for i in range(101)) + b"\r\n", b"431"),
        (b"GET /echo HTTP/1.1\r\n\r\n", b"400"),
        (b"\x16\x03\x01", b"400"),
    ],
    ids=["large", "large expected", "encoding", "fields", "no host", "tls"],
)
def test_a_wrong_request_is_refused(sent: bytes, status: bytes) -> None:
    with served() as sock:
        sock.sendall(sent)
        assert all_of(sock).startswith(b"HTTP/1.1 " + status)


def test_bodies_of_all_connections_together_are_limited() -> None:
    budget = BodyBudget(100)
    budget.take(90)
    with served(budget=budget) as sock:
        sock.sendall(HEAD + b"Content-Length: 20\r\n\r\n")
        assert b"\r\nRetry-After: 1\r\n" in all_of(sock)
    budget.give_back(90)
    with served(budget=budget) as sock:
        sock.sendall(HEAD + b"Content-Length: 20\r\n\r\n" + bytes(20))
        assert all_of(sock).startswith(b"HTTP/1.1 200 ")
