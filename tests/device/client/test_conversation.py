"""What both clients say and understand, without a socket."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.client.conversation import KEPT_BYTES_MAX, Conversation, ModelInterface
from edgert.errors import EdgeRTError
from edgert.protocol import wire
from edgert.protocol.sharing import SharedArea

RNG = np.random.default_rng(7)


def a_conversation(*item_shapes: list[int], area: SharedArea | None = None) -> Conversation:
    inputs = [{"name": f"x{i}", "datatype": "FP32", "shape": [-1, *shape]} for i, shape in enumerate(item_shapes)]
    outputs = [{"name": "y", "datatype": "FP32", "shape": [-1]}]
    return Conversation(ModelInterface("m", {"inputs": inputs, "outputs": outputs, "release": 1}), 5, area)


def received(parts: Any, shared: memoryview | None = None) -> wire.Frame:
    frames = wire.FrameBuffer()
    frames.shared = shared
    data = b"".join(parts)
    at, frame = 0, None
    while frame is None:
        count = min(len(frames.room), len(data) - at)
        frames.room[:count] = data[at : at + count]
        at += count
        frame = frames.feed(count)
    return frame


def values(frame: wire.Frame) -> list[NDArray[Any]]:
    return [np.frombuffer(tensor.data, np.float32).reshape(tensor.shape) for tensor in frame.tensors]


def an_answer(talk: Conversation, value: float, number: int = 0) -> wire.Frame:
    data = np.full(1, value, np.float32).tobytes()
    tensor = wire.OutTensor(wire.descriptor(number, "FP32", (1,), len(data)), data)
    return received(wire.frame(wire.RESULT, request_id=talk.request_id, tensors=[tensor]))


@pytest.mark.parametrize("items", [3, KEPT_BYTES_MAX // 4], ids=["short", "long"])
@pytest.mark.parametrize("named", [False, True])
def test_requests_of_one_shape_say_each_its_own(items: int, named: bool) -> None:
    talk = a_conversation([items])
    for turn in range(3):
        array = RNG.random((1, items), np.float32)
        frame = received(talk.ask({"x0": array} if named else array, wire.FLAG_NO_CACHE, 1000 + turn))
        assert np.array_equal(values(frame)[0], array)
        assert (frame.request_id, frame.model_id, frame.arg) == (turn + 1, 5, 1000 + turn)
        assert frame.flags == wire.FLAG_NO_CACHE


def test_several_inputs_are_sent_in_the_models_order() -> None:
    talk = a_conversation([2], [70])
    for _ in range(3):
        first, second = RNG.random((4, 2), np.float32), RNG.random((4, 70), np.float32)
        got = values(received(talk.ask({"x1": second, "x0": first}, 0, 1)))
        assert np.array_equal(got[0], first)
        assert np.array_equal(got[1], second)


def test_arrays_that_do_not_lie_in_order_are_sent_in_order() -> None:
    for items in (3, KEPT_BYTES_MAX // 4):
        talk = a_conversation([items])
        for _ in range(2):
            array = RNG.random((items, 2), np.float32).T
            assert np.array_equal(values(received(talk.ask(array, 0, 1)))[0], array)


def test_long_requests_go_through_shared_memory_each_time() -> None:
    made = SharedArea.made(1 << 20)
    assert made is not None
    area = made[0]
    talk = a_conversation([20_000], area=area)
    for _ in range(3):
        array = RNG.random((1, 20_000), np.float32)
        parts = talk.ask(array, 0, 1)
        assert talk.size_bytes == sum(map(len, parts)) == 64
        assert np.array_equal(values(received(parts, area.request))[0], array)


def test_an_item_without_its_axis_is_answered_without_it_each_time_anew() -> None:
    talk = a_conversation([3])
    for value in (1.5, 2.5):
        talk.ask(np.zeros(3, np.float32), 0, 1)
        answer = talk.outputs(an_answer(talk, value))["y"]
        assert (answer.shape, float(answer)) == ((), value)
    talk.ask(np.zeros((1, 3), np.float32), 0, 1)
    assert talk.outputs(an_answer(talk, 3.5))["y"].shape == (1,)


def test_an_answer_with_an_output_that_the_model_lacks_is_an_error() -> None:
    talk = a_conversation([3])
    talk.ask(np.zeros(3, np.float32), 0, 1)
    with pytest.raises(EdgeRTError, match="does not have"):
        talk.outputs(an_answer(talk, 1, number=1))
