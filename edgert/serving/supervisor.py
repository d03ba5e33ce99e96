"""The supervisor: accepts connections, reads their hello, passes them to the model's worker; keeps workers up.

It never touches a request: a connection's descriptor goes to the worker as soon as the hello has named the
model. One thread, one selector; whoever sends a hello slowly waits alone, under a deadline.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgert import __version__, wire
from edgert.config import DeviceConfig, StateDir, read_config
from edgert.errors import ConfigInvalid, DeviceError, EdgeRTError, ModelNotFound, ProtocolError, StorageFailed
from edgert.serving import channel
from edgert.serving.control import LINE_BYTES_MAX, answer_of, error_answer
from edgert.serving.device_reporter import DeviceReporter
from edgert.serving.service import ModelService, WorkerProcess, reject

HELLO_S_MAX = 5.0
GREETINGS_MAX = 256
CONTROL_S_MAX = 5.0
STATS_S_MAX = 1.0
STOP_S_MAX = 20.0
BACKLOG = 512
FORWARDER_PAUSE_S = 5.0


@dataclass(eq=False)
class _Greeting:
    """A connection whose hello is on its way."""

    sock: socket.socket
    until_s: float
    data: bytearray = field(default_factory=bytearray)


@dataclass(eq=False)
class _ControlClient:
    """A command's connection: one JSON line in, one out."""

    sock: socket.socket
    until_s: float | None
    data: bytearray = field(default_factory=bytearray)

    def reply(self, value: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # a command that went away needs no answer
            self.sock.setblocking(True)
            self.sock.settimeout(1.0)
            self.sock.sendall(json.dumps(value).encode() + b"\n")
        self.sock.close()


@dataclass(eq=False)
class _StatsRound:
    """A `status` that waits for the workers' figures."""

    client: _ControlClient
    until_s: float
    expected: set[int]
    stats: dict[str, dict[str, Any]] = field(default_factory=dict)


class Supervisor:
    """The daemon of one state folder. `run` returns when it was told to stop."""

    def __init__(self, state: StateDir, clock: Callable[[], float] = time.monotonic) -> None:
        self._state, self._clock = state, clock
        self._config: DeviceConfig = read_config(state)
        self._boot = f"b{uuid.uuid4().hex[:12]}"
        self._reporter = DeviceReporter(state, self._config, self._boot, self._say)
        self._selector = selectors.DefaultSelector()
        self._services: dict[str, ModelService] = {}
        self._greetings: set[_Greeting] = set()
        self._controls: set[_ControlClient] = set()
        self._rounds: dict[int, _StatsRound] = {}
        self._round = 0
        self._stop_by_s: float | None = None
        self._forwarder: subprocess.Popen[bytes] | None = None
        self._forwarder_at_s: float | None = None
        self._ready_said = False

    def run(self) -> None:
        """Serve until SIGTERM, SIGINT or a `stop` command. Raises DeviceError if another daemon runs here."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(_sole_daemon(self._state))
            socket_path = self._state.socket(self._config)
            self._listen(stack, socket_path, 0o660, self._accept_client)
            self._listen(stack, self._state.control_socket, 0o600, self._accept_control)
            self._heed_signals(stack)
            self._say(f"edgertd {__version__} listens on {socket_path}")
            self._start_forwarder()
            for model in self._state.model_names():
                self._service(model).sync()
            while not self._done():
                self._turn()
            self._stop_forwarder()
        self._say("edgertd has stopped")

    # --- the loop -----------------------------------------------------------------------------

    def _turn(self) -> None:
        for key, _ in self._selector.select(self._wait_s()):
            key.data()
        now_s = self._clock()
        for service in list(self._services.values()):
            service.tick()
        for greeting in [g for g in self._greetings if now_s > g.until_s]:
            self._drop_greeting(greeting, ProtocolError(f"no hello came within {HELLO_S_MAX:.0f} s"))
        for control in [c for c in self._controls if c.until_s is not None and now_s > c.until_s]:
            self._drop_control(control)
            control.sock.close()
        for number in [n for n, r in self._rounds.items() if now_s > r.until_s]:
            self._finish_round(number)
        self._tend_forwarder(now_s)
        if not self._ready_said and all(s.next is None for s in self._services.values()):
            self._ready_said = True
            notify_systemd("READY=1")

    def _wait_s(self) -> float | None:
        times = [service.due_s() for service in self._services.values()]
        times += [g.until_s for g in self._greetings] + [c.until_s for c in self._controls]
        times += [r.until_s for r in self._rounds.values()] + [self._stop_by_s, self._forwarder_at_s]
        due = min((t for t in times if t is not None), default=None)
        if self._stop_by_s is not None:  # workers end within milliseconds: look often
            return 0.01
        return None if due is None else max(0.0, due - self._clock()) + 0.001

    def _done(self) -> bool:
        if self._stop_by_s is None:
            return False
        workers = [w for s in self._services.values() for w in s.workers]
        if workers and self._clock() > self._stop_by_s:
            for worker in workers:
                worker.process.kill()
            return True
        return not workers

    def _stop(self) -> None:
        if self._stop_by_s is None:
            notify_systemd("STOPPING=1")
            self._stop_by_s = self._clock() + STOP_S_MAX
            for service in self._services.values():
                service.stop()

    # --- clients ------------------------------------------------------------------------------

    def _accept_client(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:  # out of descriptors, or gone again: the next turn tries again
            time.sleep(0.01)
            return
        if len(self._greetings) >= GREETINGS_MAX:
            sock.close()
            return
        sock.setblocking(False)
        greeting = _Greeting(sock, self._clock() + HELLO_S_MAX)
        self._greetings.add(greeting)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._greeted(greeting))
        self._greeted(greeting)

    def _greeted(self, greeting: _Greeting) -> None:
        """Read what is there of the hello, and not one byte more: what follows is the worker's."""
        try:
            hello = _read_hello(greeting)
        except BlockingIOError:
            return
        except EdgeRTError as error:
            self._drop_greeting(greeting, error)
            return
        except OSError:
            hello = None
        if hello is None:
            self._forget_greeting(greeting)
            greeting.sock.close()
            return
        self._forget_greeting(greeting)
        self._route(greeting.sock, hello)

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
        return [
            {"name": name, **{k: v for k, v in service.as_json().items() if k in ("state", "release", "engine")}}
            for name, service in sorted(self._services.items())
        ]

    def _drop_greeting(self, greeting: _Greeting, error: EdgeRTError) -> None:
        self._forget_greeting(greeting)
        reject(greeting.sock, error)

    def _forget_greeting(self, greeting: _Greeting) -> None:
        self._greetings.discard(greeting)
        self._selector.unregister(greeting.sock)

    # --- workers ------------------------------------------------------------------------------

    def _service(self, model: str) -> ModelService:
        if model not in self._services:
            self._services[model] = ModelService(
                model, self._state, self._boot, self._watch_worker, self._report, self._clock
            )
        return self._services[model]

    def _watch_worker(self, service: ModelService, worker: WorkerProcess) -> None:
        self._selector.register(worker.channel, selectors.EVENT_READ, lambda: self._heard(service, worker))

    def _heard(self, service: ModelService, worker: WorkerProcess) -> None:
        try:
            received = channel.receive(worker.channel)
        except BlockingIOError:
            return
        if received is None:
            self._selector.unregister(worker.channel)
            worker.channel.close()
            service.ended(worker)
            return
        message, _ = received
        if message["op"] == "stats":
            self._collect_stats(service.model, message)
        else:
            service.received(worker, message)

    def _report(self, event: str, model: str, fields: dict[str, Any]) -> None:
        """Say what happened to a model, on the log and over telemetry."""
        self._say(f"{model}: {event} " + " ".join(f"{k}={v}" for k, v in fields.items()))
        self._reporter.event(event, model, fields)
        self._reporter.slots(s.store for s in self._services.values())

    # --- commands -----------------------------------------------------------------------------

    def _accept_control(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:
            return
        sock.setblocking(False)
        control = _ControlClient(sock, self._clock() + CONTROL_S_MAX)
        self._controls.add(control)
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._commanded(control))

    def _commanded(self, control: _ControlClient) -> None:
        try:
            data = control.sock.recv(LINE_BYTES_MAX)
        except OSError:
            data = b""
        control.data += data
        if data and not control.data.endswith(b"\n") and len(control.data) < LINE_BYTES_MAX:
            return
        self._drop_control(control)
        if not data:
            control.sock.close()
            return
        try:
            self._obey(control, json.loads(control.data))
        except EdgeRTError as error:
            control.reply(error_answer(error))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            control.reply(error_answer(ProtocolError(f"not a control request: {type(error).__name__}")))

    def _drop_control(self, control: _ControlClient) -> None:
        self._controls.discard(control)
        self._selector.unregister(control.sock)

    def _obey(self, control: _ControlClient, request: dict[str, Any]) -> None:
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
                control.reply(answer_of(service.as_json()) if error is None else error_answer(error))

            service.sync(settled)
        else:
            raise ProtocolError(f"no control request is called {op!r}")

    def _begin_round(self, control: _ControlClient) -> None:
        self._round += 1
        asked = set()
        for service in self._services.values():
            worker = service.current
            if worker is None:
                continue
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
        current.stats[model] = {k: v for k, v in message.items() if k not in ("op", "id")}
        if len(current.stats) == len(current.expected):
            self._finish_round(message["id"])

    def _finish_round(self, number: int) -> None:
        finished = self._rounds.pop(number)
        models = {
            name: {**service.as_json(), **finished.stats.get(name, {})} for name, service in self._services.items()
        }
        finished.client.reply(answer_of({"pid": os.getpid(), "boot": self._boot, "models": models}))

    # --- the forwarder ------------------------------------------------------------------------

    def _start_forwarder(self) -> None:
        """Start the process that sends the spool to the broker, where a broker is configured."""
        mqtt = self._config.mqtt
        if not mqtt.host:
            return
        path = self._state.spool.with_name("forwarder.json")
        value = {
            "site": self._config.site,
            "device": self._config.device,
            "boot": self._boot,
            "spool": os.fspath(self._state.spool),
            "info": {"edgert": __version__, "profile": self._config.profile, "machine": self._config.machine},
            "mqtt": {k: v for k, v in vars(mqtt).items() if v != ""},
            "sys_interval_s": self._config.serving.window_s,
        }
        path.write_text(json.dumps(value))
        self._forwarder = subprocess.Popen(
            [sys.executable, "-m", "edgert.telemetry.forwarder", "--config", os.fspath(path)], stdin=subprocess.DEVNULL
        )
        self._forwarder_at_s = self._clock() + FORWARDER_PAUSE_S

    def _tend_forwarder(self, now_s: float) -> None:
        """Start it again when it ended; looked at every few seconds, as nothing waits for it."""
        if self._forwarder is None or self._forwarder_at_s is None or now_s < self._forwarder_at_s:
            return
        self._forwarder_at_s = now_s + FORWARDER_PAUSE_S
        if self._forwarder.poll() is not None and self._stop_by_s is None:
            self._say(f"telemetry: the forwarder ended with {self._forwarder.returncode}; starting it again")
            self._start_forwarder()

    def _stop_forwarder(self) -> None:
        if self._forwarder is None:
            return
        self._forwarder.terminate()
        try:
            self._forwarder.wait(5.0)
        except subprocess.TimeoutExpired:
            self._forwarder.kill()

    # --- set-up -------------------------------------------------------------------------------

    def _listen(
        self, stack: contextlib.ExitStack, path: Path, mode: int, accept: Callable[[socket.socket], None]
    ) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # the lock says that no daemon of this state uses it
            listener = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC))
            listener.bind(os.fspath(path))
            path.chmod(mode)
            listener.listen(BACKLOG)
        except OSError as error:
            raise ConfigInvalid(f"cannot listen on {path}: {error.strerror}") from error
        listener.setblocking(False)
        stack.callback(path.unlink, missing_ok=True)
        self._selector.register(listener, selectors.EVENT_READ, lambda: accept(listener))

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
        print(line, file=sys.stderr, flush=True)


