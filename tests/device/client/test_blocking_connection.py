"""A connection of the blocking client: how it waits for an answer."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgert import Client
from edgert.errors import DaemonUnreachable, DeadlineExceeded
from edgert.protocol import wire
from tests.support.clients import ITEM, halted
from tests.support.devices import Device, a_device
from tests.support.stand_ins.false_daemon import WELCOME

RUN_S = 0.05
ASKING = """
import os, sys, numpy as np
from edgert import Client
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
with Client(sys.argv[1]) as client:
    def ask():
        client.infer("echo", np.zeros((1, 4), np.float32), cache=False)
    def slept():
        return int(open("/proc/thread-self/status").read().split("\\nvoluntary_ctxt_switches:")[1].split()[0])
    ask()
    before = slept()
    for _ in range(20):
        ask()
    print(slept() - before)
"""


@pytest.fixture(scope="module")
def device() -> Iterator[Device]:
    with a_device("[serving]\nbatch_max = 1\n") as device:
        device.put(delay_s=RUN_S)
        yield device


def test_on_one_core_a_client_sleeps_until_its_answer_arrives(
    device: Device,
) -> None:
    done = subprocess.run([sys.executable, "-c", ASKING, device.socket], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # 40 if the thread sleeps in `recv`; fewer than 20 if a busy core delays an answer
    assert 0 < int(done.stdout) < 30


@contextlib.contextmanager
def periodic_signal() -> Iterator[list[None]]:
    ticks: list[None] = []

    def tick(*_: object) -> None:
        ticks.append(None)
        assert len(ticks) < 200, "the client still waits"

    before = signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
    try:
        yield ticks
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_periodic_signal_does_not_prolong_a_time_out(device: Device, is_connected: bool) -> None:
    with periodic_signal() as ticks, Client(device.socket) as client:
        if is_connected:
            client.metadata("echo")
        with halted(device):
            ticks.clear()
            with pytest.raises(DeadlineExceeded):
                client.infer("echo", ITEM, timeout_s=0.5, cache=False)


def test_a_periodic_signal_does_not_prolong_the_sending_of_a_large_request(tmp_path: Path) -> None:
    welcome = wire.json_frame(wire.WELCOME, {**json.loads(WELCOME), "frame_bytes_max": 2**30})
    taken: list[socket.socket] = []

    def greet() -> None:  # and then read nothing
        taken.append(listener.accept()[0])
        taken[0].recv(65536)
        taken[0].sendall(welcome)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.fspath(tmp_path / "deaf.sock"))
        listener.listen()
        thread = threading.Thread(target=greet)
        thread.start()
        with (
            periodic_signal(),
            Client(tmp_path / "deaf.sock", transport="socket") as client,
            pytest.raises(DeadlineExceeded, match="did not accept the request in time"),
        ):
            client.infer("echo", np.zeros((1_000_000, 4), np.float32), timeout_s=0.5)
        thread.join()
        taken[0].close()


@pytest.mark.parametrize("timeout_s", [math.inf, 1e9])
def test_a_client_may_wait_without_a_time_limit(device: Device, timeout_s: float) -> None:
    with Client(device.socket, timeout_s=timeout_s) as client:
        assert client.infer("echo", ITEM)["y"].tolist() == ITEM.tolist()


def test_a_client_gets_an_error_at_its_time_out_if_the_answer_is_late(device: Device) -> None:
    with Client(device.socket) as client:
        client.infer("echo", ITEM)
        began_s = time.monotonic()
        with halted(device), pytest.raises(DeadlineExceeded):
            client.infer("echo", ITEM, timeout_s=RUN_S / 5, cache=False)
        assert time.monotonic() - began_s >= RUN_S / 5


def test_a_full_queue_of_new_connections_is_not_reported_as_a_missing_daemon(tmp_path: Path) -> None:
    path = tmp_path / "full.sock"
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(os.fspath(path))
        listener.listen(1)
        for _ in range(2):
            stack.enter_context(socket.socket(socket.AF_UNIX)).connect(os.fspath(path))
        with pytest.raises(DaemonUnreachable, match="has too many new connections"):
            Client(path, timeout_s=0.05).models()


@pytest.mark.parametrize("kind", ["control socket", "silent program"])
def test_a_socket_of_something_else_is_named(device: Device, kind: str, tmp_path: Path) -> None:
    """The control socket waits for a line of JSON, and a hello has no line end."""
    with socket.socket(socket.AF_UNIX) as listener:
        path = device.state.control_socket
        if kind == "silent program":
            path = tmp_path / "other.sock"
            listener.bind(os.fspath(path))
            listener.listen(1)
        with pytest.raises(DeadlineExceeded, match=f"nothing answered at {path} in time: check with edgertd status"):
            Client(path, timeout_s=0.2).models()
