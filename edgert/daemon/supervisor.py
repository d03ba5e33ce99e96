"""The supervisor: accepts connections, reads their hello, passes them to the model's worker; keeps workers up.

It never touches a request: a connection's descriptor goes to the worker as soon as the hello has named the
model. One thread, one selector; whoever sends a hello slowly waits alone, under a deadline.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from edgert import __version__
from edgert.checks.status import DaemonStatus, LoadedStatus, MemoryStatus, WorkerFigures
from edgert.config import DeviceConfig, StateDir, read_config
from edgert.daemon import service_manager
from edgert.daemon.acceptor import Acceptor, reject
from edgert.daemon.control_server import ControlClient, ControlServer
from edgert.daemon.device_reporter import DeviceReporter
from edgert.daemon.forwarder_process import forwarder_command
from edgert.daemon.incoming import IncomingFolder
from edgert.daemon.memory import Claim, LearnedSizes, estimated_mb, make_room
from edgert.daemon.model_service import ModelService
from edgert.daemon.resources import listening, raise_descriptor_limit, sole_daemon
from edgert.daemon.side_process import SideProcess
from edgert.daemon.worker_process import WorkerProcess, WorkerState
from edgert.errors import (
    DeviceError,
    EdgeRTError,
    ModelNotFound,
    ProtocolError,
    Unavailable,
)
from edgert.log import log
from edgert.protocol import wire
from edgert.protocol.control import answer_of, error_answer
from edgert.typed_json import from_json, to_json
from edgert.versions.slots import SlotState
from edgert.worker_link import channel

STATS_S_MAX = 1.0
STOP_S_MAX = 30.0
HOME_S = 30.0  # how often the daemon looks whether its state folder is still there


@dataclass(eq=False)
class _StatsRound:
    """A `status` that waits for the workers' figures."""

    client: ControlClient
    until_s: float
    expected: set[int]
    answers: dict[str, tuple[LoadedStatus, WorkerFigures]] = field(default_factory=dict)


