"""Bootstrap: turn a bare device into one that takes deployments, or bring such a device up to date.

A bootstrap looks at the device, plans what has to change, and does exactly that: a second one changes nothing. It
replaces a runtime only on request, or if an engine is missing, and then on trial (edgert_deploy.bootstrap.runtime). If it
is interrupted, the old runtime goes on serving, and the next bootstrap continues.

    HOME/                    the runtimes (edgert_deploy.bootstrap.runtime)
    HOME/receipt             what else bootstrap made, for `edgert uninstall`
    STATE/config.toml        the device's configuration; lines that the user added stay
    STATE/keys/<id>.pem      the trusted public keys
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import PurePosixPath
from typing import Any

from edgert.bundle.signing import PublicKey
from edgert.checks.status import DeviceStatus
from edgert.config import DeviceConfig
from edgert.engines import engine_by_name
from edgert.environment import TENSORRT_HINT
from edgert.errors import DeployUnderWay, DeviceError, EdgeRTError, EngineMissing, RolledBack
from edgert.telemetry.link import CONNECTED, STOPPED, Link
from edgert_deploy.bootstrap import wheelhouse
from edgert_deploy.bootstrap.locked_wheels import shipped_lock
from edgert_deploy.bootstrap.runtime import (
    TRIAL_S,
    RuntimePlan,
    Runtimes,
    RuntimeThere,
    plan_runtime,
    script_text,
)
from edgert_deploy.bootstrap.wheelhouse import Wheelhouse, WheelTarget
from edgert_deploy.devices import service
from edgert_deploy.devices.claims import note_folders, setting_up
from edgert_deploy.devices.device_files import (
    Broker,
    DeviceFile,
    Following,
    broker_doubt,
    check_config,
    config_there,
    holds,
    put,
    wanted_files,
)
from edgert_deploy.devices.facts import PYTHONS, MachineFacts, describe, misfits, probe
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.devices.remote import RemoteDaemon, script_path
from edgert_deploy.devices.service import Unit
from edgert_deploy.devices.transports import Transport, in_folder

QUICK_S_MAX = 60.0
ANSWER_S_MAX = 60.0  # until the daemon of the previous runtime answers again
BROKER_S_MAX = 15.0  # for the first connection of the new daemon
FIRST_ENGINE, ALL_ENGINES = "first", "all"

Progress = Callable[[str], None]


@dataclass(frozen=True)
class BootstrapOptions:
    """The request of a bootstrap: what it installs and configures.

    `engines` is `all` of the profile, the `first`, or names with commas. Named engines must load; of `all`, an engine
    without wheels for the device is left out. `upgrade` replaces a runtime in use by this host's. `service` is systemd,
    monitor (edgertd's own, which no reboot starts), or auto: systemd if it runs there. `settings` go into the device's
    config.toml: {"serving": {"window_s": 10.0}}. `unlocked` takes the newest wheels in place of the locked ones.
    `extras` are more of edgert's extras to install; those that a device has stay.
    """

    keys: tuple[PublicKey, ...]
    broker: Broker | None = None
    engines: str = ALL_ENGINES
    refresh: bool = False
    service: str = "auto"
    settings: dict[str, Any] = field(default_factory=dict)
    upgrade: bool = False
    trial_s: float = TRIAL_S
    unlocked: bool = False
    following: Following | None = None
    extras: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise ConfigInvalid for an engine that does not exist."""
        if self.engines not in (ALL_ENGINES, FIRST_ENGINE):
            for name in self._named():
                engine_by_name(name)

    @property
    def exactly(self) -> bool:
        """Whether every engine must load."""
        return self.engines != ALL_ENGINES

    def engines_of(self, profile: DeviceProfile) -> tuple[str, ...]:
        if self.engines == ALL_ENGINES:
            return profile.engines
        if self.engines == FIRST_ENGINE:
            return profile.engines[:1]
        return self._named()

    def _named(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name.strip() for name in self.engines.split(",") if name.strip()))


@dataclass
class BootstrapResult:
    """The result of a bootstrap. `engines` load on the device; `lacking` says why others do not.

    `sbom` is the file on this host with the bill of materials of the runtime that it prepared.
    """

    device: str
    profile: str
    service: str
    engines: list[str] = field(default_factory=list)
    lacking: dict[str, str] = field(default_factory=dict)
    runtime: dict[str, Any] | None = None
    changed: list[str] = field(default_factory=list)
    status: DeviceStatus | None = None
    sbom: str = ""


