"""The request of a bootstrap, and the plan of its steps."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from edgert.bundle.signing import PublicKey
from edgert.config import DeviceConfig
from edgert.engines import engine_by_name
from edgert.errors import DeployUnderWay, DeviceError
from edgert.printable import counted
from edgert_deploy.bootstrap import wheelhouse
from edgert_deploy.bootstrap.locked_wheels import shipped_lock
from edgert_deploy.bootstrap.runtime import (
    TRIAL_S,
    InstalledRuntimes,
    RuntimeAction,
    RuntimePlan,
    Runtimes,
    plan_runtime,
    script_text,
)
from edgert_deploy.bootstrap.wheelhouse import Wheelhouse, WheelTarget
from edgert_deploy.devices import service
from edgert_deploy.devices.device_files import Broker, DeviceFile, Following, config_text, holds, own_user, wanted_files
from edgert_deploy.devices.facts import NO_GLIBC, MachineFacts, describe, local_facts, misfits, probe
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.devices.remote_daemon import QUICK_S_MAX, script_path
from edgert_deploy.devices.transports import LineSink, Transport

FIRST_ENGINE, ALL_ENGINES = "first", "all"
_IS_FILE = 'test -f "$1" && test ! -L "$1"'


@dataclass(frozen=True)
class BootstrapOptions:
    """The request of a bootstrap: the software to install, and the settings.

    Attributes:
        engines: "all" for all engines of the profile, "first" for its first engine, or names separated by commas. With
            "all", an engine without wheels for the device is left out. Otherwise every engine must load.
        service: "systemd"; "monitor", which is edgertd's own monitor and does not start after a reboot; or "auto". With
            "auto", a running monitor stays. Otherwise "auto" means "systemd" if the device runs systemd.
        settings: Values for the device's config.toml, such as {"serving": {"window_s": 10.0}}.
        upgrade: Whether this host's runtime replaces the runtime in use.
        unlocked: Whether the newest wheels are installed, instead of those in the lock.
        extras: The extras of edgert to install. The device also keeps the extras that it has.
    """

    keys: tuple[PublicKey, ...]
    broker: Broker | None = None
    engines: str = ALL_ENGINES
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
            for name in self._engine_names():
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
        return self._engine_names()

    def _engine_names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name.strip() for name in self.engines.split(",") if name.strip()))


@dataclass(frozen=True)
class BootstrapPlan:
    """The steps of a bootstrap.

    `files` has only the files to write, because they differ on the device or are missing. `runtime` is None if the
    device needs no runtime of its own.
    """

    device: Device
    profile: DeviceProfile
    facts: MachineFacts
    options: BootstrapOptions
    service: str
    runtime: RuntimePlan | None
    files: tuple[DeviceFile, ...]
    config: DeviceConfig
    restart_due: bool
    installed: InstalledRuntimes = field(default_factory=InstalledRuntimes)
    house: Wheelhouse | None = None

    def steps(self) -> list[str]:
        """Return the steps as text, in order."""
        lines = []
        plan = self.runtime
        if plan is not None and plan.changes:
            lines.append(f"send {counted(len(plan.send), 'wheel')}, {plan.send_bytes / 1e6:.1f} MB")
            made = f"make runtime {plan.id} (edgert {plan.edgert} with {', '.join(plan.engines)})"
            lines.append(f"{made}: {plan.disk_bytes / 1e6:.0f} MB of {plan.free_bytes / 1e6:.0f} MB free")
            if plan.action is RuntimeAction.UPGRADE:
                lines.append(
                    f"self-test runtime {plan.id}, then try it for at most {self.options.trial_s:.0f} s; if it fails, "
                    f"{plan.in_use} stays"
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


def plan_bootstrap(
    device: Device,
    profile: DeviceProfile,
    options: BootstrapOptions,
    transport: Transport,
    progress: LineSink = lambda _: None,
) -> BootstrapPlan:
    """Inspect the device and plan the changes.

    Planning changes nothing on the device, except that it ends a runtime trial that can no longer succeed. Raises the
    errors of `bootstrap`.
    """
    facts = probe(transport, device.name)
    if not device.kind.needs_runtime:
        facts = local_facts(facts)
    progress(describe(facts))
    has_unit = service.chosen_unit(device, facts, options.service, transport) is not None
    installed, house, plan = InstalledRuntimes(), None, None
    if device.kind.needs_runtime:
        _check_machine(device, profile, facts)
        installed, house, plan = _plan_runtime(Runtimes(device, transport, progress), facts, options, profile)
    broker = options.broker
    if broker is not None and (user := own_user(broker, config_text(device.state, transport))):
        progress(
            f"the device keeps its own login {user} at the broker; --mqtt-username {broker.username or 'NAME'} with "
            "--mqtt-password-file replaces that login"
        )
        broker = replace(broker, username="", password=None)
    files, config = wanted_files(
        device,
        profile,
        facts,
        keys=options.keys,
        broker=broker,
        following=options.following,
        settings=options.settings,
        has_unit=has_unit,
        transport=transport,
    )
    if has_unit:
        unit = service.unit_for(device, facts, (*profile.engines, *options.engines_of(profile)), config)
        assert unit is not None
        files.append(DeviceFile(unit.path, unit.text.encode(), "unit"))
    if device.kind.needs_runtime:
        files.insert(0, DeviceFile(script_path(device), script_text(), "runtime.sh"))
    differing = tuple(file for file in files if not holds(transport, file))
    if plan is not None and plan.action is RuntimeAction.KEEP:
        differing = _without_runtimes_own(differing, transport)
    due = installed.restart_due
    if not device.kind.needs_runtime:
        due = transport.run(["test", "-e", restart_marker(device)], QUICK_S_MAX).ok
    return BootstrapPlan(
        device,
        profile,
        facts,
        options,
        service="systemd" if has_unit else "monitor",
        runtime=plan,
        files=differing,
        config=config,
        restart_due=due,
        installed=installed,
        house=house,
    )


def _plan_runtime(
    runtimes: Runtimes, facts: MachineFacts, options: BootstrapOptions, profile: DeviceProfile
) -> tuple[InstalledRuntimes, Wheelhouse, RuntimePlan]:
    installed, progress = runtimes.inspect(), runtimes.progress
    check_no_trial(runtimes.device, installed)
    target = WheelTarget(facts.python, facts.machine, facts.glibc)
    engines = options.engines_of(profile)
    lock = None if options.unlocked else shipped_lock()
    house = wheelhouse.prepare(
        target,
        engines,
        progress,
        shrink=not options.exactly,
        lock=lock,
        extras=sorted({*options.extras, *installed.in_use.extras}),  # the models may need the extras of the old runtime
    )
    plan = plan_runtime(installed, facts, house, upgrade=options.upgrade, exactly=options.exactly)
    if plan.action is RuntimeAction.UPGRADE and installed.configured:
        runtimes.live_models()  # raises DeployUnderWay, if a model is on trial, before a byte is sent
    for engine, why in house.lacking.items():
        progress(f"{engine} is left out: {why}")
    if plan.action is RuntimeAction.KEEP:
        progress(
            f"runtime {plan.in_use} stays; --upgrade installs this host's runtime {plan.id} with edgert {plan.edgert}"
        )
    return installed, house, plan


def _without_runtimes_own(files: tuple[DeviceFile, ...], transport: Transport) -> tuple[DeviceFile, ...]:
    """Return `files` without the script and the unit, which belong to the runtime that stays.

    So hosts with different versions do not overwrite each other's files. A script or a unit that the device lacks stays
    in the list. The unit also stays in the list if the configuration changes.
    """
    configured = any(file.change == "configuration" for file in files)
    own = ("runtime.sh",) if configured else ("runtime.sh", "unit")
    return tuple(
        file
        for file in files
        if file.change not in own or not transport.run(["sh", "-c", _IS_FILE, "sh", file.path], QUICK_S_MAX).ok
    )


def check_no_trial(device: Device, installed: InstalledRuntimes) -> None:
    if installed.trial:
        raise DeployUnderWay(
            f"{device.name} has a new runtime on trial. The trial ends within minutes: try again after its end"
        )


def restart_marker(device: Device) -> str:
    return f"{device.home or device.state}/restart-due"


def _check_machine(device: Device, profile: DeviceProfile, facts: MachineFacts) -> None:
    if not facts.python_path:
        raise DeviceError(
            f"{device.name} ({facts.distribution or 'an unknown Linux'}) has no Python from 3.10 to 3.13. Install one "
            "with its venv module (apt-get install python3-venv), or upgrade the system first (Debian and Raspberry Pi OS "
            "from 12, Ubuntu from 22.04). Then bootstrap again"
        )
    if facts.lacks_glibc:
        raise DeviceError(f"{device.name} ({facts.distribution or 'an unknown Linux'}) {NO_GLIBC}")
    if facts.python_lacks:
        raise DeviceError(
            f"{facts.python_path} on {device.name} was built without {facts.python_lacks}. Install the packages that provide "
            "them, or the distribution's own Python; or build this Python again with the headers of SQLite, OpenSSL, libffi "
            "and zlib. Then bootstrap again"
        )
    reasons = [reason for check, reason in misfits(profile, facts).items() if check != "memory"]
    if reasons:
        raise DeviceError(
            f"profile {profile.name} {', '.join(reasons)}; {device.name} is {describe(facts)}: "
            f"give it a profile that fits: edgert device set {device.name} --profile NAME"
        )
