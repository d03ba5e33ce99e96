"""The HTTP server's threads: on which cores they run."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from edgert.http.limits import Limits
from edgert.http.messages import HttpRequest, HttpResponse
from tests.support.devices import WAIT_S_MAX

pytest.importorskip("httptools", reason="the HTTP server needs the extra edgert[http]")

from edgert.http.server import HttpServer

LIMITS = Limits(body_bytes_max=1000, connections_max=8)


def own_cores(request: HttpRequest) -> HttpResponse:
    """Answer with the cores on which the connection's thread may run."""
    return HttpResponse(200, (json.dumps(sorted(os.sched_getaffinity(0))).encode(),))


@contextmanager
def server_on(cores: set[int], path: Path, *, one_core: bool) -> Iterator[None]:
    """Run a server whose accepting thread may use `cores`."""
    stop, stops = socket.socketpair()
    with stop, stops, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        listener.setblocking(False)
        server = HttpServer(listener, own_cores, LIMITS, one_core=one_core)

        def run() -> None:
            os.sched_setaffinity(0, cores)
            server.run(stops)

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            stop.send(b"x")
            thread.join(WAIT_S_MAX)


def cores_of(sock: socket.socket) -> list[int]:
    sock.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    answer = b""
    while not answer.endswith(b"]"):
        answer += sock.recv(4096)
    return list(json.loads(answer.partition(b"\r\n\r\n")[2]))


def asked(path: Path, count: int) -> list[list[int]]:
    """Return the cores of `count` connections that are open at once."""
    with ExitStack() as stack:
        socks = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(count)]
        for sock in socks:
            sock.settimeout(WAIT_S_MAX)
            sock.connect(str(path))
        return [cores_of(sock) for sock in socks]


@pytest.mark.parametrize("core", sorted(os.sched_getaffinity(0))[:2])
def test_connections_share_the_core_of_the_accepting_thread(tmp_path: Path, core: int) -> None:
    with server_on({core}, tmp_path / "http.sock", one_core=True):
        assert asked(tmp_path / "http.sock", 3) == [[core]] * 3


def test_connections_share_one_of_the_cores_that_the_process_may_use(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    with server_on(allowed, tmp_path / "http.sock", one_core=True):
        first, *others = asked(tmp_path / "http.sock", 3)
    assert len(first) == 1
    assert set(first) <= allowed
    assert others == [first] * 2


def test_connections_use_every_core_unless_they_are_to_share_one(tmp_path: Path) -> None:
    allowed = os.sched_getaffinity(0)
    with server_on(allowed, tmp_path / "http.sock", one_core=False):
        assert asked(tmp_path / "http.sock", 2) == [sorted(allowed)] * 2
