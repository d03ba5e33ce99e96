"""The latest time that a device has seen: an expired bundle stays expired if the clock is set back.

The clock of a device without a battery or a time source may show any time. But the device knows other times: a bundle
that expires states the time of its signature, files have times, and the clock may have been correct earlier. The real
time is never before the latest of them. `STATE/latest_time.json` stores times of signatures. While the clock follows a
time source, the file also stores the time of the clock.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable

from edgert import machine
from edgert.bundle.expiry import expiry_time, time_text
from edgert.durable import LOCK_S_MAX, locked, store_file, storing
from edgert.errors import StorageFailed
from edgert.state_dir import StateDir

STORE_STEP_S = 86400.0  # the clock's time is stored if it is later than the stored time by more than this
CHECK_S = 3600.0
AHEAD_S_MAX = 86400.0  # a signed time may be ahead of a correct clock by at most this


class LatestTime:
    """The latest time that the device has seen, in seconds since 1970; `wall_clock` may be wrong."""

    def __init__(
        self,
        state: StateDir,
        wall_clock: Callable[[], float] = time.time,
        clock_synced: Callable[[], bool | None] = machine.clock_synced,
    ) -> None:
        self._state = state
        self._path = state.latest_time
        self._wall_clock = wall_clock
        self._clock_synced = clock_synced

    def now_s(self) -> float:
        """Return the latest known time, which is a lower bound of the real time."""
        return max(self._wall_clock(), self._stored_s(), *self._file_times_s())

    def store(self, time_s: float, wait_s: float = LOCK_S_MAX) -> None:
        """Store a time that has certainly passed, unless a later time is stored. Raises StorageFailed.

        If the clock follows a time source, a time far ahead of the clock is ignored. Such a time comes from a host with
        a wrong clock, and the device would refuse every bundle that expires before this time. If another process stores
        a time, the function waits up to `wait_s`.
        """
        if time_s <= self._stored_s() or (time_s > self._wall_clock() + AHEAD_S_MAX and self._clock_synced()):
            return
        with storing(f"cannot write {self._path}"), locked(self._path.with_suffix(".lock"), wait_s):
            if time_s > self._stored_s():  # another process may have stored a later time
                store_file(self._path, json.dumps({"latest": time_text(time_s)}).encode())

    def store_clock(self) -> None:
        """Once a day, store the clock's time if the clock follows a time source. Call this every CHECK_S."""
        wall_s = self._wall_clock()
        if self._clock_synced() and wall_s - self._stored_s() > STORE_STEP_S:
            with contextlib.suppress(StorageFailed):  # the disk is full, or a lock is held; the next call tries again
                self.store(wall_s, wait_s=0)

    def _stored_s(self) -> float:
        try:
            return expiry_time(json.loads(self._path.read_bytes())["latest"])
        except (OSError, ValueError, KeyError, TypeError):  # the file is missing or damaged
            return 0.0

    def _file_times_s(self) -> list[float]:
        """Return the times of the files that a bootstrap wrote."""
        times = [0.0]
        for path in (self._state.config, *self._state.keys.glob("*.pem")):
            with contextlib.suppress(OSError):  # the file was just removed
                times.append(path.lstat().st_mtime)
        return times
