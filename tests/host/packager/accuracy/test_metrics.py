"""The gate's metrics: which one applies, and what it says of answers known beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.bundle.manifest import Accuracy
from edgert.bundle.rules import Detect
from edgert.errors import CalibrationInvalid, ConfigInvalid, EngineFailed
from edgert.tensors import TensorSpec
from edgert_deploy.packager.accuracy import accuracy_gate as gate
from edgert_deploy.packager.accuracy.accuracy_gate import (
    GROUP_SAMPLES_MIN,
    GateResult,
    Limits,
    artifact_outputs,
    reference_outputs,
    run_samples,
)
from edgert_deploy.packager.accuracy.metrics import metric_for, sqnr_db
from edgert_deploy.packager.accuracy.reference import Reference
from edgert_deploy.packager.builders import Artifact
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support import models

SCORES = TensorSpec("scores", "FP32", (-1, 3))
BOXES = TensorSpec("boxes", "FP32", (-1, 5, 4))
CLASSES = TensorSpec("classes", "INT64", (-1,))
LIMITS = Limits()
EYE = np.eye(3, dtype=np.float32)


def reference_to(specs: tuple[TensorSpec, ...], reference: list[Any], labels: Any = None, **more: Any) -> Reference:
    holdout = {key: more.pop(key) for key in ("slices", "boxes") if key in more}
    return Reference(specs, reference, CalibrationSet({"x": reference[0]}, labels, **holdout), **more)


def result_of(asked: Reference, answers: list[Any], limits: Limits = LIMITS, metric: str = "auto") -> GateResult:
    return gate.judge(metric_for(metric, asked), asked, answers, limits)


def judge(
    specs: tuple[TensorSpec, ...],
    reference: list[Any],
    answers: list[Any],
    labels: Any,
    max_drop: float,
    metric: str = "auto",
    **more: Any,
) -> Accuracy:
    return result_of(reference_to(specs, reference, labels, **more), answers, Limits(max_drop), metric).accuracy


def warnings(reference: list[Any], labels: list[int] | None, metric: str = "auto") -> list[str]:
    given = reference_to((SCORES,), reference, None if labels is None else np.asarray(labels))
    return gate.warnings(metric_for(metric, given), given)


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


def test_a_source_no_better_than_chance_is_a_warning() -> None:
    assert warnings([EYE], [0, 1, 2]) == []
    (warning,) = warnings([EYE[[1, 2, 0]]], [0, 1, 2])
    assert "top-1 is 0.0000" in warning
    assert "chance is 0.3333" in warning
    # Three of four labels are class 0: naming it always is right in 0.75.
    (warning,) = warnings([EYE[[0, 0, 0, 0]]], [0, 0, 0, 1])
    assert "chance is 0.7500" in warning
    assert warnings([EYE[[1, 2, 0]]], [0, 1, 2], "cosine") == []


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


def test_a_class_and_a_slice_that_the_mean_hides_are_named_and_can_fail_the_gate() -> None:
    labels = np.repeat([0, 1, 2], 40)
    reference = EYE[labels]
    answers = reference.copy()
    answers[40:52] = EYE[0]  # 12 of class 1, all at night
    asked = reference_to(
        (SCORES,), [reference], labels, slices=np.array(["night" if 40 <= i < 60 else "day" for i in range(120)])
    )
    found = result_of(asked, [answers], Limits(0.1))
    assert found.passed
    worst_class, worst_slice = found.worst("class"), found.worst("slice")
    assert worst_class is not None
    assert worst_slice is not None
    assert (worst_class.name, worst_class.samples, round(worst_class.drop, 4)) == ("1", 40, 0.3)
    assert (worst_slice.name, worst_slice.samples, round(worst_slice.drop, 4)) == ("night", 20, 0.6)
    strict = result_of(asked, [answers], Limits(0.1, max_class_drop=0.2))
    assert not strict.passed
    assert "slice 'night' lost 0.6000" in strict.loss()


def test_a_class_of_a_few_samples_is_shown_but_stops_nothing() -> None:
    labels = np.array([0] * 100 + [1] * (GROUP_SAMPLES_MIN - 1))
    reference = EYE[labels]
    found = result_of(reference_to((SCORES,), [reference], labels), [EYE[np.zeros_like(labels)]], Limits(0.5, 0.1))
    assert found.passed
    assert [g.artifact for g in found.groups] == [1.0, 0.0]


def test_top5_counts_the_right_class_among_the_first_five() -> None:
    spec, scores = TensorSpec("scores", "FP32", (-1, 8)), np.tile(np.arange(8, dtype=np.float32), (4, 1))
    asked = reference_to((spec,), [scores], np.array([7, 3, 2, 0]))
    assert result_of(asked, [scores], Limits(), "top5").accuracy.artifact == 0.5
    assert {name: got for name, _, got in result_of(asked, [scores]).also}["top5"] == 0.5
    with pytest.raises(CalibrationInvalid, match="top5 needs"):
        metric_for("top5", reference_to((spec,), [scores]))


def test_a_detectors_precision_is_cocos() -> None:
    pytest.importorskip("pycocotools")
    spec = TensorSpec("boxes", "FP32", (-1, 2, 6))  # corners and the scores of two classes
    truth = np.full((3, 2, 5), -1, np.float32)
    truth[:, 0] = [0, 10, 10, 40, 40]
    truth[:2, 1] = [1, 60, 60, 90, 90]
    answers = np.zeros((3, 2, 6), np.float32)
    answers[:, 0] = [10, 10, 40, 40, 0.9, 0]
    answers[:2, 1] = [60, 60, 90, 90, 0, 0.8]
    rule = Detect("boxes", form="anchors_first", box_format="xyxy", labels=("cat", "dog"))
    asked = reference_to(
        (spec,), [answers], boxes=truth, detect=rule, image_size=(100, 100), class_names=("cat", "dog")
    )
    exact = result_of(asked, [answers])
    assert (exact.accuracy.metric, exact.accuracy.fp32, exact.accuracy.artifact) == ("map", 1.0, 1.0)
    worse = answers.copy()
    worse[1, 1, 4:] = 0  # the second dog is not seen: half of the recall, so half of the class's precision
    found = result_of(asked, [worse], Limits(0.1))
    assert found.accuracy.artifact == pytest.approx(0.75, abs=0.01)
    assert not found.passed
    dog = found.worst("class")
    assert dog is not None
    assert (dog.name, dog.samples) == ("dog", 2)
    with pytest.raises(CalibrationInvalid, match="array `boxes`"):
        metric_for("map", reference_to((spec,), [answers], detect=rule, image_size=(100, 100)))
    with pytest.raises(ConfigInvalid, match="--postprocess"):
        metric_for("map", reference_to((spec,), [answers], boxes=truth))


def test_a_metric_of_the_users_own_is_called_for_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "edgert_own_metric.py").write_text(
        "def negative_error(outputs, inputs, labels):\n    return -float(abs(outputs['scores'].sum() - inputs['x'].sum()))\n"
        "def broken(outputs, inputs, labels):\n    return outputs['nothing']\n"
        "def endless(outputs, inputs, labels):\n    return float('nan')\n"
    )
    monkeypatch.chdir(tmp_path)
    asked = reference_to((SCORES,), [EYE])
    found = result_of(asked, [EYE * 1.5], Limits(1.0), "edgert_own_metric:negative_error")
    assert (found.accuracy.fp32, found.accuracy.artifact, found.passed) == (0.0, -1.5, False)
    for name, words in (("broken", "failed: KeyError"), ("endless", "returned nan"), ("absent", "cannot import")):
        with pytest.raises(ConfigInvalid, match=words):
            result_of(asked, [EYE], Limits(), f"edgert_own_metric:{name}")
    with pytest.raises(ConfigInvalid, match="give auto, top1"):
        metric_for("f1", asked)


def test_noise_is_told_in_decibels() -> None:
    signal = np.ones((4, 100), np.float32)
    assert sqnr_db([signal], [signal * 1.1]) == pytest.approx(20.0, abs=0.01)
    assert sqnr_db([signal], [signal]) == 200.0
    assert sqnr_db([signal], [signal * np.nan]) == -200.0
