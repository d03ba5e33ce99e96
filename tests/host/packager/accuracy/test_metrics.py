"""The metrics: the choice of a metric, and its score for known answers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.bundle.rules import Classify
from edgert.errors import CalibrationInvalid, ConfigInvalid
from edgert.tensors import TensorSpec
from edgert_deploy.packager.accuracy.accuracy_gate import Limits
from edgert_deploy.packager.accuracy.metrics import metric_for, sqnr_db
from tests.support import models
from tests.support.models.metrics import BOXES, CLASSES, EYE, SCORES, judge, reference_to, result_of, worst


def test_labels_give_the_top1_accuracy_of_fp32_and_of_the_artifact() -> None:
    labels = np.array([0, 1, 2])
    accuracy = judge((SCORES,), [EYE], [EYE[[0, 0, 2]]], labels, 0.1)
    assert (accuracy.metric, accuracy.samples, accuracy.fp32) == ("top1", 3, 1.0)
    assert accuracy.artifact == pytest.approx(2 / 3)
    assert not accuracy.passed


@pytest.mark.parametrize("datatype", ["INT8", "UINT8"])
def test_the_integers_of_a_quantized_classifier_are_class_scores(datatype: str) -> None:
    spec = TensorSpec("scores", datatype, (-1, 3))
    scores = (EYE * 120).astype(spec.dtype)
    accuracy = judge((spec,), [scores], [scores[[0, 0, 2]]], np.array([0, 1, 2]), 0.1)
    assert (accuracy.metric, accuracy.fp32) == ("top1", 1.0)
    assert accuracy.artifact == pytest.approx(2 / 3)


def test_without_labels_the_first_classes_are_compared() -> None:
    accuracy = judge((SCORES,), [EYE], [EYE * 5 + 0.1], None, 0.0)
    assert (accuracy.metric, accuracy.artifact, accuracy.passed) == ("top1_agreement", 1.0, True)


def test_without_labels_a_vector_without_class_scores_is_judged_by_its_values() -> None:
    """The largest element of an embedding or a regression means nothing."""
    vectors = models.random(6, 3) - 0.5
    assert judge((SCORES,), [vectors], [vectors], None, 0.0).metric == "values"
    assert judge((SCORES,), [vectors], [vectors], None, 0.0, classify=Classify("scores")).metric == "top1_agreement"
    assert judge((SCORES,), [vectors], [vectors], None, 0.0, "top1").metric == "top1_agreement"
    assert judge((SCORES,), [EYE], [EYE], np.array([0, 1, 2]), 0.0, "cosine").metric == "cosine"
    with pytest.raises(CalibrationInvalid, match="--metric cosine"):
        judge((BOXES,), [models.random(1, 5, 4)], [models.random(1, 5, 4)], None, 0.0, "top1")


def test_the_worst_output_determines_the_score() -> None:
    good, bad = models.random(6, 5, 4), models.random(6, 5, 4, seed=1)
    accuracy = judge((BOXES, BOXES), [good, good], [good * 1.01, bad], None, 0.5)
    assert accuracy.metric == "values"
    assert accuracy.artifact < 0.5
    assert judge((BOXES,), [good], [good], None, 0.0).artifact == pytest.approx(1.0)


def test_whole_numbers_are_compared_for_equality() -> None:
    accuracy = judge((CLASSES,), [np.array([1, 2, 3, 4])], [np.array([1, 2, 3, 0])], None, 0.01)
    assert accuracy.artifact == 0.75


def test_an_answer_that_is_nan_does_not_pass() -> None:
    nan = np.full((3, 3), np.nan, np.float32)
    assert judge((SCORES,), [EYE], [nan], np.zeros(3, np.int64), 0.0).artifact == 0.0
    assert judge((SCORES,), [EYE], [nan], None, 0.0).artifact == 0.0
    boxes = models.random(3, 5, 4)
    assert judge((BOXES,), [boxes], [boxes * np.nan], None, 0.0).artifact == 0.0


def test_a_zero_answer_is_similar_only_to_a_zero_answer() -> None:
    zero, boxes = np.zeros((2, 5, 4), np.float32), models.random(2, 5, 4)
    assert judge((BOXES,), [zero], [zero], None, 0.0).artifact == 1.0
    assert judge((BOXES,), [zero], [boxes], None, 0.0).artifact == 0.0


def test_labels_that_fit_no_output_are_refused() -> None:
    with pytest.raises(CalibrationInvalid, match="classes 0 to 2"):
        judge((SCORES,), [EYE], [EYE], np.array([0, 1, 3]), 0.0)
    with pytest.raises(CalibrationInvalid, match="no output"):
        judge((BOXES,), [models.random(1, 5, 4)], [models.random(1, 5, 4)], np.array([0]), 0.0)


def test_labels_judge_the_output_that_names_them_most_often() -> None:
    """The first output of a model may hold features instead of scores."""
    labels = np.tile([0, 1, 2], 10)
    features, scores = models.random(30, 8), EYE[labels]
    specs = (TensorSpec("features", "FP32", (-1, 8)), SCORES)
    accuracy = judge(specs, [features, scores], [features, EYE[labels[::-1]]], labels, 0.01)
    assert accuracy.fp32 == 1.0
    assert accuracy.artifact == pytest.approx(1 / 3)
    accuracy = judge(specs, [features, scores], [features, scores], labels, 0.01)
    assert (accuracy.metric, accuracy.fp32, accuracy.artifact) == ("top1", 1.0, 1.0)
    stated = reference_to(specs, [features, scores], labels, classify=Classify("features"))
    assert result_of(stated, [features, scores], metric="top1").accuracy.fp32 < 0.5


def test_labels_that_fp32_does_not_match_are_not_used() -> None:
    """Every artifact would keep a score that is no better than chance."""
    labels = np.tile([0, 1, 2], 20)
    scores = EYE[np.repeat([0, 1, 2], 20)]
    reference = reference_to((SCORES,), [scores], labels)
    result = result_of(reference, [scores[::-1].copy()])
    assert (result.accuracy.metric, result.accuracy.fp32) == ("top1_agreement", 1.0)
    assert not result.passed
    assert result_of(reference, [scores], metric="top1").accuracy.metric == "top1"


def test_outputs_beside_the_labelled_one_are_judged_like_those_of_a_model_without_labels() -> None:
    labels = np.tile([0, 1, 2], 20)
    scores, size = EYE[labels], models.random(60, 2) * 100
    specs = (SCORES, TensorSpec("size", "FP32", (-1, 2)), TensorSpec("chosen", "INT64", (-1,)))
    reference = reference_to(specs, [scores, size, labels], labels)
    assert result_of(reference, [scores, size, labels]).passed
    broken = result_of(reference, [scores, size[::-1], labels])
    assert broken.accuracy.passed
    assert not broken.passed
    assert broken.loss_text().startswith("values of size fell by ")
    assert "--metric top1" in broken.loss_text()
    assert broken.loss_text().endswith("passes. To judge only the outputs that this metric reads, give --metric top1")
    assert worst(broken, "output").samples == 60
    assert result_of(
        reference, [scores, size[::-1], labels], metric="top1"
    ).passed  # a stated metric judges only its own output


def test_top5_counts_the_right_class_among_the_first_five() -> None:
    spec, scores = TensorSpec("scores", "FP32", (-1, 8)), np.tile(np.arange(8, dtype=np.float32), (4, 1))
    reference = reference_to((spec,), [scores], np.array([7, 3, 2, 0]))
    assert result_of(reference, [scores], Limits(), "top5").accuracy.artifact == 0.5
    others = result_of(reference, [scores], metric="top1").other_metrics
    assert {other.name: other.artifact for other in others}["top5"] == 0.5
    with pytest.raises(CalibrationInvalid, match="top5 needs"):
        metric_for("top5", reference_to((spec,), [scores]))


def test_a_metric_of_the_user_judges_fp32_and_the_artifact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "edgert_own_metric.py").write_text(
        "def negative_error(outputs, inputs, labels):\n    return -float(abs(outputs['scores'].sum() - inputs['x'].sum()))\n"
        "def broken(outputs, inputs, labels):\n    return outputs['nothing']\n"
        "def ends(outputs, inputs, labels):\n    raise SystemExit(3)\n"
        "def endless(outputs, inputs, labels):\n    return float('nan')\n"
    )
    monkeypatch.chdir(tmp_path)
    reference = reference_to((SCORES,), [EYE])
    found = result_of(reference, [EYE * 1.5], Limits(1.0), "edgert_own_metric:negative_error")
    assert (found.accuracy.fp32, found.accuracy.artifact, found.passed) == (0.0, -1.5, False)
    for name, words in (
        (
            "broken",
            r"failed: KeyError.*; it is called as function\(outputs, inputs, labels\).* \(outputs: scores; inputs: x",
        ),
        ("ends", "failed: SystemExit: 3"),
        ("endless", "returned nan"),
        ("absent", "--metric edgert_own_metric:absent.*no function"),
    ):
        with pytest.raises(ConfigInvalid, match=words):
            result_of(reference, [EYE], Limits(), f"edgert_own_metric:{name}")
    with pytest.raises(ConfigInvalid, match="give auto, top1"):
        metric_for("f1", reference)


def test_noise_is_measured_in_decibels() -> None:
    signal = np.ones((4, 100), np.float32)
    assert sqnr_db([signal], [signal * 1.1]) == pytest.approx(20.0, abs=0.01)
    assert sqnr_db([signal], [signal]) == 200.0
    assert sqnr_db([signal], [signal * np.nan]) == -200.0
