"""A trial with limits, watched on the device: the supervisor looks, the worker counts, nobody else is asked.

Theory of operation: a `TrialWatch` begins when the version on trial serves. Every `look_s` it asks the worker for its
figures, measures the worker's memory and the device's temperature, and judges (edgert.versions.trial_limits). A limit that is broken
LOOKS_TO_BREAK times in a row ends the trial at once; at the end one look decides. Where apps asked too little for a
p99 or a share of errors to mean anything, the worker first asks itself golden samples, through the socket as an app
would. A worker that ends, hangs or is replaced in the middle has not held.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

from edgert import machine as host
from edgert.checks.status import TrialStatus
from edgert.daemon.worker_process import WorkerProcess
from edgert.versions.slot_store import SlotStore
from edgert.versions.slots import SlotState
from edgert.versions.trial_limits import FILL_S_MAX, LOOKS_TO_BREAK, REQUESTS_MIN, Broken, Readings, TrialLimits, broken
from edgert.worker_link import channel

LOOK_SHARE = 1 / 60  # of the watch, between two looks
LOOK_S_MIN, LOOK_S_MAX = 0.2, 5.0
SILENT_S_MAX = 15.0  # for a worker that gives no figures
FILL_GRACE_S = 30.0  # the last golden sample may take as long


class Phase(str, Enum):
    WATCHING = "watching"
    FILLING = "filling"  # golden samples are asked, as apps asked too little
    HELD = "held"  # all limits held
    BROKEN = "broken"


class TrialWatch:
    """Watches `worker` for `limits`, from `now_s` on (monotonic). `tick` and `heard` say what to do through `phase`."""

    def __init__(
        self, limits: TrialLimits, worker: WorkerProcess, now_s: float, temp_c: Callable[[], float | None] = host.temp_c
    ) -> None:
        self.limits, self.worker = limits, worker
        self.phase = Phase.WATCHING
        self.finding: Broken | None = None
        self.readings = Readings()
        self._temp_c = temp_c
        self._begun_s, self._heard_s = now_s, now_s
        self._over_s = now_s + limits.watch_s
        self._look_s = min(max(limits.watch_s * LOOK_SHARE, LOOK_S_MIN), LOOK_S_MAX)
        self._look_at_s = now_s + self._look_s
        self._golden = 0
        self._streak = 0
        self._filled = False

    @property
    def due_s(self) -> float:
        return self._look_at_s

    @property
    def over(self) -> bool:
        return self.phase in (Phase.HELD, Phase.BROKEN)

    def tick(self, now_s: float) -> None:
        """Ask for figures where it is time to; a worker that gives none for long is broken."""
        if self.over or now_s < self._look_at_s:
            return
        self._look_at_s = now_s + self._look_s
        if now_s < self._over_s:
            self._look_at_s = min(self._look_at_s, self._over_s)
        with contextlib.suppress(OSError):  # it is gone, or full: the loop hears of it, or the next look asks again
            channel.send(self.worker.channel, {"op": "figures"})
        if now_s - self._heard_s > SILENT_S_MAX + self._look_s:
            message = f"the worker gave no figures for {now_s - self._heard_s:.0f} s"
            self._break(Broken("worker", None, SILENT_S_MAX, message))

    def checked(self, samples: int) -> None:
        """So many golden samples were asked by a command."""
        self._golden += samples

    def heard(self, message: dict[str, Any], now_s: float) -> None:
        """The worker's figures, or that it has asked the golden samples."""
        if self.over:
            return
        self._heard_s = now_s
        if message["op"] == "asked_golden":
            self._golden += int(message["count"])
            self.phase, self._filled, self._look_at_s = Phase.WATCHING, True, now_s
            return
        if self.phase is Phase.FILLING:
            return
        self.readings = Readings(
            requests=int(message["requests"]),
            failed=int(message["failed"]),
            golden=min(self._golden, int(message["requests"])),
            p99_ms=float(message["p99_ms"]),
            rss_mb=round(self.worker.measure(), 1),
            temp_c=self._temp_c() if "temp_c" in self.limits.bounds else None,
            compared=int(message["compared"]),
            agreed=int(message["agreed"]),
        )
        self._judge(now_s)

    def _judge(self, now_s: float) -> None:
        ended = now_s >= self._over_s
        if ended and self._too_few():
            self._fill()
            return
        found = broken(self.limits, self.readings, at_end=ended)
        self._streak = self._streak + 1 if found else 0
        if found and (ended or self._streak >= LOOKS_TO_BREAK):
            self._break(found[0])
        elif ended:
            self.phase = Phase.HELD

    def _too_few(self) -> bool:
        return self.limits.fills and not self._filled and self.readings.requests < REQUESTS_MIN

    def _fill(self) -> None:
        self.phase = Phase.FILLING
        self._look_at_s += FILL_S_MAX + FILL_GRACE_S  # it says itself when it is done
        count = REQUESTS_MIN - self.readings.requests
        with contextlib.suppress(OSError):
            channel.send(self.worker.channel, {"op": "ask_golden", "count": count, "for_s": FILL_S_MAX})

    def _break(self, finding: Broken) -> None:
        self.phase, self.finding = Phase.BROKEN, finding

    def try_later(self, at_s: float) -> None:
        """What was found cannot be noted now."""
        self._look_at_s = at_s

    def watched_s(self, now_s: float) -> float:
        return max(0.0, now_s - self._begun_s)

    def status(self, now_s: float) -> TrialStatus:
        left_s = round(max(0.0, self._over_s - now_s), 1)
        release, readings = self.worker.version.release, self.readings
        return TrialStatus(release, self.phase.value, left_s, readings, readings.described())


def flat(readings: Readings) -> dict[str, Any]:
    """The figures as an event bears them."""
    known = {name: readings.value(name) for name in ("p99_ms", "error_rate", "agreement")}
    rounded = {name: round(value, 4) for name, value in known.items() if value is not None}
    return {"requests": readings.requests, "golden": readings.golden, "rss_mb": readings.rss_mb, **rounded}


def previous_version(store: SlotStore, slots: SlotState) -> tuple[Path, str] | None:
    """Folder and digest of the good version that the one on trial is compared with; None where that is not wanted."""
    spare = slots.spare
    if slots.limits is None or "agreement" not in slots.limits.bounds or spare is None or not spare.good:
        return None
    return store.slot_folder(slots.spare_slot), spare.digest
