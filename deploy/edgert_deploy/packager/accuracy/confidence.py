"""The confidence interval of a measured drop, and the number of samples that a limit needs.

FP32 and the artifact answer the same hold-out samples, so their shares of right answers are paired. Tango's score
interval for the difference of paired shares (Statistics in Medicine 17, 1998, 891-908) is valid for few samples. It is
also valid if the artifact loses no sample. Its upper end is then near 3 / samples, the rule of three.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

LEVEL = 0.95
Z = 1.959964  # a share LEVEL of a normal distribution is within this number of standard deviations
STEPS = 50  # steps of the bisection; each step halves the error


def drop_interval(drops: NDArray[Any]) -> tuple[float, float]:
    """Return both ends of the interval around the mean of `drops`, which has a value for each sample.

    The value is 1 if only FP32 answers the sample correctly, and -1 if only the artifact answers it correctly. A sample
    with several decisions has a value between -1 and 1.
    """
    count, lost, gained = len(drops), float(drops.clip(0).sum()), float(-drops.clip(max=0).sum())

    def fits(drop: float) -> bool:
        """Return whether the samples are likely enough if `drop` is the true drop."""
        b = (2 * count - lost + gained) * drop - lost - gained
        c = -gained * drop * (1 - drop)
        only_artifact = (math.sqrt(max(b * b - 8 * count * c, 0.0)) - b) / (4 * count)
        variance = count * max(2 * only_artifact + drop * (1 - drop), 0.0)
        return abs(lost - gained - count * drop) <= Z * math.sqrt(variance)

    mean = (lost - gained) / count
    return _boundary(fits, mean, -1.0), _boundary(fits, mean, 1.0)


def samples_needed(max_drop: float) -> int:
    """Return how many samples prove `max_drop` if the artifact loses none of them (the rule of three)."""
    return math.ceil(3 / max_drop - 1e-9)


def _boundary(fits: Callable[[float], bool], inside: float, outside: float) -> float:
    """Return the value between `inside` and `outside` at which `fits` becomes false."""
    for _ in range(STEPS):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if fits(middle) else (inside, middle)
    return inside
