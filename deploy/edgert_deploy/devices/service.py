"""The service that keeps `edgertd` running: a systemd unit, or edgertd's own monitor.

Root gets a system unit: the daemon runs as the user USER, in a sandbox. Any other user gets a user unit. Without
lingering, the user unit ends at log-out.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from string import Template

from edgert.config import LOGIN_CREDENTIAL, PASSWORD_CREDENTIAL, UNIT, DeviceConfig
from edgert.engines import ENGINES
from edgert.errors import DeviceError
from edgert_deploy.devices.facts import MachineFacts
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.remote_daemon import QUICK_S_MAX, RemoteDaemon, edgertd, script_path
from edgert_deploy.devices.transports import Result, Transport

USER = "edgert"
USER_COMMENT = "EdgeRT daemon"  # tells `edgert uninstall` that bootstrap created the account
START_S_MAX = 1000.0

# Over SSH, systemctl finds the user's service manager only with this variable.
_USER_RUNTIME = "export XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-/run/user/$(id -u)}; "


@dataclass(frozen=True)
class Unit:
    """A systemd unit: its path, its text, and the command that controls it."""

    path: str
    text: str
    systemctl: str
    user: bool


def chosen_unit(device: Device, facts: MachineFacts, chosen: str, transport: Transport) -> Unit | None:
    """Return the unit that keeps edgertd running on the device; None if the monitor keeps it running.

    `chosen` is auto, systemd or monitor. With auto, a running monitor continues to run. Raises DeviceError if `chosen`
    is systemd and the device does not run systemd, and if both systemd and the monitor would start the daemon.
    """
    unit = unit_for(device, facts)
    if unit is None:
        if chosen == "systemd":
            raise DeviceError(f"systemd does not run on {device.name}: omit --service, or give --service monitor")
        return None
    monitored = transport.run(["sh", "-c", _MONITORED, "sh", device.state], QUICK_S_MAX).ok
    if chosen == "systemd" and monitored:
        raise DeviceError(
            f"{device.name}: the monitor runs the daemon, and would compete with systemd. Stop it on the device first: "
            f"{shlex.join([*edgertd(device), 'stop'])}"
        )
    if chosen == "monitor" and not monitored and _systemd_has_unit(transport, device):
        raise DeviceError(
            f"{device.name}: systemd has a unit for this daemon, and would compete with the monitor. Omit --service; or "
            f"remove the unit first, which keeps models, keys and configuration: edgert uninstall {device.name}"
        )
    return None if chosen == "monitor" or monitored else unit


def unit_for(
    device: Device, facts: MachineFacts, engines: Sequence[str] = (), config: DeviceConfig | None = None
) -> Unit | None:
    """Return the unit that can keep edgertd running on the device; None if only the monitor can do this.

    `engines` are the engines that may serve on the device. `config` is the device's configuration, if it is known.
    Raises DeviceError if the daemon's user could change the programs that root runs.
    """
    if not facts.systemd or not device.kind.needs_runtime:
        return None
    user = facts.uid != 0
    if not user and f"{device.home}/".startswith(f"{device.state}/"):
        raise DeviceError(
            f"{device.name}: root runs programs in {device.home}, which is in {device.state}, and the daemon's user may "
            f"change that folder. Run edgert device remove {device.name}, then add it again with a --home outside its --state"
        )
    template = (files("edgert_deploy") / "devices" / "systemd" / ("edgertd-user.service" if user else UNIT)).read_text()
    text = Template(template).substitute(
        edgertd=_quoted(edgertd(device)[0]),
        runtime=_quoted(script_path(device)),
        state=_quoted(device.state),
        keys=_quoted(f"-{device.state}/keys"),
        config=_quoted(f"-{device.state}/config.toml"),
        user=USER,
        group=USER if config is None else config.socket_group or USER,  # the group that owns the socket
        protect_home="read-only" if _in_a_home(device.home) or _in_a_home(device.state) else "yes",
        devices=_devices(engines),
        credential=_credentials(config),
    )
    if user:
        path = f"{facts.home}/.config/systemd/user/{UNIT}"
        return Unit(path, text, f"{_USER_RUNTIME}systemctl --user", user=True)
    return Unit(f"/etc/systemd/system/{UNIT}", text, "systemctl", user=False)


def serves(device: Device) -> str:
    """Return a text that only the unit of this device's state folder contains."""
    return f"--state {_quoted(device.state)} serve"


