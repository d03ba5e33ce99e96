"""Frames of one connection, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.protocol import wire
from edgert.protocol.frame_builder import KEPT_BYTES_MAX, FrameBuilder
from tests.support.frames import complete

NUMBERS = (0, 2)


def read(parts: Sequence[wire.Buffer], shared: memoryview | None = None) -> wire.Frame:
    frame = complete(b"".join(parts), shared=shared)
    assert frame is not None
    return frame


def arrays(items: int, value: float) -> list[NDArray[Any]]:
    return [np.full((items, 3), value, np.float32), np.full(items, int(value), np.int64)]


@pytest.mark.parametrize("items", [1, KEPT_BYTES_MAX // 4], ids=["short", "long"])
@pytest.mark.parametrize("shared", [False, True])
def test_each_frame_holds_its_own_values(items: int, shared: bool) -> None:
    memory = memoryview(bytearray(1 << 20)) if shared else None
    kept = FrameBuilder(wire.RESULT, model_id=5, shared=memory)
    for turn in range(1, 4):
        given = arrays(items, turn)
        stages = tuple(range(turn, turn + 6))
        parts = kept.parts(given, NUMBERS, wire.FLAG_CACHE_HIT, turn, 10 * turn, stages)
        assert kept.sent_bytes == sum(map(len, parts))
        assert kept.frame_bytes >= sum(array.nbytes for array in given)
        frame = read(parts, memory)
        assert (frame.request_id, frame.model_id, frame.arg) == (turn, 5, 10 * turn)
        assert frame.flags & wire.FLAG_CACHE_HIT
        assert tuple(wire.stage_times(frame)) == stages
        assert [tensor.number for tensor in frame.tensors] == list(NUMBERS)
        assert [bytes(tensor.data) for tensor in frame.tensors] == [array.tobytes() for array in given]
    went_shared = kept.sent_bytes == 64
    assert went_shared == (shared and items > 1)


def test_a_frame_with_other_shapes_or_numbers_is_built_anew() -> None:
    kept = FrameBuilder(wire.RESULT)
    for items, numbers in ((1, NUMBERS), (2, NUMBERS), (2, (1, 3)), (1, NUMBERS)):
        frame = read(kept.parts(arrays(items, 1), numbers, 0, 1, 1))
        assert [tensor.number for tensor in frame.tensors] == list(numbers)
        assert frame.tensors[1].shape == (items,)


def test_arrays_in_another_order_of_memory_are_sent_in_rows() -> None:
    for items in (3, KEPT_BYTES_MAX):
        kept = FrameBuilder(wire.INFER)
        for _ in range(2):
            array = np.arange(2 * items, dtype=np.float32).reshape(items, 2).T
            frame = read(kept.parts([array], (0,), 0, 1, 1))
            assert bytes(frame.tensors[0].data) == array.tobytes()
