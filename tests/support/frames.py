"""Single frames of the local protocol, written and read without a connection."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from edgert.protocol import wire
from edgert.protocol.frame_buffer import FrameBuffer
from edgert.tensors import DATATYPES


def out(number: int, array: NDArray[Any]) -> wire.OutTensor:
    described = wire.descriptor(number, DATATYPES[array.dtype.name], array.shape, array.nbytes)
    return wire.OutTensor(described, array.tobytes())


def infer_frame(*arrays: NDArray[Any], meta: bytes = b"", request_id: int = 7) -> bytes:
    tensors = [out(i, array) for i, array in enumerate(arrays)]
    return b"".join(wire.frame(wire.INFER, request_id=request_id, meta=meta, tensors=tensors))


def complete(
    data: bytes, frame_bytes_max: int = wire.FRAME_BYTES_MAX, shared: memoryview | None = None
) -> wire.Frame | None:
    """Return the frame that `data` begins with; None if it is incomplete. `shared` is the sender's memory."""
    frames = FrameBuffer(frame_bytes_max, size_bytes=len(data) + 64)
    frames.shared = shared
    frames.room[: len(data)] = data
    return frames.feed(len(data))
