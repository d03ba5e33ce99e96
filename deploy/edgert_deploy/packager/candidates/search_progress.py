"""The progress of a search for layers in float: the steps so far, and an estimate of the time left."""

from __future__ import annotations

import time
from collections.abc import Callable

from edgert.durations import UNITS_S, duration_text
from edgert.printable import counted
from edgert_deploy.packager.processes.sandbox import Progress

LINE_S = 15.0  # a new line about the measured layers comes after this time at the earliest


class SearchProgress:
    """Reports the steps of one search. `name` is the target, `clock` is monotonic seconds."""

    def __init__(self, report: Progress, name: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._report = report
        self._name = name
        self._clock = clock
        self._begun_s = self._line_s = clock()
        self._candidates = 0

    def begin(self) -> None:
        """Start the time of the next kind of step."""
        self._begun_s = self._line_s = self._clock()

    def measured(self, number: int, total: int) -> None:
        """Report that `number` of `total` layers are measured: after the first, and then every LINE_S."""
        now_s = self._clock()
        if number < total and (number == 1 or now_s - self._line_s >= LINE_S):
            self._line_s = now_s
            self._say(f"{number} of {counted(total, 'layer')} measured{self._left(number, total - number)}")

    def candidate(self, text: str, left_max: int) -> None:
        """Report the next candidate. `left_max` counts the builds that the search still needs at most."""
        total = self._candidates + left_max
        left = self._left(self._candidates, left_max) if self._candidates else ""
        self._candidates += 1
        self._say(f"candidate {self._candidates} of at most {total}{left}: {text}")

    def _left(self, done: int, left: int) -> str:
        spent_s = self._clock() - self._begun_s
        return f" in {_rounded(spent_s)}, at most about {_rounded(spent_s / done * left)} left"

    def _say(self, text: str) -> None:
        self._report(f"{self._name}: {text}")


def attempts_max(fails: int, passes: int, most: int) -> int:
    """Return the largest number of builds that a search still needs.

    Args:
        fails: The largest number of layers in float that is known to fail.
        passes: The smallest number of layers in float that is known to pass; 0 if none is known.
        most: The largest number of layers in float to try.
    """
    if passes:
        return (passes - fails - 1).bit_length()
    if fails >= most:
        return 0
    count = next_count(fails, passes, most)
    return 1 + max(attempts_max(fails, count, most), attempts_max(count, 0, most))


def next_count(fails: int, passes: int, most: int) -> int:
    """Return the number of layers in float to try next; the arguments are those of `attempts_max`."""
    return (fails + passes) // 2 if passes else min(max(1, 2 * fails), most)


def _rounded(seconds: float) -> str:
    """Return whole seconds up to two minutes, and whole minutes above."""
    unit_s = 1 if seconds <= 2 * UNITS_S["m"] else UNITS_S["m"]
    return duration_text(round(seconds / unit_s) * unit_s)
