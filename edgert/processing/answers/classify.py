"""Computes the best classes from class scores, with thresholds and smoothing over a signal's windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.rules import Classify

NONE = -1  # the class of an entry without a class


class Classifier:
    """Applies `rule` to class scores [N, C]; returns INT64 classes and FP32 scores [N, top_k], best first.

    If fewer than top_k classes pass the rule, the remaining entries are NONE with the score 0.
    """

    def __init__(self, rule: Classify) -> None:
        self._rule = rule
        self._least = np.array(rule.threshold or (-np.inf,), np.float32)
        self._none = [i for i, label in enumerate(rule.labels) if label in rule.none]
        self._always = not rule.threshold and not rule.none

    def __call__(
        self, scores: NDArray[Any], windows: Sequence[int] | None = None, before: NDArray[np.float32] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return classes and their scores.

        Args:
            scores: Class scores [N, C].
            windows: The number of items of each signal, in order; these items are smoothed. With None, nothing is
                smoothed.
            before: The `shares` of earlier windows, if the request continues one signal.
        """
        rule = self._rule
        if self._always and rule.smooth is None:
            return best_classes(scores, rule.top_k, rule.softmax)
        shares = self.shares(scores)
        if rule.smooth is None or windows is None:
            return self._decided(shares)
        ends = np.cumsum(windows)[:-1]
        smoothed = [self.smoothed(signal, before) for signal in np.split(shares, ends)]
        return np.concatenate([classes for classes, _ in smoothed]), np.concatenate([shares for _, shares in smoothed])

    def shares(self, scores: NDArray[Any]) -> NDArray[np.float32]:
        """Return the scores for thresholds and smoothing: probabilities if the rule has `softmax`."""
        return softmax(scores) if self._rule.softmax else scores.astype(np.float32, copy=False)

    def smoothed(
        self, shares: NDArray[np.float32], before: NDArray[np.float32] | None = None
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Return classes and scores of one signal's windows; `before` holds the shares of earlier windows.

        Only the last `windows - 1` earlier windows are used. The same windows give the same bits in one call and in
        several calls.
        """
        smooth = self._rule.smooth
        assert smooth is not None  # the caller has checked
        known = 0 if before is None else min(len(before), smooth.windows - 1)
        if before is not None and known:
            shares = np.concatenate((before[-known:], shares))
        counts = np.minimum(np.arange(1, len(shares) + 1), smooth.windows)[:, None]
        mean = np.divide(_running_sum(shares, smooth.windows), counts, dtype=np.float32)
        if smooth.rule == "mean":
            classes, scores = self._decided(mean)
            return classes[known:], scores[known:]
        needed = smooth.windows if smooth.rule == "all" else smooth.windows // 2 + 1
        votes = _running_sum(self._decided(shares)[0] == np.arange(shares.shape[1]), smooth.windows)
        best = votes.argmax(axis=1, keepdims=True)
        enough = np.take_along_axis(votes, best, axis=1) >= needed
        classes = np.where(enough, best, NONE).astype(np.int64)
        scores = np.where(enough, np.take_along_axis(mean, best, axis=1), np.float32(0))
        return classes[known:], scores[known:]

    def _decided(self, shares: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        if self._always:
            return top_k(shares, self._rule.top_k)
        allowed = shares >= self._least
        if self._none:
            allowed &= shares > shares[:, self._none].max(axis=1, keepdims=True)
        classes, scores = top_k(np.where(allowed, shares, np.float32(-np.inf)), self._rule.top_k)
        none = np.isneginf(scores)
        return np.where(none, NONE, classes), np.where(none, np.float32(0), scores)


def _running_sum(rows: NDArray[Any], count: int) -> NDArray[np.float32]:
    """Return the sum of each row and the `count - 1` rows before it, always added in the same order."""
    padded = np.concatenate((np.zeros((count - 1, rows.shape[1]), np.float32), rows.astype(np.float32, copy=False)))
    total = np.zeros(rows.shape, np.float32)
    for i in range(count):
        total += padded[i : i + len(rows)]
    return total


def softmax(scores: NDArray[Any]) -> NDArray[np.float32]:
    """Return float32 probabilities along the last axis; the largest score is subtracted first."""
    shifted = np.exp(scores.astype(np.float32) - scores.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True), dtype=np.float32)


def top_k(scores: NDArray[Any], k: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return indices (int64) and scores of the `k` largest on the last axis: best first, ties by index."""
    k = min(k, scores.shape[-1])
    if k == 1:
        best = scores.argmax(axis=-1, keepdims=True)
        return best.astype(np.int64, copy=False), np.take_along_axis(scores, best, axis=-1)
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :k]
    return order.astype(np.int64), np.take_along_axis(scores, order, axis=-1)


def best_classes(scores: NDArray[Any], k: int, probabilities: bool) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return `top_k` of [N, C] as indices and float32 scores. With `probabilities`, apply `softmax` first.

    Nearly every request has one item and needs one class. Then this function sorts nothing and divides only one value.
    """
    if len(scores) == 1 and k == 1 and scores.ndim == 2:
        row = scores[0]
        i = row.argmax()
        if not probabilities:
            return np.array([[i]], np.int64), row[i : i + 1].astype(np.float32)[None]
        shifted = np.exp(row.astype(np.float32, copy=False) - row[i])
        return np.array([[i]], np.int64), np.array([[1 / shifted.sum()]], np.float32)
    shares = softmax(scores) if probabilities else scores.astype(np.float32, copy=False)
    return top_k(shares, k)
