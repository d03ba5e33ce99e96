"""The supervisor: accepts connections, passes them to the model's worker, keeps workers running.

The supervisor handles no request of an app. It reads the first frame of a connection, the hello, which names the model.
Then it passes the connection's descriptor to the worker of this model. The supervisor has one thread and one selector.
"""

from __future__ import annotations

import contextlib
import os
import random
import selectors
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from edgert import __version__
from edgert.checks.channel_status import STALE, ChannelEvent, read_channel_status
from edgert.config import DeviceConfig, read_config
from edgert.daemon import monitor
from edgert.daemon.device_reporter import DeviceReporter
from edgert.daemon.memory.load_turns import LoadTurns
from edgert.daemon.memory.memory_budget import MemoryBudget
from edgert.daemon.memory.worker_sizes import LearnedSizes
from edgert.daemon.model.model_service import ModelService
from edgert.daemon.sockets.acceptor import PASSED_ON, Acceptor, reject
from edgert.daemon.sockets.control_server import ControlClient, ControlServer
from edgert.daemon.sockets.status_queries import StatusQueries
from edgert.daemon.system import incoming, service_manager
from edgert.daemon.system.incoming import IncomingFolder
from edgert.daemon.system.resources import PidFile, raise_descriptor_limit, sole_daemon
from edgert.daemon.system.side_process import SideProcess
from edgert.daemon.timed import Periodic, Timed, soonest_s
from edgert.daemon.workers.fork_server import WorkerStarter
from edgert.daemon.workers.worker_process import WorkerProcess
from edgert.errors import DeviceError, EdgeRTError, ModelNotFound, ProtocolError, StorageFailed
from edgert.log import log
from edgert.protocol import wire
from edgert.protocol.control import answer_of, error_answer
from edgert.protocol.hello import HelloFlags
from edgert.protocol.listening import listening
from edgert.state_dir import StateDir
from edgert.typed_json import from_json, to_json
from edgert.versions import latest_time
from edgert.versions.latest_time import LatestTime
from edgert.versions.slots import Version
from edgert.worker_link import link
from edgert.worker_link.load_message import LoadMessage

STOP_S_MAX = 30.0
FIRST_ROUND_S_MAX = 60.0  # the longest time until the follower's first round
HINT_PAUSE_S = 60.0  # the shortest time between two rounds for hints
HINT_S_MAX = 10.0  # the longest pause from a hint to its round; it is random, because all devices get the hint at once
FORKED_MODELS_MIN = 2  # with one model, the fork server would cost 16 MB and share nothing
STATE_CHECK_S = 30.0  # the time between two checks that the state folder exists


