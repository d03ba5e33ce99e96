"""Serves the live version of one model.

The service follows the model's slots: `sync` reads the slots and starts a worker for the live version. A new version
loads in its own worker while the old version serves. When the new worker is ready, it receives new connections, and the
old worker tells its clients to reconnect. If the memory of a worker exceeds its limit, the service replaces the worker
in the same way.

If a worker ends unexpectedly, the service starts the next worker after a pause that grows. After CRASHES_MAX crashes in
a row, the service rolls the model back. If no good version is left, or each good version also failed, the service
quarantines the model: the pauses between restarts are then long.

With a memory budget, a model loads when the first client requests it. The service unloads the model when another model
needs the memory.

Most methods end in `sync`, which may be called at any time. Some parts act at their own times: `restarts` (the next
restart), `trial`, and `slot_writer` (changes to repeat because the slots are busy). Two other parts are in
`edgert/daemon/workers`: `worker_set` (the processes) and `watchdog`. All methods run on the supervisor's thread.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial
from typing import Any

from edgert.checks.status import ServingStatus
from edgert.config import DeviceConfig
from edgert.daemon.model.model_state import RETRY_S, ModelState, unavailable
from edgert.daemon.model.restarts import Restarts
from edgert.daemon.model.slot_writer import SlotWriter
from edgert.daemon.model.trial import Trial
from edgert.daemon.model.trial_watch import previous_version
from edgert.daemon.timed import Timed, soonest_s
from edgert.daemon.workers.watchdog import Watchdog
from edgert.daemon.workers.worker_process import WorkerProcess
from edgert.daemon.workers.worker_set import StartWorker, WorkerSet
from edgert.errors import (
    ConfigInvalid,
    DeviceError,
    EdgeRTError,
    EngineFailed,
    EngineMissing,
    HealthCheckFailed,
    NotCompatible,
    Overloaded,
    StorageFailed,
    TransitionRefused,
    Unavailable,
)
from edgert.log import log
from edgert.protocol.hello import NO_FLAGS, HelloFlags
from edgert.state_dir import StateDir
from edgert.versions.slot_store import SlotStore
from edgert.versions.slots import Slots, Version
from edgert.worker_link import link
from edgert.worker_link.load_message import LoadMessage

# The states that are alarms.
ALARMING = frozenset({ModelState.DEGRADED, ModelState.RESTARTING, ModelState.QUARANTINED, ModelState.FAILED})
# Faults of config.toml or of the installed packages. Both may have changed since the install of the version.
DEVICE_FAULTS = (ConfigInvalid, NotCompatible, EngineMissing)

OnSettled = Callable[[EdgeRTError | None], None]


class ModelService:
    """Serves the live version of one model.

    Args:
        report: Reports an event of the model in telemetry. Its arguments are the event's name and fields.
        admit: Returns whether the live version may load now. If it returns False, it calls `sync` later. It raises if
            the version cannot load soon.
        clock: Monotonic seconds, from the clock that the workers' run pages use.
        start_worker: Starts a worker. Passes the worker's messages to `handle_message` and its end to `handle_end`.
    """

    def __init__(
        self,
        model: str,
        state_dir: StateDir,
        config: DeviceConfig,
        boot: str,
        report: Callable[[str, dict[str, Any]], None],
        admit: Callable[[ModelService, Slots], bool],
        clock: Callable[[], float],
        start_worker: StartWorker,
    ) -> None:
        self.model = model
        self.pinned = config.model(model).pinned
        self.store = SlotStore(state_dir.models / model, remembers=True)
        self.fault: EdgeRTError | None = None
        # whether the model loads even if no client has sent a request
        self.wanted = self.pinned or not config.serving.memory_mb
        self.requested_at_s: float | None = None  # the time of the last request that was refused
        self._no_room: dict[str, Any] = {}  # the last event `no_room` since a load was admitted
        self._idle_state = ModelState.STOPPED  # while no worker serves or loads
        self._on_settled: list[OnSettled] = []
        self._report = report
        self._admit = admit
        self._clock = clock
        self._load_message = partial(LoadMessage, model, state_dir=str(state_dir.root), boot=boot)
        self.workers = WorkerSet(clock, start_worker)
        self._watchdog = Watchdog(config.serving, self.workers, clock, self._recycle)
        self._restarts = Restarts(clock, self._restart)
        self._slot_writer = SlotWriter(clock)
        self.trial = Trial(
            model,
            self.store,
            self._slot_writer,
            clock,
            report=report,
            roll_back=self._roll_back,
            rolled_back=self._rolled_back,
            sync=self.sync,
        )
        self._parts: list[Timed] = [self._restarts, self._slot_writer, self.trial, self.workers, self._watchdog]

    # --- inputs -------------------------------------------------------------------------------

    def sync(self, on_settled: OnSettled | None = None) -> None:
        """Serve the live version. Call `on_settled` with None once the version serves, else with the error."""
        if on_settled is not None:
            self._on_settled.append(on_settled)
            self._restarts.distrusted.clear()  # a command chose the version
        if self._idle_state is ModelState.STOPPING:
            self._settle(Unavailable("the daemon is stopping"))
            return
        try:
            slots = self.store.read()
        except EdgeRTError as error:
            if self._idle_state is ModelState.STOPPED:  # a version may be live
                log(f"model {self.model}: {error.message}")
                self.fault, self._idle_state = error, ModelState.FAILED
                self._restart()
            self._settle(error)
            return
        if isinstance(self.fault, StorageFailed):
            self.fault = None
        self._restarts.cancel()
        self.trial.update(slots)
        if self.store.fault is not None:  # a rollback is not yet written, because the disk was full or read-only
            self._slot_writer.attempt("record the rollback", self.store.record)
        serving, loading = self.workers.serving, self.workers.loading
        if loading is not None and not loading.runs(slots.live):
            self.workers.kill_loading()
        if slots.live is None:
            if slots.rolled_back is None:  # no version failed: somebody removed the model's folder
                self.fault = None
            self.workers.stop_serving()
            self._serve_none(ModelState.STOPPED)
        elif serving is not None and serving.runs(slots.live):
            self._settle(None)
        elif self.workers.loading is None:
            self._load_if_admitted(slots, slots.live)

    def connect(self, client: socket.socket, flags: HelloFlags = NO_FLAGS) -> None:
        """Pass a client's connection to the worker that serves. Raises EdgeRTError if no worker serves."""
        worker = self.workers.serving
        if worker is None:
            at_rest = self.state is ModelState.UNLOADED or not self.wanted
            self.wanted, self.requested_at_s = True, self._clock()
            if at_rest:
                self.sync()
            raise unavailable(self.model, self.state, self.fault, self._restarts.crashes, self._restarts.in_s())
        try:
            link.send(worker.link, {"op": "connection", **flags.to_json()}, (client.fileno(),))
        except BlockingIOError as error:
            raise Overloaded(
                f"model {self.model} receives too many connections at once: try again", retry_after_s=0.5
            ) from error
        except OSError as error:  # the worker has just ended; the loop will notice this
            raise Unavailable(f"model {self.model} is restarting: try again", retry_after_s=RETRY_S) from error
        worker.connected_at_s = self._clock()

    def handle_message(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        """Handle a worker's message. Raises ValueError, KeyError or TypeError for a malformed message."""
        op = message["op"]
        worker.handle_message(message, self._clock())
        if op == "ready" and worker is self.workers.loading:
            self._switch(worker)
        elif op == "progress":
            log(f"model {self.model}: {worker.progress}")
        elif op in ("figures", "golden_sent"):
            self.trial.handle_message(worker, message)

    def handle_end(self, worker: WorkerProcess) -> None:
        """Handle the end of a worker's process, whose link is closed."""
        end = worker.wait_for_end()
        was_loading = worker is self.workers.loading
        if not self.workers.remove(worker):
            return
        self._idle_state = ModelState.FAILED
        if not worker.process.pid:
            fault = worker.failure or DeviceError("no worker can be started: the fork server ended")
            self._crashed(worker.version, fault, blamed=False)
            return
        fault = worker.failure or EngineFailed(f"the worker of model {self.model} ended: {end}")
        if (was_loading or self.trial.watches(worker)) and self.trial.is_of(worker.version):
            self._roll_back(worker.version, fault)
        else:
            served_s = worker.served_s(self._clock())
            self._crashed(worker.version, fault, served_s=served_s, blamed=not isinstance(fault, DEVICE_FAULTS))

    def tick(self) -> None:
        for part in self._parts:
            part.tick()

    def due_s(self) -> float | None:
        """Return the time when `tick` is due next, on `clock`; None if nothing is due."""
        return soonest_s(self._parts)

    def unload(self, reason: str) -> None:
        """End the worker, to free memory for another model. The model loads again when a client requests it."""
        worker = self.workers.serving
        if worker is not None:
            self._restarts.note_planned_end(worker.served_s(self._clock()))
            self.workers.stop_serving()
            self.wanted, self.requested_at_s, self._idle_state = False, None, ModelState.UNLOADED
            self._report("unloaded", {"release": worker.version.release, "reason": reason})

    def stop(self) -> None:
        """Stop with the daemon: every worker answers its current requests and refuses new requests."""
        self._idle_state = ModelState.STOPPING
        self.workers.kill_loading()  # a worker that loads has no clients
        self.workers.stop_serving(final=True)
        self._restarts.cancel()
        self._slot_writer.clear()
        self.trial.stop()
        self._settle(Unavailable("the daemon is stopping"))

    # --- the model's state --------------------------------------------------------------------

    @property
    def needs_turn(self) -> bool:
        """Whether a load may wait for the loads of other models."""
        return not (self._on_settled or self.trial.in_progress or self.workers.serving)

    @property
    def waits_for_restart(self) -> bool:
        """Whether a restart is planned. Until then, no load may start."""
        return self._restarts.due_s() is not None

    @property
    def settled(self) -> bool:
        """Whether no load is in progress or waits."""
        return self.workers.loading is None and self.state is not ModelState.WAITING

    @property
    def alarms(self) -> tuple[str, ...]:
        """The current alarms: a state in which the model does not serve well, and its worker's alarms."""
        worker = self.workers.serving
        return ((self.state.value,) if self.state in ALARMING else ()) + (() if worker is None else worker.alarms)

    def status(self) -> ServingStatus:
        worker, loading = self.workers.serving, self.workers.loading
        fault = self.fault or self.trial.fault or self.store.fault
        restart_in_s = self._restarts.in_s()
        return ServingStatus(
            state=self.state.value,
            fault=None if fault is None else fault.message,
            loading=None if loading is None else loading.progress or None,
            crashes=self._restarts.crashes,
            retry_s=None if restart_in_s is None else round(restart_in_s, 1),
            pinned=self.pinned,
            trial=self.trial.status(),
            pid=None if worker is None else worker.process.pid,
            memory_mb=None if worker is None else round(worker.mb, 1),
            loaded=None if worker is None else worker.loaded,
        )

    @property
    def state(self) -> ModelState:
        worker = self.workers.serving
        if worker is not None:
            return ModelState.DEGRADED if worker.loaded and worker.loaded.degraded else ModelState.SERVING
        return self._idle_state if self.workers.loading is None else ModelState.LOADING

    # --- loading ------------------------------------------------------------------------------

    def _load_if_admitted(self, slots: Slots, version: Version) -> None:
        """Load `version` if the model is wanted and `admit` allows the load."""
        if not self.wanted and not (self.trial.in_progress or self.workers.serving):
            self._serve_none(ModelState.UNLOADED)
            return
        self._restarts.note_start(version.digest)
        try:
            if not self._admit(self, slots):
                self._idle_state = ModelState.WAITING
                return
        except EdgeRTError as error:
            self._refuse(version, error)
            return
        self.fault = None
        self._no_room = {}
        self._start(slots, version)

    def _refuse(self, version: Version, fault: EdgeRTError) -> None:
        """Do not load `version` until the next request of a client, because `admit` refused it with `fault`."""
        if not isinstance(fault, Overloaded):
            self.fault = fault
        self.wanted, self.requested_at_s = self.pinned, None
        self._idle_state = ModelState.FAILED if self.fault else ModelState.UNLOADED
        if self.trial.is_of(version):
            self._roll_back(version, fault)
            return
        event = {"release": version.release, "reason": fault.message}
        if event != self._no_room:
            self._no_room = event
            self._report("no_room", event)
        self._settle(fault)

    def _serve_none(self, idle: ModelState) -> None:
        """Serve no version for now. If there is a fault, clients receive the fault as the reason."""
        self._idle_state = ModelState.FAILED if self.fault else idle
        self._settle(None)

    def _restart(self) -> None:
        """Start the next worker, now or once the slots can be read."""

        def read_and_sync() -> None:
            self.store.read()  # if this read fails, the slot writer tries again; `sync` would not
            self.sync()

        self._slot_writer.attempt("restart", read_and_sync)

    def _start(self, slots: Slots, version: Version) -> None:
        folder = str(self.store.live_folder(slots))
        previous = previous_version(self.store, slots)
        load_message = self._load_message(folder, version.digest, previous=previous)
        try:
            self.workers.start(load_message, version)
        except OSError as error:  # too little memory or too many processes; the version did not cause this
            self._crashed(version, DeviceError(f"no worker can be started: {error.strerror}"), blamed=False)

    def _switch(self, worker: WorkerProcess) -> None:
        """Let the worker that loaded serve."""
        if (before := self.workers.serving) is not None:
            self._restarts.note_planned_end(before.served_s(self._clock()))
        self.workers.switch()
        self.fault = None
        self._watchdog.plan()
        engine = worker.loaded and worker.loaded.engine
        self._report("serving", {"release": worker.version.release, "engine": engine})
        self._settle(None)
        self.trial.begin(worker)

    def _recycle(self, worker: WorkerProcess) -> bool:
        """Load the live version in a new worker, which will replace `worker`; return whether the load started.

        If the trial limits of the version are watched, roll back instead: the watch is of one worker.
        """
        mb, limit_mb = round(worker.mb, 1), self._watchdog.limit_mb
        try:
            slots = self.store.read()
            if not worker.runs(slots.live):
                return False
            if self.trial.watches(worker):
                message = f"the worker used {mb:.0f} MB on trial, more than its limit of {limit_mb:g} MB: raise [serving] worker_mb_max, or deploy a smaller model"
                self._roll_back(worker.version, HealthCheckFailed(message))
                return False
            if not self._admit(self, slots):
                return False
        except EdgeRTError:
            return False
        self._report("recycled", {"release": worker.version.release, "memory_mb": mb, "limit_mb": limit_mb})
        self._start(slots, worker.version)
        return True

    # --- failures -----------------------------------------------------------------------------

    def _crashed(self, version: Version, fault: EdgeRTError, *, served_s: float = 0.0, blamed: bool = True) -> None:
        """Restart a version whose worker ended, or roll back. Roll back only if the version is `blamed`."""
        self._restarts.note_crash(version.digest, served_s)
        self.fault = fault
        fields = {"release": version.release, "reason": fault.message, "crashes": self._restarts.crashes}
        self._report("crashed", fields)
        if self.workers.loading is not None:
            return
        if self.workers.serving is not None:
            self._settle(fault)
        elif blamed and self._restarts.too_many:
            self._roll_back(version, fault, of_trial=False)
            return
        self._idle_state = ModelState.RESTARTING
        self._restarts.plan()

    def _roll_back(
        self, version: Version, fault: EdgeRTError, fields: dict[str, Any] | None = None, *, of_trial: bool = True
    ) -> None:
        """Roll back from `version`, now or once the slots can change. The event also contains `fields`."""

        def change() -> None:
            try:
                if not self.store.fail(version.digest, fault.message, self._restarts.distrusted, of_trial=of_trial):
                    self.fault = None  # a command has already made another version live
                    self.sync()
                    return
            except TransitionRefused:
                self._quarantine(version, fault)
                return
            self._restarts.distrusted.add(version.digest)
            self._rolled_back(version, fault, fields)

        if self._slot_writer.attempt("roll back", change) is not None:
            self.fault = fault
            self._settle(fault)

    def _rolled_back(self, version: Version, fault: EdgeRTError, fields: dict[str, Any] | None = None) -> None:
        self.trial.forget()
        self._report("rolled_back", {"release": version.release, "reason": fault.message, **(fields or {})})
        self._settle(fault)
        self.sync()

    def _quarantine(self, version: Version, fault: EdgeRTError) -> None:
        self._idle_state = ModelState.QUARANTINED
        counted = {"crashes": self._restarts.crashes, "retry_s": self._restarts.plan()}
        self._report("quarantined", {"release": version.release, "reason": fault.message, **counted})
        self._settle(fault)

    def _settle(self, error: EdgeRTError | None) -> None:
        """Tell the callers of `sync` that the version serves, or why it does not."""
        waiting, self._on_settled = self._on_settled, []
        for on_settled in waiting:
            on_settled(error)
