"""One HTTP connection without a daemon: the answers to slow and wrong clients, with short limits."""

from __future__ import annotations

import fcntl
import itertools
import select
import socket
import termios
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http import HTTPStatus

import pytest

from edgert.http.admission import EVICTED, STOPPING, Admission, Place
from edgert.http.limits import STOP_LINGER_S, Limits
from edgert.http.messages import HttpError, HttpRequest, HttpResponse
from tests.support.devices import WAIT_S_MAX, wait_until

pytest.importorskip("httptools", reason="the HTTP server needs the extra edgert[http]")

from edgert.http.connection import Handler, HttpConnection

HEAD = b"POST /echo HTTP/1.1\r\nHost: localhost\r\n"
PATIENT = Limits(1000, 8, head_s_max=WAIT_S_MAX, stall_s=WAIT_S_MAX, idle_s_max=WAIT_S_MAX)
SHORT = Limits(1000, 8, head_s_max=0.1, stall_s=0.05, idle_s_max=0.1)


def echo(request: HttpRequest) -> HttpResponse:
    if request.path == "/refused":
        raise HttpError(HTTPStatus.NOT_FOUND, "nothing here")
    return HttpResponse(200, (bytes(request.body),), "text/plain")


@contextmanager
def served(
    limits: Limits = PATIENT,
    admission: Admission | None = None,
    clock: Callable[[], float] = time.monotonic,
    handle: Handler = echo,
    *,
    sent: bytes = b"",
    tcp: bool = False,
) -> Iterator[socket.socket]:
    """The client's end of a connection that a thread serves. The client has already sent `sent`."""
    ours, theirs = tcp_pair() if tcp else socket.socketpair()
    ours.settimeout(WAIT_S_MAX)
    ours.sendall(sent)
    admission, place = admission or Admission(limits), Place(theirs, "", clock())
    assert admission.admit(place)
    connection = HttpConnection(theirs, handle, limits, admission, place, clock)

    def serve() -> None:
        with theirs, suppress(OSError):
            connection.serve()
        admission.leave(place)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with ours:
        yield ours
    thread.join(WAIT_S_MAX)
    assert not thread.is_alive()
    assert not place.body_bytes


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        return ours, listener.accept()[0]


def all_of(sock: socket.socket) -> bytes:
    """Return all bytes until the connection ends."""
    data = b""
    while part := sock.recv(65536):
        data += part
    return data


def test_an_idle_connection_is_closed_without_an_answer() -> None:
    with served(SHORT) as sock:
        assert all_of(sock) == b""


def test_a_head_that_does_not_end_is_answered_408() -> None:
    with served(SHORT, sent=HEAD) as sock:
        assert all_of(sock).startswith(b"HTTP/1.1 408 ")


def test_a_body_that_stops_is_answered_408() -> None:
    with served(replace(PATIENT, stall_s=0.05), sent=HEAD + b"Content-Length: 10\r\n\r\nhalf") as sock:
        assert b"the body stopped for 0.05 s" in all_of(sock)


def test_requests_sent_together_are_answered_in_their_order() -> None:
    with served() as sock:
        sock.sendall(b"".join(HEAD + b"Content-Length: 1\r\n\r\n%d" % i for i in range(3)))
        sock.shutdown(socket.SHUT_WR)
        bodies = [answer.rpartition(b"\r\n\r\n")[2] for answer in all_of(sock).split(b"HTTP/1.1 200 OK")[1:]]
    assert bodies == [b"0", b"1", b"2"]


def test_an_answer_to_http_1_0_says_that_the_connection_stays_open() -> None:
    """Without the field `Connection`, `ab -k` waits for the end of the connection."""
    asked = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Connection: Keep-Alive\r\nContent-Length: 2\r\n\r\nok"
    with served() as sock:
        sock.sendall(asked + asked)
        sock.shutdown(socket.SHUT_WR)
        assert all_of(sock).count(b"\r\nConnection: keep-alive\r\n\r\nok") == 2


def test_an_error_of_the_handler_leaves_the_connection_usable() -> None:
    with served() as sock:
        sock.sendall(HEAD.replace(b"/echo", b"/refused") + b"\r\n" + HEAD + b"Content-Length: 2\r\n\r\nok")
        sock.shutdown(socket.SHUT_WR)
        data = all_of(sock)
    assert data.startswith(b"HTTP/1.1 404 ")
    assert data.endswith(b"ok")


