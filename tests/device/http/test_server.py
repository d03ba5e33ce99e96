"""The HTTP server without a daemon: refusals, the release of memory, and a sandbox around the process."""

from __future__ import annotations

import contextlib
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edgert.http.limits import Limits
from edgert.http.messages import HttpRequest, HttpResponse
from tests.support.devices import WAIT_S_MAX, wait_until

pytest.importorskip("httptools", reason="the HTTP server needs the extra edgert[http]")

from edgert.http import connection
from edgert.http.connection import Handler
from edgert.http.server import HttpServer

LIMITS = Limits(body_bytes_max=1000, connections_max=8, release_after_s=0.02)


class Rests:
    """Counts the calls, and returns False for the first calls, as after an inference."""

    def __init__(self, busy: int) -> None:
        self.busy, self.calls = busy, 0

    def __call__(self) -> bool:
        self.calls += 1
        return self.calls > self.busy


def answered(request: HttpRequest) -> HttpResponse:
    return HttpResponse(200, (b"ok",), "text/plain")


@contextlib.contextmanager
def served(
    rests: Rests,
    limits: Limits = LIMITS,
    handle: Handler = answered,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[int]:
    """The port of a server on loopback."""
    stop, stopping = socket.socketpair()
    with stop, stopping, socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        server = HttpServer(listener, handle, limits, clock)
        thread = threading.Thread(target=server.run, args=(stop, rests), daemon=True)
        thread.start()
        yield listener.getsockname()[1]
        stopping.send(b"x")
        thread.join(WAIT_S_MAX)
        assert not thread.is_alive()


def ask(client: socket.socket) -> None:
    client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert client.recv(4096).startswith(b"HTTP/1.1 200")


def test_memory_is_given_back_once_no_inference_runs_and_then_the_process_sleeps() -> None:
    rests = Rests(busy=2)
    with served(rests) as port:
        assert rests.calls == 0
        with socket.create_connection(("127.0.0.1", port), timeout=WAIT_S_MAX) as client:
            ask(client)
        wait_until(lambda: rests.calls >= 3, "it rests")
        slept = threading.Event()
        assert not slept.wait(0.2)
        assert rests.calls == 3


def test_memory_is_given_back_repeatedly_while_a_client_stays_connected() -> None:
    rests = Rests(busy=0)
    with served(rests) as port, socket.create_connection(("127.0.0.1", port), timeout=WAIT_S_MAX) as client:
        ask(client)
        wait_until(lambda: rests.calls >= 3, "it rests again")
        ask(client)


def test_a_client_without_a_place_can_read_the_refusal_while_it_uploads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LINGER_SILENT_S_MAX", WAIT_S_MAX)
    handled, may_end = threading.Semaphore(0), threading.Event()

    def slow(request: HttpRequest) -> HttpResponse:
        handled.release()
        may_end.wait(WAIT_S_MAX)
        return answered(request)

    with (
        served(Rests(0), replace(LIMITS, connections_max=2), slow, lambda: 0.0) as port,
        contextlib.ExitStack() as stack,
    ):

        def connected() -> socket.socket:
            return stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=WAIT_S_MAX))

        for _ in range(2):
            connected().sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert handled.acquire(timeout=WAIT_S_MAX)
        refused = connected()
        select.select([refused], [], [], WAIT_S_MAX)
        for _ in range(10):
            refused.sendall(bytes(65536))
        assert refused.recv(4096).startswith(b"HTTP/1.1 503 ")
        may_end.set()


# A filter of system calls as systemd sets it: sched_setaffinity fails with EPERM, everything else is allowed.
FORBIDDEN = """
import ctypes, errno, platform, struct, sys
number = {"x86_64": 203, "aarch64": 122}[platform.machine()]
steps = [(0x20, 0, 0, 0), (0x15, 0, 1, number), (0x06, 0, 0, 0x00050000 | errno.EPERM), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
program = struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program) == 0
from edgert.http.__main__ import main
sys.exit(main(["--state", sys.argv[1]]))
"""


def test_a_sandbox_that_forbids_the_choice_of_a_core_does_not_end_the_server(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORBIDDEN, str(tmp_path / "none")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, "Traceback" in done.stderr) == (7, False), done.stderr
    assert "config.toml is missing" in done.stderr, "it went on to read its configuration"