@dataclass(frozen=True)
class BootstrapPlan:
    """The steps that a bootstrap will take. `files` are those that differ; `runtime` is None for a device that needs none."""

    device: Device
    profile: DeviceProfile
    facts: MachineFacts
    options: BootstrapOptions
    service: str
    runtime: RuntimePlan | None
    files: tuple[DeviceFile, ...]
    config: DeviceConfig
    restart_due: bool
    there: RuntimeThere = field(default_factory=RuntimeThere)
    house: Wheelhouse | None = None

    def steps(self) -> list[str]:
        """Return the steps as text, in order."""
        lines = []
        plan = self.runtime
        if plan is not None and plan.changes:
            lines.append(f"send {len(plan.send)} wheels, {plan.send_bytes / 1e6:.1f} MB")
            made = f"make runtime {plan.id} (edgert {plan.edgert} with {', '.join(plan.engines)})"
            lines.append(f"{made}: {plan.disk_bytes / 1e6:.0f} MB of {plan.free_bytes / 1e6:.0f} MB free")
            if plan.action == "upgrade":
                lines.append(
                    f"self-test it, then try it for at most {self.options.trial_s:.0f} s; {plan.current} stays if it fails"
                )
        lines += [f"write {file.change}: {file.path}" for file in self.files]
        if lines or self.restart_due:
            lines.append("restart the daemon")
        return lines

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.device.name,
            "profile": self.profile.name,
            "facts": asdict(self.facts),
            "service": self.service,
            "runtime": None if self.runtime is None else asdict(self.runtime),
            "files": [file.path for file in self.files],
            "steps": self.steps(),
        }


_KEEP_UNIT = 'test -e "$1" || { cp -p "$2" "$1.new" && sync && mv "$1.new" "$1" && sync; }'


def bootstrap(
    device: Device,
    profile: DeviceProfile,
    options: BootstrapOptions,
    transport: Transport,
    progress: Progress = lambda _: None,
) -> BootstrapResult:
    """Install, configure and start EdgeRT on `device`.

    Raises DeviceError (with what to install by hand), ConfigInvalid, EngineMissing, StorageFailed, RolledBack if a new
    runtime failed its trial, and DeployUnderWay if another host works on the device.
    """
    with setting_up(device, transport) as held:
        plan = plan_bootstrap(device, profile, options, held, progress)
        return _Work(device, held, progress).apply(plan)


def plan_bootstrap(
    device: Device,
    profile: DeviceProfile,
    options: BootstrapOptions,
    transport: Transport,
    progress: Progress = lambda _: None,
) -> BootstrapPlan:
    """Look at the device and plan what has to change. Only a runtime trial that cannot succeed any more is ended.

    Raises as `bootstrap`.
    """
    facts = probe(transport, device.name)
    progress(describe(facts))
    python = facts.python_path if device.kind.needs_runtime else device.python
    if options.broker is not None and python and (doubt := broker_doubt(options.broker, device, python, transport)):
        progress(f"warning: {doubt}")
    unit = None if options.service == "monitor" else service.unit_for(device, facts)
    if unit is None and options.service == "systemd":
        raise DeviceError(f"systemd does not run on {device.name}: omit --service, or give --service monitor")
    there, house, plan = RuntimeThere(), None, None
    if device.kind.needs_runtime:
        _check_machine(device, profile, facts, transport)
        there, house, plan = _plan_runtime(Runtimes(device, transport, progress), facts, options, profile)
    files, config = wanted_files(
        device,
        profile,
        facts,
        options.keys,
        options.broker,
        options.following,
        options.settings,
        unit is not None,
        transport,
    )
    if unit is not None:
        unit = service.unit_for(device, facts, (*profile.engines, *options.engines_of(profile)), config)
        assert unit is not None
        files.append(DeviceFile(unit.path, unit.text.encode(), "unit"))
    if device.kind.needs_runtime:
        files.insert(0, DeviceFile(script_path(device), script_text(), "runtime.sh"))
    differing = tuple(file for file in files if not holds(transport, file))
    due = there.restart_due
    if not device.kind.needs_runtime:
        due = transport.run(["test", "-e", _marker(device)], QUICK_S_MAX).ok
    kept_by = "systemd" if unit else "monitor"
    return BootstrapPlan(device, profile, facts, options, kept_by, plan, differing, config, due, there, house)


