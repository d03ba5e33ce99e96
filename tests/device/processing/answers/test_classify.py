"""From class scores to the best classes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from edgert.bundle.rules import Classify, Smooth
from edgert.processing.answers.classify import Classifier, best_classes, softmax, top_k


@settings(deadline=None)
@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=20), st.integers(1, 5), st.booleans())
def test_one_row_gets_the_classes_that_a_batch_gets(row: list[float], k: int, probabilities: bool) -> None:
    scores = np.array([row], np.float32)
    classes, shares = best_classes(scores, k, probabilities)
    want, wanted = top_k(softmax(scores) if probabilities else scores, k)
    assert classes.dtype == np.int64
    assert shares.dtype == np.float32
    assert shares == pytest.approx(wanted, rel=1e-6)
    # Two scores are seen as equal if their probabilities are equal in FP32.
    assert scores[0, classes[0]] == pytest.approx(scores[0, want[0]], abs=1e-5)
    both, _ = best_classes(np.concatenate([scores, scores]), k, probabilities)
    assert both.tolist() == [want[0].tolist()] * 2


def test_the_best_come_first_and_ties_keep_their_order() -> None:
    indices, scores = top_k(np.array([[1.0, 3.0, 3.0, 2.0]]), 3)
    assert (indices.tolist(), scores.tolist()) == ([[1, 2, 3]], [[3.0, 3.0, 2.0]])
    assert top_k(np.array([[1.0, 2.0]]), 5)[0].tolist() == [[1, 0]], "no more than there are"


def test_large_scores_do_not_overflow() -> None:
    assert best_classes(np.array([[-128, 127]], np.int8), 1, True)[1].tolist() == [[1.0]]
    shares = softmax(np.array([[1e4, 1e4, -1e4]], np.float32))
    assert np.allclose(shares, [[0.5, 0.5, 0.0]])


ROWS = np.array([[0.7, 0.2, 0.1], [0.45, 0.35, 0.2], [0.1, 0.3, 0.6]], np.float32)


RAW = Classify("x", ("a", "b", "c"), softmax=False)


def answered(rule: Classify, rows: NDArray[np.float32], windows: list[int] | None = None) -> tuple[object, object]:
    classes, scores = Classifier(rule)(rows, windows)
    assert (classes.dtype.name, scores.dtype.name) == ("int64", "float32")
    return classes.tolist(), scores.astype(np.float64).round(4).tolist()


def test_a_class_below_its_threshold_is_not_answered() -> None:
    assert answered(replace(RAW, threshold=(0.5,)), ROWS) == ([[0], [-1], [2]], [[0.7], [0.0], [0.6]])
    by_class = replace(RAW, top_k=2, threshold=(0.8, 0.3, 0.2))
    assert answered(by_class, ROWS) == ([[-1, -1], [1, 2], [2, 1]], [[0.0, 0.0], [0.35, 0.2], [0.6, 0.3]])
    none = replace(RAW, top_k=2, none=("b",))
    assert answered(none, ROWS) == ([[0, -1], [0, -1], [2, -1]], [[0.7, 0.0], [0.45, 0.0], [0.6, 0.0]])
    assert answered(replace(RAW, none=("a", "c")), ROWS)[0] == [[-1], [-1], [-1]]
    assert answered(replace(RAW, threshold=(0.5,)), np.full((1, 3), np.nan, np.float32))[0] == [[-1]]
    assert answered(Classify("x", ("a", "b"), threshold=(0.6,)), np.array([[2.0, 1.0]], np.float32))[0] == [[0]]


def test_the_mean_is_taken_over_the_last_windows_of_one_signal() -> None:
    rule = replace(RAW, threshold=(0.5,), smooth=Smooth("mean", 2))
    classes, scores = answered(rule, np.concatenate([ROWS, ROWS]), [3, 3])
    assert classes == [[0], [0], [-1], [0], [0], [-1]], "the second signal begins anew"
    assert scores == [[0.7], [0.575], [0.0]] * 2
    assert answered(rule, ROWS)[0] == [[0], [-1], [2]], "items that are no windows are not smoothed"


@settings(deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.integers(2, 5), st.sampled_from(["majority", "all"]))
def test_votes_count_the_decisions_of_the_last_windows(best: list[int], count: int, rule: str) -> None:
    rows = np.where(np.eye(3, dtype=bool)[best], 0.8, 0.1).astype(np.float32)
    smoothed = Classify(
        "x", ("a", "b", "rest"), softmax=False, none=("rest",), threshold=(0.5,), smooth=Smooth(rule, count)
    )
    classes, _ = Classifier(smoothed)(rows, [len(rows)])
    needed = count if rule == "all" else count // 2 + 1
    for i, got in enumerate(classes[:, 0]):
        votes = Counter(c for c in best[max(0, i + 1 - count) : i + 1] if c != 2)
        want = next((c for c, n in votes.items() if n >= needed), -1)
        assert got == want


@settings(deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 6), st.sampled_from(["mean", "majority", "all"]), st.integers(1, 4))
def test_windows_in_several_requests_give_the_same_bits_as_in_one(seed: int, count: int, rule: str, part: int) -> None:
    rows = np.random.default_rng(seed).dirichlet(np.ones(4), 11).astype(np.float32)
    classifier = Classifier(Classify("x", softmax=False, threshold=(0.3,), smooth=Smooth(rule, count)))
    whole = classifier.smoothed(rows)
    parts = [classifier.smoothed(rows[i : i + part], rows[:i]) for i in range(0, len(rows), part)]
    assert np.array_equal(whole[0], np.concatenate([classes for classes, _ in parts]))
    assert np.array_equal(whole[1], np.concatenate([scores for _, scores in parts]))
