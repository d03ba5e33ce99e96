"""The checks of one device, from the connection to the models. They change nothing."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from edgert import __version__
from edgert.checks.status import DeviceStatus
from edgert.engines import system_package
from edgert.errors import ConfigInvalid, DaemonBusy, DeviceError, DeviceUnreachable, EdgeRTError, HostKeyMismatch
from edgert.telemetry.broker_connection import CONNECTED, REFUSED
from edgert.telemetry.mqtt import BrokerRefused
from edgert_deploy.devices.facts import FREE_KB, MachineFacts, local_facts, misfits, probe
from edgert_deploy.devices.inventory import Device, SshAddress
from edgert_deploy.devices.profiles import DeviceProfile, load_profile
from edgert_deploy.devices.remote_daemon import RemoteDaemon, script_path
from edgert_deploy.devices.service import serves
from edgert_deploy.devices.transports import (
    CommandNotStarted,
    JumpKeyMismatch,
    SshLoginRefused,
    Transport,
    open_transport,
)
from edgert_deploy.doctor import Finding, Report

INSPECT_S_MAX = 30.0
FREE_MB_FAIL, FREE_MB_WARN = 100, 500
# A device's clock must be right, because it decides whether certificates and bundles have expired.
SKEW_S_WARN = 5.0
SKEW_S_FAIL = 300.0
WAITING_WARN = 500  # more waiting reports give a warning; a model makes two reports in each window
MODE_OTHERS_WRITE = 0o002

# $1 is the state folder, $2 the Python, and $3 a text that only the unit of this state folder contains.
_INSPECT = (
    FREE_KB
    + r"""
echo now=$(date +%s)
place=$1; while test ! -e "$place"; do place=$(dirname "$place"); done
echo "free_kb=$(free_kb "$place")"
echo "user=$(id -un)"
export XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-/run/user/$(id -u)}
if test -d /run/systemd/system; then
  scope=$(test $(id -u) = 0 || echo --user)
  systemctl $scope cat edgertd.service 2>/dev/null | grep -qF -- "$3" && echo enabled=$(systemctl $scope is-enabled edgertd.service 2>/dev/null)
  test $(id -u) = 0 || echo lingers=$(loginctl show-user --property=Linger --value "$(id -un)" 2>/dev/null)
fi
test $(id -u) = 0 && echo root=yes || { sudo -n true 2>/dev/null && echo root=sudo; }
test -n "$2" && "$2" -c 'import venv' 2>/dev/null && echo venv=yes
exit 0
"""
)
_SOCKET = 'stat -L -c "%a %U %G %F" -- "$1"'


class _Report(Report):
    """The findings of one device so far."""

    def __init__(self, device: Device, transport: Transport, keys: Mapping[str, str]) -> None:
        super().__init__(device.name, DeviceError.exit_code)
        self.device, self.transport, self.keys = device, transport, keys

    def root_command(self, command: str) -> str:
        """Return the command line that runs `command` as root on the device."""
        if not self.device.kind.uses_ssh:
            return f"sudo {command}"
        as_root = "" if self.device.address.startswith("root@") else "sudo "
        return f"edgert ssh {'-t ' if as_root else ''}{self.device.name} -- {as_root}{command}"


def check_device(
    device: Device, keys: Mapping[str, str], profiles_dir: Path | None = None, clock: Callable[[], float] = time.time
) -> list[Finding]:
    """Run every check on one device.

    `keys` maps the ids of this host's keys to their names. `clock` is this host's wall clock. Without a connection or
    an installation, the function stops early, because later checks would only repeat the fault.
    """
    report = _Report(device, open_transport(device), keys)
    try:
        facts = _connection(report)
        if facts is not None:
            profile = _machine(report, facts, profiles_dir)
            _state(report, facts, clock)
            if (status := _installed(report)) is not None:
                _daemon(report, status)
                _engines(report, status, profile)
                _trust(report, status)
                _http(report, status)
                _telemetry(report, status)
                _channel(report, status)
                _models(report, status)
    except EdgeRTError as error:  # for example, the link was lost or a command took too long
        report.fail("reachable", error.message, f"edgert doctor {device.name}", error.exit_code)
    finally:
        report.transport.close()
    return report.found


def _connection(report: _Report) -> MachineFacts | None:
    device, name = report.device, report.device.name
    begun = time.monotonic()
    try:
        facts = probe(report.transport, name, device.python)
        facts = facts if device.kind.needs_runtime else local_facts(facts)
    except HostKeyMismatch as error:
        jump = f"--jump {device.jump}" if isinstance(error, JumpKeyMismatch) else "--repin"
        report.fail(
            "host key",
            error.message,
            f"find out why the key differs, then: edgert device set {name} {jump}",
            error.exit_code,
        )
    except SshLoginRefused as error:
        next_step = error.next_step
        if error.key_missing_at is not None:
            copy = _copies_key(device, error.key_missing_at)
            next_step = f"{copy}, or: edgert device set {name} --identity FILE"
        report.fail("login", error.reason, next_step, error.exit_code)
    except DeviceUnreachable as error:
        next_step = f"switch it on; if its address has changed: edgert device set {name} --address USER@HOST"
        report.fail("reachable", error.message, next_step, error.exit_code)
    except ConfigInvalid as error:
        report.fail("login", error.message, f"edgert device set {name} --identity FILE", error.exit_code)
    except CommandNotStarted as error:
        report.fail("system", error.reason, error.next_step, error.exit_code)
    except DeviceError as error:
        report.fail("system", error.message, "EdgeRT runs on Linux with a shell and glibc", error.exit_code)
    else:
        took = "" if not device.kind.uses_ssh else f", host key as pinned, login in {time.monotonic() - begun:.1f} s"
        report.ok("reachable", f"{device.address}{took}")
        return facts
    return None


def _copies_key(device: Device, address: SshAddress) -> str:
    """Return the command that copies the user's public key to `address`, the device or its jump host."""
    port = "" if address.port is None else f"-p {address.port} "
    over = f"-o ProxyJump={device.jump} " if device.jump and address == SshAddress.parse(device.address) else ""
    return f"ssh-copy-id {port}{over}{f'{address.user}@' if address.user else ''}{address.host}"


