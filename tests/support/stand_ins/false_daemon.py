"""A daemon that follows a script, right or wrong, for tests of the clients."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

import numpy as np

from edgert import AsyncClient
from edgert.protocol import wire
from edgert.protocol.sharing import send_with_descriptor
from tests.support.clients import run
from tests.support.devices import WAIT_S_MAX

WELCOME = json.dumps({"model": "echo", "release": 1, "engine": "null", "frame_bytes_max": 65536,
                      "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
                      "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}]})  # fmt: skip
RESULT = b"".join(
    wire.frame(
        wire.RESULT,
        request_id=1,
        arg=1,
        tensors=[wire.OutTensor(wire.descriptor(0, "FP32", (1, 4), 16), np.ones(4, np.float32).tobytes())],
    )
)
WELCOME_FRAME = wire.json_frame(wire.WELCOME, json.loads(WELCOME))


@contextlib.contextmanager
def false_daemon(folder: Path, *scripts: Sequence[bytes | None], memory: int | None = None) -> Iterator[Path]:
    """Run a daemon that answers each frame of a connection with the next bytes of the connection's script.

    None ends the connection. With `memory`, the first bytes to each connection carry its descriptor.
    """
    path = folder / "false.sock"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.fspath(path))
    listener.listen()

    def serve() -> None:
        for script in scripts:
            with contextlib.suppress(OSError):
                sock, _ = listener.accept()
                for i, said in enumerate(script):
                    sock.recv(65536)
                    if said is None:
                        break
                    if memory is not None and i == 0:
                        send_with_descriptor(sock, said, memory)
                    else:
                        sock.sendall(said)
                else:
                    sock.recv(65536)
                sock.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield path
    finally:
        listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that waits for a connection
        listener.close()
        thread.join(WAIT_S_MAX)


def against(folder: Path, test: Callable[[AsyncClient], Awaitable[None]], *scripts: Sequence[bytes | None]) -> None:
    """Run `test` with an asynchronous client of a false daemon."""

    async def connected(path: Path) -> None:
        async with AsyncClient(path, timeout_s=WAIT_S_MAX) as asking:
            await test(asking)

    with false_daemon(folder, *scripts) as path:
        run(connected(path))


def changed(frame: bytes, at: int, *values: int) -> bytes:
    data = bytearray(frame)
    data[at : at + len(values)] = bytes(values)
    return bytes(data)
