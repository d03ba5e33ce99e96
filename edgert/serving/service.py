"""One model as the supervisor sees it: which worker serves, which one is loading, what to do when one ends.

A service follows the model's slots: `sync` reads them and brings a worker up for what they name. A new
version loads in a worker of its own while the old one serves; only when it is ready do new connections go
to it and are the old ones told to move. A worker that ends unasked is started again, with growing pauses;
after CRASHES_MAX in a row the version is given up and the previous good one returns, if there is one.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from edgert import wire
from edgert.config import StateDir
from edgert.errors import (
    DeviceError,
    EdgeRTError,
    EngineFailed,
    ModelNotFound,
    Overloaded,
    ShuttingDown,
    SlotsBusy,
    Unavailable,
)
from edgert.serving import channel
from edgert.slots import ON_TRIAL, SlotState, SlotStore, Version

CRASHES_MAX = 3
STABLE_S = 60.0  # a worker that lived this long makes its predecessors' crashes forgotten
RESTART_PAUSES_S = (0.1, 0.5, 2.0, 10.0, 30.0)
LOAD_S_MAX = 180.0
STOP_S_MAX = 15.0
LOADING_RETRY_S = 0.1


class WorkerState(str, Enum):
    LOADING = "loading"
    READY = "ready"
    STOPPING = "stopping"


@dataclass(eq=False)
class WorkerProcess:
    """A worker and our end of its channel. `facts` is what it said when it became ready."""

    process: subprocess.Popen[bytes]
    channel: socket.socket
    version: Version
    started_s: float
    state: WorkerState = WorkerState.LOADING
    stop_by_s: float | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    failure: EdgeRTError | None = None

    def stop(self, *, final: bool, now_s: float) -> None:
        """Ask it to answer what it has and end. `final`: its clients are told that the daemon stops."""
        if self.state is WorkerState.STOPPING:
            return
        self.state, self.stop_by_s = WorkerState.STOPPING, now_s + STOP_S_MAX
        try:
            channel.send(self.channel, {"op": "stop", "final": final})
        except OSError:
            self.process.kill()


Settled = Callable[[EdgeRTError | None], None]


class ModelService:
    """Keeps one model served as its slots say. All methods run on the supervisor's one thread.

    `watch` and `unwatch` tell the supervisor's loop about a worker's channel; `notify` reports what happened
    (event name and fields). `clock` is monotonic seconds.
    """

    def __init__(
        self,
        model: str,
        state: StateDir,
        boot: str,
        watch: Callable[[ModelService, WorkerProcess], None],
        notify: Callable[[str, str, dict[str, Any]], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.model = model
        self.store = SlotStore(state.models / model)
        self._state_dir, self._boot, self._watch, self._notify, self._clock = state, boot, watch, notify, clock
        self.current: WorkerProcess | None = None
        self.next: WorkerProcess | None = None
        self._ending: list[WorkerProcess] = []
        self._waiting: list[Settled] = []
        self._crashes = 0
        self._restart_at_s: float | None = None
        self._trial_until_s: float | None = None
        self._give_up_pending = False
        self._stopped = False
        self.fault: EdgeRTError | None = None

    # --- what the supervisor asks -------------------------------------------------------------

    def sync(self, settled: Settled | None = None) -> None:
        """Bring up what the slots name; `settled` hears None when it serves, or why it does not."""
        if settled is not None:
            self._waiting.append(settled)
        try:
            slots = self.store.read()
        except EdgeRTError as error:
            self._settle(error)
            return
        self._watch_trial(slots)
        version = slots.version(slots.active)
        if version is None or slots.active is None:
            self._retire(self.current)
            self.current = None
            self._settle(None)
        elif self.current is not None and self.current.version.digest == version.digest:
            self._abandon_next()
            self._settle(None)
        elif self.next is None or self.next.version.digest != version.digest:
            self._abandon_next()
            self.fault = None
            self._restart_at_s = None
            self.next = self._start(slots.active, version)

    def connect(self, client: socket.socket) -> None:
        """Hand a client's connection to the worker that serves. Raises EdgeRTError where none does."""
        worker = self.current
        if worker is None:
            raise self._unavailable()
        try:
            channel.send(worker.channel, {"op": "connection"}, (client.fileno(),))
        except BlockingIOError as error:
            raise Overloaded(f"model {self.model} takes no more connections now", retry_after_s=0.5) from error
        except OSError as error:  # it has just ended; the loop will hear of it
            raise self._unavailable() from error

    def received(self, worker: WorkerProcess, message: dict[str, Any]) -> None:
        """A worker said something."""
        if message["op"] == "ready":
            worker.facts = {k: v for k, v in message.items() if k != "op"}
            if worker is self.next:
                self._switch_to(worker)
        elif message["op"] == "failed":
            worker.failure = DeviceError(message["message"])
            worker.failure.code, worker.failure.exit_code = message["code"], message["exit_code"]

    def ended(self, worker: WorkerProcess) -> None:
        """A worker's process is gone; its channel is closed by the supervisor."""
        code = worker.process.wait()
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
        if was_loading and self._ends_trial(worker, fault):
            return
        self._crashed(worker, fault)

    def tick(self) -> None:
        """Do what is due by now."""
        now_s = self._clock()
        if self._restart_at_s is not None and now_s >= self._restart_at_s:
            self._restart_at_s = None
            self.sync()
        if self._give_up_pending:
            self._give_up()
        if self._trial_until_s is not None and now_s >= self._trial_until_s:
            self._expire_trial()
        if self.next is not None and now_s > self.next.started_s + LOAD_S_MAX:
            self.next.failure = EngineFailed(
                f"release {self.next.version.release} did not load within {LOAD_S_MAX:.0f} s"
            )
            self.next.process.kill()
        for worker in self._ending:
            if worker.stop_by_s is not None and now_s > worker.stop_by_s:
                worker.process.kill()

    def due_s(self) -> float | None:
        """When `tick` has something to do next, on `clock`; None for never."""
        times = [self._restart_at_s, self._trial_until_s]
        times += [self._clock() + LOADING_RETRY_S] if self._give_up_pending else []
        times += [self.next.started_s + LOAD_S_MAX] if self.next is not None else []
        times += [worker.stop_by_s for worker in self._ending]
        return min((t for t in times if t is not None), default=None)

    def stop(self) -> None:
        """The daemon stops: every worker answers what it has and refuses the rest."""
        self._stopped = True
        for worker in (self.current, self.next):
            if worker is not None:
                worker.stop(final=True, now_s=self._clock())
                self._ending.append(worker)
        self.current = self.next = None
        self._restart_at_s = self._trial_until_s = None
        self._settle(Unavailable("the daemon is stopping"))

    @property
    def workers(self) -> list[WorkerProcess]:
        return [w for w in (self.current, self.next, *self._ending) if w is not None]

    def as_json(self) -> dict[str, Any]:
        """What `edgertd status` shows of this model's serving."""
        if self.current is not None:
            state = "ready"
        elif self.next is not None:
            state = "loading"
        elif self._restart_at_s is not None:
            state = "restarting"
        else:
            state = "failed" if self.fault is not None else "stopped"
        worker = self.current
        return {
            "state": state,
            "fault": None if self.fault is None else self.fault.message,
            "crashes": self._crashes,
            "pid": None if worker is None else worker.process.pid,
            **({} if worker is None else worker.facts),
        }

    # --- inside -----------------------------------------------------------------------------

    def _start(self, slot: str, version: Version) -> WorkerProcess:
        ours, theirs = channel.pair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "edgert.serving.worker", "--channel", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        ours.setblocking(False)
        worker = WorkerProcess(process, ours, version, self._clock())
        order = {
            "model": self.model,
            "folder": os.fspath(self.store.slot_folder(slot)),
            "digest": version.digest,
            "state": os.fspath(self._state_dir.root),
            "boot": self._boot,
        }
        channel.send(ours, order)
        self._watch(self, worker)
        return worker

    def _switch_to(self, worker: WorkerProcess) -> None:
        old, self.current, self.next = self.current, worker, None
        worker.state, worker.started_s = WorkerState.READY, self._clock()
        self.fault = None
        self._retire(old)
        self._notify("serving", self.model, {"release": worker.version.release, "engine": worker.facts.get("engine")})
        self._settle(None)

    def _retire(self, worker: WorkerProcess | None) -> None:
        if worker is not None:
            worker.stop(final=False, now_s=self._clock())
            self._ending.append(worker)

    def _abandon_next(self) -> None:
        if self.next is not None:
            self.next.process.kill()
            self._ending.append(self.next)
            self.next = None

    def _ends_trial(self, worker: WorkerProcess, fault: EdgeRTError) -> bool:
        """Whether the worker that failed to load was on trial; then its version is rolled back."""
        try:
            slots = self.store.read()
            active = slots.version(slots.active)
            if slots.state not in ON_TRIAL or active is None or active.digest != worker.version.digest:
                return False
            self.store.rollback(wait=False)
        except SlotsBusy:
            self.fault, self._give_up_pending = fault, True
            return True
        except EdgeRTError as error:
            fault = error
        self._roll_back_done(worker.version, fault)
        return True

    def _crashed(self, worker: WorkerProcess, fault: EdgeRTError) -> None:
        if self._clock() - worker.started_s > STABLE_S and worker.state is WorkerState.READY:
            self._crashes = 0
        self._crashes += 1
        self.fault = fault
        self._notify("crashed", self.model, {"reason": fault.message[:300], "crashes": self._crashes})
        if self._crashes >= CRASHES_MAX:
            self._give_up_pending = True
            self._give_up()
        if self.next is None and self.current is None and not self._give_up_pending:
            pause = RESTART_PAUSES_S[min(self._crashes, len(RESTART_PAUSES_S)) - 1]
            self._restart_at_s = self._clock() + pause
        if self.current is not None or self._crashes >= CRASHES_MAX:
            self._settle(fault)

    def _give_up(self) -> None:
        """Go back to the good version before; where there is none, the pauses between restarts just grow."""
        self._give_up_pending = False
        fault = self.fault or EngineFailed(f"model {self.model} keeps failing")
        try:
            slots = self.store.read()
            failed = slots.version(slots.active)
            spare = slots.version(slots.spare)
            if failed is None or not (slots.state in ON_TRIAL or (spare is not None and spare.good)):
                return
            self.store.rollback(wait=False)
        except SlotsBusy:
            self._give_up_pending = True
            return
        except EdgeRTError:
            return  # nothing to go back to
        self._crashes = 0
        self._roll_back_done(failed, fault)

    def _expire_trial(self) -> None:
        self._trial_until_s = None
        try:
            if not self.store.expire_trial(wait=False):
                self.sync()
                return
        except SlotsBusy:
            self._trial_until_s = self._clock() + 1.0
            return
        except EdgeRTError as error:
            self.fault = error
            return
        version = self.current.version if self.current is not None else None
        self._roll_back_done(version, DeviceError("the trial was not confirmed in time"))

    def _roll_back_done(self, version: Version | None, fault: EdgeRTError) -> None:
        release = None if version is None else version.release
        self._notify("rolled_back", self.model, {"release": release, "reason": fault.message[:300]})
        self._settle(fault)
        self.sync()

    def _watch_trial(self, slots: SlotState) -> None:
        self._trial_until_s = None
        if slots.state in ON_TRIAL and slots.trial is not None:
            clock = self.store.clock
            left_s = 0.0 if slots.trial.over(clock) else slots.trial.ends_at_s - clock.now_s()
            self._trial_until_s = self._clock() + left_s

    def _settle(self, error: EdgeRTError | None) -> None:
        waiting, self._waiting = self._waiting, []
        for settled in waiting:
            settled(error)

    def _unavailable(self) -> EdgeRTError:
        if self._stopped:
            return ShuttingDown("the daemon is stopping", retry_after_s=1.0)
        if self.current is not None or self.next is not None or self._restart_at_s is not None:
            return Unavailable(f"model {self.model} is loading", retry_after_s=LOADING_RETRY_S)
        if self.fault is not None:
            return Unavailable(f"model {self.model} does not load: {self.fault.message}")
        return ModelNotFound(f"model {self.model} is not active; deploy it")


def reject(client: socket.socket, error: EdgeRTError) -> None:
    """Say why and close; a client that does not read is not waited for."""
    try:
        client.setblocking(False)
        client.send(wire.error_frame(error))
    except OSError:
        pass
    client.close()


def _how(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
