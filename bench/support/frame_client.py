"""A minimal client of the local socket, like the peers' clients: it sends prepared frames."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.protocol import wire
from edgert.protocol.frame_builder import FrameBuilder
from tests.support.clients import read_frame

RESULT = wire.MAGIC + bytes((wire.VERSION, wire.RESULT))


def frame_asker(path: Path, model: str, form: NDArray[Any]) -> Callable[[NDArray[Any]], NDArray[np.float32]]:
    """Return a function that sends an array like `form`, past the cache, and returns the answer, one FP32 tensor.

    It only asserts that each answer is a RESULT of the first one's size.
    """
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(str(path))
    sock.sendall(wire.json_frame(wire.HELLO, {"model": model}))
    model_id = read_frame(sock).model_id
    parts = FrameBuilder(wire.INFER, model_id).parts([form], (0,), wire.FLAG_NO_CACHE, 1, 0)
    sock.sendmsg(parts)
    first = read_frame(sock)
    assert first.kind == wire.RESULT, first
    (output,) = first.tensors
    start = wire.HEADER_BYTES + wire.aligned(len(first.meta)) + wire.DESCRIPTOR_BYTES
    size = start + wire.aligned(len(output.data))
    head = b"".join(parts)[: -wire.aligned(form.nbytes)]
    padding = bytes(-form.nbytes % wire.ALIGNMENT)
    values = len(output.data) // np.dtype(np.float32).itemsize

    def ask(array: NDArray[Any]) -> NDArray[np.float32]:
        sock.sendmsg((head, array.data, padding))
        answer = sock.recv(size, socket.MSG_WAITALL)
        assert answer.startswith(RESULT), answer
        assert len(answer) == size
        return np.frombuffer(answer, np.float32, values, start)

    return ask
