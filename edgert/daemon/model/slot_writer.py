"""Changes of a model's slots, repeated while the slots are busy or the disk is full."""

from __future__ import annotations

from collections.abc import Callable

from edgert.errors import EdgeRTError, SlotsBusy, StorageFailed

BUSY_RETRY_S = 0.1  # another process holds the lock for milliseconds
STORAGE_RETRY_S = 5.0  # a full disk stays full for longer


class SlotWriter:
    """Makes a change of the slots now, or later if the change fails.

    Each change is a function that reads the slots first, so that an outdated change does nothing.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._pending: dict[str, tuple[float, Callable[[], None]]] = {}

    def attempt(self, name: str, change: Callable[[], None]) -> EdgeRTError | None:
        """Make the change, instead of a pending change of the same name.

        Return the error if the change failed. If the slots are busy or the disk is full, `tick` tries again.
        """
        self._pending.pop(name, None)
        try:
            change()
        except EdgeRTError as error:
            if isinstance(error, (SlotsBusy, StorageFailed)):
                retry_s = BUSY_RETRY_S if isinstance(error, SlotsBusy) else STORAGE_RETRY_S
                self._pending[name] = self._clock() + retry_s, change
            return error
        return None

    def tick(self) -> None:
        """Try the changes that are due."""
        now_s = self._clock()
        for name, (at_s, change) in list(self._pending.items()):
            if now_s >= at_s and name in self._pending:
                self.attempt(name, change)

    def due_s(self) -> float | None:
        """Return the time when `tick` is due, on the clock; None while no change is pending."""
        return min((at_s for at_s, _ in self._pending.values()), default=None)

    def clear(self) -> None:
        """Drop the pending changes."""
        self._pending.clear()
