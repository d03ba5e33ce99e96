"""Keeps one model served as its slots say.

The service follows the model's slots: `sync` reads them and starts a worker for the live version. A new version loads
in a worker of its own while the old one serves. When it is ready, new connections go to it, and the old worker asks its
clients to reconnect. A worker whose memory outgrows its limit is replaced in the same way.

A worker that ends unexpectedly is restarted after growing pauses. After CRASHES_MAX in a row, the service rolls the
model back; without a good version that it trusts, it quarantines the model, with long pauses.

With a memory budget, a model loads when the first client asks for it, and is unloaded when another model needs the
memory. `model_state` has the states, `worker_set` the processes, `trial` the trial, `slot_writer` what has to be tried
again because the slots are busy. All methods run on the supervisor's thread.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from edgert.checks.status import LoadedStatus, ServingStatus
from edgert.config import DeviceConfig, StateDir
from edgert.daemon.model.crashes import Crashes
from edgert.daemon.model.model_state import RETRY_S, Event, ModelState, step, unavailable
from edgert.daemon.model.slot_writer import SlotWriter
from edgert.daemon.model.trial import Trial
from edgert.daemon.model.trial_watch import previous_version
from edgert.daemon.workers.watchdog import Watchdog
from edgert.daemon.workers.worker_process import WorkerProcess, WorkerState
from edgert.daemon.workers.worker_set import StartWorker, WorkerSet
from edgert.errors import DeviceError, EdgeRTError, EngineFailed, Overloaded, TransitionRefused, Unavailable
from edgert.log import log
from edgert.typed_json import from_json
from edgert.versions.slot_store import SlotStore
from edgert.versions.slots import ON_TRIAL, SlotState, Version
from edgert.worker_link import channel
from edgert.worker_link.load_order import LoadOrder

STABLE_S = 60.0  # a worker that served this long makes earlier crashes forgotten
ROOM_RETRY_S = 0.05
ALARMING = ("degraded", "restarting", "quarantined", "failed")  # of the states that `edgertd status` shows
ROOM_S_MAX = 10.0  # how long a model waits for memory unless a client asks again

Settled = Callable[[EdgeRTError | None], None]


class ModelService:
    """`watch` registers a worker's channel with the supervisor's loop. `report` reports an event (name, model, fields).
    `admit` returns whether a version may load now, and raises if there never will be memory for it. If not now, it makes
    room, or marks the service as `queued` and calls `sync` when its turn has come.
    `clock` is monotonic seconds, the same as the workers' run pages.
    """

    def __init__(
        self,
        model: str,
        state: StateDir,
        config: DeviceConfig,
        boot: str,
        watch: Callable[[ModelService, WorkerProcess], None],
        report: Callable[[str, str, dict[str, Any]], None],
        admit: Callable[[ModelService, SlotState], bool],
        clock: Callable[[], float],
        start_worker: StartWorker,
    ) -> None:
        self.model, self.config = model, config.serving
        self.pinned = config.model(model).pinned
        self.store = SlotStore(state.models / model, remembers=True)
        self._state_dir, self._boot, self._watch, self._report = state, boot, watch, report
        self._admit, self._clock = admit, clock
        self.workers = WorkerSet(clock, start_worker)
        self._slot_writer = SlotWriter(clock)
        self.trial = Trial(
            model, self.store, self._slot_writer, clock, self._roll_back, self._trial_expired, self._report
        )
        self.fault: EdgeRTError | None = None
        self._state = ModelState.STOPPED
        self.queued = False  # the model waits for its turn to load
        self.asked = False  # a client asked for it since the last load began
        self._waiting: list[Settled] = []
        self._wanted = self.pinned or not self.config.memory_mb
        self._room_until_s: float | None = None  # set while the model waits for memory
        self._sync_at_s: float | None = None  # when the next start is tried
        self._crashes, self._watchdog = Crashes(), Watchdog(config.serving)

    # --- calls of the supervisor --------------------------------------------------------------

    def sync(self, settled: Settled | None = None) -> None:
        """Serve what the slots name. `settled` is called once it serves (None), or with the reason why it does not."""
        self.queued = False
        if settled is not None:
            self._waiting.append(settled)
            self._crashes.forgive()  # a command has decided anew
        if self._state is ModelState.STOPPING:
            self._settle(Unavailable("the daemon is stopping"))
            return
        try:
            slots = self.store.read()
        except EdgeRTError as error:
            self._settle(error)
            return
        self.trial.follow(slots)
        if self.store.fault is not None:  # the disk is full or read-only: the version before serves meanwhile
            self._slot_writer.attempt("record the roll-back", self.store.record)
        version = slots.live
        serving, loading = self.workers.serving, self.workers.loading
        if loading is not None and (version is None or loading.version.digest != version.digest):
            self._abandon()
            loading = None
        if version is None:
            self._stop_serving()
        elif serving is not None and serving.version.digest == version.digest:
            self._sync_at_s = self._room_until_s = None
            self._settle(None)
        elif loading is None:
            self._bring_up(slots, version)

    def connect(
        self, client: socket.socket, *, shared: bool = False, probe: bool = False, session: bool = False
    ) -> None:
        """Pass a client's connection to the worker that serves.

        `shared` asks for shared memory, `probe` is a check, and the requests of a `session` continue each other.

        Raises EdgeRTError while none serves.
        """
        worker = self.workers.serving
        if worker is None:
            self._demand()
            raise self._unavailable()
        try:
            order = {"op": "connection", "shared": shared, "probe": probe, "session": session}
            channel.send(worker.channel, order, (client.fileno(),))
        except BlockingIOError as error:
            raise Overloaded(f"model {self.model} takes no more connections now", retry_after_s=0.5) from error
        except OSError as error:  # it has just ended; the loop will notice
            raise Unavailable(f"model {self.model} is restarting", retry_after_s=RETRY_S) from error
        worker.connected_at_s = self._clock()

    def received(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        """Take a worker's message. Raises ValueError, KeyError or TypeError for one that no worker sends."""
        if message["op"] == "ready":
            worker.loaded = from_json(LoadedStatus, message["loaded"])
            if worker is self.workers.loading:
                self._switch()
        elif message["op"] == "started":
            worker.started(int(message["pid"]))
        elif message["op"] == "progress":
            self.workers.progressed(worker, str(message["line"]))
            log(f"model {self.model}: {worker.progress}")
        elif message["op"] in ("figures", "asked_golden"):
            self.trial.received(worker, message)
        elif message["op"] == "alarms":
            worker.alarms = tuple(map(str, message["names"]))
        elif message["op"] == "failed":
            worker.failure = DeviceError(message["message"])
            worker.failure.code, worker.failure.exit_code = message["code"], message["exit_code"]

    def ended(self, worker: WorkerProcess) -> None:
        """Handle the end of a worker's process, whose channel is closed."""
        end = worker.reaped()
        was_loading = worker is self.workers.loading
        if not self.workers.remove(worker):
            return
        self._enter(Event.LOAD_ENDED if was_loading else Event.WORKER_ENDED)
        if not worker.process.pid:
            fault = worker.failure or DeviceError("no worker can be started: the fork server ended")
            self._crashed(worker.version, fault, stable=False, blamed=False)
            return
        fault = worker.failure or EngineFailed(f"the worker of model {self.model} ended: {end}")
        if (was_loading or self.trial.watches(worker)) and self._on_trial(worker.version):
            self._roll_back(worker.version, fault)
            return
        stable = worker.state is WorkerState.READY and self._clock() - worker.started_s > STABLE_S
        self._crashed(worker.version, fault, stable=stable)

    def tick(self) -> None:
        """Do what is due."""
        now_s = self._clock()
        if self._sync_at_s is not None and now_s >= self._sync_at_s:
            self._sync_at_s = None
            self.sync()
        self._slot_writer.tick(now_s)
        self.trial.tick(now_s)
        self.workers.tick(now_s)
        if self._watchdog.due_s is not None and now_s >= self._watchdog.due_s:
            serving = self.workers.serving
            if serving is not None and self._watchdog.check(serving, now_s) and self.workers.loading is None:
                self._recycle(serving, now_s)
            self._watchdog.plan(self.workers.serving, self._clock())

    def due_s(self) -> float | None:
        """Return when `tick` is due next, on `clock`; None for never."""
        parts = (self._slot_writer.due_s(), self.trial.due_s, self.workers.due_s(), self._watchdog.due_s)
        return min((time_s for time_s in (self._sync_at_s, *parts) if time_s is not None), default=None)

    def unload(self, reason: str) -> None:
        """Release this model's memory for another; it loads again when a client asks for it."""
        worker = self.workers.serving
        if worker is not None:
            self.workers.retire()
            self._wanted = False
            self._enter(Event.UNLOAD)
            self._report("unloaded", self.model, {"release": worker.version.release, "reason": reason})

    def stop(self) -> None:
        """Stop with the daemon: every worker answers what it has and refuses the rest."""
        self._enter(Event.STOP)
        self.workers.abandon()  # no client is connected to a worker that loads
        self.workers.retire(final=True)
        self._sync_at_s = self._room_until_s = self._watchdog.due_s = None
        self._slot_writer.clear()
        self.trial.stop()
        self._settle(Unavailable("the daemon is stopping"))

    @property
    def needs_turn(self) -> bool:
        """Whether a load may wait for those of other models."""
        return not (self._waiting or self.trial.in_progress or self.workers.serving)

    @property
    def settled(self) -> bool:
        """Whether the first version has loaded, or will not soon."""
        return self._state not in (ModelState.LOADING, ModelState.SWAPPING, ModelState.WAITING)

    @property
    def state(self) -> str:
        """The state as `edgertd status` shows it."""
        if self._state in (ModelState.SERVING, ModelState.SWAPPING):
            worker = self.workers.serving
            return "degraded" if worker and worker.loaded and worker.loaded.degraded else "ready"
        return str(self._state.value)

    @property
    def alarms(self) -> tuple[str, ...]:
        """What is wrong with the model now: a state in which it does not serve well, and its worker's alarms."""
        worker = self.workers.serving
        return ((self.state,) if self.state in ALARMING else ()) + (() if worker is None else worker.alarms)

    def status(self) -> ServingStatus:
        worker, loading = self.workers.serving, self.workers.loading
        fault, restart_in_s = self.fault or self.trial.fault or self.store.fault, self._restart_in_s()
        return ServingStatus(
            state=self.state,
            fault=None if fault is None else fault.message,
            loading=None if loading is None else loading.progress or None,
            crashes=self._crashes.in_a_row,
            retry_s=None if restart_in_s is None else round(restart_in_s, 1),
            pinned=self.pinned,
            trial=self.trial.status(),
            pid=None if worker is None else worker.process.pid,
            memory_mb=None if worker is None else round(worker.mb, 1),
            loaded=None if worker is None else worker.loaded,
        )

    # --- loading ------------------------------------------------------------------------------

    def _bring_up(self, slots: SlotState, version: Version) -> None:
        """Load `version` if a client wants it and there is memory."""
        if not (self._wanted or self.trial.in_progress or self.workers.serving is not None):
            self._enter(Event.FAIL if self.fault else Event.NOT_WANTED)
            self._settle(None)
            return
        self._crashes.starts(version.digest)
        self._sync_at_s = None
        try:
            admitted = self._admit(self, slots)
        except EdgeRTError as error:  # it is larger than the whole budget
            self._refuse(version, error)
            return
        if self.queued:
            self._enter(Event.NO_ROOM)
            return
        if not admitted:
            self._wait_for_room(version)
            return
        self._room_until_s = self.fault = None
        self._start(slots, version)

    def _start(self, slots: SlotState, version: Version) -> None:
        previous = previous_version(self.store, slots) if slots.state in ON_TRIAL else None
        folder, state = str(self.store.live_folder(slots)), str(self._state_dir.root)
        order = LoadOrder(self.model, folder, version.digest, state, self._boot, previous)
        try:
            worker = self.workers.start(order, version)
        except OSError as error:  # no memory or no processes, which is no fault of the version
            fault = DeviceError(f"no worker can be started: {error.strerror}")
            self._crashed(version, fault, stable=False, blamed=False)
            return
        self.asked = False
        self._enter(Event.STARTED)
        self._watch(self, worker)

    def _switch(self) -> None:
        """Let the worker that loaded serve."""
        self.workers.switch()
        worker = self.workers.serving
        assert worker is not None
        self._enter(Event.LOADED)
        self.fault = None
        self._watchdog.plan(worker, self._clock())
        engine = worker.loaded and worker.loaded.engine
        self._report("serving", self.model, {"release": worker.version.release, "engine": engine})
        self._settle(None)
        self.trial.begin(worker)

    def _abandon(self) -> None:
        self.workers.abandon()
        self._enter(Event.LOAD_ENDED)

    def _stop_serving(self) -> None:
        """No version is live."""
        self.workers.retire()
        self._sync_at_s = self._room_until_s = None
        self._enter(Event.NOTHING_LIVE)
        if self.fault is not None:  # the only version failed
            self._enter(Event.FAIL)
        self._settle(None)

    def _recycle(self, worker: WorkerProcess, now_s: float) -> None:
        """Load the version that serves once more and switch to it."""
        try:
            slots = self.store.read()
            active = slots.live
            if active is None or active.digest != worker.version.digest or not self._admit(self, slots):
                return
        except EdgeRTError:
            return  # the next check tries again
        self._watchdog.recycled(now_s)
        fields = {"release": active.release, "memory_mb": round(worker.mb, 1), "limit_mb": self.config.worker_mb_max}
        self._report("recycled", self.model, fields)
        self._start(slots, active)

    # --- memory -------------------------------------------------------------------------------

    def _demand(self) -> None:
        """Load the model for a client that asks for it."""
        self.asked = True
        if self._room_until_s is not None:
            self._room_until_s = self._clock() + ROOM_S_MAX
        if self._state is ModelState.UNLOADED or not self._wanted:
            self._wanted = True
            self.sync()

    def _wait_for_room(self, version: Version) -> None:
        now_s = self._clock()
        self._room_until_s = self._room_until_s or now_s + ROOM_S_MAX
        if now_s < self._room_until_s:
            self._sync_at_s = now_s + ROOM_RETRY_S
            self._enter(Event.NO_ROOM)
        else:
            self._refuse(version, Overloaded("other models hold the memory and are in use", retry_after_s=1.0))

    def _refuse(self, version: Version, fault: EdgeRTError) -> None:
        """Do not load `version` until the next client asks."""
        self._room_until_s = None
        self._wanted = self.pinned
        known = self.fault is not None and self.fault.message == fault.message
        if not isinstance(fault, Overloaded):
            self.fault = fault
        self._enter(Event.FAIL if self.fault else Event.NOT_WANTED)
        if self._on_trial(version):
            self._roll_back(version, fault)
            return
        if not known:
            self._report("no_room", self.model, {"release": version.release, "reason": fault.message})
        self._settle(fault)

    # --- failures -----------------------------------------------------------------------------

    def _crashed(self, version: Version, fault: EdgeRTError, *, stable: bool, blamed: bool = True) -> None:
        """Restart, roll back or quarantine a version whose worker ended; only a version that is `blamed` is replaced."""
        self._crashes.add(version.digest, stable=stable)
        self.fault = fault
        fields = {"release": version.release, "reason": fault.message, "crashes": self._crashes.in_a_row}
        self._report("crashed", self.model, fields)
        if self.workers.loading is not None:
            return
        if self.workers.serving is not None:
            self._settle(fault)
        elif blamed and self._crashes.too_many:
            self._roll_back(version, fault)
            return
        self._enter(Event.RETRY)
        self._sync_at_s = self._clock() + self._crashes.pause_s

    def _roll_back(self, version: Version, fault: EdgeRTError, fields: dict[str, Any] | None = None) -> None:
        """Roll back from `version`, now or once the slots can be changed. `fields` are added to the event."""
        change = partial(self._roll_back_now, version, fault, fields or {})
        prevented = self._slot_writer.attempt("roll back", change)
        if prevented is not None:
            self.fault = fault
            self._settle(fault)

    def _roll_back_now(self, version: Version, fault: EdgeRTError, fields: dict[str, Any]) -> None:
        slots = self.store.read()
        live, spare = slots.live, slots.spare
        if live is None or live.digest != version.digest:  # a command was faster
            return
        try:
            if slots.state in ON_TRIAL:
                if not self.store.fail_trial(version.digest, fault.message):
                    return
            elif spare is not None and spare.good and self._crashes.trusts(spare.digest):
                self.store.rollback(wait=False, reason=fault.message)
            else:
                self._quarantine(version, fault)
                return
        except TransitionRefused:
            self._quarantine(version, fault)
            return
        self._crashes.distrust(version.digest)
        self._rolled_back(version, fault, fields)

    def _trial_expired(self, version: Version | None, reason: str | None) -> None:
        """Follow the slots after a trial ran out; `reason` is None if a command ended it before."""
        if reason is None:
            self.sync()
        else:
            self._rolled_back(version, DeviceError(reason), {})

    def _rolled_back(self, version: Version | None, fault: EdgeRTError, fields: dict[str, Any]) -> None:
        release = None if version is None else version.release
        self.trial.forget()
        self._report("rolled_back", self.model, {"release": release, "reason": fault.message, **fields})
        self._settle(fault)
        self.sync()

    def _quarantine(self, version: Version, fault: EdgeRTError) -> None:
        pause_s, crashes = self._crashes.pause_s, self._crashes.in_a_row
        self._sync_at_s = self._clock() + pause_s
        self._enter(Event.QUARANTINE)
        fields = {"release": version.release, "reason": fault.message, "crashes": crashes, "retry_s": pause_s}
        self._report("quarantined", self.model, fields)
        self._settle(fault)

    # --- helpers ------------------------------------------------------------------------------

    def _enter(self, event: Event) -> None:
        self._state = step(self._state, event)

    def _on_trial(self, version: Version) -> bool:
        """Return whether `version` is on trial, also when the slots cannot be read: then nothing may be started."""
        try:
            slots = self.store.read()
        except EdgeRTError:
            return True
        active = slots.live
        return slots.state in ON_TRIAL and active is not None and active.digest == version.digest

    def _settle(self, error: EdgeRTError | None) -> None:
        waiting, self._waiting = self._waiting, []
        for settled in waiting:
            settled(error)

    def _restart_in_s(self) -> float | None:
        if self._sync_at_s is None or self._room_until_s is not None:
            return None
        return max(0.0, self._sync_at_s - self._clock())

    def _unavailable(self) -> EdgeRTError:
        return unavailable(self.model, self._state, self.fault, self._crashes.in_a_row, self._restart_in_s())