def _machine(report: _Report, facts: MachineFacts, profiles_dir: Path | None) -> DeviceProfile | None:
    name = report.device.name
    try:
        profile = load_profile(report.device.profile, profiles_dir)
    except ConfigInvalid as error:
        report.fail("profile", error.message, f"edgert device probe {name} --save", error.exit_code)
        return None
    reasons = misfits(profile, facts)
    other = f"edgert device probe {name} finds the profile that fits"
    processor = f"{facts.machine}{f', L4T {facts.l4t}' if facts.l4t else ''}"
    if facts.machine == "x86_64" and not facts.vnni:
        processor += " without VNNI: INT8 is about as fast as FP32"
    checks = (
        ("processor", processor, other),
        ("python", f"Python {facts.python or 'older than 3.10, or none'}", f"{report.root_command('apt-get install python3')}; {other}"),
        ("glibc", f"glibc {facts.glibc or 'unknown'}, {facts.distribution}", f"a newer distribution; {other}"),
        ("memory", f"{facts.memory_mb} MB", other),
    )  # fmt: skip
    for check, text, next_step in checks:
        if check in reasons:
            text = f"{text}; {profile.name} {reasons[check]}"
        report.graded(check, text, next_step, fails=check in reasons and check != "memory", warns=check in reasons)
    return profile


def _state(report: _Report, facts: MachineFacts, clock: Callable[[], float]) -> None:
    """Check the clock, the free space, and the service that keeps the daemon running."""
    device, before = report.device, clock()
    result = report.transport.run(
        ["sh", "-c", _INSPECT, "sh", device.state, facts.python_path, serves(device)], INSPECT_S_MAX
    )
    answers = dict(line.partition("=")[::2] for line in result.stdout.splitlines())
    after = clock()
    _clock_agrees(report, int(answers["now"]) if answers.get("now", "").isdigit() else None, before, after)
    free_mb = int(answers["free_kb"]) // 1024 if answers.get("free_kb", "").isdigit() else 0
    room = f"{free_mb} MB free for {device.state}"
    next_step = f"free some space on the device; {device.state}/cache may be removed at any time"
    report.graded("disk", room, next_step, fails=free_mb < FREE_MB_FAIL, warns=free_mb < FREE_MB_WARN)
    if not device.kind.needs_runtime:
        return
    user, root = answers.get("user", "?"), answers.get("root", "")
    rights = {"yes": "root", "sudo": f"{user}, and root by sudo"}.get(root, f"{user}, without root")
    lingers = answers.get("lingers", "")
    if not facts.systemd:
        report.warn(
            "service",
            "no systemd: edgertd's own monitor keeps the daemon running, until a reboot",
            f"edgert bootstrap {device.name} after a reboot, or cron: {crontab_line(device)}",
        )
    elif lingers and lingers != "yes":
        report.warn(
            "service", f"services of {user} end at log-out", f"on the device, as root: loginctl enable-linger {user}"
        )
    elif answers.get("enabled", "enabled") != "enabled":
        report.fail("service", "the unit is not started at boot", f"edgert bootstrap {device.name}")
    else:
        report.ok("service", f"systemd, logged in as {rights}")
    if facts.python_path and answers.get("venv") != "yes":
        next_step = report.root_command(f"apt-get install python{facts.python}-venv")
        report.warn("venv", f"{facts.python_path} cannot make virtual environments: a bootstrap would fail", next_step)


