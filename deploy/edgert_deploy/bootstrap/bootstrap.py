"""Bootstrap: sets up a bare device so that it accepts deployments, or brings a device up to date.

A bootstrap inspects the device, plans the changes, and makes only these changes. So a second bootstrap changes nothing.
A bootstrap replaces a runtime only on request, or if an engine or an extra is missing. The new runtime goes on trial
(edgert_deploy.bootstrap.runtime). After an interruption, the old runtime still serves, and the next bootstrap does the
remaining work.

    HOME/                    the runtimes (edgert_deploy.bootstrap.runtime)
    HOME/receipt             the folders that bootstrap made, and whether it turned lingering on, for `edgert uninstall`
    STATE/config.toml        the device's configuration; lines that the user added stay
    STATE/keys/<id>.pem      the trusted public keys
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from edgert.checks.status import DeviceStatus
from edgert.config import DeviceConfig
from edgert.environment import install_hint
from edgert.errors import DeviceError, EdgeRTError, EngineMissing, RolledBack
from edgert.telemetry.broker_connection import CONNECTED, STOPPED, BrokerConnection
from edgert_deploy.bootstrap.plan import BootstrapOptions, BootstrapPlan, check_no_trial, plan_bootstrap, restart_marker
from edgert_deploy.bootstrap.runtime import InstalledRuntimes, RuntimeAction, RuntimePlan, Runtimes
from edgert_deploy.bootstrap.wheelhouse import Wheelhouse
from edgert_deploy.devices import service
from edgert_deploy.devices.claims import record_folders, setting_up
from edgert_deploy.devices.device_files import DeviceFile, check_config, device_config, holds, put, unnamed_files
from edgert_deploy.devices.facts import probe
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.devices.remote_daemon import QUICK_S_MAX, RemoteDaemon
from edgert_deploy.devices.service import Unit
from edgert_deploy.devices.transports import LineSink, Transport, in_folder

ANSWER_S_MAX = 60.0  # the longest wait until the daemon of the previous runtime answers again
FIRST_CONNECTION_S_MAX = 15.0  # the longest wait for the first connection of the new daemon
POLL_S = 1.0  # the pause between two requests to the daemon


@dataclass
class BootstrapResult:
    """The result of a bootstrap.

    Attributes:
        engines: The requested engines that load on the device.
        lacking: The requested engines that do not load, each with the reason.
        runtime: The change of the runtime; None if the device has no runtime of its own.
        status: The device's status at the end.
        sbom: The file on this host with the bill of materials of the prepared runtime.
    """

    device: str
    profile: str
    service: str
    engines: list[str] = field(default_factory=list)
    lacking: dict[str, str] = field(default_factory=dict)
    runtime: dict[str, Any] | None = None
    changed: list[str] = field(default_factory=list)
    status: DeviceStatus = field(init=False)
    sbom: str = ""


_KEEP_UNIT = 'test -e "$1" || { cp -p "$2" "$1.new" && sync && mv "$1.new" "$1" && sync; }'


def bootstrap(
    device: Device,
    profile: DeviceProfile,
    options: BootstrapOptions,
    transport: Transport,
    progress: LineSink = lambda _: None,
) -> BootstrapResult:
    """Install, configure and start EdgeRT on `device`.

    Raises ConfigInvalid, EngineMissing, StorageFailed and DeviceError. Also raises RolledBack if a new runtime failed
    its self-test or its trial, and DeployUnderWay if another host works on the device.
    """
    with setting_up(device, transport) as claim:
        plan = plan_bootstrap(device, profile, options, claim, progress)
        return _Work(device, claim, progress).apply(plan)


def use_previous_runtime(
    device: Device, options: BootstrapOptions, transport: Transport, progress: LineSink = lambda _: None
) -> BootstrapResult:
    """Change to the previous runtime, which goes on trial like a new one.

    Raises DeviceError if the device has no previous runtime, and RolledBack if the previous runtime failed its trial.
    """
    with setting_up(device, transport, make=False) as claim:
        facts, work = probe(claim, device.name), _Work(device, claim, progress)
        runtimes = work.runtimes.inspect() if device.kind.needs_runtime else InstalledRuntimes()
        check_no_trial(device, runtimes)
        if not runtimes.previous or runtimes.previous == runtimes.in_use.id:
            raise DeviceError(f"{device.name} has no previous runtime: nothing was changed")
        unit = service.chosen_unit(device, facts, options.service, claim)
        done = BootstrapResult(device.name, device.profile, "systemd" if unit else "monitor")
        done.runtime = {"action": RuntimeAction.ROLLBACK, "in_use": runtimes.in_use.id, "id": runtimes.previous}
        work.try_out(runtimes.previous, work.runtimes.live_models(), unit, options.trial_s)
        done.changed.append("runtime")
        done.status = RemoteDaemon(claim, device).status()
        done.engines = list(done.status.engines)
        return done


class _Work:
    """The changes of one bootstrap."""

    def __init__(self, device: Device, transport: Transport, progress: LineSink) -> None:
        self.device = device
        self.transport = transport
        self.progress = progress
        self.runtimes = Runtimes(device, transport, progress)

    def apply(self, plan: BootstrapPlan) -> BootstrapResult:
        """Make the planned changes. Raises the errors of `bootstrap`."""
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
            # An interrupted bootstrap may have written the unit without enabling it.
            service.enable(self.transport, self.device, unit)
        # A changed key or script needs no restart: the daemon reads keys at each install, and the script runs at each
        # start.
        if plan.restart_due or any(not change.startswith(("key ", "runtime")) for change in done.changed):
            self.progress("starting the daemon")
            before = self._connection() if plan.config.mqtt.host else BrokerConnection()
            service.restart(self.transport, self.device, unit)
            unnamed = unnamed_files(plan.config, self.device.state)
            self.transport.run(["rm", "-f", restart_marker(self.device), *unnamed], QUICK_S_MAX)
            if not done.changed:
                done.changed.append("daemon restarted")
            done.status = self._with_broker(before)
        else:
            daemon = RemoteDaemon(self.transport, self.device)
            done.status = daemon.status()
            if not done.status.daemon.running:
                self.progress("starting the daemon, which was not running")
                service.start(self.transport, self.device)
                done.changed.append("daemon started")
                done.status = daemon.status()
        _check_engines(plan, done)
        if self.device.kind.needs_runtime:
            self.runtimes.collect()
        return done

    def try_out(self, runtime: str, models: Sequence[str], unit: Unit | None, trial_s: float) -> None:
        """Switch to `runtime` on trial. If it fails, raise RolledBack once the old runtime's daemon answers."""
        manager = "monitor" if unit is None else "user" if unit.user else "system"
        self.progress(f"trying runtime {runtime}: unless it serves within {trial_s:.0f} s, the device rolls back")
        try:
            self.runtimes.try_out(runtime, models, manager, trial_s)
        except RolledBack:
            self._wait_for_the_daemon()
            self.runtimes.collect()
            raise

    def _install_runtime(
        self, plan: BootstrapPlan, change: RuntimePlan, house: Wheelhouse, done: BootstrapResult
    ) -> None:
        """If the runtime has to change, install the new runtime and put it into use."""
        done.runtime = {
            "action": change.action,
            "in_use": change.in_use,
            "id": change.id,
            "sent_bytes": change.send_bytes,
        }
        self._record_folders(plan)
        if change.changes:
            self.runtimes.install(plan.facts, change, plan.installed, house, plan.options.exactly)
        on_trial = change.action is RuntimeAction.UPGRADE and plan.installed.configured
        if change.changes and not on_trial:
            self.runtimes.use_first(change)
            done.changed.append("environment")
        self._write([file for file in plan.files if file.change == "runtime.sh"], done)
        if on_trial:
            models = self.runtimes.live_models()
            self.progress("testing the new runtime beside the one in use")
            try:
                self.runtimes.self_test(change, models)
            except RolledBack:
                self.runtimes.collect()
                raise
            unit = _unit(plan, device_config(self.device, self.transport))
            if unit is not None:
                self._put_trial_unit(unit)
            self.try_out(change.id, models, unit, plan.options.trial_s)
            done.changed.append("runtime")

    def _put_trial_unit(self, unit: Unit) -> None:
        """Write this host's unit. First copy the old unit, which a rollback of the runtime restores."""
        file = DeviceFile(unit.path, unit.text.encode(), "unit")
        if not unit.user:
            service.give_to_user(self.transport, self.device)
        if not holds(self.transport, file):
            if self.transport.run(["test", "-e", unit.path], QUICK_S_MAX).ok:
                saved_unit = f"{self.device.home}/unit.before"
                self.runtimes.run_checked(["sh", "-c", _KEEP_UNIT, "sh", saved_unit, unit.path])
            put(self.transport, self.device, file)
        service.enable(self.transport, self.device, unit)

    def _wait_for_the_daemon(self) -> None:
        """Wait until the daemon of the previous runtime answers, so that the next command can use it."""
        until = time.monotonic() + ANSWER_S_MAX
        while time.monotonic() < until:
            with contextlib.suppress(EdgeRTError):
                if RemoteDaemon(self.transport, self.device).status().daemon.running:
                    return
            time.sleep(POLL_S)

    def _connection(self) -> BrokerConnection:
        """Return the state of the device's connection to the broker."""
        try:
            return RemoteDaemon(self.transport, self.device).status().telemetry.connection
        except EdgeRTError:  # nothing is installed yet
            return BrokerConnection()

    def _with_broker(self, before: BrokerConnection) -> DeviceStatus:
        """Wait until the restarted daemon has connected to its broker, and return the daemon's status.

        The wait also ends if the connection fails, or after FIRST_CONNECTION_S_MAX. `before` is the state of the
        previous daemon's connection.
        """
        until = time.monotonic() + FIRST_CONNECTION_S_MAX
        while True:
            status = RemoteDaemon(self.transport, self.device).status()
            telemetry = status.telemetry
            failed = telemetry.connection != before and telemetry.connection.state not in ("", STOPPED)
            if not telemetry.broker or telemetry.connection.state == CONNECTED or failed or time.monotonic() >= until:
                return status
            time.sleep(POLL_S)

    def _write(self, files: list[DeviceFile], done: BootstrapResult) -> None:
        """Write the files.

        If one of them needs a restart of the daemon, first write a marker. After an interruption, the next bootstrap
        finds the marker and restarts the daemon.
        """
        # A trial may have written the unit already.
        files = [file for file in files if not holds(self.transport, file)]
        if any(file.path.startswith(self.device.state) for file in files):
            for folder in (self.device.state, f"{self.device.state}/keys"):
                self.runtimes.run_checked(in_folder(folder, ["chmod", "755", "."], make=True))
        if any(
            file.change in ("configuration", "unit") or file.change.startswith(("mqtt-", "registry-")) for file in files
        ):
            self._mark()
        for file in files:
            if file.change == "configuration":
                check_config(self.device, file, self.transport)
            put(self.transport, self.device, file)
            done.changed.append(file.change)

    def _mark(self) -> None:
        marker = PurePosixPath(restart_marker(self.device))
        self.runtimes.run_checked(
            in_folder(str(marker.parent), ["sh", "-c", ': >"$1" && sync', "sh", f"./{marker.name}"])
        )

    def _record_folders(self, plan: BootstrapPlan) -> None:
        folders = [self.device.home, self.device.state]
        if plan.service == "systemd" and plan.facts.uid != 0:
            folders.append(f"{plan.facts.home}/.config/systemd/user/default.target.wants")
        record_folders(self.device, folders, self.transport)


