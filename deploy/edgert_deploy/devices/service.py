"""What keeps `edgertd` running on a device: a systemd unit where systemd runs, else edgertd's own monitor.

For root it is a system unit, whose daemon runs as the user USER and sees little of the machine; for another user
it is a unit of their own, which needs lingering to survive the log-out.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from string import Template

from edgert.config import DeviceConfig
from edgert.errors import DeviceError
from edgert_deploy.devices.facts import MachineFacts
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.remote import RemoteDaemon, edgertd, script_path
from edgert_deploy.devices.transports import Result, Transport

UNIT = "edgertd.service"
USER = "edgert"
USER_COMMENT = "EdgeRT daemon"  # by which `edgert uninstall` knows the account as one that bootstrap made
PASSWORD_CREDENTIAL = "mqtt-password"  # the daemon looks for it under this name
# These reach their processor through device files.
ENGINES_WITH_DEVICES = ("tensorrt",)
START_S_MAX = 1000.0
QUICK_S_MAX = 60.0

# Over SSH a user's own service manager is found only with the first; systemd makes that folder at log-in or by linger.
_USER_RUNTIME = "export XDG_RUNTIME_DIR=${XDG_RUNTIME_DIR:-/run/user/$(id -u)}; "


@dataclass(frozen=True)
class Unit:
    """A systemd unit: where it lies, what it says, and the words that reach its manager."""

    path: str
    text: str
    systemctl: str
    user: bool


def unit_for(
    device: Device, facts: MachineFacts, engines: Sequence[str] = (), config: DeviceConfig | None = None
) -> Unit | None:
    """The unit that keeps edgertd running there, or None where the monitor does.

    `engines` are those that may serve there, `config` the device's own where it is known already.
    """
    if not facts.systemd or not device.kind.needs_runtime:
        return None
    user = facts.uid != 0
    template = (files("edgert_deploy") / "devices" / "systemd" / ("edgertd-user.service" if user else UNIT)).read_text()
    text = Template(template).substitute(
        edgertd=_quoted(edgertd(device)[0]),
        runtime=_quoted(script_path(device)),
        state=_quoted(device.state),
        keys=_quoted(f"-{device.state}/keys"),
        config=_quoted(f"-{device.state}/config.toml"),
        user=USER,
        group=USER if config is None else config.socket_group or USER,  # the socket is this group's
        protect_home="read-only" if _in_a_home(device.home) or _in_a_home(device.state) else "yes",
        devices=_devices(engines),
        credential=_credential("" if config is None else config.mqtt.password_file),
    )
    if user:
        path = f"{facts.home}/.config/systemd/user/{UNIT}"
        return Unit(path, text, f"{_USER_RUNTIME}systemctl --user", user=True)
    return Unit(f"/etc/systemd/system/{UNIT}", text, "systemctl", user=False)


def serves(device: Device) -> str:
    """What the unit of this very state folder says; that of /var/lib/edgert-2 does not."""
    return f"--state {_quoted(device.state)} serve"


def give_to_user(transport: Transport, device: Device) -> bool:
    """Make the unit's user there, and the state folder theirs; whether anything had to change.

    Keys, configuration and passwords stay root's. Raises DeviceError where the user could not use what is there.
    """
    done = _shell(
        transport,
        _GIVE_TO_USER,
        "the state folder belongs to its user",
        device,
        words=(device.state, USER, USER_COMMENT),
    )
    program = edgertd(device)[0]
    reach = 'runuser -u "$1" -- test -w "$2" && runuser -u "$1" -- test -x "$3"'
    if not transport.run(["sh", "-c", reach, "sh", USER, device.state, program], QUICK_S_MAX).ok:
        raise DeviceError(
            f"{device.name}: the user {USER}, as whom the daemon runs, cannot reach {device.state} or {program}: "
            "add the device again with --state and --home where others may look, such as /var/lib and /opt"
        )
    return bool(done.stdout.strip())


def start(transport: Transport, device: Device) -> None:
    """Start what bootstrap set up, where it does not run already. Raises DeviceError with what it said."""
    if device.kind.needs_runtime and _systemd_has_unit(transport, device):
        _systemctl(transport, device, "start")
    else:
        RemoteDaemon(transport, device).call("start")


def enable(transport: Transport, device: Device, unit: Unit) -> None:
    """Make a unit that lies there known, and wanted at each boot. What has to be taken back one day goes into the receipt."""
    _shell(
        transport, f"{unit.systemctl} daemon-reload && {unit.systemctl} enable {UNIT}", "systemd took the unit", device
    )
    if unit.user:
        advice = f"run there, as root: loginctl enable-linger {device.address.partition('@')[0]}"
        # Without polkit only root may allow it; where root has, asking again would be refused.
        lingers = (
            'test -e "/var/lib/systemd/linger/$(id -un)" || '
            '{ loginctl enable-linger && printf "linger\\n" >>"$1/receipt"; }'
        )
        done = transport.run(["sh", "-c", lingers, "sh", device.home], QUICK_S_MAX)
        if not done.ok:
            raise DeviceError(f"{device.name}: the service would end with the log-out; {advice} ({done.complaint()})")


def restart(transport: Transport, device: Device, unit: Unit | None) -> None:
    """End what runs and start what is installed now."""
    if unit is not None:
        _shell(transport, f"{unit.systemctl} restart {UNIT}", "edgertd started", device, START_S_MAX)
        return
    daemon = RemoteDaemon(transport, device)
    daemon.call("stop")
    daemon.call("start")


def _systemd_has_unit(transport: Transport, device: Device) -> bool:
    script = f"test -d /run/systemd/system && {_manager()} cat {UNIT} | grep -qF -- {shlex.quote(serves(device))}"
    return transport.run(["sh", "-c", script], QUICK_S_MAX).ok


def _systemctl(transport: Transport, device: Device, verb: str) -> None:
    _shell(transport, f"{_manager()} {verb} {UNIT}", f"systemd could {verb} edgertd", device, START_S_MAX)


def _manager() -> str:
    """The words for the manager of whoever logs in, decided over there."""
    return f"{_USER_RUNTIME}systemctl $(test $(id -u) = 0 || echo --user)"


def _shell(
    transport: Transport,
    script: str,
    what: str,
    device: Device,
    timeout_s: float = QUICK_S_MAX,
    words: Sequence[str] = (),
) -> Result:
    done = transport.run(["sh", "-c", script, "sh", *words], timeout_s)
    if not done.ok:
        raise DeviceError(
            f"{device.name}: it is not so that {what}: {done.complaint()}; look there with: journalctl -u {UNIT} -e"
        )
    return done


# Prints a word where something had to change. Bundles on their way in stay whose they are: they are only read.
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
find "$1" -path "$1/keys" -prune -o -path "$1/incoming" -prune -o -path "$1/config.toml" -prune -o -path "$1/mqtt-*" -prune -o ! -user "$2" \\
  -exec chown --no-dereference "$2:$2" {} + -exec echo owner {} +
"""


def _devices(engines: Sequence[str]) -> str:
    if any(engine in ENGINES_WITH_DEVICES for engine in engines):
        return "# The engine reaches its processor through device files."
    return "PrivateDevices=yes\nDevicePolicy=closed"


def _credential(password_file: str) -> str:
    """The line with which systemd hands over a password file that only root may read."""
    if not password_file:
        return "# No broker's password is configured."
    return f"LoadCredential={PASSWORD_CREDENTIAL}:{password_file.replace('%', '%%')}"


def _in_a_home(path: str) -> bool:
    return path.startswith(("/home/", "/root/", "/run/user/"))


def _quoted(word: str) -> str:
    """`word` as systemd reads it in a unit: specifiers and variables doubled, quoted where it has spaces."""
    escaped = word.replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if " " in escaped else escaped
