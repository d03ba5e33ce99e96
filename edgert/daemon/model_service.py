"""One model as the supervisor sees it: which worker serves, which one is loading, what to do when one ends.

A service follows the model's slots: `sync` reads them and brings a worker up for what they name. A new
version loads in a worker of its own while the old one serves; only when it is ready do new connections go
to it and are the old ones told to move. A worker that outgrows its memory is replaced in the same way.

A worker that ends unasked, or whose engine run takes longer than allowed, is started again with growing pauses.
After CRASHES_MAX in a row the version is given up and the previous good one returns; where there is none that
did not fail before, the model is quarantined: tried again after long and growing pauses.

Where a memory budget is set, a model is loaded when the first client asks for it, and unloaded when the
supervisor needs its memory for another. All methods run on the supervisor's one thread.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

from edgert.checks.status import LoadedStatus, ServingStatus
from edgert.config import DeviceConfig, StateDir
from edgert.daemon.crashes import Crashes
from edgert.daemon.model_state import LOADING_RETRY_S, ServingState, unavailable
from edgert.daemon.trial import Trial, retry_s
from edgert.daemon.trial_watch import previous_version
from edgert.daemon.watchdog import Watchdog
from edgert.daemon.worker_process import WorkerProcess, WorkerState
from edgert.errors import (
    DeviceError,
    EdgeRTError,
    EngineFailed,
    ModelNotFound,
    Overloaded,
    ShuttingDown,
    SlotsBusy,
    StorageFailed,
    TransitionRefused,
    Unavailable,
)
from edgert.log import log
from edgert.typed_json import from_json
from edgert.versions.slot_store import SlotStore
from edgert.versions.slots import ON_TRIAL, SlotState, Version
from edgert.worker_link import channel

STABLE_S = 60.0  # a worker that lived this long makes its predecessors' crashes forgotten
LOAD_S_MAX = 180.0
PROGRESS_S_MAX = 900.0  # between two words of an engine that says what it does so long (TensorRT builds a plan)
ROOM_RETRY_S = 0.05
ROOM_S_MAX = 10.0  # how long a model nobody asks for again waits for room
STUCK_S = 10.0  # a worker that lives on that long after it was killed

Settled = Callable[[EdgeRTError | None], None]


class ModelService:
    """Keeps one model served as its slots say.

    `watch` tells the supervisor's loop about a worker's channel; `notify` reports what happened (event, model,
    fields); `admit` says whether there is memory for a version now, raises where there never will be, and makes
    room meanwhile. `clock` is monotonic seconds, the same as the workers' run pages.
    """

    def __init__(
        self,
        model: str,
        state: StateDir,
        config: DeviceConfig,
        boot: str,
        watch: Callable[[ModelService, WorkerProcess], None],
        notify: Callable[[str, str, dict[str, Any]], None],
        admit: Callable[[ModelService, SlotState], bool] = lambda service, slots: True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model, self.config = model, config.serving
        self.pinned = config.model(model).pinned
        self.store = SlotStore(state.models / model)
        self._state_dir, self._boot, self._watch, self._notify = state, boot, watch, notify
        self._admit, self._clock = admit, clock
        self.current: WorkerProcess | None = None
        self.next: WorkerProcess | None = None
        self.trial = Trial(model, self.store, clock, self._ends_trial, self._notify)
        self.fault: EdgeRTError | None = None
        self._ending: list[WorkerProcess] = []
        self._waiting: list[Settled] = []
        self._demanded = self.pinned or not self.config.memory_mb
        self._room_until_s: float | None = None
        self._room_at_s: float | None = None
        self._crashes, self._watchdog = Crashes(), Watchdog(config.serving)
        self._restart_at_s: float | None = None
        self._give_up_at_s: float | None = None
        self._giving_up = ""  # the digest of the version that is to go then
        self._stopped = False

    # --- what the supervisor asks -------------------------------------------------------------

    def sync(self, settled: Settled | None = None) -> None:
        """Bring up what the slots name; `settled` hears None when that is so, or why it is not."""
        if settled is not None:
            self._waiting.append(settled)
            self._crashes.forgive()  # somebody decided anew
        try:
            slots = self.store.read()
        except EdgeRTError as error:
            self._settle(error)
            return
        self.trial.follow(slots)
        version = slots.live
        if version is None:
            self._abandon_next()
            self._retire(self.current)
            self.current = None
            self._forget_restart()
            self._settle(None)
        elif self.current is not None and self.current.version.digest == version.digest:
            if self.next is not None and self.next.version.digest != version.digest:
                self._abandon_next()
            self._settle(None)
        elif self.next is None or self.next.version.digest != version.digest:
            self._abandon_next()
            self._bring_up(slots, version)

    def connect(self, client: socket.socket, *, shared: bool = False) -> None:
        """Hand a client's connection to the worker that serves; `shared` asks it for shared memory.

        Raises EdgeRTError where none serves.
        """
        worker = self.current
        if worker is None:
            self._demand()
            raise self._unavailable()
        try:
            channel.send(worker.channel, {"op": "connection", "shared": shared}, (client.fileno(),))
        except BlockingIOError as error:
            raise Overloaded(f"model {self.model} takes no more connections now", retry_after_s=0.5) from error
        except OSError as error:  # it has just ended; the loop will hear of it
            raise Unavailable(f"model {self.model} is restarting", retry_after_s=LOADING_RETRY_S) from error
        worker.connected_at_s = self._clock()

    def received(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        """A worker said something."""
        if message["op"] == "ready":
            worker.loaded = from_json(LoadedStatus, message["loaded"])
            if worker is self.next:
                self._switch_to(worker)
        elif message["op"] == "progress":
            worker.load_s_max = max(worker.load_s_max, self._clock() - worker.started_s + PROGRESS_S_MAX)
            worker.doing = str(message["line"])
            log(f"model {self.model}: {worker.doing}")
        elif message["op"] in ("figures", "asked_golden"):
            self.trial.heard(worker, message)
        elif message["op"] == "failed":
            worker.failure = DeviceError(message["message"])
            worker.failure.code, worker.failure.exit_code = message["code"], message["exit_code"]

    def ended(self, worker: WorkerProcess) -> None:
        """A worker's process is gone; its channel is closed by the supervisor."""
        code = worker.reaped()
        if worker in self._ending:
            self._ending.remove(worker)
            return
        was_loading = worker is self.next
        if was_loading:
            self.next = None
        elif worker is self.current:
            self.current = None
        else:
            return
        fault = worker.failure or EngineFailed(f"the worker of model {self.model} ended: {_how(code)}")
        if (was_loading or self.trial.watches(worker)) and self._ends_trial(worker.version, fault):
            return
        stable = worker.state is WorkerState.READY and self._clock() - worker.started_s > STABLE_S
        self._crashed(worker.version, fault, stable=stable)

    def tick(self) -> None:
        """Do what is due by now."""
        now_s = self._clock()
        if self._restart_at_s is not None and now_s >= self._restart_at_s:
            self._restart_at_s = None
            self.sync()
        if self._room_at_s is not None and now_s >= self._room_at_s:
            self._room_at_s = None
            self.sync()
        if self._give_up_at_s is not None and now_s >= self._give_up_at_s:
            self._give_up()
        if self.trial.until_s is not None and now_s >= self.trial.until_s:
            self._expire_trial()
        self.trial.tick(now_s)
        if self.next is not None and now_s > self.next.started_s + self.next.load_s_max:
            release, after_s = self.next.version.release, self.next.load_s_max
            self.next.kill(now_s, EngineFailed(f"release {release} did not load within {after_s:.0f} s"))
        for worker in self._ending:
            if worker.stop_by_s is not None and now_s > worker.stop_by_s:
                worker.kill(now_s)
        if self._watchdog.due_s is not None and now_s >= self._watchdog.due_s:
            self._look(now_s)

    def due_s(self) -> float | None:
        """When `tick` has something to do next, on `clock`; None for never."""
        times = [self._restart_at_s, self._room_at_s, self.trial.due_s, self._watchdog.due_s, self._give_up_at_s]
        times += (
            [self.next.started_s + self.next.load_s_max] if self.next is not None and not self.next.killed_at_s else []
        )
        times += [worker.stop_by_s for worker in self._ending if not worker.killed_at_s]
        return min((t for t in times if t is not None), default=None)

    def unload(self, reason: str) -> None:
        """Give this model's memory to another; it is loaded again when somebody asks for it."""
        worker = self.current
        if worker is None:
            return
        self._retire(worker)
        self.current, self._demanded = None, False
        self._notify("unloaded", self.model, {"release": worker.version.release, "reason": reason})

    def stop(self) -> None:
        """The daemon stops: every worker answers what it has and refuses the rest."""
        self._stopped = True
        self._abandon_next()  # it loads and hears nothing; nobody is connected to it
        if self.current is not None:
            self.current.stop(final=True, now_s=self._clock())
            self._ending.append(self.current)
        self.current = None
        self._forget_restart()
        self.trial.until_s = self._watchdog.due_s = None
        self._settle(Unavailable("the daemon is stopping"))

    @property
    def workers(self) -> list[WorkerProcess]:
        return [w for w in (self.current, self.next, *self._ending) if w is not None]

    @property
    def busy(self) -> bool:
        """Whether an engine run is under way."""
        return any(worker.page.running_since_s() is not None for worker in self.workers)

    @property
    def settled(self) -> bool:
        """Whether nothing is on its way up."""
        return self.next is None and self._room_at_s is None

    def stuck(self) -> bool:
        """Whether a worker has outlived its kill: then this daemon cannot help itself."""
        return any(w.killed_at_s is not None and self._clock() - w.killed_at_s > STUCK_S for w in self.workers)

    @property
    def state(self) -> ServingState:
        if self.current is not None:
            return ServingState.DEGRADED if self.current.loaded and self.current.loaded.degraded else ServingState.READY
        if self.next is not None:
            return ServingState.LOADING
        if self._room_at_s is not None:
            return ServingState.WAITING
        if self._restart_at_s is not None:
            return ServingState.QUARANTINED if self._crashes.too_many else ServingState.RESTARTING
        if self.fault is not None:
            return ServingState.FAILED
        return ServingState.STOPPED if self._demanded else ServingState.UNLOADED

    def status(self) -> ServingStatus:
        """Return what `edgertd status` shows of this model's serving."""
        worker = self.current
        return ServingStatus(
            state=self.state.value,
            fault=None if self.fault is None else self.fault.message,
            loading=None if self.next is None else self.next.doing or None,
            crashes=self._crashes.in_a_row,
            retry_s=None if self._restart_at_s is None else round(max(0.0, self._restart_at_s - self._clock()), 1),
            pinned=self.pinned,
            trial=self.trial.status(),
            pid=None if worker is None else worker.process.pid,
            memory_mb=None if worker is None else round(worker.mb, 1),
            loaded=None if worker is None else worker.loaded,
        )

    # --- loading ------------------------------------------------------------------------------

    def _bring_up(self, slots: SlotState, version: Version) -> None:
        """Load `version`, if it is wanted now and there is room."""
        if not (self._demanded or self.trial.under_way or self.current is not None):
            self._settle(None)
            return
        self._crashes.tries(version.digest)
        self._restart_at_s = None
        try:
            admitted = self._admit(self, slots)
        except EdgeRTError as error:  # it is larger than the whole budget
            self._refused_for_good(version, error)
            return
        if not admitted:
            self._wait_for_room(version)
            return
        self._room_at_s = self._room_until_s = None
        self.fault = None
        self._start(slots, version)

    def _start(self, slots: SlotState, version: Version) -> None:
        previous = previous_version(self.store, slots) if slots.state in ON_TRIAL else None
        order = {
            "model": self.model,
            "folder": os.fspath(self.store.live_folder(slots)),
            "digest": version.digest,
            "state": os.fspath(self._state_dir.root),
            "boot": self._boot,
            "previous": None if previous is None else (os.fspath(previous[0]), previous[1]),
        }
        try:
            self.next = WorkerProcess.start(order, version, self._clock())
            self.next.load_s_max = LOAD_S_MAX
        except OSError as error:  # no memory, no process: as any other end of a worker
            self._crashed(version, DeviceError(f"no worker can be started: {error.strerror}"), stable=False)
            return
        self._watch(self, self.next)

    def _demand(self) -> None:
        """Somebody asks for a model that is not loaded."""
        if self._room_until_s is not None:
            self._room_until_s = self._clock() + ROOM_S_MAX
        if self._demanded or self._stopped:
            return
        self._demanded = True
        self.sync()

    def _wait_for_room(self, version: Version) -> None:
        now_s = self._clock()
        if self._room_until_s is None:
            self._room_until_s = now_s + ROOM_S_MAX
        if now_s < self._room_until_s:
            self._room_at_s = now_s + ROOM_RETRY_S
            return
        self._refused_for_good(version, Overloaded("other models hold the memory and are in use", retry_after_s=1.0))

    def _refused_for_good(self, version: Version, fault: EdgeRTError) -> None:
        """There is no room, or there never will be: whoever asks next asks anew."""
        self._room_at_s = self._room_until_s = None
        self._demanded = self.pinned
        told = self.fault is not None and self.fault.message == fault.message
        if not isinstance(fault, Overloaded):
            self.fault = fault
        if self._ends_trial(version, fault):
            return
        if not told:
            self._notify("no_room", self.model, {"release": version.release, "reason": fault.message})
        self._settle(fault)

    def _switch_to(self, worker: WorkerProcess) -> None:
        old, self.current, self.next = self.current, worker, None
        worker.state, worker.started_s = WorkerState.READY, self._clock()
        worker.connected_at_s = self._clock()
        self.fault = None
        self._retire(old)
        self._watchdog.plan(worker, self._clock())
        engine = worker.loaded and worker.loaded.engine
        self._notify("serving", self.model, {"release": worker.version.release, "engine": engine})
        self._settle(None)
        self.trial.begin(worker)

    def _retire(self, worker: WorkerProcess | None) -> None:
        if worker is not None:
            worker.stop(final=False, now_s=self._clock())
            self._ending.append(worker)

    def _abandon_next(self) -> None:
        if self.next is not None:
            self.next.kill(self._clock())
            self._ending.append(self.next)
            self.next = None

    # --- looking after the worker that serves ---------------------------------------------------

    def _look(self, now_s: float) -> None:
        """See to it that no run lasts for ever and that the memory stays within its limits."""
        if self.current is not None and self._watchdog.look(self.current, now_s) and self.next is None:
            self._recycle(self.current, now_s)
        self._watchdog.plan(self.current, self._clock())

    def _recycle(self, worker: WorkerProcess, now_s: float) -> None:
        """Load the same version beside it; the switch that follows is the same as to a new version."""
        try:
            slots = self.store.read()
            active = slots.live
            if active is None or active.digest != worker.version.digest or not self._admit(self, slots):
                return
        except EdgeRTError:
            return  # the next look tries again
        self._watchdog.recycled(now_s)
        fields = {"release": active.release, "memory_mb": round(worker.mb, 1), "limit_mb": self.config.worker_mb_max}
        self._notify("recycled", self.model, fields)
        self._start(slots, active)

    # --- when one ends ------------------------------------------------------------------------

    def _ends_trial(self, version: Version, fault: EdgeRTError, told: dict[str, Any] | None = None) -> bool:
        """Whether the version that failed was on trial; then it is rolled back. `told` is for the event."""
        try:
            slots = self.store.read()
            active = slots.live
            if slots.state not in ON_TRIAL or active is None or active.digest != version.digest:
                return False
            if not self.store.fail_trial(version.digest, fault.message):  # a command has ended it meanwhile
                return False
        except (SlotsBusy, StorageFailed) as error:  # nothing was rolled back, so nothing else may be started
            self.fault = fault
            self._give_up_later(version.digest, error)
            return True
        except TransitionRefused:  # there is nothing to go back to
            return False
        self._roll_back_done(version, fault, told)
        return True

    def _crashed(self, version: Version, fault: EdgeRTError, *, stable: bool) -> None:
        self._crashes.add(version.digest, stable=stable)
        self.fault = fault
        self._notify("crashed", self.model, {"reason": fault.message, "crashes": self._crashes.in_a_row})
        if self.next is not None:  # a new version is on its way up already
            return
        if self.current is not None:  # what serves goes on; what did not load is tried again
            self._settle(fault)
        elif self._crashes.too_many:
            self._give_up()
            return
        self._restart_at_s = self._clock() + self._crashes.pause_s

    def _give_up(self) -> None:
        """Go back to the good version before; where there is none that may be trusted, into quarantine."""
        self._give_up_at_s = None
        self._giving_up, giving_up = "", self._giving_up
        fault = self.fault or EngineFailed(f"model {self.model} keeps failing")
        try:
            slots = self.store.read()
            failed, spare = slots.live, slots.spare
            if failed is None or giving_up not in ("", failed.digest):  # a command was faster
                return
            trusted = spare is not None and spare.good and self._crashes.trusted(spare.digest)
            if not trusted and slots.state not in ON_TRIAL:
                self._quarantine(fault)
                return
            self.store.rollback(wait=False, reason=fault.message)
        except (SlotsBusy, StorageFailed) as error:
            self._give_up_later(giving_up, error)
            return
        except EdgeRTError:
            self._quarantine(fault)
            return
        self._crashes.give_up(failed.digest)
        self._roll_back_done(failed, fault)

    def _give_up_later(self, digest: str, why: EdgeRTError) -> None:
        """The slots could not be changed now, by a busy lock or a full disk: try until they can.

        It is the version `digest` that is to go, "" for the one that is live then.
        """
        self._giving_up = digest
        self._give_up_at_s = self._clock() + retry_s(why)
        self._settle(self.fault or why)

    def _quarantine(self, fault: EdgeRTError) -> None:
        pause_s, crashes = self._crashes.quarantine_s, self._crashes.in_a_row
        self._restart_at_s = self._clock() + pause_s
        self._notify("quarantined", self.model, {"reason": fault.message, "crashes": crashes, "retry_s": pause_s})
        self._settle(fault)

    def _expire_trial(self) -> None:
        try:
            reason = self.trial.expire()
        except EdgeRTError as error:  # a trial that is over must end: it is tried again
            self.fault = None if isinstance(error, SlotsBusy) else error
            return
        if reason is None:
            self.sync()
            return
        version = self.current.version if self.current is not None else None
        self._roll_back_done(version, DeviceError(reason))

    def _roll_back_done(self, version: Version | None, fault: EdgeRTError, told: dict[str, Any] | None = None) -> None:
        release = None if version is None else version.release
        self.trial.forget_watch()
        self._notify("rolled_back", self.model, {"release": release, "reason": fault.message, **(told or {})})
        self._settle(fault)
        self.sync()

    def _forget_restart(self) -> None:
        self._restart_at_s = self._room_at_s = self._room_until_s = None

    def _settle(self, error: EdgeRTError | None) -> None:
        waiting, self._waiting = self._waiting, []
        for settled in waiting:
            settled(error)

    def _unavailable(self) -> EdgeRTError:
        if self._stopped:
            return ShuttingDown("the daemon is stopping", retry_after_s=1.0)
        state, left_s = self.state, None
        if self._restart_at_s is not None:
            left_s = max(LOADING_RETRY_S, self._restart_at_s - self._clock())
        if state in (ServingState.STOPPED, ServingState.UNLOADED) and not self._is_active():
            return ModelNotFound(f"model {self.model} is not active; deploy it")
        return unavailable(self.model, state, self.fault, self._crashes.in_a_row, left_s)

    def _is_active(self) -> bool:
        try:
            return self.store.read().live is not None
        except EdgeRTError:
            return False


def _how(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
