"""Precision, recall and F1 of answers: by window, equal to scikit-learn's, and by event."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgert.bundle.rules import Classify, Smooth
from edgert.errors import CalibrationInvalid, ConfigInvalid
from edgert.tensors import TensorSpec
from edgert_deploy.packager.accuracy.metrics import metric_for
from edgert_deploy.packager.accuracy.reference import OtherMetric
from edgert_deploy.packager.accuracy.window_metrics import AnswerF1, Counts, Event, events, matched
from tests.support.models.metrics import reference_to, result_of
from tests.support.needed import needed

metrics = needed("sklearn.metrics")

SPECS = (TensorSpec("scores", "FP32", (-1, 3)),)
RULE = Classify("scores", ("yes", "no", "noise"), softmax=False, none=("noise",))
CLASSES = st.lists(st.integers(0, 2), min_size=1, max_size=30)


def scores_of(classes: list[int]) -> list[NDArray[np.float32]]:
    return [np.eye(3, dtype=np.float32)[classes]]


def counts_of(name: str, found: list[int], truth: list[int], rule: Classify = RULE, **more: Any) -> Counts:
    more = {"recordings": np.zeros(len(truth), np.int64), **more}
    reference = reference_to(SPECS, scores_of(found), np.array(truth), classify=rule, **more)
    metric = metric_for(name, reference)
    assert isinstance(metric, AnswerF1)
    return metric.counts(reference.answers, reference.all_rows)


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=30))
def test_windows_are_counted_as_scikit_learn_counts_them(pairs: list[tuple[int, int]]) -> None:
    found, truth = ([pair[i] for pair in pairs] for i in (0, 1))
    got = counts_of("window_f1", found, truth)
    options: dict[str, Any] = {"labels": [0, 1], "average": "micro", "zero_division": 1.0}
    assert got.precision == pytest.approx(metrics.precision_score(truth, found, **options))
    assert got.recall == pytest.approx(metrics.recall_score(truth, found, **options))
    assert got.f1 == pytest.approx(metrics.f1_score(truth, found, **options))


def test_each_event_is_counted_once() -> None:
    truth = [2, 0, 0, 0, 2, 1, 1, 2]
    assert counts_of("event_f1", truth, truth) == Counts(2, 2, 2)
    assert counts_of("event_f1", [2, 0, 2, 0, 2, 2, 1, 2], truth) == Counts(2, 3, 2), "yes is answered twice"
    assert counts_of("event_f1", [0, 2, 2, 2, 2, 0, 0, 0], truth) == Counts(0, 2, 2), "before, and the other class"
    halves = np.array([0, 0, 0, 0, 1, 1, 1, 1])
    assert counts_of("event_f1", truth, truth, recordings=halves) == Counts(2, 2, 2)
    assert counts_of("event_f1", [0] * 8, [0] * 8, recordings=halves) == Counts(2, 2, 2)
    assert counts_of("event_f1", [2] * 3, [2] * 3).f1 == 1.0


def test_an_event_may_be_late_by_the_length_of_the_smoothing() -> None:
    rule = Classify("scores", RULE.labels, softmax=False, none=RULE.none, smooth=Smooth("mean", 3))
    assert counts_of("event_f1", [2, 0, 2, 2, 2], [2, 0, 2, 2, 2], rule) == Counts(0, 0, 1)
    assert matched([Event(4, 5, 0)], [Event(1, 3, 0)], 2).right == 1
    assert matched([Event(5, 6, 0)], [Event(1, 3, 0)], 2).right == 0
    assert matched([Event(4, 5, 1)], [Event(1, 3, 0)], 2).right == 0


@given(CLASSES)
def test_an_event_is_a_run_of_one_class(classes: list[int]) -> None:
    found = events(np.array(classes) - 1)
    again = np.full(len(classes), -1)
    for event in found:
        again[event.begin : event.end] = event.label
    assert again.tolist() == (np.array(classes) - 1).tolist()
    assert all(a.end < b.begin or a.label != b.label for a, b in itertools.pairwise(found))


def test_the_gate_shows_precision_and_recall_and_each_class() -> None:
    truth = [0] * 10 + [1] * 10 + [2] * 10
    reference = reference_to(SPECS, scores_of(truth), np.array(truth), classify=RULE)
    result = result_of(reference, scores_of([0] * 9 + [2] + [1] * 15 + [2] * 5), metric="window_f1")
    assert result.accuracy.metric == "window_f1"
    precision, recall = OtherMetric("precision", 1.0, 19 / 24), OtherMetric("recall", 1.0, 19 / 20)
    assert result.other_metrics[:2] == (precision, recall)
    by_class = [(group.name, group.samples, round(group.artifact, 4)) for group in result.groups]
    assert by_class == [("yes", 10, 0.9474), ("no", 10, 0.8)]


def test_an_error_names_the_missing_requirement_of_the_metric() -> None:
    with pytest.raises(CalibrationInvalid, match="needs `labels`"):
        metric_for("window_f1", reference_to(SPECS, scores_of([0]), classify=RULE))
    with pytest.raises(CalibrationInvalid, match="an array `recording`"):
        metric_for("event_f1", reference_to(SPECS, scores_of([0]), np.array([0]), classify=RULE))
    with pytest.raises(ConfigInvalid, match="give --labels"):
        metric_for("event_f1", reference_to(SPECS, scores_of([0]), np.array([0])))