def _clock_agrees(report: _Report, now: int | None, before: float, after: float) -> None:
    if now is None:
        report.warn("clock", "the device does not report the time", f"edgert ssh {report.device.name} -- date")
        return
    skew = clock_skew_s(now, before, after)
    next_step = f"{report.root_command('timedatectl set-ntp true')}, on the machine whose clock is wrong"
    off = abs(skew) > SKEW_S_WARN
    text = f"{abs(skew):.0f} s {'behind' if skew < 0 else 'ahead of'} this host" if off else "same time as this host"
    report.graded("clock", text, next_step, fails=abs(skew) > SKEW_S_FAIL, warns=off)


def crontab_line(device: Device) -> str:
    """Return the line of a crontab that starts the monitor.

    The line escapes each %, because cron would end the command at a %.
    """
    return f"@reboot {shlex.join(['sh', script_path(device), 'start', device.state])}".replace("%", r"\%")


def clock_skew_s(now: int, before: float, after: float) -> float:
    """Return the number of seconds by which a device's clock is ahead of this host's clock.

    The device's clock showed `now` (whole seconds) at a time between `before` and `after`. The duration of the command
    is not part of the skew.
    """
    return now + 1 - before if now + 1 < before else max(0.0, now - after)


def _installed(report: _Report) -> DeviceStatus | None:
    device = report.device
    try:
        status = RemoteDaemon(report.transport, device).status()
    except DeviceUnreachable:
        raise
    except ConfigInvalid as error:  # a bootstrap also refuses this file
        advice = "correct this file" + ("" if device.transport == "local" else f": edgert ssh {device.name}")
        report.fail("configuration", error.message, advice, DeviceError.exit_code)
        return None
    except DaemonBusy as error:  # EdgeRT is installed, and its service manager or monitor restarts a daemon that hangs
        report.fail(
            "daemon", error.message, f"edgert logs {device.name}, and try again in four minutes", error.exit_code
        )
        return None
    except EdgeRTError as error:
        next_step = f"edgert bootstrap {device.name}"
        report.fail("installed", error.message.partition(f": {next_step}")[0], next_step, DeviceError.exit_code)
        return None
    other = status.edgert != __version__
    text = f"edgert {status.edgert}" + (f"; this host has {__version__}" if other else "")
    report.graded("installed", text, f"edgert bootstrap {device.name} --upgrade", fails=False, warns=other)
    for key in ("device", "profile", "site"):
        ours, theirs = getattr(device, "name" if key == "device" else key), getattr(status, key)
        if theirs != ours:
            text = f"its configuration has {key} {theirs!r}, but the inventory has {ours!r}"
            report.warn("installed", text, f"edgert bootstrap {device.name}")
    return status


def _daemon(report: _Report, status: DeviceStatus) -> None:
    name, path = report.device.name, status.socket
    if not status.daemon.running:
        report.fail("daemon", "it is not running", f"edgert logs {name}, then: edgert bootstrap {name}")
        return
    report.ok("daemon", f"runs, pid {status.daemon.pid}")
    words = report.transport.run(["sh", "-c", _SOCKET, "sh", path], INSPECT_S_MAX).stdout.split(None, 3)
    if len(words) < 4 or "socket" not in words[3]:
        report.fail("socket", f"{path} is not a socket", f"edgert logs {name}, then: edgert bootstrap {name}")
    elif int(words[0], 8) & MODE_OTHERS_WRITE:
        report.warn(
            "socket",
            f"every user of the device may connect to {path} (mode {words[0]})",
            f"set socket_group: edgert bootstrap {name} --set 'socket_group=\"GROUP\"'",
        )
    else:
        report.ok("socket", f"{path}, for user {words[1]} and group {words[2]}")


