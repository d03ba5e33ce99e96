"""A device for tests: its own state folder, the real `edgertd` commands, the real daemon."""

from __future__ import annotations

import json
import os
import resource
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgert import Client
from edgert.bundle.signing import SigningKey, new_key
from edgert.checks.health import check_served
from edgert.checks.status import ask_daemon
from edgert.cli.start import start_daemon
from edgert.cli.status import device_status
from edgert.cli.stop import stop_daemon
from edgert.config import read_config
from edgert.errors import DaemonBusy, DaemonUnreachable
from edgert.protocol.control import ask
from edgert.state_dir import StateDir
from edgert.versions.install import install
from edgert.versions.slot_store import SlotStore
from tests.support.bundles import make_null_bundle
from tests.support.paths import IN_MEMORY
from tests.support.stand_ins.forked_edgertd import shared

WAIT_S_MAX = 120.0  # long enough for a busy machine


def as_run(command: list[str]) -> list[str]:
    """Return `command`, an `edgertd` command, unchanged; the fixture `edgertd_is_forked` replaces this function."""
    return command


@dataclass
class Device:
    """A device in `folder`, which has a short path because the path of a socket must be short."""

    folder: Path
    key: SigningKey = field(default_factory=new_key)
    forked: bool = False  # `edgertd`, the daemon and its workers are forks; the daemon has no monitor
    monitors: list[subprocess.Popen[bytes]] = field(default_factory=list, repr=False)

    @property
    def state(self) -> StateDir:
        return StateDir(self.folder / "state")

    @property
    def socket(self) -> Path:
        return self.state.root / "edgert.sock"

    def prepare(self, config: str = "") -> None:
        """Write the files of a bootstrap; `config` is appended to config.toml."""
        self.state.keys.mkdir(parents=True)
        (self.state.keys / "test.pem").write_bytes(self.key.public.pem())
        self.state.config.write_text(f'device = "d-test"\nprofile = "this-machine"\n{config}')

    def run(self, *words: str, code: int = 0) -> dict[str, Any]:
        """Run an `edgertd` command with --json and return its answer. The command must end with `code`."""
        command = [sys.executable, "-m", "edgert.cli", "--state", os.fspath(self.state.root), *words, "--json"]
        argv = shared().argv(command) if self.forked else as_run(command)
        done = subprocess.run(argv, capture_output=True, text=True, timeout=2 * WAIT_S_MAX)
        assert done.returncode == code, f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}\n{self.log()}"
        return dict(json.loads(done.stdout))

    def start(self) -> None:
        """Start a stopped daemon as `edgertd start` does, without a process for the command."""
        if self.forked:
            self.run("start")
            return
        self.monitors += filter(None, start_daemon(self.state)[:1])

    def stop(self) -> None:
        """Stop the daemon as `edgertd stop` does, without a process for the command. Ask a busy daemon again."""

        def stopped() -> bool:
            try:
                stop_daemon(self.state)
            except DaemonBusy:
                return False
            return True

        wait_until(stopped, "the daemon stops")

    def bundle(self, **options: Any) -> Path:
        return make_null_bundle(self.folder / "bundles", self.key, **options)

    def deploy(self, **options: Any) -> None:
        """Install, activate, check and mark good a null bundle made with `options`."""
        model = options.get("model", "echo")
        self.run("install", os.fspath(self.bundle(**options)))
        self.run("activate", model)
        self.run("check", model)
        self.run("mark-good", model)

    def put(self, **options: Any) -> None:
        """Do the same as `deploy` without the check, and without a process for each command."""
        self.keep(options.get("model", "echo"), self.bundle(**options))

    def keep(self, model: str, bundle: Path, *, checked: bool = False) -> None:
        """Make `bundle` live and good; if `checked`, its golden answers through the socket must be right."""
        store, config = SlotStore(self.state.models / model), read_config(self.state)
        install(bundle, self.state, config)
        store.activate(10 * WAIT_S_MAX)
        self.sync(model)
        if checked:
            assert check_served(model, store, self.state, config)["ok"]
        store.mark_good()
        self.sync(model)

    def stage(self, **options: Any) -> SlotStore:
        """Install a null bundle without a daemon; return its model's slots."""
        install(self.bundle(**options), self.state, read_config(self.state))
        return SlotStore(self.state.models / options.get("model", "echo"))

    def replace(self, model: str, **options: Any) -> None:
        """Do `put`, and wait until the previous worker has ended, because it may still answer for a moment."""
        pid = self.serving(model)["pid"]
        self.put(model=model, **options)
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), "the worker of the release before has ended")

    def sync(self, model: str) -> dict[str, Any]:
        """Let the daemon follow the slots of `model`; return its status of the model."""
        return ask(self.state.control_socket, {"op": "sync", "model": model}, WAIT_S_MAX)

    def serving(self, model: str = "echo") -> dict[str, Any]:
        """Return the daemon's status of one model, without a process for the command."""
        return dict(ask(self.state.control_socket, {"op": "status"}, WAIT_S_MAX)["models"][model])

    def daemon_pid(self) -> int | None:
        """Return the daemon's process id; None if no daemon answers. Starts no process for the command."""
        try:
            return ask_daemon(self.state.control_socket).pid
        except (DaemonUnreachable, DaemonBusy):
            return None

    def model(self, name: str = "echo") -> dict[str, Any]:
        """Return the status of one model that `edgertd status` prints, without a process for the command."""
        status = device_status(self.state, read_config(self.state)).as_json()
        return next(dict(each) for each in status["models"] if each["model"] == name)

    def client(self, timeout_s: float = WAIT_S_MAX) -> Client:
        return Client(self.socket, timeout_s=timeout_s)

    def log(self) -> str:
        return self.state.log.read_text() if self.state.log.exists() else ""


