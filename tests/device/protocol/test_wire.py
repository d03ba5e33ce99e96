"""The bytes of the local protocol's frames, and errors on the wire."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.errors import BundleCorrupt, EdgeRTError, Overloaded, ProtocolError, WorkerLost
from edgert.protocol import wire
from edgert.protocol.arrays import from_wire
from edgert.protocol.frame_buffer import FrameBuffer
from edgert.tensors import DATATYPES


def out(number: int, array: NDArray[Any]) -> wire.OutTensor:
    described = wire.descriptor(number, DATATYPES[array.dtype.name], array.shape, array.nbytes)
    return wire.OutTensor(described, array.tobytes())


def infer_frame(*arrays: NDArray[Any], meta: bytes = b"", request_id: int = 7) -> bytes:
    tensors = [out(i, array) for i, array in enumerate(arrays)]
    return b"".join(wire.frame(wire.INFER, request_id=request_id, meta=meta, tensors=tensors))


def complete(data: bytes, frame_bytes_max: int = wire.FRAME_BYTES_MAX) -> wire.Frame | None:
    frames = FrameBuffer(frame_bytes_max, size_bytes=len(data) + 64)
    frames.room[: len(data)] = data
    return frames.feed(len(data))


@pytest.mark.parametrize("error", [Overloaded("full", retry_after_s=0.25), WorkerLost("gone"), ProtocolError("bad")])
def test_an_error_is_read_back_with_its_class_and_message(error: EdgeRTError) -> None:
    frame = complete(wire.error_frame(error, request_id=3))
    assert frame is not None
    assert frame.request_id == 3
    back = wire.error_of(frame)
    assert type(back) is type(error)
    assert (back.message, back.retry_after_s) == (error.message, error.retry_after_s)


def test_an_error_without_a_number_is_sent_as_its_parent_class() -> None:
    frame = complete(wire.error_frame(BundleCorrupt("x")))
    assert frame is not None
    assert isinstance(BundleCorrupt("x"), type(wire.error_of(frame)))


def test_the_bytes_of_the_protocol_page_are_those_that_are_sent() -> None:
    """docs/protocol.md gives these bytes to implementers in other languages."""
    hello = wire.json_frame(wire.HELLO, {"model": "digits"})
    assert hello[:16].hex() == "45525431010100000000000000000000"
    assert hello[64:82] == b'{"model":"digits"}'
    request = infer_frame(np.array([[1.0, 2.0]], np.float32), request_id=1)
    assert request[64:96].hex() == "000b0200000000000800000000000000" + "01000000020000000000000000000000"
    assert request[128:136].hex() == "0000803f00000040"
    assert len(request) == 192


def test_an_empty_tensor_whose_shape_is_too_large_for_numpy_is_the_senders_fault() -> None:
    shape = (0, wire.AXIS_MAX, wire.AXIS_MAX, 4)
    with pytest.raises(ProtocolError, match="NumPy cannot hold the shape"):
        from_wire(wire.WireTensor(0, "FP32", shape, memoryview(b"")))
