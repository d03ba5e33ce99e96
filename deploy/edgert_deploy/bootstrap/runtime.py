"""The runtimes of a device: Python environments side by side. One of them is in use.

    HOME/venvs/<id>/     environments; the id is a hash of the wheels; in a complete environment, the file `.complete`
                         lists its contents
    HOME/venv            symbolic link to the environment in use
    HOME/previous        symbolic link to the previous environment, which is kept
    HOME/wheels/         the wheels that the host sends for an installation
    HOME/runtime.sh      the script that decides on the device which environment is in use (on_device/runtime.sh)
    HOME/trial           exists during the trial of a new runtime
    HOME/outcome         the result of the last trial
    HOME/setup           the claim of a set-up (devices.claims)
    HOME/working         the lock of the command that makes an environment (devices.claims)
    HOME/restart-due     exists while the daemon still runs with older software or an older configuration

The host starts a trial and watches it, but the device alone decides which runtime stays. `inspect` finds the installed
runtimes. `plan_runtime` plans the change of the runtime, with the transfer and the disk space that it needs.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from importlib.resources import files

from edgert.checks.status import WILL_SERVE
from edgert.environment import (
    ID_LENGTH,
    INSTALL_S_MAX,
    INSTALLED_FACTOR,
    SPARE_BYTES,
    VENV_S_MAX,
    Environment,
    Installed,
    RuntimeOutcome,
    RuntimeResult,
    changed_wheels,
    make_environment,
    self_test,
    trial_command,
)
from edgert.errors import (
    DeployUnderWay,
    DeviceError,
    DeviceUnreachable,
    EngineMissing,
    HealthCheckFailed,
    RolledBack,
    StorageFailed,
)
from edgert.printable import counted
from edgert_deploy.bootstrap.wheelhouse import Wheelhouse
from edgert_deploy.devices.facts import FREE_KB, MachineFacts
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.remote_daemon import QUICK_S_MAX, RemoteDaemon, script_path
from edgert_deploy.devices.transports import LineSink, Result, Transport, sha256_command

TRIAL_S = 600.0
WATCH_PAUSE_S = 1.0


class RuntimeAction(str, Enum):
    """The change that a bootstrap makes to the runtime. JSON contains these values."""

    INSTALL = "install"  # the first runtime
    UPGRADE = "upgrade"
    KEEP = "keep"  # the runtime in use differs from this host's, and stays
    NONE = "none"  # the runtime in use is this host's
    ROLLBACK = "rollback"  # the previous runtime comes into use again


@dataclass(frozen=True)
class InstalledRuntimes:
    """The runtimes that a device has installed.

    Attributes:
        previous: The id of the previous runtime; "" if there is none.
        complete: The ids of all complete environments.
        sent: The SHA-256 of the wheels that an interrupted bootstrap has sent.
    """

    in_use: Installed = field(default_factory=Installed)
    previous: str = ""
    complete: frozenset[str] = frozenset()
    sent: frozenset[str] = frozenset()
    trial: bool = False
    restart_due: bool = False
    configured: bool = False
    free_bytes: int = 0


@dataclass(frozen=True)
class RuntimePlan:
    """The change of a runtime.

    The new environment is a copy of the environment `base`, or is empty if `base` is "". Then the wheels in
    `changed` are installed into it. `send` lists the wheels in `changed` that the device lacks.
    """

    action: RuntimeAction
    in_use: str
    id: str
    edgert: str
    engines: tuple[str, ...]
    lacking: Mapping[str, str]
    base: str = ""
    send: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    send_bytes: int = 0
    disk_bytes: int = 0
    free_bytes: int = 0

    @property
    def changes(self) -> bool:
        return self.action in (RuntimeAction.INSTALL, RuntimeAction.UPGRADE)


def script_text() -> bytes:
    return (files("edgert_deploy") / "bootstrap" / "on_device" / "runtime.sh").read_bytes()


_INSPECT = (
    FREE_KB
    + """
