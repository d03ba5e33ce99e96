"""When a worker that ended unexpectedly is started again, and which versions are not trusted any more."""

from __future__ import annotations

from edgert.backoff import Backoff

CRASHES_MAX = 3
RESTART_PAUSES_S = (0.1, 0.5)
QUARANTINE_PAUSES_S = (30.0, 60.0, 120.0, 300.0, 600.0)  # from CRASHES_MAX on


class Crashes:
    """The crashes of one model. They count for one version, known by its digest."""

    def __init__(self) -> None:
        self._backoff = Backoff((*RESTART_PAUSES_S, *QUARANTINE_PAUSES_S))
        self._digest = ""
        self._distrusted: set[str] = set()

    def starts(self, digest: str) -> None:
        """Note that a worker with this version starts: the crashes of another version do not count."""
        if digest != self._digest:
            self._backoff.reset()

    def add(self, digest: str, *, stable: bool) -> None:
        """Note that a worker ended; a `stable` one ran long enough to make earlier crashes forgotten."""
        if stable or digest != self._digest:
            self._backoff.reset()
        self._digest = digest
        self._backoff.failed()

    @property
    def in_a_row(self) -> int:
        return self._backoff.failures

    @property
    def too_many(self) -> bool:
        return self.in_a_row >= CRASHES_MAX

    @property
    def pause_s(self) -> float:
        """The pause before the next start."""
        return self._backoff.pause_s

    def distrust(self, digest: str) -> None:
        """Do not roll back to this version, until `forgive`."""
        self._distrusted.add(digest)

    def trusts(self, digest: str) -> bool:
        return digest not in self._distrusted

    def forgive(self) -> None:
        self._distrusted.clear()
