"""Updates of the runtime by a channel: fetch and create a new runtime, test it, and start its trial.

Theory of operation: the follower fetches the wheels to STATE/incoming, like the files of a model. The next steps are
the same as in `edgert bootstrap --upgrade` (edgert.environment), and the same script HOME/runtime.sh decides which
runtime stays. After an interrupted round, a later round repeats the steps. If an environment is incomplete, the later
round creates it again. The files of the script show whether a trial started, and its result.

The follower runs as the daemon's user. So it can change only a runtime that belongs to this user, and refuses to change
a runtime that root installed.
"""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from edgert.bundle.bundle_file import ENVELOPE_BYTES_MAX
from edgert.bundle.channel import Entry
from edgert.bundle.runtime_release import RuntimeTarget, Wheel, read_runtime
from edgert.bundle.signing import PublicKey
from edgert.checks.status import WILL_SERVE, ask_daemon
from edgert.config import UNIT, DeviceConfig
from edgert.durable import check_free, locked, store_file, storing
from edgert.environment import (
    INSTALLED_FACTOR,
    RELEASE_NAME,
    SPARE_BYTES,
    VENV_S_MAX,
    Environment,
    Installed,
    Result,
    RuntimeOutcome,
    RuntimeResult,
    changed_wheels,
    make_environment,
    self_test,
    trial_command,
    trial_of,
)
from edgert.errors import ChannelMismatch, ConfigInvalid, DeployUnderWay, DeviceError, ReleaseTooOld, RolledBack
from edgert.follow.decision import Action, Decision
from edgert.follow.pace import Pace
from edgert.follow.record import Attempt, RecordStore
from edgert.names import RUNTIME
from edgert.registry.artifacts import file_blob
from edgert.registry.client import Blob, Registry
from edgert.state_dir import StateDir
from edgert.versions.boot_clock import BootClock
from edgert.versions.claims import Claims
from edgert.versions.install import fetched_path
from edgert.versions.slot_store import SlotStore

if TYPE_CHECKING:
    from edgert.follow.follower import Report

BEGIN_S_MAX = 60.0  # the longest time until the script starts the trial
POLL_S = 0.05


@dataclass(frozen=True)
class InstalledRuntimes:
    """The runtimes in HOME, by the ids of their environments.

    `on_trial` is the runtime on trial; "" if there is no trial. `outcome` is the result of the last trial.
    """

    in_use: str = ""
    on_trial: str = ""
    outcome: RuntimeOutcome = field(default_factory=RuntimeOutcome)


def decide_runtime(
    entry: Entry, runtime: str, runtimes: InstalledRuntimes, tried: Attempt | None, newest: int
) -> Decision:
    """Return the follower's next action for `entry`, a release of the runtime. Has no side effects.

    `runtime` is the id of the release's environment on this device, `tried` the earlier attempt with the same entry,
    and `newest` the highest release that was in use.
    """
    name = f"release {entry.release} of {entry.model}"
    last = runtimes.outcome
    if runtimes.on_trial:
        return Decision(
            Action.WAIT, f"{name} {'is on trial' if runtimes.on_trial == runtime else 'waits for another trial'}"
        )
    if runtimes.in_use == runtime:
        return Decision(Action.NOTHING, f"{name} is live")
    if tried is not None and tried.reason:
        return Decision(Action.NOTHING, f"{name} is not tried again: {tried.reason}")
    if tried is not None and last.runtime == runtime and last.result is RuntimeResult.ROLLED_BACK:
        return Decision(Action.NOTHING, f"{name} is not tried again: it was rolled back ({last.reason})")
    if tried is not None and (
        newest >= entry.release or (last.runtime == runtime and last.result is RuntimeResult.KEPT)
    ):
        return Decision(Action.NOTHING, f"{name} is not tried again: another runtime became live here after it")
    if entry.halted:
        return Decision(Action.NOTHING, f"{name} is halted")
    return Decision(Action.FETCH, f"{name} is wanted")