def _check_engines(plan: BootstrapPlan, done: BootstrapResult) -> None:
    """Record which engines load. Raises EngineMissing if too few load, or text support is missing."""
    engines = plan.options.engines_of(plan.profile)
    done.engines = [engine for engine in engines if engine in done.status.engines]
    reasons: dict[str, str] = {}
    if plan.runtime is not None:
        reasons = {**plan.installed.in_use.lacking, **plan.runtime.lacking}
    done.lacking = {
        engine: reasons.get(engine, f"engine {engine} does not load{install_hint(engine)}")
        for engine in engines
        if engine not in done.engines
    }
    if done.lacking and (plan.options.exactly or not done.engines):
        raise EngineMissing(f"the daemon runs on {plan.device.name}, but {'; '.join(done.lacking.values())}")
    if "text" in plan.options.extras and not done.status.text:
        raise EngineMissing(
            f"the daemon runs on {plan.device.name}, but its Python has no package tokenizers: install it on the "
            "device with pip install 'edgert[text]'"
        )


def _unit(plan: BootstrapPlan, config: DeviceConfig) -> Unit | None:
    if plan.service != "systemd":
        return None
    engines = (*plan.profile.engines, *plan.options.engines_of(plan.profile))
    return service.unit_for(plan.device, plan.facts, engines, config)
