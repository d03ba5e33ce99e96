"""A model's trial: how long it may last, the limits that are watched meanwhile, and the word that it kept them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgert.checks.status import TrialStatus
from edgert.daemon.model_state import LOADING_RETRY_S
from edgert.daemon.trial_watch import TrialWatch, flat
from edgert.daemon.worker_process import WorkerProcess
from edgert.errors import EdgeRTError, HealthCheckFailed, SlotsBusy, StorageFailed
from edgert.log import log
from edgert.versions.slot_store import SlotStore
from edgert.versions.slots import CUT_OFF, ON_TRIAL, SlotState, Version

BUSY_RETRY_S = 1.0
STORAGE_RETRY_S = 5.0


class Trial:
    """Of one model. `go_back` ends the trial of a version (version, why, fields for the event); `tell` reports.

    `until_s` is when the trial runs out, on `clock`. All methods run on the supervisor's one thread.
    """

    def __init__(
        self,
        model: str,
        store: SlotStore,
        clock: Callable[[], float],
        go_back: Callable[[Version, EdgeRTError, dict[str, Any] | None], bool],
        tell: Callable[[str, str, dict[str, Any]], None],
    ) -> None:
        self._model, self._store, self._clock, self._go_back, self._tell = model, store, clock, go_back, tell
        self.under_way = False
        self.until_s: float | None = None
        self._watch: TrialWatch | None = None
        self._judged: TrialStatus | None = None  # what the last watch found
        self._to_watch: WorkerProcess | None = None  # once the slots can be changed
        self._begin_at_s = 0.0

    @property
    def due_s(self) -> float | None:
        """When there is something to do next."""
        times = [self.until_s, None if self._watch is None else self._watch.due_s]
        times.append(None if self._to_watch is None else self._begin_at_s)
        return min((t for t in times if t is not None), default=None)

    def follow(self, slots: SlotState) -> None:
        """What the slots now say of a trial."""
        self.until_s = None
        self.under_way = slots.state in ON_TRIAL
        active = slots.live
        watch = self._watch
        if not self.under_way or (watch and active and watch.worker.version.digest != active.digest):
            self._watch = None
        if not self.under_way:
            self._to_watch = None
        if self.under_way and slots.trial is not None:
            self.until_s = self._clock() + slots.trial.left_s(self._store.clock)

    def begin(self, worker: WorkerProcess) -> None:
        """Watch the trial's limits from now on, where it has some and `worker` is what is on trial."""
        self._watch = self._to_watch = None
        try:
            slots = self._store.read()
            active, limits = slots.live, slots.limits
            if limits is None or limits.passed or active is None or active.digest != worker.version.digest:
                return
            if not self._store.start_watch():
                self._go_back(active, HealthCheckFailed(CUT_OFF), None)
                return
        except (SlotsBusy, StorageFailed) as error:  # a busy lock or a full disk: the version serves all the same
            self._to_watch, self._begin_at_s = worker, self._clock() + retry_s(error)
            return
        except EdgeRTError as error:  # the trial ends by itself, as nobody can keep it
            log(f"model {self._model}: its limits are not watched: {error.message}")
            return
        self._watch = TrialWatch(limits, worker, self._clock())

    def watches(self, worker: WorkerProcess) -> bool:
        """Whether the trial's limits are watched on `worker`, or are about to be."""
        return worker is self._to_watch or (self._watch is not None and worker is self._watch.worker)

    def heard(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        """A worker told figures."""
        if self._watch is not None and worker is self._watch.worker:
            self._watch.heard(message, self._clock())
            self._heed()

    def checked(self, samples: int) -> None:
        """So many golden samples were asked by a command."""
        if self._watch is not None:
            self._watch.checked(samples)

    def tick(self, now_s: float) -> None:
        """Do what is due by now; the end of the trial is `expire`'s."""
        if self._to_watch is not None and now_s >= self._begin_at_s:
            self.begin(self._to_watch)
        if self._watch is not None and now_s >= self._watch.due_s:
            self._watch.tick(now_s)
            self._heed()

    def expire(self) -> str | None:
        """End a trial that ran out, in the slots: why; None where it had ended already.

        Raises SlotsBusy or what the disk does; then it is tried again at `until_s`.
        """
        self.until_s = None
        try:
            reason = self._store.read().why_expired(self._store.clock)
            return reason if self._store.expire_trial(wait=False) else None
        except EdgeRTError as error:
            self.until_s = self._clock() + (BUSY_RETRY_S if isinstance(error, SlotsBusy) else STORAGE_RETRY_S)
            raise

    def forget_watch(self) -> None:
        """The version went back."""
        self._watch = self._to_watch = None

    def status(self) -> TrialStatus | None:
        """Return how the limits are watched, or how the last watch ended; None where there was none."""
        return self._judged if self._watch is None else self._watch.status(self._clock())

    def _heed(self) -> None:
        """Keep the version, wait for the host's word, or go back, once the limits have been judged."""
        watch = self._watch
        if watch is None or not watch.over:
            return
        self._watch, self._judged = None, watch.status(self._clock())
        release, watched_s = watch.worker.version.release, watch.watched_s(self._clock())
        told = {"release": release, "watched_s": round(watched_s, 1), **flat(watch.readings)}
        if watch.finding is not None:
            reason = f"{watch.finding.message}; watched for {watched_s:.0f} s"
            broke = {"broken": watch.finding.name, "value": watch.finding.value, "limit": watch.finding.limit}
            self._go_back(watch.worker.version, HealthCheckFailed(reason), {**told, **broke})
            return
        try:
            after = self._store.pass_limits(watch.worker.version.digest)
        except EdgeRTError as error:
            if not isinstance(error, (SlotsBusy, StorageFailed)):  # somebody ended the trial meanwhile
                return
            self._watch = watch  # a busy lock or a full disk: the next turn tries again
            watch.try_later(self._clock() + retry_s(error))
            return
        self.follow(after)
        self._tell("kept" if watch.limits.unattended else "limits_held", self._model, told)


def retry_s(error: EdgeRTError) -> float:
    """How long to wait where the slots could not be changed: a busy lock is free soon, a full disk is not."""
    return LOADING_RETRY_S if isinstance(error, SlotsBusy) else STORAGE_RETRY_S