class RuntimeFollower:
    """Updates the runtime in `home` to a channel's release. `home` is None if no bootstrap created one."""

    def __init__(
        self, registry: Registry, state: StateDir, config: DeviceConfig, pace: Pace, report: Report, home: Path | None
    ) -> None:
        self._registry = registry
        self._state = state
        self._config = config
        self._pace = pace
        self._home = home
        self._report = report
        self._records = RecordStore(state)

    def next_step(self, entry: Entry, trusted: tuple[PublicKey, ...]) -> Decision:
        """Return the next action for `entry`.

        If a trial of its runtime has ended, record and report this first. Raises RegistryError, BundleError,
        ChannelMismatch and StorageFailed; also ConfigInvalid if bootstrap did not install the runtime.
        """
        home = self._own_home(check=False)
        runtimes = self._installed_runtimes(home)
        target = self._target(entry, trusted, _installed(home, runtimes.in_use))
        if not runtimes.on_trial:
            self._note_end(home, entry, target.id, runtimes)
        record = self._records.read()
        decision = decide_runtime(entry, target.id, runtimes, record.attempt_of(entry), record.runtime)
        if decision.action is Action.FETCH and entry.release < record.runtime:
            raise ReleaseTooOld(
                f"release {entry.release} of {RUNTIME} is older than {record.runtime}, which was live here: publish it with a "
                "higher number"
            )
        return decision

    def _note_end(self, home: Path, entry: Entry, runtime: str, runtimes: InstalledRuntimes) -> None:
        """Record and report that the runtime of `entry` is in use, or that it failed its trial."""
        record = self._records.read()
        tried, last = record.attempt_of(entry), runtimes.outcome
        if runtimes.in_use == runtime and record.runtime < entry.release:
            if os.access(home / "venvs", os.W_OK):
                store_file(home / "venvs" / runtime / RELEASE_NAME, f"{entry.release}\n".encode())
            self._records.write(replace(record, runtime=entry.release))
            self._report("kept", RUNTIME, {"release": entry.release})
        elif (
            tried is not None
            and not tried.reason
            and (last.result, last.runtime) == (RuntimeResult.ROLLED_BACK, runtime)
        ):
            self._records.write(record.with_attempt(entry, f"it was rolled back ({last.reason})"))
            self._report("rolled_back", RUNTIME, {"release": entry.release, "reason": last.reason})
        else:
            return
        self._collect(home)

    def fetch(self, entry: Entry, trusted: tuple[PublicKey, ...]) -> None:
        """Fetch the wheels that the environment lacks. Raises RegistryError, StorageFailed, WindowClosed."""
        home = self._own_home()
        base = _installed(home, self._installed_runtimes(home).in_use)
        target = self._target(entry, trusted, base)
        if not _complete(home, target.id):
            changed = _changed(target, base.base_for(target.python, target.engines))
            self._check_space(home, changed)
            for wheel in changed:
                self._pace.check()
                self._registry.download(file_blob(wheel), self._fetched(wheel), self._pace.count_bytes)

    def try_out(self, entry: Entry, trusted: tuple[PublicKey, ...]) -> None:
        """Create the environment, test the environment and start its trial.

        The script `runtime.sh` decides whether the runtime stays, and restarts the daemon at most twice. Raises
        DeployUnderWay, EngineMissing, DaemonUnreachable and DeviceError; also RolledBack if the test failed.
        """
        home = self._own_home()
        with self._claimed(home):
            base = _installed(home, self._installed_runtimes(home).in_use)
            target = self._target(entry, trusted, base)
            if not _complete(home, target.id):
                self._make(home, target, base.base_for(target.python, target.engines))
            daemon = ask_daemon(self._state.control_socket)
            models = [name for name, model in daemon.models.items() if model.state in WILL_SERVE]
            folder = home / "venvs" / target.id
            why = self_test(_run, os.fspath(folder), os.fspath(self._state.root), models)
            if why:
                self._collect(home)
                raise RolledBack(f"the new runtime failed its self-test: {why}")
            # Both files are written first. So whatever the result of the trial, this release is not tried again.
            store_file(folder / RELEASE_NAME, f"{entry.release}\n".encode())
            self._records.write(self._records.read().with_attempt(entry))
            self._begin_trial(home, target.id, models, _manager(daemon.pid), entry.watch_s)

    def _own_home(self, *, check: bool = True) -> Path:
        """Return HOME. Raises ConfigInvalid if there is no HOME.

        With `check`, also raises ConfigInvalid if this user cannot change HOME.
        """
        if self._home is None:
            raise ConfigInvalid(
                f"edgertd runs in {sys.prefix}, which edgert bootstrap did not install: update this environment by hand"
            )
        if check and not os.access(self._home, os.W_OK, effective_ids=True):
            owner = self._home.stat().st_uid
            raise ConfigInvalid(
                f"the runtime in {self._home} belongs to {'root' if owner == 0 else f'user {owner}'}, so the follower "
                "cannot change it: run edgert bootstrap --upgrade from the host"
            )
        return self._home

    def _installed_runtimes(self, home: Path) -> InstalledRuntimes:
        return InstalledRuntimes(
            _target_of(home / "venv"), trial_of(home), RuntimeOutcome.read(_content(home / "outcome"))
        )

    def _target(self, entry: Entry, trusted: tuple[PublicKey, ...], base: Installed) -> RuntimeTarget:
        """Return this device's part of the release. Fetch the envelope once; verify its signature each time."""
        path = self._records.runtime_release
        data = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(data).hexdigest() != entry.envelope:
            data = self._registry.read(Blob(f"sha256:{entry.envelope}", ENVELOPE_BYTES_MAX), ENVELOPE_BYTES_MAX)
            store_file(path, data)
        release, payload = read_runtime(data, trusted)
        if (release.release, hashlib.sha256(payload).hexdigest()) != (entry.release, entry.digest):
            raise ChannelMismatch(
                f"the channel names release {entry.release} of {RUNTIME}, but the registry has release {release.release} "
                "or other content: publish it again"
            )
        python = "{}.{}".format(*sys.version_info)
        glibc = (os.confstr("CS_GNU_LIBC_VERSION") or "").rpartition(" ")[2]
        has = frozenset(base.engines), frozenset(base.extras)
        return release.target_for(python, self._config.machine, glibc, *has)

    def _fetched(self, wheel: Wheel) -> Path:
        return fetched_path(self._state, RUNTIME, wheel.sha256)

    def _check_space(self, home: Path, wheels: Sequence[Wheel]) -> None:
        fetched_bytes = sum(path.stat().st_size for wheel in wheels if (path := self._fetched(wheel)).is_file())
        sent = sum(wheel.size_bytes for wheel in wheels)
        new_bytes = int(sum(wheel.unpacked_bytes for wheel in wheels) * INSTALLED_FACTOR)
        need = {self._state.root: sent - fetched_bytes, home: sent + new_bytes}
        if self._state.root.stat().st_dev == home.stat().st_dev:
            need = {home: sent - fetched_bytes + new_bytes}  # the wheels are linked, not copied
        for folder, count in need.items():
            check_free(folder, count + SPARE_BYTES, "the runtime")

    @contextmanager
    def _claimed(self, home: Path) -> Iterator[None]:
        """Lock out bootstraps and deployments, like `edgert bootstrap`. Raises DeployUnderWay."""
        with storing(f"cannot use {home}", busy=DeployUnderWay("a bootstrap runs on this device")):
            lock = locked(home / "working", wait_s=0)
        with lock:
            claim = dict(line.partition("=")[::2] for line in _content(home / "setup").splitlines())
            until = float(claim["until"]) if claim.get("until", "").isdecimal() else 0.0
            if BootClock().left_s(claim.get("boot", ""), until) > 0:
                raise DeployUnderWay(f"a bootstrap is in progress on this device, by {claim.get('who')}")
            for deployment in Claims(self._state, self._config.device).under_way():
                raise DeployUnderWay(f"a deployment of {deployment.model} is in progress, by {deployment.by}")
            for model in self._state.model_names():
                if SlotStore(self._state.models / model).read().on_trial:
                    raise DeployUnderWay(f"{model} is on trial")
            yield

    def _make(self, home: Path, target: RuntimeTarget, base: Installed) -> None:
        folder = home / "wheels"
        with storing(f"cannot write {folder}"):
            folder.mkdir(exist_ok=True)
            for wheel in _changed(target, base):
                _link(self._fetched(wheel), folder / wheel.name)
        version = next((wheel.name.split("-")[1] for wheel in target.wheels if wheel.name.startswith("edgert-")), "")
        about = {"edgert": version, "extras": list(target.extras), "python": target.python}
        device = self._config.device
        python = os.path.realpath(sys._base_executable)  # type: ignore[attr-defined]  # typeshed lacks it
        where = device, os.fspath(home), target.id, python
        make_environment(_run, Environment(*where, target.engines, target.pins, base, about=about))

    def _begin_trial(self, home: Path, runtime: str, models: Sequence[str], manager: str, trial_s: float) -> None:
        began = _run(
            trial_command(os.fspath(home), os.fspath(self._state.root), runtime, models, manager, trial_s), VENV_S_MAX
        )
        if not began.ok:
            raise DeviceError(f"the trial of the new runtime did not start: {began.failure_text()}")
        until = time.monotonic() + BEGIN_S_MAX
        while time.monotonic() < until:
            runtimes = self._installed_runtimes(home)
            ended = runtimes.outcome.runtime == runtime and runtimes.outcome.result is not RuntimeResult.RUNNING
            if runtimes.on_trial or ended:
                return
            time.sleep(POLL_S)
        raise DeviceError(f"the trial of the new runtime did not start within {BEGIN_S_MAX:.0f} s")

    def _collect(self, home: Path) -> None:
        _run(["sh", os.fspath(home / "runtime.sh"), "collect"], VENV_S_MAX)


