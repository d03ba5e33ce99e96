"""Class scores to the best classes: pure functions over arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def softmax(scores: NDArray[Any]) -> NDArray[np.float32]:
    """Probabilities along the last axis, as float32; the largest score is taken off first, so nothing overflows."""
    shifted = np.exp(scores.astype(np.float32) - scores.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True), dtype=np.float32)


def top_k(scores: NDArray[Any], k: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
    """Indices (int64) and scores of the `k` largest along the last axis, best first; ties in index order."""
    k = min(k, scores.shape[-1])
    order = np.argsort(-scores, axis=-1, kind="stable")[..., :k]
    return order.astype(np.int64), np.take_along_axis(scores, order, axis=-1)