def notify_systemd(message: str) -> None:
    """sd_notify(3): tell the service manager, where there is one."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.sendto(message.encode(), "\0" + address[1:] if address.startswith("@") else address)


def _read_hello(greeting: _Greeting) -> dict[str, Any] | None:
    """The hello's content; None when the client is gone. Raises BlockingIOError while bytes are missing."""
    while True:
        wanted = 64
        if len(greeting.data) >= 64:
            header = wire.HEADER.unpack_from(greeting.data)
            if header[0] != wire.MAGIC or header[2] != wire.HELLO or header[10] > wire.HELLO_BYTES_MAX or header[8]:
                raise ProtocolError("a connection begins with a HELLO frame of at most 4096 bytes (docs/protocol.md)")
            wanted += header[10]
        missing = wanted - len(greeting.data)
        if not missing:
            break
        data = greeting.sock.recv(missing)
        if not data:
            return None
        greeting.data += data
    frames = wire.FrameBuffer(size_bytes=2 * wire.HELLO_BYTES_MAX)
    frames.room[: len(greeting.data)] = greeting.data
    hello = frames.feed(len(greeting.data))
    assert hello is not None  # the lengths above were those of a whole frame
    return hello.json()


@contextlib.contextmanager
def _sole_daemon(state: StateDir) -> Any:
    """Hold the state folder's pid file for as long as the daemon runs."""
    try:
        state.make()
        file = state.pid.open("a+")
    except OSError as error:
        raise StorageFailed(f"cannot write {state.pid}: {error.strerror}") from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DeviceError(f"a daemon runs on {state.root} already; stop it with: edgertd stop") from error
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        yield
