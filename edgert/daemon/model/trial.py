"""The trial of one model: its time, and the watch of its limits.

`Trial` starts a `TrialWatch` if the trial has limits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from edgert.checks.trial_status import TrialStatus
from edgert.daemon.model.slot_writer import SlotWriter
from edgert.daemon.model.trial_watch import TrialWatch, event_fields
from edgert.daemon.workers.worker_process import WorkerProcess
from edgert.errors import DeviceError, EdgeRTError, HealthCheckFailed, SlotsBusy, TransitionRefused
from edgert.log import log
from edgert.versions.slot_store import SlotStore
from edgert.versions.slots import CUT_OFF, Slots, Version


class Trial:
    """The trial of one model. All methods run on the supervisor's thread.

    Args:
        report: Reports an event of the model in telemetry.
        roll_back: Rolls back a version that broke a limit, or whose watch was cut off.
        rolled_back: Called after the time of the trial has passed and the slots are rolled back.
        sync: Called if the time of the trial has passed, but a command has already changed the slots.
    """

    def __init__(
        self,
        model: str,
        store: SlotStore,
        slot_writer: SlotWriter,
        clock: Callable[[], float],
        *,
        report: Callable[[str, dict[str, Any]], None],
        roll_back: Callable[[Version, EdgeRTError, dict[str, Any]], None],
        rolled_back: Callable[[Version, EdgeRTError], None],
        sync: Callable[[], None],
    ) -> None:
        self._model = model
        self._store = store
        self._slot_writer = slot_writer
        self._clock = clock
        self._report = report
        self._roll_back = roll_back
        self._rolled_back = rolled_back
        self._sync = sync
        self.in_progress = False
        self._ends_at_s: float | None = None
        self.fault: EdgeRTError | None = None  # the reason why the trial could not end after its time
        self._watch: TrialWatch | None = None
        self._last: TrialStatus | None = None  # the result of the last watch
        self._to_watch: WorkerProcess | None = None  # the worker whose watch starts once the slots can change

    def update(self, slots: Slots) -> None:
        self._ends_at_s = None
        self.in_progress = slots.on_trial
        if not self.in_progress:
            self.forget()
        elif self._watch is not None and not self._watch.worker.runs(slots.live):
            self._watch = None
        if self.in_progress and slots.trial is not None:
            self._ends_at_s = self._clock() + slots.trial.left_s(self._store.clock)

    def begin(self, worker: WorkerProcess) -> None:
        """Start to watch the limits, if the trial of `worker`'s version has limits."""
        self._watch, self._to_watch = None, worker
        error = self._slot_writer.attempt("begin the watch", partial(self._begin, worker))
        if error is not None:  # a trial with limits that are never watched ends with a rollback
            log(f"model {self._model}: the trial limits are not watched yet: {error.message}")

    def is_of(self, version: Version) -> bool:
        """Return whether `version` is on trial.

        If the slots cannot be read, return True. The caller then rolls back, and the rollback reads the slots again.
        """
        try:
            slots = self._store.read()
        except EdgeRTError:
            return True
        return slots.on_trial and slots.live is not None and slots.live.digest == version.digest

    def watches(self, worker: WorkerProcess) -> bool:
        """Return whether a watch of the limits on `worker` is in progress or planned."""
        return worker is self._to_watch or (self._watch is not None and worker is self._watch.worker)

    def handle_message(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        """Handle a worker's message `figures` or `golden_sent`."""
        if self._watch is not None and worker is self._watch.worker:
            self._watch.handle_message(message, self._clock())
            self._conclude(self._watch)

    def count_golden(self, samples: int) -> None:
        """Count golden samples that a command sent, because they are not requests of apps."""
        if self._watch is not None:
            self._watch.count_golden(samples)

    def forget(self) -> None:
        """Stop watching a version whose trial is over."""
        self._watch = self._to_watch = self.fault = None

    def stop(self) -> None:
        """Stop watching; the trial continues without this daemon."""
        self.forget()
        self._ends_at_s = None

    def tick(self) -> None:
        """End the trial if its time has passed, and continue the watch."""
        now_s = self._clock()
        if self._ends_at_s is not None and now_s >= self._ends_at_s:
            self._ends_at_s = None
            error = self._slot_writer.attempt("end the trial", self._expire)
            self.fault = None if isinstance(error, SlotsBusy) else error
        if self._watch is not None:
            self._watch.tick(now_s)
            self._conclude(self._watch)

    def due_s(self) -> float | None:
        """Return the time when `tick` is due, on `clock`; None if nothing is due."""
        times = [self._ends_at_s, None if self._watch is None else self._watch.due_s]
        return min((time_s for time_s in times if time_s is not None), default=None)

    def status(self) -> TrialStatus | None:
        """Return the status of the watch, or the result of the last watch; None before the first watch."""
        return self._last if self._watch is None else self._watch.status(self._clock())

    def _begin(self, worker: WorkerProcess) -> None:
        if worker is not self._to_watch:
            return
        slots = self._store.read()
        limits = slots.limits
        if limits is None or limits.passed or not worker.runs(slots.live):
            self._to_watch = None
            return
        begun = self._store.start_watch()
        self._to_watch = None
        if begun:
            self._watch = TrialWatch(limits, worker, self._clock())
        else:
            self._roll_back(worker.version, HealthCheckFailed(CUT_OFF), {})

    def _conclude(self, watch: TrialWatch) -> None:
        """Handle the result of the watch, once."""
        if not watch.over or watch.concluded:
            return
        watch.concluded = True
        self._last = watch.status(self._clock())
        release = watch.worker.version.release
        watched_s = watch.watched_s(self._clock())
        fields = {"release": release, "watched_s": round(watched_s, 1), **event_fields(watch.readings)}
        if watch.finding is not None:
            self._watch = None
            broke = {"broken": watch.finding.name, "value": watch.finding.value, "limit": watch.finding.limit}
            reason = HealthCheckFailed(f"{watch.finding.message}; watched for {watched_s:.0f} s")
            self._roll_back(watch.worker.version, reason, {**fields, **broke})
        else:
            self._slot_writer.attempt("pass the limits", partial(self._pass, watch, fields))

    def _pass(self, watch: TrialWatch, fields: dict[str, Any]) -> None:
        if watch is not self._watch:
            return
        try:
            slots = self._store.pass_limits(watch.worker.version.digest)
        except TransitionRefused:  # a command has ended the trial
            self._watch = None
            return
        self._watch = None
        self.update(slots)
        self._report("kept" if watch.limits.unattended else "limits_held", fields)

    def _expire(self) -> None:
        slots = self._store.read()
        ended = self._store.expire_trial(wait=False)
        self.fault = None
        if ended and slots.live is not None:
            self._rolled_back(slots.live, DeviceError(slots.why_expired(self._store.clock)))
        else:
            self._sync()