def use_previous_runtime(
    device: Device, options: BootstrapOptions, transport: Transport, progress: Progress = lambda _: None
) -> BootstrapResult:
    """Change to the previous runtime, on trial like any change. Raises DeviceError if there is none."""
    with setting_up(device, transport, make=False) as held:
        facts, work = probe(held, device.name), _Work(device, held, progress)
        there = work.runtimes.look() if device.kind.needs_runtime else RuntimeThere()
        _check_no_trial(device, there)
        if not there.previous or there.previous == there.current:
            raise DeviceError(f"{device.name} has no previous runtime: nothing was changed")
        unit = None if options.service == "monitor" else service.unit_for(device, facts)
        done = BootstrapResult(device.name, device.profile, "systemd" if unit else "monitor")
        done.runtime = {"action": "rollback", "current": there.current, "id": there.previous}
        work.try_out(there.previous, work.runtimes.live_models(), unit, options.trial_s)
        done.changed.append("runtime")
        done.status = RemoteDaemon(held, device).status()
        done.engines = list(done.status.engines)
        return done


def _plan_runtime(
    runtimes: Runtimes, facts: MachineFacts, options: BootstrapOptions, profile: DeviceProfile
) -> tuple[RuntimeThere, Wheelhouse, RuntimePlan]:
    there, progress = runtimes.look(), runtimes.progress
    _check_no_trial(runtimes.device, there)
    target = WheelTarget(facts.python, facts.machine, facts.glibc)
    wanted = options.engines_of(profile)
    lock = None if options.unlocked else shipped_lock()
    house = wheelhouse.prepare(
        target,
        wanted,
        progress,
        refresh=options.refresh,
        shrink=not options.exactly,
        lock=lock,
        extras=sorted({*options.extras, *there.extras}),  # a model that the device serves may need what it has
    )
    loaded = runtimes.loaded_engines() if there.current and there.engines is None else ()
    plan = plan_runtime(there, facts, house, upgrade=options.upgrade, exactly=options.exactly, loaded=loaded)
    if plan.action == "upgrade" and there.configured:
        runtimes.live_models()  # refuse before a byte is sent: a deployment may be under way
    for engine, why in house.lacking.items():
        progress(f"{engine} is left out: {why}")
    if plan.action == "keep":
        progress(f"runtime {plan.current} stays; --upgrade installs this host's {plan.id}, edgert {plan.edgert}")
    return there, house, plan


def _check_no_trial(device: Device, there: RuntimeThere) -> None:
    if there.trial:
        raise DeployUnderWay(f"{device.name} is trying a new runtime. It decides within minutes: try again then")