def _run(argv: Sequence[str], timeout_s: float) -> Result:
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, errors="replace", timeout=timeout_s, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise DeviceError(f"`{shlex.join(argv)[:200]}` failed: {error}") from error
    return Result(tuple(argv), done.returncode, done.stdout, done.stderr)


def _installed(home: Path, runtime: str) -> Installed:
    folder = home / "venvs" / runtime
    lines = _content(folder / "pyvenv.cfg").splitlines()
    return Installed.read(runtime, _content(folder / ".complete"), dict(line.partition(" = ")[::2] for line in lines))


def _changed(target: RuntimeTarget, base: Installed) -> list[Wheel]:
    names = set(changed_wheels(target.pins, base.wheels))
    return [wheel for wheel in target.wheels if wheel.name in names]


def _complete(home: Path, runtime: str) -> bool:
    return (home / "venvs" / runtime / ".complete").exists() and (home / "venvs" / runtime / "bin/python").exists()


def _manager(daemon: int) -> str:
    """Return the manager that restarts the daemon: system, user (systemd) or monitor."""
    if f"/{UNIT}" not in _content(Path(f"/proc/{daemon}/cgroup")):
        return "monitor"
    return "system" if os.geteuid() == 0 else "user"


def _link(source: Path, path: Path) -> None:
    path.unlink(missing_ok=True)
    try:
        os.link(source, path)
    except OSError:  # `path` is on another file system than `source`
        shutil.copyfile(source, path)


def _target_of(link: Path) -> str:
    try:
        return os.path.basename(os.readlink(link))
    except OSError:
        return ""


def _content(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
