"""One request through a model, in the test's own process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.bundle.rules import Classify, Ctc, Smooth
from edgert.bundle.signal_rules import Series
from edgert.processing.answers.ctc import text_of
from edgert.protocol import wire
from edgert.tensors import TensorSpec
from edgert.worker.pipeline.batcher import Batcher
from edgert.worker.pipeline.cache import PredictionCache
from edgert.worker.pipeline.near_cache import NearCache
from edgert.worker.pipeline.pipeline import Pipeline
from tests.support.stand_ins.loaded_models import loaded, pipeline_of, sent

ITEM = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)


def test_a_bare_request_is_answered_by_the_engine_alone(tmp_path: Path) -> None:
    pipeline = pipeline_of(loaded(tmp_path))
    inputs = pipeline.tensors.read(sent(ITEM))
    assert pipeline.needs_only_engine(inputs, 0)
    answer = pipeline.infer(inputs, 0, arrived_ns=0, deadline_s=None)
    assert (answer.outputs[0].tolist(), answer.numbers, answer.batch, answer.flags) == (ITEM.tolist(), [0], 1, 0)
    assert (answer.stages.preprocess_us, answer.stages.cache_us, answer.stages.postprocess_us) == (0, 0, 0)
    assert answer.stages.decode_us > 0


def test_requests_that_run_together_get_their_own_answers(tmp_path: Path) -> None:
    pipeline = pipeline_of(loaded(tmp_path))
    requests = [pipeline.tensors.read(sent(ITEM * i)) for i in range(3)]
    answers = pipeline.infer_together(requests, [(0, 0, 0)] * 3, None)
    assert [answer.outputs[0].tolist() for answer in answers] == [(ITEM * i).tolist() for i in range(3)]
    assert {answer.batch for answer in answers} == {3}


def test_an_equal_request_is_answered_by_the_cache_unless_it_asks_for_the_engine(tmp_path: Path) -> None:
    pipeline = pipeline_of(loaded(tmp_path), 10**6)
    inputs = pipeline.tensors.read(sent(ITEM))
    assert not pipeline.needs_only_engine(inputs, 0)
    assert pipeline.needs_only_engine(inputs, wire.FLAG_NO_CACHE)
    first, again = (pipeline.infer(inputs, 0, 0, None) for _ in range(2))
    assert (first.flags, first.batch) == (0, 1)
    assert (again.flags, again.batch, again.stages.engine_us) == (wire.FLAG_CACHE_HIT, 0, 0)
    assert pipeline.infer(inputs, wire.FLAG_NO_CACHE, 0, None).batch == 1


def test_the_answer_contains_the_text_of_ctc(tmp_path: Path) -> None:
    pipeline = pipeline_of(loaded(tmp_path, item_shape=(5, 3), rules={"ctc": Ctc("y", ("", "ä", "b"))}))
    assert [spec.name for spec in pipeline.tensors.outputs] == ["y", "y_text", "y_probability"]
    steps = 20 * np.eye(3, dtype=np.float32)[[[1, 1, 0, 2, 2], [0, 0, 0, 0, 0]]]
    answer = pipeline.infer(pipeline.tensors.read(sent(steps)), 0, arrived_ns=0, deadline_s=None)
    assert [text_of(row) for row in answer.outputs[1]] == ["äb", ""]
    assert answer.outputs[2].tolist() == pytest.approx([1.0, 0.0], abs=1e-6)


def test_the_windows_of_a_signal_are_smoothed_and_separate_items_are_not_smoothed(tmp_path: Path) -> None:
    rules = {
        "series": Series("x", channels=1, length=3, step=3),
        "classify": Classify("y", ("a", "b", "rest"), softmax=False, none=("rest",), smooth=Smooth("all", 2)),
    }
    pipeline = pipeline_of(loaded(tmp_path, item_shape=(3,), rules=rules))
    windows = np.eye(3, dtype=np.float32)[[0, 0, 1, 1, 2, 1]]

    def classes(given: NDArray[np.float32]) -> list[int]:
        answer = pipeline.infer(pipeline.tensors.read(sent(given)), 0, arrived_ns=0, deadline_s=None)
        return [int(c) for c in answer.outputs[1].ravel()]

    assert classes(windows.reshape(1, 18, 1)) == [-1, 0, -1, 1, -1, -1]
    assert classes(windows.reshape(2, 9, 1)) == [-1, 0, -1, -1, -1, -1], "each signal begins anew"
    assert classes(windows) == [0, 0, 1, 1, -1, 1], "the model's own tensor has no order"


def test_an_answer_without_a_window_can_be_joined_with_answers_that_have_windows(tmp_path: Path) -> None:
    rules = {
        "series": Series("x", channels=1, length=3, step=3),
        "classify": Classify("y", ("a", "b", "c"), top_k=2),
    }
    pipeline = pipeline_of(loaded(tmp_path, item_shape=(3,), rules=rules))
    answers, memory = [], pipeline.memory_form.first
    for length in (2, 4):
        given = pipeline.tensors.read(sent(np.ones((1, length, 1), np.float32)))
        answer, memory = pipeline.infer_in_session(given, 0, arrived_ns=0, deadline_s=None, memory=memory)
        answers.append(answer.outputs)
    joined = [np.concatenate(each) for each in zip(*answers, strict=True)]
    assert [array.shape for array in joined] == [(2, 3), (2, 2), (2, 2)]


def test_with_a_near_cache_the_windows_of_a_model_with_a_fixed_batch_run_one_by_one(tmp_path: Path) -> None:
    item = (4, 4, 1)  # has the form of a gray image
    specs = {"inputs": (TensorSpec("x", "FP32", (1, *item)),), "outputs": (TensorSpec("y", "FP32", (1, *item)),)}
    model = loaded(tmp_path, item_shape=item, rules={"series": Series("x", channels=4, length=4, step=4), **specs})
    batcher = Batcher(model.session, model.learned.batch_cap)
    near = NearCache(specs["inputs"][0], distance=0.01, value_range=1.0, ttl_s=60.0)
    pipeline = Pipeline(model, batcher, PredictionCache(0, 60.0), near)
    signal = pipeline.tensors.read(sent(np.ones((1, 12, 4), np.float32)))
    assert len(pipeline.infer(signal, 0, arrived_ns=0, deadline_s=None).outputs[0]) == 3
    assert {items: count for items, (count, _) in batcher.runs.items()} == {1: 3}


def test_a_request_of_the_reactor_that_the_near_cache_does_not_know_runs_on_the_reactors_session(
    tmp_path: Path,
) -> None:
    model = loaded(tmp_path, item_shape=(2, 2, 1))
    batcher = Batcher(
        model.session, 1, reactor_sessions=(loaded(tmp_path / "b", item_shape=(2, 2, 1), op="sum").session,)
    )
    near = NearCache(model.version.manifest.inputs[0], distance=0.01, value_range=1.0, ttl_s=60.0)
    pipeline = Pipeline(model, batcher, PredictionCache(0, 60.0), near)
    inputs = pipeline.tensors.read(sent(ITEM.reshape(1, 2, 2, 1)))
    answer = pipeline.infer(inputs, 0, arrived_ns=0, deadline_s=None, in_reactor=True)
    assert answer.outputs[0].ravel().tolist() == [10.0] * 4, "the sum, which only the reactor's session computes"