cd "$1" 2>/dev/null && {
  test -e runtime.sh && sh runtime.sh settle
  for link in venv previous; do
    to=$(readlink $link) && test -e "$to/.complete" && test -x "$to/bin/python" && echo "$link ${to##*/}"
  done
  for each in venvs/*/.complete; do test -e "$each" && each=${each%/*} && test -x "$each/bin/python" && echo "complete ${each##*/}"; done
  test -e trial && echo "trial 1"
  test -e restart-due && echo "restart_due 1"
  test -e venv/.complete && echo "about $(cat venv/.complete)"
  test -e venv/pyvenv.cfg && grep -E '^(version|include-system)' venv/pyvenv.cfg | sed 's/ = / /'
  for wheel in wheels/*.whl; do test -e "$wheel" && echo "wheel $PWD/$wheel"; done
}
test -e "$2/config.toml" && echo "configured 1"
there=$1
while ! test -d "$there"; do there=$(dirname "$there"); done
echo "free $(free_kb "$there")"
"""
)


# The command and its children hold this lock, because they may continue after the link is lost.
_WITH_LOCK = 'exec 8>>"$1" && shift && { ! command -v flock >/dev/null || flock -n 8; } && exec "$@"'


def plan_runtime(
    installed: InstalledRuntimes, facts: MachineFacts, house: Wheelhouse, *, upgrade: bool, exactly: bool
) -> RuntimePlan:
    """Plan whether and how the runtime changes.

    The runtime in use stays, unless `upgrade` is true or the runtime lacks an engine or an extra of the wheelhouse. An
    engine that failed to load on this device before is treated as missing only if `exactly` is true, which means that
    the user named the engines.
    """
    name, in_use = house.digest[:ID_LENGTH], installed.in_use
    if not in_use.id:
        action = RuntimeAction.INSTALL
    elif in_use.id == name:
        action = RuntimeAction.NONE
    else:
        engines = {*in_use.engines, *(() if exactly else in_use.lacking)}
        complete = engines.issuperset(house.engines) and set(in_use.extras).issuperset(house.extras)
        action = RuntimeAction.KEEP if complete and not upgrade else RuntimeAction.UPGRADE
    plan = RuntimePlan(
        action, in_use.id, name, house.version, house.engines, house.lacking, free_bytes=installed.free_bytes
    )
    if not plan.changes or name in installed.complete:
        return plan
    base = in_use.base_for(facts.python, house.engines)
    changed = changed_wheels(house.pins, base.wheels)
    send = tuple(wheel for wheel in changed if house.pins[wheel] not in installed.sent)
    size = house.size_bytes(send)
    disk = size + int(house.installed_bytes(changed) * INSTALLED_FACTOR)
    return replace(plan, base=base.id, changed=changed, send=send, send_bytes=size, disk_bytes=disk)


@dataclass(frozen=True)
class Runtimes:
    """Inspects and changes the runtimes of one device over its transport."""

    device: Device
    transport: Transport
    progress: LineSink = lambda _: None

    def inspect(self) -> InstalledRuntimes:
        """Return the installed runtimes. End a trial that can no longer succeed. Raises DeviceError."""
        result = self.run_checked(["sh", "-c", _INSPECT, "sh", self.device.home, self.device.state])
        lines = [line.partition(" ") for line in result.stdout.splitlines()]
        answers = {key: value for key, _, value in lines}
        paths = [value for key, _, value in lines if key == "wheel"]
        digests = self.transport.run(sha256_command(*paths), INSTALL_S_MAX).stdout.split() if paths else []
        return InstalledRuntimes(
            in_use=Installed.read(answers.get("venv", ""), answers.get("about", ""), answers),
            previous=answers.get("previous", ""),
            complete=frozenset(value for key, _, value in lines if key == "complete"),
            sent=frozenset(digests),
            trial="trial" in answers,
            restart_due="restart_due" in answers,
            configured="configured" in answers,
            free_bytes=int(answers.get("free") or 0) * 1024,
        )

    def live_models(self) -> tuple[str, ...]:
        """Return the models that the runtime in use serves; () if the daemon does not answer.

        Raises DeployUnderWay if a model is on trial. With two trials at the same time, nobody could
        tell which of them caused a failure.
        """
        try:
            status = RemoteDaemon(self.transport, self.device).status()
        except DeviceError:
            return ()
        on_trial = [model.model for model in status.models if model.on_trial]
        if on_trial:
            raise DeployUnderWay(
                f"{self.device.name} has {', '.join(on_trial)} on trial: change the runtime after the trial, or end the trial with: "
                f"edgert rollback {on_trial[0]} {self.device.name}"
            )
        return tuple(m.model for m in status.models if m.serving is not None and m.serving.state in WILL_SERVE)

    def install(
        self, facts: MachineFacts, plan: RuntimePlan, installed: InstalledRuntimes, house: Wheelhouse, exactly: bool
    ) -> None:
        """Make the complete environment `plan.id` beside the one in use.

        The links in HOME do not change, so the new environment is not yet in use.

        Raises DeviceError; StorageFailed, before the first byte is sent, if the disk has too little free space; and
        EngineMissing if no engine loads. With `exactly`, raises EngineMissing if any engine does not load.
        """
        if plan.id in installed.complete:
            return
        if plan.free_bytes < plan.disk_bytes + SPARE_BYTES:
            raise StorageFailed(
                f"{self.device.name} has {plan.free_bytes / 1e6:.0f} MB free at {self.device.home}; the runtime needs "
                f"{(plan.disk_bytes + SPARE_BYTES) / 1e6:.0f} MB: free some space, or install fewer engines (--engines first)"
            )
        wheels = f"{self.device.home}/wheels"
        self.progress(f"sending {counted(len(plan.send), 'wheel')}, {plan.send_bytes / 1e6:.1f} MB")
        for wheel in house.wheels:
            if wheel.name in plan.send:
                self.transport.put(wheel, f"{wheels}/{wheel.name}")
        self.progress("making the environment" + (" from the one in use" if plan.base else ""))
        new = Environment(
            device=self.device.name,
            home=self.device.home,
            id=plan.id,
            python=facts.python_path,
            engines=plan.engines,
            pins=house.pins,
            base=installed.in_use if plan.base else Installed(),
            exactly=exactly,
            about={
                "edgert": plan.edgert,
                "extras": list(house.extras),
                "lacking": dict(plan.lacking),
                "python": facts.python,
            },
        )
        try:
            lacking = make_environment(self._run_claimed, new)
        except EngineMissing as error:
            before = "; the old runtime stays in use" if plan.in_use else ""
            raise EngineMissing(f"{error.message}{before}") from error
        for engine, why in lacking.items():
            self.progress(f"{engine} is left out: {why}")

    def use_first(self, plan: RuntimePlan) -> None:
        """Put the first environment into use. No model is served yet, so there is no trial."""
        script = 'ln -sfn "$1/venvs/$2" "$1/venv.new" && mv -fT "$1/venv.new" "$1/venv" && : >"$1/restart-due" && sync'
        self.run_checked(["sh", "-c", script, "sh", self.device.home, plan.id])

    def self_test(self, plan: RuntimePlan, models: Sequence[str]) -> None:
        """Make the new runtime load each model and answer its golden samples. Raises RolledBack."""
        folder = f"{self.device.home}/venvs/{plan.id}"
        why = self_test(self.transport.run, folder, self.device.state, models)
        if why:
            raise RolledBack(f"{self.device.name}: the new runtime failed its self-test: {why}. The old runtime stays")

    def try_out(self, runtime: str, models: Sequence[str], manager: str, trial_s: float = TRIAL_S) -> None:
        """Make the device switch to `runtime` on trial, and wait for its decision.

        `runtime` is the id of a complete environment. `manager` is the service manager of the daemon: "system", "user"
        or "monitor". Raises RolledBack with the device's reason, HealthCheckFailed if the device does not decide in
        time, and DeviceUnreachable if the link stays lost. In this case, the device decides alone.
        """
        self.run_checked(trial_command(self.device.home, self.device.state, runtime, models, manager, trial_s))
        until = time.monotonic() + trial_s + QUICK_S_MAX
        lost: DeviceUnreachable | None = None
        while time.monotonic() < until:
            time.sleep(WATCH_PAUSE_S)
            try:
                outcome = self._outcome()
                lost = None
            except DeviceUnreachable as error:
                lost = error
                continue
            if outcome.runtime != runtime or outcome.result is RuntimeResult.RUNNING:
                continue
            if outcome.result is RuntimeResult.KEPT:
                self.progress(
                    f"runtime {runtime} serves and stays" + (f" ({outcome.reason})" if outcome.reason else "")
                )
                return
            raise RolledBack(
                f"{self.device.name}: runtime {runtime} was rolled back ({outcome.reason}). The previous runtime is in use"
            )
        if lost is not None:
            raise DeviceUnreachable(
                f"{lost.message}; {self.device.name} decides alone which runtime stays. See the result with: edgert bootstrap {self.device.name}"
            )
        raise HealthCheckFailed(
            f"{self.device.name} did not decide on runtime {runtime} in {trial_s:.0f} s. End the trial with: edgert bootstrap {self.device.name}"
        )

    def collect(self) -> None:
        """Remove all environments except the one in use and the previous one."""
        self.transport.run(["sh", script_path(self.device), "collect"], VENV_S_MAX)

    def run_checked(self, argv: Sequence[str]) -> Result:
        """Run a command on the device. Raises DeviceError if it fails."""
        result = self.transport.run(argv, QUICK_S_MAX)
        if not result.ok:
            raise DeviceError(f"{self.device.name}: {result.failure_text()}")
        return result

    def _outcome(self) -> RuntimeOutcome:
        return RuntimeOutcome.read(self.transport.run(["cat", f"{self.device.home}/outcome"], QUICK_S_MAX).stdout)

    def _run_claimed(self, argv: Sequence[str], timeout_s: float) -> Result:
        result = self.transport.run(["sh", "-c", _WITH_LOCK, "sh", f"{self.device.home}/working", *argv], timeout_s)
        return replace(result, argv=tuple(argv))
