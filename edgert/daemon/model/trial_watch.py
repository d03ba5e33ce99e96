"""Measures a version on trial and judges its limits.

A `TrialWatch` starts when the version on trial serves. After each period, the watch requests the worker's figures, and
measures the worker's memory and the device's temperature. It compares all these values with the limits
(edgert.versions.trial_limits). If limits are broken in BROKEN_CHECKS_MAX comparisons in a row, the watch ends at once.
The trial also fails if a limit is broken in the last comparison. If apps sent too few requests for a p99 or an error
rate, the worker first sends golden samples to itself, through the socket like an app. If the worker ends during the
watch, the trial also fails (`ModelService.handle_end`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from edgert import machine
from edgert.checks.trial_status import TrialPhase, TrialStatus
from edgert.daemon.workers.worker_process import WorkerProcess
from edgert.versions.slot_store import SlotStore
from edgert.versions.slots import Slots
from edgert.versions.trial_limits import (
    BROKEN_CHECKS_MAX,
    FILL_S_MAX,
    REQUESTS_MIN,
    BrokenLimit,
    Readings,
    TrialLimits,
    broken_limits,
    doubt,
)
from edgert.worker_link import link

PERIOD_SHARE = 1 / 60  # the time between two comparisons with the limits, as a share of the watch
PERIOD_S_MIN, PERIOD_S_MAX = 0.2, 5.0
SILENT_S_MAX = 15.0  # a worker without figures for longer than this fails the watch
FILL_GRACE_S = 30.0  # the time that golden samples may take in addition to FILL_S_MAX


class TrialWatch:
    """Watches the limits of a trial. `tick` and `handle_message` set the result: `phase` and `finding`.

    The watch starts at `now_s`, in monotonic seconds.
    """

    def __init__(
        self,
        limits: TrialLimits,
        worker: WorkerProcess,
        now_s: float,
        temp_c: Callable[[], float | None] = machine.temp_c,
    ) -> None:
        self.limits = limits
        self.worker = worker
        self.phase = TrialPhase.WATCHING
        self.finding: BrokenLimit | None = None
        self.concluded = False  # whether `Trial` has acted on the result
        self.readings = Readings()
        self._temp_c = temp_c
        self._begun_s = self._received_s = now_s
        self._ends_s = now_s + limits.watch_s
        self._period_s = min(max(limits.watch_s * PERIOD_SHARE, PERIOD_S_MIN), PERIOD_S_MAX)
        self._due_s = now_s + self._period_s
        self._golden = 0
        self._streak = 0
        self._filled = False

    @property
    def due_s(self) -> float | None:
        """The time when `tick` is due; None once the watch is over."""
        return None if self.over else self._due_s

    @property
    def over(self) -> bool:
        return self.phase in (TrialPhase.HELD, TrialPhase.BROKEN)

    def tick(self, now_s: float) -> None:
        """Request figures if they are due. If the worker has sent no figures for too long, the trial fails."""
        if self.over or now_s < self._due_s:
            return
        self._received_s += now_s - self._due_s  # if the tick is late, the daemon was delayed, not the worker
        self._due_s = now_s + self._period_s
        if now_s < self._ends_s:
            self._due_s = min(self._due_s, self._ends_s)
        with contextlib.suppress(OSError):  # the worker has ended, which the loop will see, or its queue is full
            link.send(self.worker.link, {"op": "figures"})
        if now_s - self._received_s > SILENT_S_MAX + self._period_s:
            message = f"the worker reported no figures for {now_s - self._received_s:.0f} s"
            self._break(BrokenLimit("worker", None, SILENT_S_MAX, message))

    def count_golden(self, samples: int) -> None:
        """Count golden samples that a command sent."""
        self._golden += samples

    def handle_message(self, message: dict[str, Any], now_s: float) -> None:
        """Handle the worker's message `figures` or `golden_sent`."""
        if self.over:
            return
        self._received_s = now_s
        if message["op"] == "golden_sent":
            self._golden += int(message["count"])
            self.phase, self._filled, self._due_s = TrialPhase.WATCHING, True, now_s
            return
        if self.phase is TrialPhase.FILLING:
            return
        self.readings = Readings(
            requests=int(message["requests"]),
            failed=int(message["failed"]),
            golden=min(self._golden, int(message["requests"])),
            p99_ms=float(message["p99_ms"]),
            memory_mb=round(self.worker.measure(), 1),
            temp_c=self._temp_c() if "temp_c" in self.limits.bounds else None,
            compared=int(message["compared"]),
            agreed=int(message["agreed"]),
        )
        self._judge(now_s)

    def _judge(self, now_s: float) -> None:
        ended = now_s >= self._ends_s
        if ended and self._too_few():
            self._fill()
            return
        reasons = broken_limits(self.limits, self.readings, at_end=ended)
        self._streak = self._streak + 1 if reasons else 0
        if reasons and (ended or self._streak >= BROKEN_CHECKS_MAX):
            self._break(reasons[0])
        elif ended:
            self.phase = TrialPhase.HELD

    def _too_few(self) -> bool:
        return self.limits.adds_golden_samples and not self._filled and self.readings.requests < REQUESTS_MIN

    def _fill(self) -> None:
        count = REQUESTS_MIN - self.readings.requests
        try:
            link.send(self.worker.link, {"op": "send_golden", "count": count, "for_s": FILL_S_MAX})
        except OSError:
            # the worker has ended, which the loop will see, or its queue is full: the next figures try again
            return
        self.phase = TrialPhase.FILLING
        self._due_s += FILL_S_MAX + FILL_GRACE_S  # a message arrives when the samples are answered

    def _break(self, finding: BrokenLimit) -> None:
        self.phase, self.finding = TrialPhase.BROKEN, finding

    def watched_s(self, now_s: float) -> float:
        return max(0.0, now_s - self._begun_s)

    def status(self, now_s: float) -> TrialStatus:
        left_s = round(max(0.0, self._ends_s - now_s), 1)
        release = self.worker.version.release
        readings = self.readings
        few = doubt(self.limits, readings) if self.phase is TrialPhase.HELD else ""
        return TrialStatus(release, self.phase, left_s, readings, readings.described(), few)


def event_fields(readings: Readings) -> dict[str, Any]:
    """Return the readings by their names in telemetry. Some names differ from the names of the limits."""
    figures = {
        "p99_ms": readings.p99_ms if readings.answered else None,
        "error_rate": readings.error_share,
        "agreement": readings.agreement,
    }
    rounded = {name: round(value, 4) for name, value in figures.items() if value is not None}
    return {"requests": readings.requests, "golden": readings.golden, "rss_mb": readings.memory_mb, **rounded}


def previous_version(store: SlotStore, slots: Slots) -> tuple[str, str] | None:
    """Return the folder and the digest of the previous version if a limit needs it; else None."""
    spare = slots.spare
    if slots.limits is None or "agreement" not in slots.limits.bounds or spare is None or not spare.good:
        return None
    return str(store.slot_folder(slots.spare_slot)), spare.digest
