"""Computes one vector for each item from a model's token states: pure functions on arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.text_rules import Embed

LENGTH_MIN = 1e-12  # a shorter vector is divided by this length, as in PyTorch's normalize


def embeddings(rule: Embed, states: NDArray[Any], mask: NDArray[Any] | None) -> NDArray[np.float32]:
    """Return FP32 [N, D] from `states` [N, T, D], or [N, D] without pooling; the mean uses `mask` [N, T]."""
    states = states.astype(np.float32, copy=False)
    if rule.pooling == "cls":
        vectors = states[:, 0]
    elif rule.pooling == "mean":
        assert mask is not None  # the manifest names the mask
        weights = mask.astype(np.float32)
        # If the mask marks no token, the sum and the vector are 0.
        vectors = np.matmul(weights[:, None], states)[:, 0] / np.maximum(weights.sum(axis=1, keepdims=True), 1e-9)
    else:
        vectors = states
    if rule.normalize:
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), LENGTH_MIN)
    return np.ascontiguousarray(vectors, np.float32)
