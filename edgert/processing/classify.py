"""From class scores to the best classes: pure functions on arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def softmax(scores: NDArray[Any]) -> NDArray[np.float32]:
    """Return probabilities along the last axis, as float32; the largest score is subtracted first against overflow."""
    shifted = np.exp(scores.astype(np.float32) - scores.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True), dtype=np.float32)


def top_k(scores: NDArray[Any], k: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Return indices (int64) and scores of the `k` largest along the last axis, best first; ties in index order."""
    k = min(k, scores.shape[-1])
    if k == 1:
        best = scores.argmax(axis=-1, keepdims=True)
        return best.astype(np.int64, copy=False), np.take_along_axis(scores, best, axis=-1)
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :k]
    return order.astype(np.int64), np.take_along_axis(scores, order, axis=-1)


def best_classes(scores: NDArray[Any], k: int, probabilities: bool) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return `top_k` of [N, C] as indices and float32 scores, after `softmax` with `probabilities`.

    Nearly every request has one item and wants one class: then nothing is sorted, and only one value is divided.
    """
    if len(scores) == 1 and k == 1 and scores.ndim == 2:
        row = scores[0]
        i = row.argmax()
        if not probabilities:
            return np.array([[i]], np.int64), row[i : i + 1].astype(np.float32)[None]
        shifted = np.exp((row - row[i]).astype(np.float32, copy=False))
        return np.array([[i]], np.int64), np.array([[1 / shifted.sum()]], np.float32)
    shares = softmax(scores) if probabilities else scores.astype(np.float32, copy=False)
    return top_k(shares, k)