class _Work:
    """The changes of one bootstrap."""

    def __init__(self, device: Device, transport: Transport, progress: Progress) -> None:
        self.device, self.transport, self.progress = device, transport, progress
        self.runtimes = Runtimes(device, transport, progress)

    def apply(self, plan: BootstrapPlan) -> BootstrapResult:
        """Do what `plan_bootstrap` planned. Raises as `bootstrap`."""
        done = BootstrapResult(self.device.name, plan.profile.name, plan.service)
        unit = _unit(plan, plan.config)
        if unit is not None:
            service.check(self.transport, self.device, unit)
        if plan.runtime is not None and plan.house is not None:
            done.sbom = str(plan.house.sbom or "")
            self._install_runtime(plan, plan.runtime, plan.house, done)
        self._write([file for file in plan.files if file.change not in ("unit", "runtime.sh")], done)
        if unit is not None:
            if not unit.user and service.give_to_user(self.transport, self.device):
                self._mark()
                done.changed.append("user")
            self._write([file for file in plan.files if file.change == "unit"], done)
            service.enable(self.transport, self.device, unit)  # an interrupted bootstrap may have written only the file
        # The daemon reads keys at each install, and the script runs at each start: neither needs a restart.
        if plan.restart_due or any(not change.startswith(("key ", "runtime")) for change in done.changed):
            self.progress("starting the daemon")
            before = self._link()
            service.restart(self.transport, self.device, unit)
            self.transport.run(["rm", "-f", _marker(self.device)], QUICK_S_MAX)
            if not done.changed:
                done.changed.append("daemon restarted")
            self._wait_for_the_broker(before)
        elif not RemoteDaemon(self.transport, self.device).status().daemon.running:
            self.progress("starting the daemon, which was not running")
            service.start(self.transport, self.device)
            done.changed.append("daemon started")
        done.status = RemoteDaemon(self.transport, self.device).status()
        _check_engines(plan, done)
        if self.device.kind.needs_runtime:
            self.runtimes.collect()
        return done

    def try_out(self, runtime: str, models: Sequence[str], unit: Unit | None, trial_s: float) -> None:
        """Switch to `runtime` on trial. Raises RolledBack once the daemon of the old one answers again."""
        manager = "monitor" if unit is None else "user" if unit.user else "system"
        self.progress(f"trying runtime {runtime}: unless it serves within {trial_s:.0f} s, the device switches back")
        try:
            self.runtimes.try_out(runtime, models, manager, trial_s)
        except RolledBack:
            self._wait_for_the_daemon()
            self.runtimes.collect()
            raise

    def _install_runtime(
        self, plan: BootstrapPlan, change: RuntimePlan, house: Wheelhouse, done: BootstrapResult
    ) -> None:
        """Install the runtime if it has to change, and put it into use."""
        done.runtime = {
            "action": change.action,
            "current": change.current,
            "id": change.id,
            "sent_bytes": change.send_bytes,
        }
        self._note_folders(plan)
        if change.changes:
            self.runtimes.install(plan.facts, change, plan.there, house, plan.options.exactly)
        if change.action == "install" or (change.action == "upgrade" and not plan.there.configured):
            self.runtimes.use_first(change)
            done.changed.append("environment")
        self._write([file for file in plan.files if file.change == "runtime.sh"], done)
        if change.action == "upgrade" and plan.there.configured:
            models = self.runtimes.live_models()
            self.progress("testing the new runtime beside the one in use")
            try:
                self.runtimes.self_test(change, models)
            except RolledBack:
                self.runtimes.collect()
                raise
            unit = _unit(plan, config_there(self.device, self.transport))
            if unit is not None:
                self._put_trial_unit(unit)
            self.try_out(change.id, models, unit, plan.options.trial_s)
            done.changed.append("runtime")

    def _put_trial_unit(self, unit: Unit) -> None:
        """Write this host's unit for the present configuration. The old unit is kept, and returns with the old runtime."""
        file = DeviceFile(unit.path, unit.text.encode(), "unit")
        if not unit.user:
            service.give_to_user(self.transport, self.device)
        if not holds(self.transport, file):
            if self.transport.run(["test", "-e", unit.path], QUICK_S_MAX).ok:
                kept = f"{self.device.home}/unit.before"
                self.runtimes.must(["sh", "-c", _KEEP_UNIT, "sh", kept, unit.path])
            put(self.transport, self.device, file)
        service.enable(self.transport, self.device, unit)

    def _wait_for_the_daemon(self) -> None:
        """Wait until the daemon of the previous runtime answers, for the next command's sake."""
        until = time.monotonic() + ANSWER_S_MAX
        while time.monotonic() < until:
            with contextlib.suppress(EdgeRTError):
                if RemoteDaemon(self.transport, self.device).status().daemon.running:
                    return
            time.sleep(1)

    def _link(self) -> Link:
        """Return the device's note of its connection to the broker."""
        try:
            return RemoteDaemon(self.transport, self.device).status().telemetry.link
        except EdgeRTError:  # nothing is installed yet
            return Link()

    def _wait_for_the_broker(self, before: Link) -> None:
        """Wait until the restarted daemon is connected to its broker or has failed to. `before` is the last daemon's note."""
        until = time.monotonic() + BROKER_S_MAX
        while time.monotonic() < until:
            said = RemoteDaemon(self.transport, self.device).status().telemetry
            failed = said.link != before and said.link.state not in ("", STOPPED)
            if not said.broker or said.link.state == CONNECTED or failed:
                return
            time.sleep(1)

    def _write(self, wanted: list[DeviceFile], done: BootstrapResult) -> None:
        """Write files. A marker comes first, so that after an interruption the next bootstrap restarts the daemon."""
        # A trial may have written the unit already.
        wanted = [file for file in wanted if not holds(self.transport, file)]
        if any(file.path.startswith(self.device.state) for file in wanted):
            for folder in (self.device.state, f"{self.device.state}/keys"):
                self.runtimes.must(in_folder(folder, ["chmod", "755", "."], make=True))
        if any(
            file.change in ("configuration", "unit") or file.change.startswith(("mqtt-", "registry-"))
            for file in wanted
        ):
            self._mark()
        for file in wanted:
            if file.change == "configuration":
                check_config(self.device, file, self.transport)
            put(self.transport, self.device, file)
            done.changed.append(file.change)

    def _mark(self) -> None:
        marker = PurePosixPath(_marker(self.device))
        self.runtimes.must(in_folder(str(marker.parent), ["sh", "-c", ': >"$1" && sync', "sh", f"./{marker.name}"]))

    def _note_folders(self, plan: BootstrapPlan) -> None:
        folders = [self.device.home, self.device.state]
        if plan.service == "systemd" and plan.facts.uid != 0:
            folders.append(f"{plan.facts.home}/.config/systemd/user/default.target.wants")
        note_folders(self.device, folders, self.transport)


