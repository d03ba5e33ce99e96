"""What a device needs, from the way there up to what it serves: asked over its own link, nothing changed."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from edgert import __version__
from edgert.checks.status import DeviceStatus
from edgert.errors import ConfigInvalid, DeviceError, DeviceUnreachable, EdgeRTError, HostKeyMismatch, LoginRefused
from edgert.telemetry.link import CONNECTED
from edgert_deploy.devices.facts import MachineFacts, misfits, probe
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.profiles import DeviceProfile, load_profile
from edgert_deploy.devices.remote import RemoteDaemon, script_path
from edgert_deploy.devices.service import serves
from edgert_deploy.devices.transports import Transport, open_transport
from edgert_deploy.doctor import FAIL, OK, WARN, Finding

LOOK_S_MAX = 30.0
FREE_MB_FAIL, FREE_MB_WARN = 100, 500
SKEW_S_WARN, SKEW_S_FAIL = 5.0, 300.0  # certificates and signed expiries go by the clock
WAITING_WARN = 500  # reports; a model makes two a window
MODE_OTHERS_WRITE = 0o002

# $1 state folder, $2 Python, $3 what the unit says that serves that folder.
_LOOK = r"""
echo now=$(date +%s)
place=$1; while test ! -e "$place"; do place=$(dirname "$place"); done
echo "free_kb=$(df -Pk "$place" 2>/dev/null | awk 'NR == 2 {print $4}')"
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
_SOCKET = 'stat -L -c "%a %U %G %F" -- "$1"'


@dataclass
class _Visit:
    """One device while it is looked at: what was learnt so far, and what was found."""

    device: Device
    transport: Transport
    keys: Mapping[str, str]
    found: list[Finding] = field(default_factory=list)

    def ok(self, check: str, says: str) -> None:
        self.found.append(Finding(self.device.name, check, OK, says))

    def warn(self, check: str, says: str, mend: str) -> None:
        self.found.append(Finding(self.device.name, check, WARN, says, mend))

    def fail(self, check: str, says: str, mend: str, exit_code: int = DeviceError.exit_code) -> None:
        self.found.append(Finding(self.device.name, check, FAIL, says, mend, exit_code))

    def there(self, command: str) -> str:
        """A step to be taken on the device itself, as root."""
        if not self.device.kind.uses_ssh:
            return f"sudo {command}"
        as_root = "" if self.device.address.startswith("root@") else "sudo "
        return f"edgert ssh {'-t ' if as_root else ''}{self.device.name} -- {as_root}{command}"


def check_device(
    device: Device, keys: Mapping[str, str], profiles_dir: Path | None = None, clock: Callable[[], float] = time.time
) -> list[Finding]:
    """Every check on one device. `keys` are the ids of this host's keys -> names; `clock` is its wall clock.

    Stops where a later check could only say the same again: no way there, or nothing installed.
    """
    try:
        transport = open_transport(device)
    except ConfigInvalid as error:
        mend = f"edgert device remove {device.name}, then add it again"
        return [Finding(device.name, "transport", FAIL, error.message, mend, error.exit_code)]
    visit = _Visit(device, transport, keys)
    try:
        facts = _way(visit)
        if facts is not None:
            profile = _machine(visit, facts, profiles_dir)
            _state(visit, facts, clock)
            if (status := _installed(visit)) is not None:
                _daemon(visit, status)
                _engines(visit, status, profile)
                _trust(visit, status)
                _http(visit, status)
                _telemetry(visit, status)
                _models(visit, status)
    except EdgeRTError as error:  # the link fell, or a command took too long, in the middle of it
        visit.fail("reachable", error.message, f"edgert doctor {device.name}", error.exit_code)
    finally:
        visit.transport.close()
    return visit.found


def _way(visit: _Visit) -> MachineFacts | None:
    device, name = visit.device, visit.device.name
    begun = time.monotonic()
    try:
        facts = probe(visit.transport, name, device.python)
    except HostKeyMismatch as error:
        jump = f"--jump {device.jump}" if "the jump host" in error.message else "--repin"
        visit.fail("host key", error.message, f"edgert device set {name} {jump}, once you know why", error.exit_code)
    except LoginRefused as error:
        mend = f"ssh-copy-id {device.address}, or: edgert device set {name} --identity FILE"
        visit.fail("login", error.message, mend, error.exit_code)
    except DeviceUnreachable as error:
        mend = f"switch it on; where its address is another one: edgert device set {name} --address USER@HOST"
        visit.fail("reachable", error.message, mend, error.exit_code)
    except ConfigInvalid as error:
        visit.fail("login", error.message, f"edgert device set {name} --identity FILE", error.exit_code)
    except DeviceError as error:
        visit.fail("system", error.message, "EdgeRT runs on Linux with a shell and glibc", error.exit_code)
    else:
        took = "" if not device.kind.uses_ssh else f", host key as pinned, login in {time.monotonic() - begun:.1f} s"
        visit.ok("reachable", f"{device.address}{took}")
        return facts
    return None


