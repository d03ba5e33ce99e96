"""The pauses between attempts of an action that fails repeatedly."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

STABLE_S = 60.0  # after a run this long, earlier failures are forgotten


def doubling(least_s: float, most_s: float) -> tuple[float, ...]:
    """Return pauses that double from `least_s` up to `most_s`."""
    pauses = [least_s]
    while pauses[-1] < most_s:
        pauses.append(min(2 * pauses[-1], most_s))
    return tuple(pauses)


class Backoff:
    """Counts failures in a row. Each failure selects the next pause of `pauses_s`; the last pause repeats.

    After an attempt that lasted longer than `stable_s`, earlier failures are forgotten.
    """

    def __init__(
        self, pauses_s: Sequence[float], stable_s: float = math.inf, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.failures = 0
        self._pauses_s = pauses_s
        self._stable_s = stable_s
        self._clock = clock
        self._started_s = clock()

    def started(self) -> None:
        """Note that an attempt starts."""
        self._started_s = self._clock()

    def failed(self) -> float:
        """Note that the attempt failed; return the pause before the next attempt."""
        if self._clock() - self._started_s > self._stable_s:
            self.failures = 0
        self.failures += 1
        return self.pause_s

    def reset(self) -> None:
        """Forget the failures."""
        self.failures = 0

    @property
    def pause_s(self) -> float:
        return self._pauses_s[min(max(self.failures, 1), len(self._pauses_s)) - 1]