def test_a_client_with_http_1_0_gets_no_interim_answer() -> None:
    with served() as sock:
        sock.sendall(HEAD.replace(b"1.1", b"1.0") + b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        sock.sendall(b"ok")
        assert all_of(sock).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (HEAD + b"Content-Length: 1001\r\n\r\n", b"413"),
        (HEAD + b"Expect: 100-continue\r\nContent-Length: 1001\r\n\r\n", b"413"),
        (HEAD + b"Content-Encoding: br\r\nContent-Length: 1\r\n\r\nx", b"415"),
        (HEAD + b"".join(b"X-%d: 1\r\n" % i for i in range(101)) + b"\r\n", b"431"),
        (b"GET /echo HTTP/1.1\r\n\r\n", b"400"),
        (b"\x16\x03\x01", b"400"),
        (b"GET /echo HTTP/1.1\r\nConnection: close\r\n\r\n", b"400"),
        (HEAD + b"Host: localhost\r\n\r\n", b"400"),
        (HEAD + b"Host: evil.example\r\n\r\n", b"400"),
        (HEAD.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n", b"400"),
        (HEAD + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", b"400"),
        (HEAD + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\nok", b"400"),
        (HEAD + b"Content-Encoding: gzip\r\nContent-Encoding: identity\r\nContent-Length: 1\r\n\r\nx", b"415"),
        (HEAD.replace(b"1.1", b"0.9") + b"\r\n", b"400"),
        (HEAD.replace(b"1.1", b"2.0") + b"\r\n", b"400"),
    ],
)
def test_a_wrong_request_is_refused(sent: bytes, status: bytes) -> None:
    with served() as sock:
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)
        assert all_of(sock).startswith(b"HTTP/1.1 " + status)


def test_bodies_of_all_connections_together_are_limited() -> None:
    limits = replace(PATIENT, body_bytes_max=50)
    admission, other = Admission(limits), Place(socket.socket(), "", 0.0)
    assert admission.admit(other)
    other.due_s = None  # its request is handled
    admission.add_bytes(other, 90)
    with served(limits, admission) as sock:
        sock.sendall(HEAD + b"Content-Length: 20\r\n\r\n" + bytes(20))
        sock.shutdown(socket.SHUT_WR)
        assert b"\r\nRetry-After: 1\r\n" in all_of(sock)
    admission.leave(other)
    with served(limits, admission) as sock:
        sock.sendall(HEAD + b"Content-Length: 20\r\n\r\n" + bytes(20))
        sock.shutdown(socket.SHUT_WR)
        assert all_of(sock).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("reason", [EVICTED, STOPPING])
@pytest.mark.parametrize(
    "sent", [b"GET /echo HTTP/1.1\r\nHo", HEAD + b"Content-Length: 900\r\n\r\n"], ids=["head", "body"]
)
def test_a_client_whose_connection_must_end_learns_why(sent: bytes, reason: str, at_once: bool) -> None:
    """With `at_once`, the connection must end just after it received the bytes, before it waits for more."""
    admission, calls = Admission(PATIENT), itertools.count(1)

    def clock() -> float:
        if next(calls) == 3 and at_once:  # after the times of the connection's start and of the first wait
            (place,) = admission._places
            place.end(reason)
        return time.monotonic()

    with served(PATIENT, admission, clock, sent=sent) as sock:
        if not at_once:
            wait_until(
                lambda: not any(fcntl.ioctl(sock, termios.TIOCOUTQ, bytes(4))),
                "the connection receives the bytes",
                pause_s=0.001,
            )
            (place,) = admission._places
            place.end(reason)
        assert reason.encode() in all_of(sock)


def test_a_client_that_still_uploads_can_read_why_its_connection_must_end() -> None:
    admission = Admission(PATIENT)
    with served(PATIENT, admission, lambda: 0.0, sent=HEAD + b"Content-Length: 900\r\n\r\n", tcp=True) as sock:
        (place,) = admission._places
        place.end(EVICTED)
        select.select([sock], [], [], WAIT_S_MAX)
        for _ in range(5000):
            sock.sendall(bytes(1))
        sock.shutdown(socket.SHUT_WR)
        assert EVICTED.encode() in all_of(sock)


def test_a_stop_waits_only_briefly_for_a_client_that_still_uploads() -> None:
    now_s = 0.0
    admission = Admission(PATIENT, lambda: now_s)
    sent = HEAD + b"Content-Length: 900\r\n\r\n"
    with served(PATIENT, admission, lambda: now_s, sent=sent, tcp=True) as sock:
        admission.end_all()
        assert b"HTTP/1.1 503" in sock.recv(4096)
        now_s = STOP_LINGER_S
        assert not all_of(sock)


def test_a_connection_that_must_end_does_not_wait_for_its_client_if_new_clients_need_places() -> None:
    limits = replace(PATIENT, connections_max=1)
    admission = Admission(limits)
    with served(limits, admission, lambda: 0.0, sent=HEAD + b"Content-Length: 900\r\n\r\n", tcp=True) as sock:
        new = Place(socket.socket(), "", 0.0)
        wait_until(lambda: admission.admit(new), "the new client gets the place", pause_s=0.001)
        assert EVICTED.encode() in all_of(sock)


def test_a_client_that_pauses_inside_a_head_learns_why_its_connection_must_end() -> None:
    """The connection must end just after its wait for further bytes has passed."""
    admission, calls = Admission(PATIENT), itertools.count(1)

    def clock() -> float:
        if next(calls) == 5:  # after the start, the wait for the first bytes, and the start of the head's time
            (place,) = admission._places
            place.end(STOPPING)
        return time.monotonic()

    with served(replace(PATIENT, stall_s=0.01), admission, clock, sent=b"GET /echo HTTP/1.1\r\nHo") as sock:
        assert STOPPING.encode() in all_of(sock)


class EndsBeforeTheThread(Admission):
    def admit(self, place: Place) -> bool:
        admitted = super().admit(place)
        place.end(STOPPING)
        return admitted


class EndsAfterAnAnswer(Admission):
    def release_bytes(self, place: Place) -> None:
        super().release_bytes(place)
        place.end(STOPPING)


@pytest.mark.parametrize(("ends", "answered"), [(EndsBeforeTheThread, 1), (EndsAfterAnAnswer, 2)])
def test_a_request_that_arrived_before_its_connection_had_to_end_is_answered(
    ends: type[Admission], answered: int
) -> None:
    request = HEAD + b"Content-Length: 2\r\n\r\nok"
    with served(admission=ends(PATIENT), sent=request * answered) as sock:
        assert all_of(sock).count(b"\r\n\r\nok") == answered


def test_a_stated_length_takes_no_memory_before_the_bytes_arrive() -> None:
    limits = Limits(body_bytes_max=2**40, connections_max=8)
    for _ in range(4):
        with served(limits) as sock:
            sock.sendall(HEAD + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % 2**40)
            assert sock.recv(100).startswith(b"HTTP/1.1 100 ")


@pytest.mark.parametrize(
    "sent", [b"GET /echo HTTP/1.1\r\nHo", HEAD + b"Content-Length: 900\r\n\r\n"], ids=["head", "body"]
)
def test_a_request_that_arrives_byte_by_byte_gets_408_at_the_deadline(sent: bytes) -> None:
    now_s = 1000.0
    limits = Limits(body_bytes_max=1000, connections_max=8)
    with served(limits, clock=lambda: now_s) as sock:
        sock.sendall(sent)
        sock.settimeout(0.02)
        for _ in range(600):
            now_s += 1.0
            with suppress(TimeoutError):
                assert sock.recv(100).startswith(b"HTTP/1.1 408 ")
                break
            with suppress(ConnectionError):  # the answer is there, and this process was slow to look
                sock.sendall(b"s")
        else:
            pytest.fail("the connection goes on")
        sock.settimeout(WAIT_S_MAX)
        assert now_s > 1009
        all_of(sock)


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /echo HTTP/1.1\r\nHost: localhost\r\nX: ",
        b"GET /echo HTTP/1.1\r\nHost: localhost\r\nX",
        b"GET /",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: ",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;x=",
    ],
    ids=["field", "name", "address", "trailer", "extension"],
)
def test_an_endless_field_is_refused_while_it_arrives(sent: bytes) -> None:
    with served(Limits(body_bytes_max=1000, connections_max=8)) as sock:
        sock.sendall(sent)
        with suppress(OSError):
            for _ in range(20):
                sock.sendall(b"a" * 16_384)
        assert all_of(sock).startswith(b"HTTP/1.1 431 ")


def test_a_trailer_does_not_replace_a_field_of_the_head() -> None:
    with served() as sock:
        sock.sendall(HEAD + b"Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\nContent-Encoding: br\r\n\r\n")
        sock.shutdown(socket.SHUT_WR)
        assert all_of(sock).endswith(b"\r\n\r\nok")


@pytest.mark.parametrize("forever", [False, True])
def test_a_stream_ends_with_its_source_or_its_client(forever: bool) -> None:
    ended = threading.Event()

    def parts() -> Generator[bytes, None, None]:
        try:
            yield b"a" * 1000
            while forever:
                yield b"b" * 100_000
        finally:
            ended.set()

    with served(handle=lambda _: HttpResponse(200, (), "text/plain", stream=parts())) as sock:
        sock.sendall(HEAD + b"Content-Length: 0\r\n\r\n")
        answer = sock.recv(65536) if forever else all_of(sock)
        assert b"Content-Length" not in answer
        assert b"Connection: close" in answer
    assert ended.wait(WAIT_S_MAX)