def _machine(visit: _Visit, facts: MachineFacts, profiles_dir: Path | None) -> DeviceProfile | None:
    """Against its profile."""
    name = visit.device.name
    try:
        profile = load_profile(visit.device.profile, profiles_dir)
    except ConfigInvalid as error:
        visit.fail("profile", error.message, f"edgert device probe {name} --save", error.exit_code)
        return None
    reasons = misfits(profile, facts)
    other = f"edgert device probe {name} says which profile fits"
    checks = (
        ("processor", "is for", f"{facts.machine}{f', L4T {facts.l4t}' if facts.l4t else ''}", other),
        ("python", "needs Python", f"Python {facts.python or 'older than 3.10, or none'}", f"{visit.there('apt-get install python3')}; {other}"),
        ("glibc", "needs glibc", f"glibc {facts.glibc or 'unknown'}, {facts.distribution}", f"a newer distribution; {other}"),
        ("memory", "needs", f"{facts.memory_mb} MB", other),
    )  # fmt: skip
    for check, begins, says, mend in checks:
        against = [
            reason for reason in reasons if reason.startswith(begins) and (check != "memory" or "memory" in reason)
        ]
        if not against:
            visit.ok(check, says)
        elif check == "memory":
            visit.warn(check, f"{says}; {profile.name} {against[0]}", mend)
        else:
            visit.fail(check, f"{says}; {profile.name} {', '.join(against)}", mend)
    return profile


def _state(visit: _Visit, facts: MachineFacts, clock: Callable[[], float]) -> None:
    """The machine as it stands: clock, room, who keeps the daemon running, with which rights."""
    device, before = visit.device, clock()
    result = visit.transport.run(["sh", "-c", _LOOK, "sh", device.state, facts.python_path, serves(device)], LOOK_S_MAX)
    said = dict(line.partition("=")[::2] for line in result.stdout.splitlines())
    after = clock()
    _clock_agrees(visit, int(said["now"]) if said.get("now", "").isdigit() else None, before, after)
    free_mb = int(said["free_kb"]) // 1024 if said.get("free_kb", "").isdigit() else 0
    room = f"{free_mb} MB free for {device.state}"
    if free_mb < FREE_MB_FAIL:
        visit.fail("room", room, f"make room there; {device.state}/cache may be removed at any time")
    elif free_mb < FREE_MB_WARN:
        visit.warn("room", room, f"make room there; {device.state}/cache may be removed at any time")
    else:
        visit.ok("room", room)
    if not device.kind.needs_runtime:
        return
    user, root = said.get("user", "?"), said.get("root", "")
    rights = {"yes": "root", "sudo": f"{user}, and root by sudo"}.get(root, f"{user}, without root")
    lingers = said.get("lingers", "")
    if not facts.systemd:
        visit.warn(
            "service",
            "no systemd: edgertd's own monitor, which no reboot starts again",
            f"edgert bootstrap {device.name} after a reboot, or cron: @reboot sh {script_path(device)} start {device.state}",
        )
    elif lingers and lingers != "yes":
        visit.warn(
            "service", f"the services of {user} end with the log-out", f"as root there: loginctl enable-linger {user}"
        )
    elif said.get("enabled", "enabled") != "enabled":
        visit.fail("service", "the unit is not started at boot", f"edgert bootstrap {device.name}")
    else:
        visit.ok("service", f"systemd, logged in as {rights}")
    if facts.python_path and said.get("venv") != "yes":
        mend = visit.there(f"apt-get install python{facts.python}-venv")
        visit.warn(
            "venv", f"{facts.python_path} makes no virtual environments: bootstrap could not change anything", mend
        )


def _clock_agrees(visit: _Visit, now: int | None, before: float, after: float) -> None:
    if now is None:
        visit.warn("clock", "it does not say the time", f"edgert ssh {visit.device.name} -- date")
        return
    # What the question took to get there is not its clock's fault; it says whole seconds.
    skew = now + 1 - before if now + 1 < before else max(0.0, now - after)
    mend = visit.there("timedatectl set-ntp true")
    says = f"{abs(skew):.0f} s {'behind' if skew < 0 else 'ahead of'} this host"
    if abs(skew) > SKEW_S_FAIL:
        visit.fail("clock", says, mend)
    elif abs(skew) > SKEW_S_WARN:
        visit.warn("clock", says, mend)
    else:
        visit.ok("clock", "as this host's")


def _installed(visit: _Visit) -> DeviceStatus | None:
    device = visit.device
    try:
        status = RemoteDaemon(visit.transport, device).status()
    except DeviceUnreachable:
        raise
    except EdgeRTError as error:
        mend = f"edgert bootstrap {device.name}"
        visit.fail("installed", error.message.partition(f": {mend}")[0], mend, DeviceError.exit_code)
        return None
    there = status.edgert
    if there != __version__:
        visit.warn(
            "installed", f"edgert {there}; this host has {__version__}", f"edgert bootstrap {device.name} --upgrade"
        )
    else:
        visit.ok("installed", f"edgert {there}")
    for key in ("device", "profile", "site"):
        ours, theirs = getattr(device, "name" if key == "device" else key), getattr(status, key)
        if theirs != ours:
            says = f"it was told {key} {theirs!r}, the inventory has {ours!r}"
            visit.warn("installed", says, f"edgert bootstrap {device.name}")
    return status