class Supervisor:
    """The daemon of one state folder. `run` returns when it was told to stop."""

    def __init__(self, state: StateDir, clock: Callable[[], float] = time.monotonic) -> None:
        self._state, self._clock = state, clock
        self._config: DeviceConfig = read_config(state)
        self._boot = f"b{uuid.uuid4().hex[:12]}"
        self._reporter = DeviceReporter(state, self._config, self._boot, self._say)
        self._selector = selectors.DefaultSelector()
        self._services: dict[str, ModelService] = {}
        self._acceptor = Acceptor(self._config.serving, self._selector, self._route, clock)
        self._sizes = LearnedSizes(state.learned)
        self._control_server = ControlServer(self._selector, self._obey, clock)
        self._rounds: dict[int, _StatsRound] = {}
        self._round = 0
        self._stop_by_s: float | None = None
        self._beside: list[SideProcess] = []
        self._incoming = IncomingFolder(state.incoming, self._say, clock)
        self._ready_said = False
        self._pid_inode, self._home_at_s = 0, 0.0
        self._watchdog_s = service_manager.watchdog_s()
        self._watchdog_at_s = None if self._watchdog_s is None else clock()

    def run(self) -> None:
        """Serve until SIGTERM, SIGINT or a `stop` command. Raises DeviceError if another daemon runs here."""
        with contextlib.ExitStack() as stack:
            self._pid_inode = stack.enter_context(sole_daemon(self._state))
            self._home_at_s = self._clock() + HOME_S
            socket_path = self._state.socket(self._config)
            raise_descriptor_limit()
            listener = stack.enter_context(listening(socket_path, 0o660, self._config.socket_group))
            control = stack.enter_context(listening(self._state.control_socket, 0o600))
            self._selector.register(listener, selectors.EVENT_READ, lambda: self._acceptor.accept(listener))
            self._selector.register(control, selectors.EVENT_READ, lambda: self._control_server.accept(control))
            self._heed_signals(stack)
            self._say(f"edgertd {__version__} listens on {socket_path}")
            self._start_beside()
            for model in self._state.model_names():
                self._service(model).sync()
                self._collect(model)
            while not self._done():
                self._turn()
            self._reporter.close()
            for process in self._beside:
                process.stop()
        self._say("edgertd has stopped")

    # --- the loop -----------------------------------------------------------------------------

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._wait_s()):
            key.data()
        now_s = self._clock()
        for service in list(self._services.values()):
            service.tick()
        self._acceptor.tick()
        self._control_server.tick()
        for number in [n for n, r in self._rounds.items() if now_s > r.until_s]:
            self._finish_round(number)
        for process in self._beside:
            process.tick(now_s)
        self._incoming.tick()
        self._ping_watchdog(now_s)
        self._look_after_home(now_s)
        if not self._ready_said and all(s.settled for s in self._services.values()):
            self._ready_said = True
            service_manager.notify("READY=1")

    def _wait_s(self) -> float | None:
        times = [service.due_s() for service in self._services.values()]
        times += [r.until_s for r in self._rounds.values()]
        times += [self._acceptor.due_s(), self._control_server.due_s(), self._stop_by_s, self._watchdog_at_s]
        times += [self._home_at_s, self._incoming.due_s]
        times += [process.due_s() for process in self._beside]
        due = min((t for t in times if t is not None), default=None)
        if self._stop_by_s is not None:  # workers end within milliseconds: look often
            return 0.01
        return None if due is None else max(0.0, due - self._clock()) + 0.001

    def _collect(self, model: str) -> None:
        """Free what a power cut or a failed trial left, unless an install is under way there."""
        store = self._services[model].store
        try:
            with store.installing():
                store.collect(wait=False)
        except EdgeRTError as error:  # it only takes room: the next install tries again
            self._say(f"{model}: nothing was cleared away: {error.message}")

    def _look_after_home(self, now_s: float) -> None:
        """End where the state folder was removed: no command could reach this daemon any more."""
        if self._stop_by_s is not None or now_s < self._home_at_s:
            return
        self._home_at_s = now_s + HOME_S
        try:
            there = self._state.pid.stat().st_ino == self._pid_inode
        except FileNotFoundError:
            there = False
        except OSError:  # a disk that does not answer is no reason to stop serving
            return
        if not there:
            self._say(f"{self._state.root} was removed or replaced: the daemon ends")
            self._stop()

    def _ping_watchdog(self, now_s: float) -> None:
        """Tell the service manager that the loop turns and every worker can be helped from here."""
        if self._watchdog_s is None or self._watchdog_at_s is None or now_s < self._watchdog_at_s:
            return
        self._watchdog_at_s = now_s + self._watchdog_s
        if not any(service.stuck() for service in self._services.values()):
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
            self._learn_sizes()
            for service in self._services.values():
                service.stop()

    # --- clients ------------------------------------------------------------------------------

    def _route(self, sock: socket.socket, hello: dict[str, Any]) -> None:
        model = hello.get("model")
        try:
            if model is None:
                sock.send(wire.json_frame(wire.WELCOME, {"edgert": __version__, "models": self._model_list()}))
            elif isinstance(model, str) and model in self._services:
                sock.setblocking(True)
                self._services[model].connect(sock, shared=hello.get("shared") is True)
            else:
                known = ", ".join(sorted(self._services)) or "none"
                raise ModelNotFound(f"no model is called {str(model)[:80]!r} here; there are: {known}")
        except EdgeRTError as error:
            reject(sock, error)
            return
        except OSError:
            pass
        sock.close()  # the worker has its own descriptor by now

    def _model_list(self) -> list[dict[str, Any]]:
        models = []
        for name, service in sorted(self._services.items()):
            status = service.status()
            served = {} if (on := status.loaded) is None else {"release": on.release, "engine": on.engine}
            models.append({"name": name, "state": status.state, **served})
        return models

    # --- workers ------------------------------------------------------------------------------

    def _service(self, model: str) -> ModelService:
        if model not in self._services:
            self._services[model] = ModelService(
                model,
                self._state,
                self._config,
                self._boot,
                self._watch_worker,
                self._report,
                self._admit,
                self._clock,
            )
        return self._services[model]

    def _watch_worker(self, service: ModelService, worker: WorkerProcess) -> None:
        self._selector.register(worker.channel, selectors.EVENT_READ, lambda: self._heard(service, worker))

    def _heard(self, service: ModelService, worker: WorkerProcess) -> None:
        try:
            received = channel.receive(worker.channel)
            if received is not None:
                self._take_message(service, worker, received[0])
                for descriptor in received[1]:  # a worker has none to give
                    os.close(descriptor)
                return
        except BlockingIOError:
            return
        except (ValueError, KeyError, TypeError, RecursionError) as error:  # its memory is not what it was
            worker.kill(self._clock(), DeviceError(f"the worker said what no worker says: {type(error).__name__}"))
            return
        except OSError:
            pass
        self._selector.unregister(worker.channel)
        worker.channel.close()
        service.ended(worker)

    def _take_message(self, service: ModelService, worker: WorkerProcess, message: dict[str, Any]) -> None:
        if message["op"] == "stats":
            self._collect_stats(service.model, message)
            return
        service.received(worker, message)
        if message["op"] == "ready" and self._config.serving.memory_mb:
            self._sizes.learn(worker.version.digest, worker.measure())

    def _report(self, event: str, model: str, fields: dict[str, Any]) -> None:
        """Say what happened to a model, on the log and over telemetry."""
        self._say(f"{model}: {event} " + " ".join(f"{k}={v}" for k, v in fields.items()))
        self._reporter.event(event, model, fields)
        self._reporter.slots(s.store for s in self._services.values())

    # --- the memory budget --------------------------------------------------------------------

    def _admit(self, service: ModelService, slots: SlotState) -> bool:
        """Whether `service` may load its active version now; where not, begin to make room for it.

        The version of the same model that still serves is not counted: a swap must not stop the model.
        Raises Unavailable where the version is larger than the budget leaves beside the pinned models.
        """
        limit_mb = self._config.serving.memory_mb
        version = slots.live
        if not limit_mb or version is None:
            return True
        self._learn_sizes()
        claims = [claim for other in self._services.values() for claim in self._claims(other, service)]
        left_mb = limit_mb - sum(claim.mb for claim in claims if self._services[claim.model].pinned)
        known_mb = self._sizes.of(version.digest)
        if known_mb is not None and known_mb > left_mb:
            raise Unavailable(
                f"release {version.release} of {service.model} needs {known_mb:.0f} MB, "
                f"the budget leaves {left_mb:.0f} MB beside pinned models: raise memory_mb in config.toml"
            )
        # An estimate alone refuses nothing: at worst the model is tried with all others gone.
        need_mb = known_mb or min(left_mb, estimated_mb(service.store.live_folder(slots)))
        room = make_room(need_mb, limit_mb, claims, self._clock())
        for model in room.unload:
            self._services[model].unload(f"room for {service.model}")
        return room.now

    def _claims(self, service: ModelService, asking: ModelService) -> list[Claim]:
        """What the workers of `service` hold of the budget, as `asking` must see it."""
        claims = []
        for worker in service.workers:
            known_mb = self._sizes.of(worker.version.digest) or estimated_mb(service.store.folder)
            leaving = worker.state is WorkerState.STOPPING or worker.killed_at_s is not None
            if service is asking and not leaving:
                continue
            fixed = (
                service.pinned or service.trial.under_way or worker is not service.current or service.next is not None
            )
            used_at_s = self._clock() if service.busy else worker.used_at_s
            claims.append(Claim(service.model, worker.mb or known_mb, used_at_s, leaving, fixed and not leaving))
        return claims

    def _learn_sizes(self) -> None:
        """Look at what each worker takes, and remember it for the next time."""
        if self._config.serving.memory_mb:
            for service in self._services.values():
                if service.current is not None:
                    self._sizes.learn(service.current.version.digest, service.current.measure())

    # --- commands -----------------------------------------------------------------------------

    def _obey(self, control: ControlClient, request: dict[str, Any]) -> None:
        op = request["op"]
        if op == "status":
            self._begin_round(control)
        elif op == "stop":
            control.reply(answer_of({"pid": os.getpid()}))
            self._stop()
        elif op == "sync":
            service = self._service(str(request["model"]))

            def settled(error: EdgeRTError | None) -> None:
                self._reporter.slots(s.store for s in self._services.values())
                control.reply(answer_of(to_json(service.status())) if error is None else error_answer(error))

            service.sync(settled)
        elif op == "checked":
            samples = int(request["samples"])
            if (known := self._services.get(str(request["model"]))) is not None:
                known.trial.checked(samples)
            control.reply(answer_of({}))
        else:
            raise ProtocolError(f"no control request is called {op!r}")

    def _begin_round(self, control: ControlClient) -> None:
        self._round += 1
        asked = set()
        for service in self._services.values():
            worker = service.current
            if worker is None:
                continue
            worker.measure()
            with contextlib.suppress(OSError):
                channel.send(worker.channel, {"op": "stats", "id": self._round})
                asked.add(worker.process.pid)
        self._rounds[self._round] = _StatsRound(control, self._clock() + STATS_S_MAX, asked)
        if not asked:
            self._finish_round(self._round)

    def _collect_stats(self, model: str, message: dict[str, Any]) -> None:
        current = self._rounds.get(message["id"])
        if current is None:
            return
        loaded = from_json(LoadedStatus, message["loaded"])
        current.answers[model] = loaded, from_json(WorkerFigures, message["figures"])
        if len(current.answers) == len(current.expected):
            self._finish_round(message["id"])

    def _finish_round(self, number: int) -> None:
        finished = self._rounds.pop(number)
        models = {name: service.status() for name, service in self._services.items()}
        for name, (loaded, figures) in finished.answers.items():
            models[name] = replace(models[name], loaded=loaded, figures=figures)
        used_mb = sum(worker.mb for service in self._services.values() for worker in service.workers)
        memory = MemoryStatus(round(used_mb, 1), self._config.serving.memory_mb)
        finished.client.reply(answer_of(to_json(DaemonStatus(os.getpid(), self._boot, memory, models))))

    # --- processes beside the workers ---------------------------------------------------------

    def _start_beside(self) -> None:
        """Start what sends the spool to the broker, and what answers HTTP, where they are configured."""
        commands = {}
        if self._config.mqtt.host:
            commands["telemetry: the forwarder"] = forwarder_command(self._state, self._config, self._boot)
        if self._config.http.listen:
            state = os.fspath(self._state.root)
            commands["http: the server"] = [sys.executable, "-m", "edgert.http", "--state", state]
        for name, command in commands.items():
            process = SideProcess(name, command, self._selector, self._say, self._clock)
            self._beside.append(process)
            process.start()

    # --- set-up -------------------------------------------------------------------------------

    def _heed_signals(self, stack: contextlib.ExitStack) -> None:
        reader, writer = socket.socketpair()
        stack.enter_context(reader)
        stack.enter_context(writer)
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno())
        stack.callback(signal.set_wakeup_fd, -1)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)

        def heard() -> None:
            reader.recv(64)
            self._stop()

        self._selector.register(reader, selectors.EVENT_READ, heard)

    def _say(self, line: str) -> None:
        log(line)
