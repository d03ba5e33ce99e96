"""Sessions of a worker in the test's own process: limits, memory, and the effect of a failed request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.bundle.signal_rules import Series, Sound
from edgert.config import ServingConfig
from edgert.engines import Session
from edgert.errors import EngineFailed, Overloaded, RequestError
from edgert.protocol import wire
from edgert.worker.connections.sessions import ClientSession, Sessions
from edgert.worker.loading.model import LoadedModel
from tests.support.frames import complete
from tests.support.stand_ins.loaded_models import loaded, pipeline_of, sent

SOUND = Sound("x", 16_000, 8, step=4, lead=2, features="samples")


def sessions(model: LoadedModel, **settings: Any) -> Sessions:
    pipeline = pipeline_of(model, 10**6)
    version, serving = model.version, replace(ServingConfig(), **settings)
    frame_bytes_max = pipeline.tensors.frame_bytes_max(int(serving.frame_mb * 1024**2))
    return Sessions(pipeline, version, serving, frame_bytes_max)


def ask(session: ClientSession, array: NDArray[Any]) -> NDArray[Any]:
    """Return the answer's first output."""
    pipeline = session._sessions.pipeline
    return session.infer(pipeline.tensors.read(sent(array)), 0, 0, None).outputs[0]


def test_answers_of_a_session_do_not_come_from_a_cache(tmp_path: Path) -> None:
    opened = sessions(loaded(tmp_path, op="add", state_id="")).open()
    item = np.ones((1, 4), np.float32)
    assert [ask(opened, item)[0, 0] for _ in range(3)] == [1, 2, 3]


def test_sessions_and_their_memory_are_limited_and_released(tmp_path: Path) -> None:
    model = loaded(tmp_path, op="add", state_id="", item_shape=(1000,))
    few = sessions(model, sessions_max=2)
    few.open()
    few.open()
    with pytest.raises(Overloaded, match="sessions_max"):
        few.open()
    few.release()
    few.open()
    small = sessions(model, session_mb=0.005)
    small.open()
    assert (small.count, small.reserved_bytes) == (1, 4000)
    with pytest.raises(Overloaded, match="session_mb"):
        small.open()


def test_a_session_whose_memory_exceeds_a_frame_is_refused(tmp_path: Path) -> None:
    model = loaded(tmp_path, op="add", state_id="", item_shape=(10_000,))
    with pytest.raises(RequestError, match=r"needs up to 40000 bytes of memory.*must fit a frame.*frame_mb"):
        sessions(model, frame_mb=0.04).open()
    sessions(model, frame_mb=0.05).open()


def test_the_memory_that_is_reserved_is_never_exceeded(tmp_path: Path) -> None:
    rules = {"sound": replace(SOUND, step=3)}
    opened = sessions(loaded(tmp_path, op="add", state_id="", item_shape=(8,), rules=rules))
    session, random = opened.open(), np.random.default_rng(0)
    for size in random.integers(0, 30, 100):
        ask(session, random.random((1, size), np.float32))
        assert sum(array.nbytes for array in session.memory.arrays) <= opened.reserved_bytes


def test_a_request_whose_answer_cannot_be_sent_is_undone(tmp_path: Path) -> None:
    session = sessions(loaded(tmp_path, op="add", state_id="")).open()
    ask(session, np.ones((1, 4), np.float32))
    ask(session, np.ones((1, 4), np.float32))
    session.undo()
    assert ask(session, np.ones((1, 4), np.float32))[0, 0] == 2


def test_a_request_whose_engine_fails_leaves_the_session_unchanged(tmp_path: Path) -> None:
    model = loaded(tmp_path, op="add", state_id="")
    runs = iter([False, False, True, False])

    class Failing(Session):
        inputs, outputs = model.session.inputs, model.session.outputs

        def run(self, tensors: Any) -> Any:
            if next(runs):
                raise EngineFailed("broken")
            return model.session.run(tensors)

        def close(self) -> None:
            return None

    session = sessions(replace(model, session=Failing())).open()
    ask(session, np.ones((1, 4), np.float32))
    with pytest.raises(EngineFailed):
        ask(session, np.ones((2, 4), np.float32))
    assert ask(session, np.ones((1, 4), np.float32))[0, 0] == 2


@pytest.mark.parametrize("step", [3, 8, 11, 20])
def test_windows_with_overlap_and_with_gaps_are_those_of_the_whole_signal(tmp_path: Path, step: int) -> None:
    rule = Series("x", 2, 8, step=step)
    model = loaded(tmp_path, item_shape=(8, 2), rules={"series": rule})
    signal = np.random.default_rng(0).random((1, 97, 2)).astype(np.float32)
    whole = np.stack([signal[0, at : at + 8] for at in range(0, 97 - 8 + 1, step)])
    for size in (1, 7, 8, 30):
        session = sessions(model).open()
        chunks = [signal[:, at : at + size] for at in range(0, 97, size)]
        np.testing.assert_array_equal(np.concatenate([ask(session, chunk) for chunk in chunks]), whole)


def test_a_session_continues_on_another_worker_from_the_frame_that_moves_it(tmp_path: Path) -> None:
    opened = sessions(loaded(tmp_path, op="add", state_id="", item_shape=(8,), rules={"sound": SOUND}))
    signal = np.random.default_rng(0).random((1, 50)).astype(np.float32)
    alone = opened.open()
    want = [ask(alone, signal[:, :21]), ask(alone, signal[:, 21:])]
    one, other = opened.open(), opened.open()
    got = [ask(one, signal[:, :21])]
    moved = complete(b"".join(one.moved()))
    assert moved is not None
    frame = complete(wire.resumed(moved))
    assert frame is not None
    assert frame.kind == wire.RESUME
    other.resume(frame)
    got.append(ask(other, signal[:, 21:]))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)


def test_several_signals_in_one_request_of_a_stateful_model_are_refused(tmp_path: Path) -> None:
    model = loaded(tmp_path, op="add", state_id="", item_shape=(8,), rules={"sound": SOUND})
    opened = sessions(model)
    two = np.ones((2, 20), np.float32)
    with pytest.raises(RequestError, match="a request of a session has one signal"):
        ask(opened.open(), two)
    pipeline = opened.pipeline
    tensor = wire.WireTensor(0, "FP32", two.shape, memoryview(two.tobytes()))
    with pytest.raises(RequestError, match="send one signal in each request"):
        pipeline.infer(pipeline.tensors.read((tensor,)), wire.FLAG_NO_CACHE, 0, None)


def test_a_session_that_has_not_begun_moves_without_a_memory(tmp_path: Path) -> None:
    session = sessions(loaded(tmp_path, op="add", state_id="")).open()
    moved = complete(b"".join(session.moved()))
    assert moved is not None
    assert (moved.kind, moved.tensors) == (wire.MOVED, ())
