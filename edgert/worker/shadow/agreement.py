"""Agreement of two answers to one input: by their top classes, else by the cosine of their values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.manifest import Manifest

COSINE_MIN = 0.99  # answers with at least this cosine agree, if the model gives no class scores


class Agreement(NamedTuple):
    """Whether two answers agree (by top classes, else by COSINE_MIN), and the cosine of their values."""

    agrees: bool
    cosine: float


def compare(got: Sequence[NDArray[Any]], want: Sequence[NDArray[Any]], scores: int | None) -> Agreement:
    """Compare two answers, output by output; `scores` is the index of the output with class scores.

    The result's cosine is the smallest cosine of all outputs. It is -1 for values that are not finite, and for shapes
    that differ.
    """
    cosine = min((_cosine(a, b) for a, b in zip(got, want, strict=True)), default=1.0)
    if scores is None:
        return Agreement(cosine >= COSINE_MIN, cosine)
    a, b = got[scores], want[scores]
    same = a.shape == b.shape and bool((a.argmax(axis=-1) == b.argmax(axis=-1)).all())
    return Agreement(same and cosine > -1.0, cosine)


def scores_output(manifest: Manifest) -> int | None:
    """Return the index of the output with class scores; None if there is none.

    The classification rule names this output. Without a classification rule, it is the model's only output, if its
    shape is [items, classes].
    """
    outputs = manifest.outputs
    if manifest.classify is not None:
        return [spec.name for spec in outputs].index(manifest.classify.output)
    if len(outputs) == 1 and len(outputs[0].shape) == 2 and outputs[0].shape[1] > 1 and "FP" in outputs[0].datatype:
        return 0
    return None


def _cosine(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Return the cosine of two arrays as vectors; -1 if they cannot be compared."""
    if a.shape != b.shape:
        return -1.0
    x, y = a.ravel().astype(np.float64), b.ravel().astype(np.float64)
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return -1.0
    lengths = float(np.linalg.norm(x) * np.linalg.norm(y))
    if lengths == 0.0:
        return 1.0 if np.array_equal(x, y) else 0.0
    return float(np.clip(x @ y / lengths, -1.0, 1.0))
