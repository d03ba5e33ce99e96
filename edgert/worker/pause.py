"""A pause that grows: for what turns itself off, and tries again later."""

from __future__ import annotations

from collections.abc import Callable


class GrowingPause:
    """Lasts `first_s`, then twice as long each time, up to `max_s`. `clock` returns seconds."""

    def __init__(self, first_s: float, max_s: float, clock: Callable[[], float]) -> None:
        self._first_s, self._max_s, self._clock = first_s, max_s, clock
        self._next_s, self._until_s = first_s, 0.0

    @property
    def active(self) -> bool:
        return self._until_s > 0.0 and self._clock() < self._until_s

    @property
    def left_s(self) -> float:
        return self._until_s - self._clock() if self.active else 0.0

    def begin(self) -> None:
        self._until_s = self._clock() + self._next_s
        self._next_s = min(2 * self._next_s, self._max_s)

    def reset(self) -> None:
        """Let the next pause last `first_s` again."""
        self._next_s = self._first_s
