"""The gate's metrics: which one applies, and what it says of answers known beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.errors import CalibrationInvalid, EngineFailed
from edgert.manifest import Accuracy
from edgert.tensors import TensorSpec
from edgert_deploy.accuracy import artifact_outputs, doubts, judge, reference_outputs, run_samples
from edgert_deploy.builders import Artifact
from edgert_deploy.calibration import CalibrationSet
from edgert_deploy.source import SourceModel, load_source
from tests import models

SCORES = TensorSpec("scores", "FP32", (-1, 3))
BOXES = TensorSpec("boxes", "FP32", (-1, 5, 4))
CLASSES = TensorSpec("classes", "INT64", (-1,))
EYE = np.eye(3, dtype=np.float32)


def test_labels_give_top1_of_both() -> None:
    labels = np.array([0, 1, 2])
    accuracy = judge((SCORES,), [EYE], [EYE[[0, 0, 2]]], labels, 0.1)
    assert (accuracy.metric, accuracy.samples, accuracy.fp32) == ("top1", 3, 1.0)
    assert accuracy.artifact == pytest.approx(2 / 3)
    assert not accuracy.passed


def test_without_labels_scores_are_compared_by_their_winner() -> None:
    accuracy = judge((SCORES,), [EYE], [EYE * 5 + 0.1], None, 0.0)
    assert (accuracy.metric, accuracy.artifact, accuracy.passed) == ("top1_agreement", 1.0, True)


def test_without_labels_a_vector_that_is_no_class_scores_is_compared_by_cosine() -> None:
    """The largest element of an embedding or a regression means nothing."""
    vectors = models.random(6, 3) - 0.5
    assert judge((SCORES,), [vectors], [vectors], None, 0.0).metric == "cosine"
    assert judge((SCORES,), [vectors], [vectors], None, 0.0, classes_named=True).metric == "top1_agreement"
    assert judge((SCORES,), [vectors], [vectors], None, 0.0, "top1").metric == "top1_agreement"
    assert judge((SCORES,), [EYE], [EYE], np.array([0, 1, 2]), 0.0, "cosine").metric == "cosine"
    with pytest.raises(CalibrationInvalid, match="--metric cosine"):
        judge((BOXES,), [models.random(1, 5, 4)], [models.random(1, 5, 4)], None, 0.0, "top1")


def samples(x: Any, labels: Any = None) -> CalibrationSet:
    return CalibrationSet({"x": np.asarray(x)}, None if labels is None else np.asarray(labels))


def test_a_source_no_better_than_chance_is_doubted() -> None:
    one, other = samples([1, 2, 3]), samples([4, 5, 6], [0, 1, 2])
    assert doubts((SCORES,), [EYE], one, other) == []
    (doubt,) = doubts((SCORES,), [EYE[[1, 2, 0]]], one, other)
    assert "top-1 is 0.0000" in doubt
    assert "chance is 0.3333" in doubt
    # Three of four labels are class 0: naming it always is right in 0.75.
    (doubt,) = doubts((SCORES,), [EYE[[0, 0, 0, 0]]], one, samples([4, 5, 6, 7], [0, 0, 0, 1]))
    assert "chance is 0.7500" in doubt
    assert doubts((SCORES,), [EYE[[1, 2, 0]]], one, other, "cosine") == []


def test_the_same_samples_for_both_are_doubted() -> None:
    (doubt,) = doubts((SCORES,), [EYE], samples([1, 2, 3]), samples([1, 2, 3], [0, 1, 2]))
    assert "same samples" in doubt


def test_other_outputs_are_compared_by_cosine_and_the_worst_counts() -> None:
    good, bad = models.random(6, 5, 4), models.random(6, 5, 4, seed=1)
    accuracy = judge((BOXES, BOXES), [good, good], [good * 2, bad], None, 0.5)
    assert accuracy.metric == "cosine"
    assert accuracy.artifact < 0.5
    assert judge((BOXES,), [good], [good], None, 0.0).artifact == pytest.approx(1.0)


def test_whole_numbers_are_compared_for_being_equal() -> None:
    accuracy = judge((CLASSES,), [np.array([1, 2, 3, 4])], [np.array([1, 2, 3, 0])], None, 0.01)
    assert accuracy.artifact == 0.75


def test_nan_never_passes_for_an_answer() -> None:
    nan = np.full((3, 3), np.nan, np.float32)
    assert judge((SCORES,), [EYE], [nan], np.zeros(3, np.int64), 0.0).artifact == 0.0
    assert judge((SCORES,), [EYE], [nan], None, 0.0).artifact == 0.0
    boxes = models.random(3, 5, 4)
    assert judge((BOXES,), [boxes], [boxes * np.nan], None, 0.0).artifact == 0.0


def test_zero_answers_are_alike_only_to_zero_answers() -> None:
    zero, boxes = np.zeros((2, 5, 4), np.float32), models.random(2, 5, 4)
    assert judge((BOXES,), [zero], [zero], None, 0.0).artifact == 1.0
    assert judge((BOXES,), [zero], [boxes], None, 0.0).artifact == 0.0


def test_labels_that_fit_no_output_are_refused() -> None:
    with pytest.raises(CalibrationInvalid, match="classes 0 to 2"):
        judge((SCORES,), [EYE], [EYE], np.array([0, 1, 3]), 0.0)
    with pytest.raises(CalibrationInvalid, match="no output"):
        judge((BOXES,), [models.random(1, 5, 4)], [models.random(1, 5, 4)], np.array([0]), 0.0)


def test_a_drop_equal_to_the_limit_passes() -> None:
    assert Accuracy("top1", 100, 0.99, 0.98, 0.01).passed
    assert not Accuracy("top1", 1000, 0.99, 0.979, 0.01).passed


def test_batches_come_back_in_order_and_whole(tmp_path: Path) -> None:
    source = load_source(models.write(models.mlp(), tmp_path / "m.onnx"))
    samples = CalibrationSet({"x": models.random(77, 4)}, None)  # no multiple of the batch
    whole = reference_outputs(source, samples)[0]
    for i in (0, 31, 32, 76):
        one = reference_outputs(source, CalibrationSet({"x": samples.inputs["x"][i : i + 1]}, None))[0]
        np.testing.assert_allclose(whole[i], one[0], rtol=1e-5)


def test_the_artifact_is_run_by_the_engine_that_judges_it(digits_source: SourceModel, tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_bytes(b"garbage")
    artifact = Artifact("tensorrt", "int8", tmp_path / "model.onnx", (), "onnxruntime", {})
    samples = CalibrationSet({"image": models.random(8, 1, 8, 8)}, None)
    with pytest.raises(EngineFailed, match="onnxruntime"):
        artifact_outputs(artifact, digits_source, samples)


def test_run_samples_gives_fixed_models_one_sample_at_a_time() -> None:
    class One:
        inputs: tuple[TensorSpec, ...] = (TensorSpec("x", "FP32", (1, 4)),)
        outputs: tuple[TensorSpec, ...] = inputs

        def run(self, tensors: Sequence[Any]) -> list[Any]:
            assert len(tensors[0]) == 1
            return list(tensors)

        def close(self) -> None: ...

    x = models.random(5, 4)
    np.testing.assert_array_equal(run_samples(One(), [x])[0], x)
