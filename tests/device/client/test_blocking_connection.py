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
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert import Client
from edgert.client.blocking_connection import Connection
from edgert.client.conversation import Conversation
from edgert.errors import DaemonUnreachable, DeadlineExceeded, EdgeRTError, Overloaded
from edgert.protocol import wire
from tests.support.clients import ITEM, halted, read_frame
from tests.support.devices import Device, a_device
from tests.support.stand_ins.false_daemon import WELCOME, WELCOME_FRAME

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
            client.infer("echo", ITEM)
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


class Scripted:
    """A connection whose daemon is the test: it writes each answer before the request, then reads the request."""

    def __init__(self, path: Path) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(os.fspath(path))
            listener.listen()
            greeter = threading.Thread(target=self._greet, args=(listener,))
            greeter.start()
            self.connection = Connection(path, Conversation("echo", path, share=False), time.monotonic() + 60)
            greeter.join()
        self.parsed = 0  # how many answers were not recognized as a repetition
        received = self.connection.conversation.received

        def counted(frame: wire.Frame) -> Any:
            self.parsed += 1
            return received(frame)

        self.connection.conversation.received = counted  # type: ignore[method-assign]

    def _greet(self, listener: socket.socket) -> None:
        self.daemon = listener.accept()[0]
        read_frame(self.daemon)
        self.daemon.sendall(WELCOME_FRAME)

    def ask(self, inputs: Any, answer: bytes, flags: int = 0, timeout_s: float = 60.0, trace: bool = False) -> Any:
        """Return the connection's answer. Checks what the daemon has received."""
        self.daemon.sendall(answer)
        try:
            return self.connection.request(inputs, timeout_s, time.monotonic() + timeout_s, flags, trace)
        finally:
            frame = read_frame(self.daemon)
            array = inputs["x"] if isinstance(inputs, dict) else inputs
            assert np.array_equal(np.frombuffer(frame.tensors[0].data, np.float32), array.ravel())
            assert (frame.request_id, frame.flags) == (self.connection.conversation.request_id, flags)
            assert 0 <= frame.arg - timeout_s * 1e6 <= 1

    def close(self) -> None:
        self.connection.close()
        self.daemon.close()


@pytest.fixture
def scripted(tmp_path: Path) -> Iterator[Scripted]:
    with contextlib.closing(Scripted(tmp_path / "scripted.sock")) as scripted:
        yield scripted


def a_result(request_id: int, values: NDArray[np.float32], **fields: Any) -> bytes:
    tensor = wire.OutTensor(wire.descriptor(0, "FP32", values.shape, values.nbytes), values.tobytes())
    return b"".join(wire.frame(wire.RESULT, request_id=request_id, tensors=[tensor], **fields))


def test_answers_of_one_form_are_recognized_from_the_third_one_on(scripted: Scripted) -> None:
    parsed, outputs = [], []
    for turn in range(1, 5):
        answer = a_result(turn, np.full((1, 4), turn, np.float32), flags=wire.FLAG_MANY)
        outputs.append(scripted.ask(np.full((1, 4), 10 * turn, np.float32), answer, wire.FLAG_NO_CACHE, 10 + turn))
        parsed.append(scripted.parsed)
    assert parsed == [1, 2, 2, 2]
    assert [output["y"][0, 0] for output in outputs] == [1, 2, 3, 4]  # copies, which later answers do not change


def test_any_sequence_of_forms_traces_and_errors_gives_the_right_answers(scripted: Scripted) -> None:
    """An answer that outgrows the receive buffer moves it; a recognized answer must not be read from the old memory."""
    choice = np.random.default_rng(3)
    for turn in range(1, 400):
        array = choice.random((choice.choice([1, 1, 1, 2]), 4), np.float32)
        trace = choice.random() < 0.05
        inputs = {"x": array} if choice.random() < 0.1 else array
        if choice.random() < 0.05:
            with pytest.raises(Overloaded):
                scripted.ask(
                    inputs, wire.error_frame(Overloaded("full", retry_after_s=0.1), request_id=turn), trace=trace
                )
            continue
        values = choice.random((choice.choice([1, 1, 1, 1, 1, 10 * turn]), 4), np.float32)  # up to 64 KB, in pieces
        answer = scripted.ask(inputs, a_result(turn, values), trace=trace)
        assert np.array_equal((answer.outputs if trace else answer)["y"], values)
    assert scripted.parsed < 350


@pytest.mark.parametrize(
    ("change", "message"),
    [({"request_id": 2}, "unexpected frame"), ({"flags": wire.FLAG_SHARED}, "shared memory"), ({"status": 1}, None)],
    ids=["other request", "shared memory", "status"],
)
def test_an_answer_of_another_kind_is_parsed(scripted: Scripted, change: dict[str, Any], message: str | None) -> None:
    array = np.ones((1, 4), np.float32)
    for turn in (1, 2, 3):
        scripted.ask(array, a_result(turn, array))
    assert scripted.parsed == 2
    answer = a_result(**{"request_id": 4, **change}, values=array)
    if message is None:
        scripted.ask(array, answer)
        assert scripted.parsed == 3
    else:
        with pytest.raises(EdgeRTError, match=message):
            scripted.ask(array, answer)
        assert scripted.connection.closed


def test_a_repeated_request_without_an_answer_ends_at_its_time_out(scripted: Scripted) -> None:
    array = np.ones((1, 4), np.float32)
    for turn in (1, 2, 3):
        scripted.ask(array, a_result(turn, array), timeout_s=0.05)
    with pytest.raises(DeadlineExceeded, match="no answer arrived in time"):
        scripted.ask(array, b"", timeout_s=0.05)
    assert scripted.connection.closed