def _engines(report: _Report, status: DeviceStatus, profile: DeviceProfile | None) -> None:
    name = report.device.name
    versions = status.engines
    if profile is None:
        return
    loads = [engine for engine in profile.engines if engine in versions]
    next_step = f"edgert bootstrap {name} --engines {profile.engines[0]}"
    if package := system_package(profile.engines[0]):
        next_step = f"{report.root_command(f'apt-get install {package}')}, then: {next_step}"
    if loads[:1] == [profile.engines[0]]:
        report.ok("engine", ", ".join(f"{engine} {versions[engine]}" for engine in loads))
    elif loads:
        report.warn("engine", f"{profile.engines[0]} does not load; {loads[0]} {versions[loads[0]]} does", next_step)
    else:
        report.fail("engine", f"none of {', '.join(profile.engines)} loads", next_step)


def _trust(report: _Report, status: DeviceStatus) -> None:
    name = report.device.name
    trusted = status.keys
    ours = [report.keys[key] for key in trusted if key in report.keys]
    for complaint in status.damaged_keys:
        report.fail("keys", complaint, f"edgert bootstrap {name} --key NAME replaces it")
    if not ours:
        text = f"it trusts {', '.join(trusted) or 'no key'}; this host has {', '.join(report.keys) or 'none'}"
        report.fail("keys", text, f"edgert bootstrap {name} --key NAME, or use the host with that key")
    elif strangers := [key for key in trusted if key not in report.keys]:
        report.warn(
            "keys",
            f"besides {', '.join(ours)} it trusts {', '.join(strangers)}, which this host does not have",
            f"if it is not needed: edgert keys remove {strangers[0]} {name}",
        )
    else:
        report.ok("keys", f"it trusts {', '.join(ours)}")


def _http(report: _Report, status: DeviceStatus) -> None:
    """Check the HTTP server's package, if the server is configured."""
    name, http = report.device.name, status.http
    if http.fault:
        bring = f"{sys.executable} -m pip install 'edgert[http]'"
        if report.device.kind.needs_runtime:
            bring = f"edgert bootstrap {name} --upgrade"
        next_step = bring if http.lacks_package else f"edgert bootstrap {name} --set 'http.listen=\"ADDRESS\"'"
        report.fail("http", http.fault, next_step)
    elif http.listen:
        report.ok("http", f"configured on {http.listen}")


def _channel(report: _Report, status: DeviceStatus) -> None:
    name, channel = report.device.name, status.channel
    if not channel.registry:
        return
    what = f"{channel.channel} of {channel.registry}"
    if channel.error or channel.stale:
        next_step = f"edgert bootstrap {name} --follow {channel.registry} --channel {channel.channel}"
        files = "--registry-ca FILE --registry-login FILE"
        report.warn("channel", f"{what}: {channel.error or channel.stale}", f"{next_step} {files}")
    else:
        report.ok("channel", f"{what}, counter {channel.counter}" if channel.asked_at else f"{what}, not requested yet")


def _telemetry(report: _Report, status: DeviceStatus) -> None:
    name, telemetry = report.device.name, status.telemetry
    waiting = f"reports: {telemetry.waiting} waiting, {telemetry.lost} lost"
    connection = telemetry.connection
    if not telemetry.broker:
        report.ok("telemetry", f"no broker is configured; {waiting}")
    elif connection.state == CONNECTED and telemetry.waiting <= WAITING_WARN:
        report.ok("telemetry", f"{connection.text}; {waiting}")
    else:
        text = f"{telemetry.broker}: {connection.text or 'never connected'}; {waiting}"
        login = "--mqtt-username USER --mqtt-password-file FILE, and --broker unless edgert.toml has it"
        other = f"another broker: edgert bootstrap {name} --broker HOST"
        if connection.state in (REFUSED, BrokerRefused.code):
            other = f"another login: edgert bootstrap {name} {login}"
        report.warn("telemetry", text, f"edgert logs {name} --since 1h; {other}")


def _models(report: _Report, status: DeviceStatus) -> None:
    name = report.device.name
    for model in status.models:
        serving, logs = model.serving, f"edgert logs {name} --model {model.model}"
        loaded = None if serving is None else serving.loaded
        if model.damaged:
            text, _, next_step = model.damaged.partition("; ")
            report.fail("model", f"{model.model}: {text}", next_step)
        elif serving is not None and serving.fault:
            report.fail("model", f"{model.model}: {serving.fault}", logs)
        elif loaded is not None and loaded.tried:
            report.warn("model", f"{model.model} on {loaded.engine}, not on: {'; '.join(loaded.tried)}", logs)
        else:
            state = "not served" if serving is None else serving.state
            report.ok("model", f"{model.model}: release {model.release or 'none'}, {model.state}, {state}")
