"""The bytes of the local protocol's frames, and errors on the wire."""

from __future__ import annotations

import numpy as np
import pytest

from edgert.errors import BundleCorrupt, EdgeRTError, Overloaded, ProtocolError, WorkerLost
from edgert.protocol import wire
from edgert.protocol.arrays import from_wire
from tests.support.frames import complete, infer_frame


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
