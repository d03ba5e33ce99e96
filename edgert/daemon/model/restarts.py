"""Restarts of a model's worker after crashes, and the versions that a rollback must not choose."""

from __future__ import annotations

from collections.abc import Callable

from edgert.backoff import STABLE_S, Backoff

CRASHES_MAX = 3
RESTART_PAUSES_S = (0.1, 0.5)
QUARANTINE_PAUSES_S = (30.0, 60.0, 120.0, 300.0, 600.0)  # the pauses after CRASHES_MAX and more crashes


class Restarts:
    """Counts the crashes of one version in a row.

    Calls `restart` after a pause that grows with their number. `distrusted` has the digests of the versions that failed
    since a command last chose a version.
    """

    def __init__(self, clock: Callable[[], float], restart: Callable[[], None]) -> None:
        self.distrusted: set[str] = set()
        self._clock = clock
        self._restart = restart
        self._backoff = Backoff((*RESTART_PAUSES_S, *QUARANTINE_PAUSES_S))
        self._digest = ""
        self._served_s = 0.0  # the time for which workers served since the last crash, and then ended as planned
        self._due_s: float | None = None

    def note_start(self, digest: str) -> None:
        """Note that a worker with the version `digest` starts. Crashes of another version are forgotten."""
        if digest != self._digest:
            self._backoff.reset()

    def note_planned_end(self, served_s: float) -> None:
        """Note that the daemon ends a worker as planned, after the worker served for `served_s`."""
        self._served_s += served_s

    def note_crash(self, digest: str, served_s: float = 0.0) -> None:
        """Note that a worker with the version `digest` ended, after it served for `served_s`."""
        if self._served_s + served_s > STABLE_S or digest != self._digest:
            self._backoff.reset()
        self._digest, self._served_s = digest, 0.0
        self._backoff.failed()

    @property
    def crashes(self) -> int:
        """The number of workers that ended in a row."""
        return self._backoff.failures

    @property
    def too_many(self) -> bool:
        return self.crashes >= CRASHES_MAX

    def plan(self) -> float:
        """Plan the next restart; return the pause before it."""
        self._due_s = self._clock() + self._backoff.pause_s
        return self._backoff.pause_s

    def cancel(self) -> None:
        self._due_s = None

    def in_s(self) -> float | None:
        """Return the time until the next restart; None if no restart is planned."""
        return None if self._due_s is None else max(0.0, self._due_s - self._clock())

    def tick(self) -> None:
        if self._due_s is not None and self._clock() >= self._due_s:
            self._due_s = None
            self._restart()

    def due_s(self) -> float | None:
        return self._due_s