@contextmanager
def a_device(config: str = "", *, started: bool = True, programs: bool = False) -> Iterator[Device]:
    """Yield a prepared device, its daemon running if `started`; remove everything afterwards.

    With `programs`, the commands, the monitor, the daemon and the first model's workers are separate programs, as on a
    device. Each of them takes 0.3 s to import edgert. Otherwise they are forks of a process that has imported edgert.
    """
    device = Device(Path(tempfile.mkdtemp(prefix="edgert-", dir=IN_MEMORY)), forked=not programs)
    try:
        device.prepare(config)
        if started:
            device.start()
        yield device
    finally:
        device.stop()
        for monitor in device.monitors:
            monitor.terminate()
            monitor.wait(WAIT_S_MAX)
        shutil.rmtree(device.folder, ignore_errors=True)


def events(device: Device, name: str = "") -> list[dict[str, Any]]:
    """Return the events that the device sent so far. With `name`, wait for such an event; return only these."""

    def told() -> list[dict[str, Any]]:
        with closing(sqlite3.connect(device.state.spool)) as spool:
            rows = spool.execute("select payload from message where kind = 'event' order by id").fetchall()
        values = [json.loads(row[0]) for row in rows]
        return [value for value in values if name in ("", value["event"])]

    wait_until(lambda: bool(told()), f"event {name} is told")
    return told()


def http_port(device: Device) -> int:
    """Wait until the device's HTTP server listens, and return its port."""
    said = "http: listens on 127.0.0.1:"
    wait_until(lambda: said in device.log(), "the HTTP server says where it listens")
    return int(device.log().rsplit(said, 1)[1].split()[0])


def http_pid(device: Device) -> int | None:
    """Return the process id of the device's HTTP server; None if no server runs."""
    daemon = ask(device.state.control_socket, {"op": "status"}, WAIT_S_MAX)["pid"]
    for child in Path(f"/proc/{daemon}/task/{daemon}/children").read_text().split():
        with suppress(OSError):  # it has ended meanwhile
            if b"edgert.http" in Path(f"/proc/{child}/cmdline").read_bytes():
                return int(child)
    return None


def runs(pid: int) -> bool:
    """Return whether a process runs. After its end it has no command line, even if nobody has reaped it."""
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


@contextmanager
def nothing_may_be_written() -> Iterator[None]:
    """Let files be created but not written, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def wait_until(true: Callable[[], object], what: str, timeout_s: float = WAIT_S_MAX, pause_s: float = 0.1) -> None:
    """Poll until `true()`; fail with `what` after `timeout_s`.

    The pauses grow with the waiting time, up to `pause_s`, because frequent polling takes processor time from the
    process under test. Use a larger `pause_s` if `true` itself is expensive.
    """
    began = time.monotonic()
    while not true():
        waited_s = time.monotonic() - began
        assert waited_s < timeout_s, f"waited {timeout_s:.0f} s in vain: {what}"
        time.sleep(min(pause_s, 0.01 + waited_s / 10))
