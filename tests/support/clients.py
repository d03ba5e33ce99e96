"""Clients for tests: load from many clients, and single frames over a socket of their own."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.errors import EdgeRTError
from edgert.protocol import wire
from edgert.protocol.frame_buffer import FrameBuffer
from tests.support.devices import WAIT_S_MAX, Device, wait_until
from tests.support.frames import infer_frame

PAUSE_S = 0.004  # each client waits so long, so that the load leaves processor time to the tested process
ITEM = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)
HELLO = wire.json_frame(wire.HELLO, {"model": "echo"})


@contextmanager
def load(device: Device, model: str = "echo", threads: int = 8) -> Iterator[tuple[list[int], list[EdgeRTError]]]:
    """Run clients that send request after request; yield the releases that answered, and the errors."""
    stop = threading.Event()
    releases: list[int] = []
    errors: list[EdgeRTError] = []

    def ask(number: int) -> None:
        with device.client() as client:
            while not stop.wait(PAUSE_S):
                try:
                    response = client.infer(model, ITEM * number, cache=False, trace=True)
                    assert response.outputs["y"].tolist() == (ITEM * number).tolist()
                    releases.append(response.release)
                except EdgeRTError as error:
                    errors.append(error)

    pool = [threading.Thread(target=ask, args=(i,)) for i in range(threads)]
    for thread in pool:
        thread.start()
    try:
        wait_until(lambda: len(releases) > 50, "the load has begun")
        yield releases, errors
    finally:
        stop.set()
        for thread in pool:
            thread.join(WAIT_S_MAX)


@contextmanager
def halted(device: Device, model: str = "echo") -> Iterator[None]:
    """Stop the worker of `model` during the block, so that it answers no request."""
    pid = device.serving(model)["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        # On a busy machine a thread may run on until another one has taken the signal.
        wait_until(lambda: all(state == "T" for state in thread_states(pid)), "the worker has stopped", pause_s=0.001)
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def thread_states(pid: int) -> list[str]:
    """Return the state of each thread, as a letter of proc(5)."""
    return [path.read_text().rpartition(")")[2].split()[0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]


def raw(device: Device) -> socket.socket:
    """Connect to the daemon and send nothing."""
    sock = socket.socket(socket.AF_UNIX)
    sock.settimeout(WAIT_S_MAX)
    sock.connect(os.fspath(device.socket))
    return sock


def greeted(device: Device) -> socket.socket:
    """Connect to the model `echo`."""
    sock = raw(device)
    sock.sendall(HELLO)
    assert read_frame(sock).kind == wire.WELCOME
    return sock


def request(request_id: int = 1, array: NDArray[np.float32] = ITEM) -> bytes:
    """Return an INFER frame."""
    return infer_frame(array, request_id=request_id)


def read_frame(sock: socket.socket) -> wire.Frame:
    """Return the next frame that the daemon sends; read no byte of a later frame."""
    frames = FrameBuffer()
    frame = None
    while frame is None:
        count = sock.recv_into(frames.room[: frames.missing() or 64])
        assert count, "the daemon closed without an answer"
        frame = frames.feed(count)
    return frame


def run(coroutine: Coroutine[Any, Any, None]) -> None:
    """Run one test on its own loop; an error that asyncio would only log fails it."""

    async def watched() -> None:
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        await asyncio.wait_for(coroutine, 120)
        await asyncio.sleep(0)
        assert complaints == []

    asyncio.run(watched())
