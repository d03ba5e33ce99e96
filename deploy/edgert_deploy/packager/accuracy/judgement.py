"""A judgement of outputs, and the tests of FP32's values by which outputs are recognized."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgert_deploy.packager.accuracy.fp32_agreement import Array, Outputs

Score = Callable[[Outputs, Outputs], float]

CLASSES_MAX = 2000
PROBABILITY_TOLERANCE = 1e-3


@dataclass(frozen=True)
class Judgement:
    """A judgement of one or more outputs.

    Attributes:
        name: The kind of decision, such as "boxes".
        score: The function that returns the score, 0 to 1, for the artifact's answers and FP32's answers.
        share: The function that returns the share of right decisions in each sample. None if samples have no shares.
        finds_nothing: Whether FP32 finds no object in any sample. Then the score compares nothing.
    """

    name: str
    outputs: tuple[str, ...]
    score: Score
    share: Callable[[Outputs, Outputs], Array] | None = None
    finds_nothing: bool = False


def are_probabilities(rows: Array) -> bool:
    """Return whether the values along the last axis are at least 0 and have the sum 1."""
    return bool(rows.min(initial=0.0) >= 0.0) and bool(
        np.allclose(rows.sum(axis=-1), 1.0, rtol=0.0, atol=PROBABILITY_TOLERANCE)
    )


def within_0_and_1(array: Array) -> bool:
    return bool(array.min(initial=0.0) >= 0.0) and bool(array.max(initial=0.0) <= 1.0 + 1e-6)
