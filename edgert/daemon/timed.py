"""The interface of the daemon's parts that act at due times. The caller passes each part its clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol


class Timed(Protocol):
    """A part that acts at due times.

    `tick` does the work that is due. `due_s` returns the next due time on the part's clock, or None if nothing is due.
    """

    def tick(self) -> None: ...

    def due_s(self) -> float | None: ...


class Periodic:
    """Calls `do` at the first `tick`, and then once every `period_s` on `clock`."""

    def __init__(self, period_s: float, do: Callable[[], object], clock: Callable[[], float]) -> None:
        self._period_s = period_s
        self._do = do
        self._clock = clock
        self._due_s = clock()

    def tick(self) -> None:
        if (now_s := self._clock()) >= self._due_s:
            self._due_s = now_s + self._period_s
            self._do()

    def due_s(self) -> float:
        return self._due_s


def soonest_s(parts: Iterable[Timed]) -> float | None:
    """Return the earliest due time of `parts`; None if no part is due."""
    return min((due_s for part in parts if (due_s := part.due_s()) is not None), default=None)
