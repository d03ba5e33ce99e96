"""The accuracy gate: its limits for the whole hold-out, for classes and for slices, and its warnings."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.bundle.buckets import Buckets, PaddedInput
from edgert.bundle.manifest import Accuracy
from edgert.bundle.rules import Detect
from edgert.tensors import TensorSpec
from edgert_deploy.packager.accuracy import accuracy_gate as gate
from edgert_deploy.packager.accuracy.accuracy_gate import GROUP_SAMPLES_MIN, GateResult, Limits
from edgert_deploy.packager.accuracy.metrics import metric_for
from edgert_deploy.packager.accuracy.reference import OtherMetric
from tests.support import models
from tests.support.models.metrics import EYE, SCORES, reference_to, result_of, worst

VECTOR = TensorSpec("vector", "FP32", (-1, 7))


def warnings(reference: list[Any], labels: list[int] | None, metric: str = "auto", max_drop: float = 1.0) -> list[str]:
    given = reference_to((SCORES,), reference, None if labels is None else np.asarray(labels))
    return gate.warnings(metric_for(metric, given), given, Limits(max_drop))


def test_a_source_that_is_no_better_than_chance_gives_a_warning() -> None:
    assert warnings([EYE], [0, 1, 2]) == []
    (warning,) = warnings([EYE[[1, 2, 0]]], [0, 1, 2])
    assert "top-1 is 0.0000" in warning
    assert "chance is 0.3333" in warning
    # Three of four labels are class 0, so a model that always answers class 0 has a top-1 of 0.75.
    (warning,) = warnings([EYE[[0, 0, 0, 0]]], [0, 0, 0, 1])
    assert "chance is 0.7500" in warning
    assert warnings([EYE[[1, 2, 0]]], [0, 1, 2], "cosine") == []


def test_a_source_that_is_little_better_than_chance_gives_a_warning_and_keeps_its_labels() -> None:
    # Of 30 samples of three classes, 11 or 13 are right: a tenth of the way from chance to 1 is 12.
    classes = np.arange(30) % 3
    for right, count in ((11, 1), (13, 0)):
        answers = EYE[np.where(np.arange(30) < right, classes, (classes + 1) % 3)]
        found = warnings([answers], classes.tolist())
        assert len(found) == count
        assert all("chance is 0.3333" in warning and "ignores" not in warning for warning in found)


def test_a_gate_that_compares_only_similarity_gives_a_warning() -> None:
    (warning,) = warnings([models.random(6, 3) - 0.5], None)
    assert warning.startswith("similarity only")
    assert warning.endswith("with --postprocess, or your own --metric module:function")


def test_a_gate_that_compares_a_grid_of_logits_only_by_similarity_tells_what_to_export() -> None:
    anchors = models.random(6, 3, 8, 13, 13) * 2 - 1
    anchors[:, :, 4] = -6  # the objectness
    anchors[:, :, 4, 5:7, 5] = anchors[:, :, 5, 5:7, 5] = 6  # two cells with an object of the first class
    given = reference_to((TensorSpec("grid", "FP32", (-1, 24, 13, 13)),), [anchors.reshape(6, 24, 13, 13)])
    (warning,) = gate.warnings(metric_for("auto", given), given, Limits(1.0))
    assert warning.endswith("If 'grid' is a detector's grid of logits, export the decoded boxes, or write a metric")


@pytest.mark.parametrize(
    ("reference", "named"),
    [
        (EYE[[1] * 20], "top1_agreement"),  # one class only
        (np.linspace(0.01, 0.3, 20, dtype=np.float32)[:, None], "values"),
        (np.zeros((20, 1), np.float32), "values"),
    ],
)
def test_a_hold_out_with_equal_answers_gives_a_warning(reference: Any, named: str) -> None:
    """A broken artifact with one constant answer would pass."""
    found = [text for text in warnings([reference], None, max_drop=0.01) if "so alike that an artifact which" in text]
    assert len(found) == int(named != "values" or not reference.any()), found
    assert all(named in text for text in found)


def test_angles_that_the_rule_for_boxes_reads_as_scores_give_a_warning() -> None:
    """In an OBB with 80 classes, --postprocess yolo reads objectness and 80 classes."""
    boxes = np.abs(models.random(20, 85, 100)) / 5
    boxes[:, :4] *= 300
    reference = reference_to(
        (TensorSpec("out", "FP32", (-1, 85, 100)),), [boxes], detect=Detect("out", objectness=True)
    )
    metric = metric_for("auto", reference)
    assert gate.warnings(metric, reference, Limits(1.0)) == []
    boxes[:, 84] = np.linspace(-0.7, 2.3, 100)
    (warning,) = gate.warnings(metric, reference, Limits(1.0))
    assert warning.startswith(
        "the scores of boxes in output 'out' are -0.7 to 2.3, not 0 to 1: if they are logits, set"
    )


@pytest.mark.parametrize("detect", [None, Detect("scores", score_threshold=0.5)])
def test_a_hold_out_without_an_object_gives_a_warning(detect: Detect | None) -> None:
    """Two detectors that find nothing agree, whatever they would do with an object."""
    nothing = np.full((20, 84, 1000), 0.01, np.float32) * np.array([[3000]] * 4 + [[1]] * 80, np.float32)
    for outputs in ([nothing], [nothing, models.random(20, 7)]):  # answers of another output differ
        reference = replace(reference_to((SCORES, VECTOR)[: len(outputs)], outputs), detect=detect)
        found = gate.warnings(metric_for("auto", reference), reference, Limits(0.01))
        texts = [text for text in found if text.startswith("FP32 finds no object in any of the 20 hold-out samples")]
        assert len(texts) == 1, found
        assert not any("so alike" in text for text in found)
    outputs[0][3, 7, 5] = 0.9
    assert not any("no object" in text for text in gate.warnings(metric_for("auto", reference), reference, Limits()))


def test_too_few_samples_for_the_limit_give_a_warning_with_the_needed_number() -> None:
    labels = np.tile([0, 1, 2], 99).tolist()
    (warning,) = warnings([EYE[labels]], labels, max_drop=0.01)
    assert warning.startswith("297 hold-out samples: too few for --max-drop 0.01")
    assert "may be 0.0101" in warning
    assert warning.endswith("at least 300 samples")
    (warning,) = warnings([EYE[labels]], None, max_drop=0.001)
    assert warning.endswith("at least 3000 samples")
    assert warnings([EYE[[*labels, 0, 1, 2]]], [*labels, 0, 1, 2], max_drop=0.01) == []
    assert warnings([EYE[labels]], labels, "cosine", max_drop=0.01) == []


def test_the_drop_has_an_interval_if_the_metric_counts_samples() -> None:
    labels = np.repeat([0, 1, 2], 40)
    answers = EYE[labels].copy()
    answers[:6] = EYE[2]
    for truth in (labels, None):
        low, high = result_of(reference_to((SCORES,), [EYE[labels]], truth), [answers]).drop_interval or (0.0, 0.0)
        assert 0.0 < low < 6 / 120 < high < 0.12
    low, high = result_of(reference_to((SCORES,), [EYE[labels]]), [EYE[labels]]).drop_interval or (1.0, 1.0)
    assert (low, round(high, 4)) == (0.0, round(3.8415 / 123.8415, 4))
    assert result_of(reference_to((SCORES,), [EYE[labels]]), [answers], metric="cosine").drop_interval is None


def test_a_drop_equal_to_the_limit_passes() -> None:
    assert Accuracy("top1", 100, 0.99, 0.98, 0.01).passed
    assert not Accuracy("top1", 1000, 0.99, 0.979, 0.01).passed


def test_a_loss_in_a_class_or_slice_that_the_mean_hides_can_fail_the_gate() -> None:
    labels = np.repeat([0, 1, 2], 40)
    answers = EYE[labels]
    answers[40:52] = EYE[0]  # 12 of class 1, all at night
    reference = reference_to(
        (SCORES,), [EYE[labels]], labels, slices=np.array(["night" if 40 <= i < 60 else "day" for i in range(120)])
    )
    found = result_of(reference, [answers], Limits(0.1))
    assert found.passed
    worst_class, worst_slice = worst(found, "class"), worst(found, "slice")
    assert (worst_class.name, worst_class.samples, round(worst_class.drop, 4)) == ("1", 40, 0.3)
    assert (worst_slice.name, worst_slice.samples, round(worst_slice.drop, 4)) == ("night", 20, 0.6)
    strict = result_of(reference, [answers], Limits(0.1, max_class_drop=0.2))
    assert not strict.passed
    assert "slice 'night' lost 0.6000" in strict.loss_text()


def test_the_loss_names_the_output_that_lost_the_most() -> None:
    others = (
        OtherMetric("share of hits", None, 0.1),
        OtherMetric("boxes of a", 1.0, 0.4, of_output=True),
        OtherMetric("values of b", 1.0, 0.9, of_output=True),
    )
    result = GateResult(Accuracy("boxes+values", 20, 1.0, 0.4, 0.01), Limits(), other_metrics=others)
    assert result.loss_text() == "boxes+values fell by 0.6000 (1.0000 -> 0.4000 on 20 samples; boxes of a fell most)"


def test_a_loss_too_small_for_four_digits_is_not_shown_as_zero() -> None:
    assert "fell by 2.0e-05 (" in GateResult(Accuracy("cosine", 20, 1.0, 0.99998, 0.0), Limits()).loss_text()


def test_a_class_of_a_few_samples_is_shown_but_fails_no_build() -> None:
    labels = np.array([0] * 100 + [1] * (GROUP_SAMPLES_MIN - 1))
    reference = EYE[labels]
    found = result_of(reference_to((SCORES,), [reference], labels), [EYE[np.zeros_like(labels)]], Limits(0.5, 0.1))
    assert found.passed
    assert [g.artifact for g in found.groups] == [1.0, 0.0]


def test_a_bucket_that_lost_too_much_fails_the_gate_whatever_the_mean() -> None:
    labels = np.tile([0, 1, 2], 40)
    answers = EYE[labels].copy()
    answers[110:] = EYE[0]  # 7 of the 10 samples of the largest bucket are wrong
    buckets = Buckets("tokens", (8, 16), (PaddedInput("x", 1),))
    reference = reference_to((SCORES,), [EYE[labels]], labels)
    lengths = np.array([5] * 110 + [12] * 10)
    reference = replace(reference, holdout=replace(reference.holdout, lengths=lengths, buckets=buckets))
    result = result_of(reference, [answers], Limits(0.2))
    assert result.accuracy.passed
    assert [(g.name, g.samples) for g in result.groups if g.kind == "bucket"] == [("8", 110), ("16", 10)]
    assert [g.name for g in result.failed_groups] == ["16"]
    assert not result.passed
    assert "bucket '16' lost" in result.loss_text()