def _marker(device: Device) -> str:
    return f"{device.home or device.state}/restart-due"


def _check_engines(plan: BootstrapPlan, done: BootstrapResult) -> None:
    """Record which engines load, by the daemon's status. Raises EngineMissing if too few do, or text was asked for in vain."""
    wanted = plan.options.engines_of(plan.profile)
    done.engines = [engine for engine in wanted if done.status is not None and engine in done.status.engines]
    known: dict[str, str] = {}
    if plan.runtime is not None:
        known = {**plan.there.lacking, **plan.runtime.lacking}
    hint = {"tensorrt": TENSORRT_HINT}
    done.lacking = {
        engine: known.get(engine, f"engine {engine} does not load{hint.get(engine, '')}")
        for engine in wanted
        if engine not in done.engines
    }
    if done.lacking and (plan.options.exactly or not done.engines):
        raise EngineMissing(f"the daemon runs on {plan.device.name}, but {'; '.join(done.lacking.values())}")
    if "text" in plan.options.extras and done.status is not None and not done.status.text:
        raise EngineMissing(
            f"the daemon runs on {plan.device.name}, but its Python has no package tokenizers: install it there with "
            "pip install 'edgert[text]'"
        )


def _unit(plan: BootstrapPlan, config: DeviceConfig) -> Unit | None:
    if plan.service != "systemd":
        return None
    engines = (*plan.profile.engines, *plan.options.engines_of(plan.profile))
    return service.unit_for(plan.device, plan.facts, engines, config)


_WHAT_PYTHON = f"""
for name in apt-get dnf zypper pacman apk opkg; do command -v $name >/dev/null && echo "installer=$name" && break; done
for path in $(command -v python3 python python2) /usr/bin/python3.[0-9] /usr/local/bin/python3.[0-9] {PYTHONS}; do
  test -x "$path" && "$path" -c 'import sys; print("has=%d.%d" % sys.version_info[:2])' 2>/dev/null
done
exit 0
"""
_INSTALLERS = {
    "apt-get": "apt-get update && apt-get install -y python3",
    "dnf": "dnf install -y python3 python3-pip",
    "zypper": "zypper install python3 python3-pip",
    "pacman": "pacman -S python",
}


def _check_machine(device: Device, profile: DeviceProfile, facts: MachineFacts, transport: Transport) -> None:
    if not facts.python_path:
        raise DeviceError(f"{device.name} {_python_to_install(facts, transport)}. Then bootstrap again")
    reasons = [reason for reason in misfits(profile, facts) if "memory" not in reason]
    if reasons:
        raise DeviceError(
            f"profile {profile.name} {', '.join(reasons)}; {device.name} is {describe(facts)}: "
            f"give it a profile that fits: edgert device set {device.name} --profile NAME"
        )


def _python_to_install(facts: MachineFacts, transport: Transport) -> str:
    """Return which Python is there and how a person on the device installs another."""
    lines = [line.partition("=") for line in transport.run(["sh", "-c", _WHAT_PYTHON], QUICK_S_MAX).stdout.splitlines()]
    said = {key: value for key, _, value in lines}
    system = facts.distribution or "an unknown Linux"
    found = sorted({value for key, _, value in lines if key == "has"})
    if not found:
        how = _INSTALLERS.get(said.get("installer", ""), "install Python 3.10 to 3.13 with its venv module")
        return f"({system}) has no Python: run there, as root: {how}"
    return (
        f"({system}) has only Python {', '.join(found)}, and EdgeRT runs on 3.10 to 3.13. Upgrade the system (Debian and "
        "Raspberry Pi OS from 12, Ubuntu from 22.04), or install another Python that is found as python3.10 ... python3.13"
    )
