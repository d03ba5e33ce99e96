"""How often in a row a model's worker ended unasked, and how long to wait before it is started again."""

from __future__ import annotations

CRASHES_MAX = 3
RESTART_PAUSES_S = (0.1, 0.5, 2.0)
QUARANTINE_PAUSES_S = (30.0, 60.0, 120.0, 300.0, 600.0)


class Crashes:
    """Of one model. A version is known by its digest; what another version did does not count."""

    def __init__(self) -> None:
        self.in_a_row = 0
        self._digest = ""
        self._given_up: set[str] = set()

    def tries(self, digest: str) -> None:
        """A worker with this version is about to be started."""
        if digest != self._digest:
            self.in_a_row = 0

    def add(self, digest: str, *, stable: bool) -> None:
        """A worker ended; `stable`: it had lived long enough to make its predecessors' ends forgotten."""
        if stable or digest != self._digest:
            self.in_a_row = 0
        self._digest = digest
        self.in_a_row += 1

    @property
    def too_many(self) -> bool:
        return self.in_a_row >= CRASHES_MAX

    @property
    def pause_s(self) -> float:
        """Until the next start."""
        pauses = (*RESTART_PAUSES_S, *QUARANTINE_PAUSES_S)
        return pauses[min(self.in_a_row, len(pauses)) - 1]

    @property
    def quarantine_s(self) -> float:
        """Until the next start of a model that there are too many of already."""
        times = min(max(0, self.in_a_row - CRASHES_MAX), len(QUARANTINE_PAUSES_S) - 1)
        return QUARANTINE_PAUSES_S[times]

    def give_up(self, digest: str) -> None:
        """Trust this version no more, until somebody decides anew."""
        self._given_up.add(digest)

    def trusted(self, digest: str) -> bool:
        return digest not in self._given_up

    def forgive(self) -> None:
        self._given_up.clear()