def _daemon(visit: _Visit, status: DeviceStatus) -> None:
    name, path = visit.device.name, status.socket
    if not status.daemon.running:
        visit.fail("daemon", "it does not run", f"edgert logs {name}, then: edgert bootstrap {name}")
        return
    visit.ok("daemon", f"runs, pid {status.daemon.pid}")
    words = visit.transport.run(["sh", "-c", _SOCKET, "sh", path], LOOK_S_MAX).stdout.split(None, 3)
    if len(words) < 4 or "socket" not in words[3]:
        visit.fail("socket", f"{path} is no socket", f"edgert logs {name}, then: edgert bootstrap {name}")
    elif int(words[0], 8) & MODE_OTHERS_WRITE:
        visit.warn(
            "socket",
            f"{path} is open to every user there (mode {words[0]})",
            f"set socket_group: edgert bootstrap {name} --set 'socket_group=\"GROUP\"'",
        )
    else:
        visit.ok("socket", f"{path}, for {words[1]} and the group {words[2]}")


def _engines(visit: _Visit, status: DeviceStatus, profile: DeviceProfile | None) -> None:
    name = visit.device.name
    there = status.engines
    if profile is None:
        return
    loads = [engine for engine in profile.engines if engine in there]
    mend = f"edgert bootstrap {name} --engines {profile.engines[0]}"
    if "tensorrt" in profile.engines[:1]:
        mend = f"{visit.there('apt-get install tensorrt')}, then: {mend}"
    if loads[:1] == [profile.engines[0]]:
        visit.ok("engine", ", ".join(f"{engine} {there[engine]}" for engine in loads))
    elif loads:
        visit.warn("engine", f"{profile.engines[0]} does not load; {loads[0]} {there[loads[0]]} does", mend)
    else:
        visit.fail("engine", f"none of {', '.join(profile.engines)} loads", mend)


def _trust(visit: _Visit, status: DeviceStatus) -> None:
    name = visit.device.name
    trusted = status.keys
    ours = [visit.keys[key] for key in trusted if key in visit.keys]
    for complaint in status.damaged_keys:
        visit.fail("keys", complaint, f"edgert bootstrap {name} --key NAME writes it anew")
    if not ours:
        says = f"it trusts {', '.join(trusted) or 'no key'}, this host has {', '.join(visit.keys) or 'none'}"
        visit.fail("keys", says, f"edgert bootstrap {name} --key NAME, or use the host that has that key")
    elif strangers := [key for key in trusted if key not in visit.keys]:
        visit.warn(
            "keys",
            f"besides {', '.join(ours)} it trusts {', '.join(strangers)}, not of this host",
            f"if nobody needs it: edgert keys remove {strangers[0]} {name}",
        )
    else:
        visit.ok("keys", f"it trusts {', '.join(ours)}")


def _http(visit: _Visit, status: DeviceStatus) -> None:
    """Only where it is switched on: what is missing for it is in the environment that bootstrap makes."""
    name, http = visit.device.name, status.http
    if http.fault:
        bring = f"{sys.executable} -m pip install 'edgert[http]'"
        if visit.device.kind.needs_runtime:
            bring = f"edgert bootstrap {name} --upgrade"
        mend = bring if "httptools" in http.fault else f"edgert bootstrap {name} --set 'http.listen=\"ADDRESS\"'"
        visit.fail("http", http.fault, mend)
    elif http.listen:
        visit.ok("http", f"what {http.listen} needs is there")


def _telemetry(visit: _Visit, status: DeviceStatus) -> None:
    name, said = visit.device.name, status.telemetry
    waiting = f"{said.waiting} reports wait, {said.lost} were lost"
    link = said.link
    if not said.broker:
        visit.ok("telemetry", f"no broker is set; {waiting}")
    elif link.state == CONNECTED and said.waiting <= WAITING_WARN:
        visit.ok("telemetry", f"{link.text}; {waiting}")
    else:
        says = f"{said.broker}: {link.text or 'never connected'}; {waiting}"
        visit.warn(
            "telemetry", says, f"edgert logs {name} --since 1h; another broker: edgert bootstrap {name} --broker HOST"
        )


def _models(visit: _Visit, status: DeviceStatus) -> None:
    name = visit.device.name
    for model in status.models:
        serving, logs = model.serving, f"edgert logs {name} --model {model.model}"
        loaded = None if serving is None else serving.loaded
        if model.damaged:
            says, _, mend = model.damaged.partition("; ")
            visit.fail("model", f"{model.model}: {says}", mend)
        elif serving is not None and serving.fault:
            visit.fail("model", f"{model.model}: {serving.fault}", logs)
        elif loaded is not None and loaded.tried:
            visit.warn("model", f"{model.model} on {loaded.engine}, not on: {'; '.join(loaded.tried)}", logs)
        else:
            state = "not served" if serving is None else serving.state
            visit.ok("model", f"{model.model}: release {model.release or 'none'}, {model.state}, {state}")
