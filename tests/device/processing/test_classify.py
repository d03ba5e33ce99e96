"""From class scores to the best classes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgert.processing.classify import best_classes, softmax, top_k


@given(st.lists(st.floats(-50, 50, width=32), min_size=1, max_size=20), st.integers(1, 5), st.booleans())
def test_one_row_gets_the_classes_that_a_batch_gets(row: list[float], k: int, probabilities: bool) -> None:
    scores = np.array([row], np.float32)
    classes, shares = best_classes(scores, k, probabilities)
    want, wanted = top_k(softmax(scores) if probabilities else scores, k)
    assert classes.dtype == np.int64
    assert shares.dtype == np.float32
    assert shares == pytest.approx(wanted, rel=1e-6)
    # Scores that differ by less than FP32 can say of their probabilities are as good as each other.
    assert scores[0, classes[0]] == pytest.approx(scores[0, want[0]], abs=1e-5)
    both, _ = best_classes(np.concatenate([scores, scores]), k, probabilities)
    assert both.tolist() == [want[0].tolist()] * 2


def test_the_best_come_first_and_ties_keep_their_order() -> None:
    indices, scores = top_k(np.array([[1.0, 3.0, 3.0, 2.0]]), 3)
    assert (indices.tolist(), scores.tolist()) == ([[1, 2, 3]], [[3.0, 3.0, 2.0]])
    assert top_k(np.array([[1.0, 2.0]]), 5)[0].tolist() == [[1, 0]], "no more than there are"


def test_large_scores_do_not_overflow() -> None:
    shares = softmax(np.array([[1e4, 1e4, -1e4]], np.float32))
    assert np.allclose(shares, [[0.5, 0.5, 0.0]])