def give_to_user(transport: Transport, device: Device) -> bool:
    """Create the unit's user and give it the state folder. Return whether anything changed.

    Root stays the owner of keys, configuration and passwords. Raises DeviceError if the user cannot reach the folders.
    """
    words = (device.state, USER, USER_COMMENT)
    done = _shell(transport, _GIVE_TO_USER, "give the state folder to its user", device, words=words)
    program = edgertd(device)[0]
    reach = 'runuser -u "$1" -- test -w "$2" && runuser -u "$1" -- test -x "$3"'
    if not transport.run(["sh", "-c", reach, "sh", USER, device.state, program], QUICK_S_MAX).ok:
        raise DeviceError(
            f"{device.name}: the daemon's user {USER} cannot reach {device.state} or {program}. Add the device again with "
            "--state and --home in folders that every user may enter, such as /var/lib and /opt"
        )
    return bool(done.stdout.strip())


def start(transport: Transport, device: Device) -> None:
    """Start the daemon if it does not run. Raises DeviceError with the message of the device."""
    if device.kind.needs_runtime and _systemd_has_unit(transport, device):
        _shell(transport, f"{_manager()} start {UNIT}", "start edgertd", device, START_S_MAX)
    else:
        RemoteDaemon(transport, device).call("start")


def check(transport: Transport, device: Device, unit: Unit) -> None:
    """Check the rights that only the device's administrator can grant. Raises DeviceError.

    This check comes before anything is sent. A user's services end at log-out if lingering is off for the user. This
    function turns lingering on, and records the change in the receipt on the device, for an uninstall.
    """
    if not unit.user:
        if not transport.run(["sh", "-c", _CAN_MAKE_USER, "sh", USER], QUICK_S_MAX).ok:
            raise DeviceError(
                f"{device.name}: useradd and runuser are missing. Install the packages passwd and util-linux on the device"
            )
        can_write = transport.run(["sh", "-c", _CAN_WRITE, "sh", USER, unit.path], QUICK_S_MAX)
        if not can_write.ok:
            raise DeviceError(
                f"{device.name}: {can_write.stdout.strip()} cannot be written by root: it is read-only. Nothing was sent. Make "
                "it writable, or bootstrap with --service monitor"
            )
        return
    done = transport.run(["sh", "-c", _LINGER, "sh", device.home], QUICK_S_MAX)
    if not done.ok:
        user = device.address.rpartition("@")[0] or "USER"
        raise DeviceError(
            f"{device.name}: the service would end at log-out ({done.failure_text()}). Nothing was sent; run on the device, as root: "
            f"loginctl enable-linger {user}"
        )
    done = transport.run(["sh", "-c", _USER_MANAGER], QUICK_S_MAX)
    if not done.ok:
        raise DeviceError(
            f"{device.name}: systemd does not answer its user ({done.failure_text()}). Nothing was sent; install "
            "dbus-user-session and libpam-systemd on the device, or bootstrap with --service monitor"
        )


def enable(transport: Transport, device: Device, unit: Unit) -> None:
    """Make systemd read the unit file again, and start the unit at each boot."""
    _shell(transport, f"{unit.systemctl} daemon-reload && {unit.systemctl} enable {UNIT}", "enable the unit", device)


def restart(transport: Transport, device: Device, unit: Unit | None) -> None:
    """Restart the daemon with the present installation."""
    if unit is not None:
        _shell(transport, f"{unit.systemctl} restart {UNIT}", "restart edgertd", device, START_S_MAX)
        return
    daemon = RemoteDaemon(transport, device)
    daemon.call("stop")
    daemon.call("start")


def _systemd_has_unit(transport: Transport, device: Device) -> bool:
    script = f"test -d /run/systemd/system && {_manager()} cat {UNIT} | grep -qF -- {shlex.quote(serves(device))}"
    return transport.run(["sh", "-c", script], QUICK_S_MAX).ok


