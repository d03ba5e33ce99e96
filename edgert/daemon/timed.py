"""The shape of everything in the daemon that acts at times of its own, with an injected clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class Timed(Protocol):
    """`tick` does what is due, if anything; `due_s` is when it is due next, on the clock, None for never."""

    def tick(self) -> None: ...

    def due_s(self) -> float | None: ...


def soonest_s(parts: Iterable[Timed]) -> float | None:
    """Return when the first of `parts` is due; None for never."""
    return min((due_s for part in parts if (due_s := part.due_s()) is not None), default=None)
