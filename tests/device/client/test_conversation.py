"""The bytes that both clients send and understand, without a socket."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.client.conversation import Conversation, Retry
from edgert.errors import (
    DaemonUnreachable,
    DeadlineExceeded,
    EdgeRTError,
    ModelNotFound,
    Overloaded,
    RequestError,
    ShuttingDown,
    Unavailable,
    WorkerLost,
)
from edgert.protocol import wire
from edgert.protocol.frame_buffer import FrameBuffer
from edgert.protocol.frame_builder import KEPT_BYTES_MAX
from edgert.protocol.sharing import SharedArea
from edgert.tensors import InferResponse, StageTimes

RNG = np.random.default_rng(7)
SOCKET = Path("/run/edgert.sock")


def a_conversation(*item_shapes: list[int], memory: int | None = None, share: bool = True) -> Conversation:
    """A conversation after the WELCOME. Without `share`, the next conversation may get shared memory."""
    inputs = [{"name": f"x{i}", "datatype": "FP32", "shape": [-1, *shape]} for i, shape in enumerate(item_shapes)]
    outputs = [{"name": "y", "datatype": "FP32", "shape": [-1]}]
    conversation = Conversation("m", SOCKET, share=share, may_share=True)
    conversation.map_memory(memory)
    welcome = {"inputs": inputs, "outputs": outputs, "release": 1}
    meta = b"".join(wire.frame(wire.WELCOME, model_id=5, meta=json.dumps(welcome).encode()))
    assert conversation.received(received([meta])) == welcome
    return conversation


def received(parts: Any, shared: memoryview | None = None) -> wire.Frame:
    frames = FrameBuffer()
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


def an_answer(request_id: int, value: float, number: int = 0, **fields: Any) -> wire.Frame:
    data = np.full(1, value, np.float32).tobytes()
    tensor = wire.OutTensor(wire.descriptor(number, "FP32", (1,), len(data)), data)
    return received(wire.frame(wire.RESULT, request_id=request_id, tensors=[tensor], **fields))


@pytest.mark.parametrize("items", [3, KEPT_BYTES_MAX // 4], ids=["short", "long"])
@pytest.mark.parametrize("named", [False, True])
def test_each_request_of_the_same_shape_has_its_own_values_and_number(items: int, named: bool) -> None:
    talk = a_conversation([items])
    for turn in range(3):
        array = RNG.random((1, items), np.float32)
        frame = received(talk.request({"x0": array} if named else array, wire.FLAG_NO_CACHE, 1000 + turn))
        assert np.array_equal(values(frame)[0], array)
        assert (frame.request_id, frame.model_id, frame.arg) == (turn + 1, 5, 1000 + turn)
        assert frame.flags == wire.FLAG_NO_CACHE


@pytest.mark.parametrize("items", [3, KEPT_BYTES_MAX // 4], ids=["short", "long"])
def test_an_item_without_its_batch_axis_gets_the_axis_in_every_request(items: int) -> None:
    talk = a_conversation([items])
    for _ in range(3):
        item = RNG.random(items, np.float32)
        (array,) = values(received(talk.request(item, 0, 1)))
        assert np.array_equal(array, item[np.newaxis])


def test_several_inputs_are_sent_in_the_models_order() -> None:
    talk = a_conversation([2], [70])
    for _ in range(3):
        first, second = RNG.random((4, 2), np.float32), RNG.random((4, 70), np.float32)
        got = values(received(talk.request({"x1": second, "x0": first}, 0, 1)))
        assert np.array_equal(got[0], first)
        assert np.array_equal(got[1], second)


def test_arrays_that_are_not_contiguous_are_sent_in_order() -> None:
    for items in (3, KEPT_BYTES_MAX // 4):
        talk = a_conversation([items])
        for _ in range(2):
            array = RNG.random((items, 2), np.float32).T
            assert np.array_equal(values(received(talk.request(array, 0, 1)))[0], array)


def test_an_empty_array_whose_axis_no_frame_can_state_is_refused() -> None:
    talk = a_conversation([-1])
    with pytest.raises(RequestError, match=r"shape \[0, 8589934592\]; an axis may have at most 4294967295 elements"):
        talk.request(np.empty((0, 2**33), np.float32), 0, 1)
    assert np.array_equal(values(received(talk.request(np.ones((1, 2), np.float32), 0, 1)))[0], [[1, 1]])


def test_each_long_request_is_sent_through_shared_memory() -> None:
    made = SharedArea.create(1 << 20)
    assert made is not None
    area, descriptor = made
    talk = a_conversation([20_000], memory=descriptor)
    for _ in range(3):
        array = RNG.random((1, 20_000), np.float32)
        parts = talk.request(array, 0, 1)
        assert talk.size_bytes == sum(map(len, parts)) == 64
        assert np.array_equal(values(received(parts, area.request))[0], array)


def test_the_first_large_frame_causes_a_new_conversation_with_shared_memory() -> None:
    large = np.zeros((1, 20_000), np.float32)
    talk = a_conversation([20_000], share=False)
    with pytest.raises(Retry):
        talk.request(large, 0, 1)
    assert talk.outgrown
    talk = a_conversation([20_000], share=True)  # the daemon gave no shared memory: another request for it is useless
    talk.request(large, 0, 1)
    assert not talk.outgrown
    talk = a_conversation([3], share=False)
    talk.request(np.zeros((1, 3), np.float32), 0, 1)
    talk.received(an_answer(1, 1.0))
    assert not talk.outgrown
    tensor = wire.OutTensor(wire.descriptor(0, "FP32", (20_000,), large.nbytes), large.tobytes())
    talk.request(np.zeros((1, 3), np.float32), 0, 1)
    answer = talk.received(received(wire.frame(wire.RESULT, request_id=2, tensors=[tensor])))
    assert isinstance(answer, dict)  # the answer arrived over the socket
    assert answer["y"].shape == (20_000,)
    assert talk.outgrown


def test_converted_inputs_are_converted_anew_for_each_request() -> None:
    talk = a_conversation([2])
    for given in ([1, 2.5], [3, 4.5], np.array([5.0, 6.5])):
        assert values(received(talk.request(given, 0, 1)))[0].tolist() == [list(given)]
    assert values(received(talk.request(np.array([[7, 8]], np.float32), 0, 1)))[0].tolist() == [[7, 8]]
    assert values(received(talk.request(np.array([9, 10], np.float32), 0, 1)))[0].tolist() == [[9, 10]]


def test_an_item_without_the_batch_axis_is_answered_without_the_batch_axis() -> None:
    talk = a_conversation([3])
    for turn, value in enumerate((1.5, 2.5)):
        talk.request(np.zeros(3, np.float32), 0, 1)
        answer: Any = talk.received(an_answer(turn + 1, value))
        assert (answer["y"].shape, float(answer["y"])) == ((), value)
    talk.request(np.zeros((1, 3), np.float32), 0, 1)
    answer = talk.received(an_answer(3, 3.5))
    assert answer["y"].shape == (1,)


def test_a_traced_answer_tells_how_it_came_about() -> None:
    talk = a_conversation([3])
    talk.request(np.zeros(3, np.float32), 0, 1, trace=True)
    stages = StageTimes(1, 2, 3, 4, 5, 6)
    answer = talk.received(an_answer(1, 1.5, arg=4, flags=wire.FLAG_CACHE_HIT, stages=stages))
    assert isinstance(answer, InferResponse)
    assert (answer.model, answer.release, answer.batch, answer.cache_hit) == ("m", 1, 4, True)
    assert (answer.stages, answer.outputs["y"].tolist()) == (stages, 1.5)


def test_an_answer_with_an_output_that_the_model_lacks_is_an_error() -> None:
    talk = a_conversation([3])
    talk.request(np.zeros(3, np.float32), 0, 1)
    with pytest.raises(EdgeRTError, match="does not have"):
        talk.received(an_answer(1, 1, number=1))


def said(error: EdgeRTError, request_id: int = 0) -> wire.Frame:
    return received([wire.error_frame(error, request_id=request_id)])


MOVED = received([wire.json_frame(wire.MOVED, {})])


def test_a_hello_asks_for_shared_memory_where_it_may_be_used() -> None:
    def hello(model: str | None, share: bool) -> dict[str, Any]:
        return received([Conversation(model, SOCKET, share=share).hello()]).json()

    assert hello("m", True) == {"model": "m", "shared": True}
    assert hello("m", False) == {"model": "m"}
    assert hello(None, True) == {"model": None}


@pytest.mark.parametrize(
    ("frame", "waits_for"),
    [
        (MOVED, Unavailable),
        (said(Unavailable("loading", retry_after_s=0.5)), Unavailable),
        (said(Unavailable("quarantined")), None),
        (said(ModelNotFound("no such model")), None),
        (received([wire.json_frame(wire.PONG, {})]), None),
    ],
    ids=["moved", "loading", "unavailable", "not found", "pong"],
)
def test_a_refused_hello_is_repeated_only_if_the_daemon_says_when(
    frame: wire.Frame, waits_for: type[EdgeRTError] | None
) -> None:
    talk = Conversation("m", SOCKET, share=False)
    event = talk.received(frame)
    assert talk.over
    if waits_for is None:
        assert isinstance(event, EdgeRTError)
    else:
        assert isinstance(event, Retry)
        assert isinstance(event.error, waits_for)


@pytest.mark.parametrize(
    ("frame", "event", "over"),
    [
        (said(RequestError("wrong shape"), 1), RequestError, False),
        (said(Overloaded("full", retry_after_s=0.1), 1), Overloaded, False),
        (said(ShuttingDown("stopping", retry_after_s=1.0)), Retry, True),
        (said(EdgeRTError("broken")), EdgeRTError, True),
        (said(RequestError("for another request"), 7), EdgeRTError, True),
        (MOVED, Retry, True),
        (an_answer(2, 1.0), EdgeRTError, True),
    ],
    ids=["refused", "overloaded", "stopping", "broken", "other request", "moved", "other answer"],
)
def test_each_frame_has_the_documented_effect_on_the_request(
    frame: wire.Frame, event: type[Exception], over: bool
) -> None:
    talk = a_conversation([3])
    talk.request(np.zeros(3, np.float32), 0, 1)
    assert type(talk.received(frame)) is event
    assert talk.over is over


def test_the_end_of_a_connection_fails_only_a_request_that_an_engine_may_have_run() -> None:
    assert isinstance(Conversation("m", SOCKET, share=False).ended(sent=True), Retry)
    assert isinstance(
        Conversation("m", SOCKET, share=False).ended(sent=True, cause=OSError("reset")), DaemonUnreachable
    )
    talk = a_conversation([3])
    talk.request(np.zeros(3, np.float32), 0, 1)
    assert isinstance(talk.ended(sent=False), Retry)
    lost = talk.ended(sent=True, cause=OSError("reset"))
    assert isinstance(lost, WorkerLost)
    assert isinstance(lost.__cause__, OSError)


def test_a_retry_waits_for_the_given_time_but_not_beyond_the_deadline() -> None:
    assert Retry().wait_s(left_s=1.0) == 0.0
    assert Retry(Unavailable("loading", retry_after_s=0.4)).wait_s(left_s=1.0) == 0.4
    with pytest.raises(Unavailable, match="loading"):
        Retry(Unavailable("loading", retry_after_s=2.0)).wait_s(left_s=1.0)
    with pytest.raises(DeadlineExceeded):
        Retry().wait_s(left_s=0.0)


def test_a_request_with_a_text_sends_only_this_input_with_its_number() -> None:
    names = ("style", "ids", "mask", "types")
    welcome = {
        "inputs": [{"name": name, "datatype": "INT64", "shape": [-1, -1]} for name in names],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1]}],
        "preprocess": {
            "text": {"name": "ids", "datatype": "UINT8", "shape": [-1, -1]},
            "text_for": ["ids", "mask", "types"],
        },
        "release": 1,
    }
    conversation = Conversation("m", SOCKET, share=False)
    conversation.received(received([b"".join(wire.frame(wire.WELCOME, model_id=5, meta=json.dumps(welcome).encode()))]))
    style = np.ones((2, 1), np.int64)
    for text in (["one", "more"], [b"one", b"more"], np.array(["one", "more"])):
        sent = received(conversation.request({"style": style, "ids": text}, 0, 1))
        assert [(tensor.number, tensor.shape) for tensor in sent.tensors] == [(0, (2, 1)), (1, (2, 4))]
        assert bytes(sent.tensors[1].data) == b"one\0more"
    own = {name: np.ones((2, 3), np.int64) for name in names}
    assert [tensor.number for tensor in received(conversation.request(own, 0, 1)).tensors] == [0, 1, 2, 3]
    with pytest.raises(
        RequestError, match=r"takes inputs \['style', 'ids', 'mask', 'types'\], or \['style', 'ids'\] with text"
    ):
        conversation.request({"ids": "one"}, 0, 1)