class Supervisor:
    """The daemon of one state folder."""

    def __init__(self, state: StateDir, clock: Callable[[], float] = time.monotonic) -> None:
        self._state = state
        self._clock = clock
        self._config: DeviceConfig = read_config(state)
        self._boot = f"b{uuid.uuid4().hex[:12]}"
        self._reporter = DeviceReporter(state, self._config, self._boot)
        self._own_alarms = self._channel_alarms()
        # The alarms that were last reported, by model. The key "" stands for the device itself.
        self._alarms: dict[str, tuple[str, ...]] = {"": ()}
        self._selector = selectors.DefaultSelector()
        self._services: dict[str, ModelService] = {}
        self._acceptor = Acceptor(self._config.serving, self._selector, self._route, clock)
        limit_mb = self._config.serving.memory_mb
        sizes = LearnedSizes(state.learned)
        self._starter = WorkerStarter(self._has_several_models)
        self._budget = MemoryBudget(limit_mb, sizes, self._services, clock, lambda: self._starter.forks)
        self._turns = LoadTurns(self._services, self._budget, clock)
        self._status_queries = StatusQueries(self._boot, limit_mb, self._services, clock, lambda: state.read_only)
        self._control_server = ControlServer(self._selector, self._handle_request, clock)
        self._stop_by_s: float | None = None
        self._side_processes: list[SideProcess] = []
        self._follower: SideProcess | None = None
        self._hinted_at_s = -HINT_PAUSE_S
        self._due_s = 0.0  # the time when a part other than the acceptor is due
        self._periodic = [
            Periodic(STATE_CHECK_S, self._check_state_folder, clock),
            Periodic(incoming.CHECK_S, IncomingFolder(state.incoming, clock).clean, clock),
            Periodic(latest_time.CHECK_S, LatestTime(state).store_clock, clock),
            Periodic(monitor.REPORT_S, monitor.report_to_monitor, clock),
        ]
        if (watchdog_s := service_manager.watchdog_s()) is not None:
            self._periodic.append(Periodic(watchdog_s, self._ping_watchdog, clock))
        self._reported_ready = False
        self._pid_file: PidFile | None = None  # locked while `run` runs

    def run(self) -> None:
        """Serve until SIGTERM, SIGINT or the command `stop`.

        Raises StorageFailed; also DeviceError if another daemon serves this state folder.
        """
        with contextlib.ExitStack() as stack:
            self._pid_file = stack.enter_context(sole_daemon(self._state))
            socket_path, control_path = self._socket_paths()
            raise_descriptor_limit()
            listener = stack.enter_context(listening(socket_path, 0o660, self._config.socket_group))
            control = stack.enter_context(listening(control_path, 0o600))
            self._selector.register(listener, selectors.EVENT_READ, lambda: self._acceptor.accept(listener))
            self._selector.register(control, selectors.EVENT_READ, lambda: self._control_server.accept(control))
            self._handle_signals(stack)
            log(f"edgertd {__version__} listens on {socket_path}")
            self._start_side_processes()
            for model in sorted(self._state.model_names(), key=lambda name: not self._config.model(name).pinned):
                self._service(model).sync()
                self._remove_leftovers(model)
            while not self._done():
                self._turn()
            self._reporter.close()
            for process in self._side_processes:
                process.stop()
            self._starter.close()
        log("edgertd has stopped")

    # --- the loop -----------------------------------------------------------------------------

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._wait_s()):
            if key.data() is not PASSED_ON:
                self._due_s = 0.0
        self._acceptor.tick()
        if self._clock() < self._due_s and self._stop_by_s is None:
            return  # only connections were passed on; to tick every part would cost more than to pass a connection on
        parts = self._timed_parts()
        for part in parts:
            part.tick()
        if self._alarms_now() != self._alarms and self._stop_by_s is None:
            self._report_slots()
        if not self._reported_ready and all(s.settled for s in self._services.values()):
            self._reported_ready = True
            service_manager.notify("READY=1")
        due_s = soonest_s(parts)
        assert due_s is not None  # the regular parts are always due at some time
        self._due_s = due_s

    def _wait_s(self) -> float:
        if self._stop_by_s is not None:  # poll, because workers end within milliseconds
            return 0.01
        accepting_s = self._acceptor.due_s()
        due_s = self._due_s if accepting_s is None else min(accepting_s, self._due_s)
        return max(0.0, due_s - self._clock()) + 0.001

    def _timed_parts(self) -> list[Timed]:
        """Return each part that has a `tick` and a due time, except the acceptor."""
        sockets = (self._control_server, self._status_queries)
        return [*self._services.values(), self._turns, *sockets, *self._side_processes, *self._periodic]

    def _remove_leftovers(self, model: str) -> None:
        """Remove the files of a power cut or a failed trial, unless an install is in progress."""
        store = self._services[model].store
        try:
            with store.installing():
                store.collect(wait=False)
        except EdgeRTError as error:  # the files only use space, and the next install tries again
            log(f"{model}: the slots were not cleaned up: {error.message}")

    def _check_state_folder(self) -> None:
        """Stop if the state folder was removed, because no command can reach this daemon any more."""
        if self._pid_file is not None and not self._pid_file.still_exists() and self._stop_by_s is None:
            log(f"{self._state.root} was removed or replaced, so no command reaches this daemon: the daemon stops")
            self._stop()
        self._own_alarms = self._channel_alarms()

    def _ping_watchdog(self) -> None:
        """Tell the service manager that the loop runs and no worker is stuck."""
        if not any(service.workers.stuck for service in self._services.values()):
            service_manager.notify("WATCHDOG=1")

    def _done(self) -> bool:
        if self._stop_by_s is None:
            return False
        workers = [w for s in self._services.values() for w in s.workers]
        if workers and self._clock() > self._stop_by_s:
            for worker in workers:
                worker.kill(self._clock())
            return True
        return not workers

    def _stop(self) -> None:
        if self._stop_by_s is None:
            service_manager.notify("STOPPING=1")
            self._stop_by_s = self._clock() + STOP_S_MAX
            self._budget.learn()
            for service in self._services.values():
                service.stop()
            self._starter.kill_unused_server()

    # --- clients ------------------------------------------------------------------------------

    def _route(self, sock: socket.socket, hello: dict[str, Any]) -> None:
        model = hello.get("model")
        try:
            if model is None:
                welcome = wire.json_frame(wire.WELCOME, {"edgert": __version__, "models": self._model_list()})
                sock.send(welcome, socket.MSG_DONTWAIT)
            elif isinstance(model, str) and model in self._services:
                self._services[model].connect(sock, HelloFlags.from_json(hello))
            else:
                models = ", ".join(sorted(self._services)) or "none"
                raise ModelNotFound(f"unknown model {str(model)[:80]!r}; this device has: {models}")
        except EdgeRTError as error:
            self._due_s = 0.0  # the model may start to load
            reject(sock, error)
            return
        except OSError:
            pass
        sock.close()  # the worker has its own descriptor

    def _model_list(self) -> list[dict[str, Any]]:
        models = []
        for name, service in sorted(self._services.items()):
            status = service.status()
            loaded = status.loaded
            served = {} if loaded is None else {"release": loaded.release, "engine": loaded.engine}
            models.append({"name": name, "state": status.state, **served})
        return models

    # --- workers ------------------------------------------------------------------------------

    def _installed_service(self, model: str) -> ModelService:
        """Return the service of an installed model. Raises ModelNotFound for any other name.

        Without this check, each unknown name would get a service, which stays in the list of models.
        """
        if model not in self._services and model not in self._state.model_names():
            raise ModelNotFound(f"unknown model {model[:80]!r}: install a bundle of it first (edgertd install)")
        return self._service(model)

    def _has_several_models(self) -> bool:
        try:
            return len(self._state.model_names()) >= FORKED_MODELS_MIN
        except OSError:  # a faulty disk is no reason to stop serving
            return False

    def _service(self, model: str) -> ModelService:
        if model not in self._services:
            self._services[model] = ModelService(
                model,
                self._state,
                self._config,
                self._boot,
                partial(self._report, model),
                self._turns.admit,
                self._clock,
                self._start_worker,
            )
            if self._stop_by_s is not None:  # a model was installed while the daemon stops
                self._services[model].stop()
        return self._services[model]

    def _start_worker(self, load_message: LoadMessage, version: Version, now_s: float) -> WorkerProcess:
        worker = WorkerProcess.start(load_message, version, now_s, self._starter)
        service = self._services[load_message.model]
        self._selector.register(worker.link, selectors.EVENT_READ, lambda: self._receive(service, worker))
        return worker

    def _receive(self, service: ModelService, worker: WorkerProcess) -> None:
        try:
            received = link.receive(worker.link)
            if received is not None:
                worker.asked_s = None
                self._handle_message(service, worker, received[0])
                for descriptor in received[1]:  # workers send no descriptors
                    os.close(descriptor)
                return
        except BlockingIOError:
            return
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:  # its memory is corrupt
            worker.kill(self._clock(), DeviceError(f"the worker sent an invalid message: {type(error).__name__}"))
            return
        except OSError:
            pass
        self._selector.unregister(worker.link)
        worker.link.close()
        service.handle_end(worker)

    def _handle_message(self, service: ModelService, worker: WorkerProcess, message: dict[str, Any]) -> None:
        if message["op"] == "stats":
            self._status_queries.handle_message(service.model, message)
            return
        service.handle_message(worker, message)
        if message["op"] == "ready":
            self._budget.loaded(service.model)

    def _report(self, model: str, event: str, fields: dict[str, Any]) -> None:
        """Report an event of a model in the log and over telemetry."""
        log(f"{model}: {event} " + " ".join(f"{k}={v}" for k, v in fields.items()))
        self._reporter.event(event, model, fields)
        self._report_slots()

    def _report_slots(self) -> None:
        self._alarms = self._alarms_now()
        self._reporter.slots(((s.store, self._alarms[name]) for name, s in self._services.items()), self._alarms[""])

    def _alarms_now(self) -> dict[str, tuple[str, ...]]:
        return {"": self._own_alarms, **{name: service.alarms for name, service in self._services.items()}}

    def _channel_alarms(self) -> tuple[str, ...]:
        return (STALE,) if read_channel_status(self._state, self._config).stale else ()

    # --- commands -----------------------------------------------------------------------------

    def _handle_request(self, control: ControlClient, request: dict[str, Any]) -> None:
        op = request["op"]
        if op == "status":
            self._status_queries.begin(control)
        elif op == "stop":
            control.reply(answer_of({"pid": os.getpid()}))
            self._stop()
        elif op == "sync":
            service = self._installed_service(str(request["model"]))

            def reply(error: EdgeRTError | None) -> None:
                self._report_slots()
                control.reply(answer_of(to_json(service.status())) if error is None else error_answer(error))

            service.sync(reply)
        elif op == "follow":  # a hint that the channel may have changed
            self._follow_hint()
            control.reply(answer_of({}))
        elif op == "event":  # an event of the follower, or of a rollback by a command
            event = vars(from_json(ChannelEvent, request))
            self._reporter.event(event.pop("event"), event.pop("model"), event)
            self._own_alarms = self._channel_alarms()
            control.reply(answer_of({}))
        elif op == "checked":  # a command sent golden samples
            samples = int(request["samples"])
            checked = self._services.get(str(request["model"]))
            if checked is not None:
                checked.trial.count_golden(samples)
            control.reply(answer_of({}))
        else:
            raise ProtocolError(f"unknown control request {op!r}")

    # --- processes beside the workers ---------------------------------------------------------

    def _start_side_processes(self) -> None:
        """Start the forwarder, the HTTP server and the follower if they are configured."""
        commands = {}
        if self._config.mqtt.host:
            commands["telemetry: the forwarder"] = ["edgert.telemetry.forwarder_process", "--boot", self._boot]
        if self._config.http.listen:
            commands["http: the server"] = ["edgert.http"]
        for name, words in commands.items():
            command = [sys.executable, "-m", *words, "--state", os.fspath(self._state.root)]
            process = SideProcess(name, command, self._selector, self._clock)
            self._side_processes.append(process)
            process.start()
        if self._config.follow.registry:
            self._follower = self._new_follower(self._config.follow.interval_s)
            self._side_processes.append(self._follower)

    def _new_follower(self, interval_s: float) -> SideProcess:
        """Return the follower's process, whose rounds start at random times: many devices may start at once."""
        command = [sys.executable, "-m", "edgert.cli", "--state", os.fspath(self._state.root), "follow"]
        follower = SideProcess(
            "channel: the follower",
            command,
            self._selector,
            self._clock,
            pause_s_max=interval_s,
            round_pause_s=lambda: interval_s * random.uniform(0.75, 1.25),
        )
        follower.start_in(random.uniform(0.0, min(FIRST_ROUND_S_MAX, interval_s)))
        return follower

    def _follow_hint(self) -> None:
        """Start a round of the follower soon. A flood of hints causes at most one round in HINT_PAUSE_S."""
        now_s = self._clock()
        if self._follower is not None and now_s >= self._hinted_at_s:  # no round is planned yet
            self._hinted_at_s = max(now_s + random.uniform(0.0, HINT_S_MAX), self._hinted_at_s + HINT_PAUSE_S)
            self._follower.start_in(self._hinted_at_s - now_s)

    # --- set-up -------------------------------------------------------------------------------

    def _socket_paths(self) -> tuple[Path, Path]:
        """Return the paths of the apps' socket and of the control socket. Raises StorageFailed."""
        try:
            control, apps = self._state.path_for_new("control.sock"), self._state.path_for_new("edgert.sock")
            if self._state.read_only:
                log(f"{self._state.root} is read-only: live versions are served, and every change is refused")
        except OSError as error:
            raise StorageFailed(
                f"cannot create a folder for the sockets: {error}; check the permissions and the free space"
            ) from error
        return (self._state.socket(self._config.socket) if self._config.socket else apps), control

    def _handle_signals(self, stack: contextlib.ExitStack) -> None:
        reader, writer = socket.socketpair()
        stack.enter_context(reader)
        stack.enter_context(writer)
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno())
        stack.callback(signal.set_wakeup_fd, -1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)

        def stop() -> None:
            reader.recv(64)
            self._stop()

        self._selector.register(reader, selectors.EVENT_READ, stop)