def _manager() -> str:
    """Return the shell command for the service manager of the user who logs in."""
    return f"{_USER_RUNTIME}systemctl $(test $(id -u) = 0 || echo --user)"


def _shell(
    transport: Transport,
    script: str,
    doing: str,
    device: Device,
    timeout_s: float = QUICK_S_MAX,
    words: Sequence[str] = (),
) -> Result:
    done = transport.run(["sh", "-c", script, "sh", *words], timeout_s)
    if not done.ok:
        raise DeviceError(
            f"{device.name}: cannot {doing}: {done.failure_text()}. See on the device: journalctl -u {UNIT} -e"
        )
    return done


_MONITORED = """
for file in $(grep -las '[e]dgert.daemon.monitor' /proc/[0-9]*/cmdline); do
  tr '\\0' ' ' <"$file" | grep -qF -- "--state $1 " && exit 0
done
exit 1
"""
_CAN_MAKE_USER = 'command -v runuser && { id -u "$1" || command -v useradd; }'
# Writes change only what is missing: a device with an account and a unit may have a read-only /etc.
_CAN_WRITE = """
writable() { test -w "$1" || { echo "$1"; exit 1; }; }
id -u "$1" >/dev/null 2>&1 || writable /etc
test -e "$2" || writable "$(dirname "$2")"
"""
# Without polkit, only root may enable lingering. Then loginctl would refuse this call, even if lingering is on already.
_LINGER = """
test -e "/var/lib/systemd/linger/$(id -un)" || { loginctl enable-linger && printf 'linger\\n' >>"$1/receipt"; }
"""
# Directly after `enable-linger`, the user's service manager may still be starting.
_USER_MANAGER = f"""
{_USER_RUNTIME}
for i in 1 2 3 4 5 6 7 8 9 10; do
  said=$(systemctl --user show-environment 2>&1 >/dev/null) && exit 0
  sleep 1
done
printf '%s\\n' "$said" >&2
exit 1
"""

# Prints a word for each change. Incoming bundles keep their owner, because the daemon only reads them. `chown` runs in
# -execdir: with -exec, the daemon's user could replace a folder of the path with a link.
_GIVE_TO_USER = """
set -e
id -u "$2" >/dev/null 2>&1 || {
  useradd --system --user-group --no-create-home --home-dir "$1" --shell /usr/sbin/nologin --comment "$3" "$2"
  for group in video render; do
    if getent group $group >/dev/null; then usermod --append --groups $group "$2"; fi
  done
  echo user
}
mkdir -p "$1"
find "$1" -path "$1/keys" -prune -o -path "$1/incoming" -prune -o -path "$1/config.toml" -prune -o -path "$1/mqtt-*" -prune -o -path "$1/registry-*" -prune -o ! -user "$2" \\
  -execdir chown --no-dereference "$2:$2" {} + -exec echo owner {} +
"""


def _devices(engines: Sequence[str]) -> str:
    if any(ENGINES[engine].device_files for engine in engines):
        return "# The engine reaches its processor through device files."
    return "PrivateDevices=yes\nDevicePolicy=closed"


def _credentials(config: DeviceConfig | None) -> str:
    """Return the lines of the unit that pass secrets to the daemon, from files that only root may read.

    The files are read-only for the daemon. Otherwise the daemon could replace them with links to other files of root.
    """
    lines = []
    if config is not None:
        for name, file in (
            (PASSWORD_CREDENTIAL, config.mqtt.password_file),
            (LOGIN_CREDENTIAL, config.follow.credentials),
        ):
            if file:
                lines += [f"LoadCredential={name}:{file.replace('%', '%%')}", f"ReadOnlyPaths={_quoted(f'-{file}')}"]
    return "\n".join(lines) or "# No broker's password and no registry's login is configured."


def _in_a_home(path: str) -> bool:
    return path.startswith(("/home/", "/root/", "/run/user/"))


def _quoted(word: str) -> str:
    """Quote `word` for a systemd unit."""
    escaped = word.replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if " " in escaped else escaped
