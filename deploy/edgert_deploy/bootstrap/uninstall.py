"""The way back from a bootstrap: service, runtimes, account, credentials; models and configuration only where that is asked for.

What is removed goes by name, and folders go where nothing is left in them: what somebody else put there stays, and is
named. The work is one shell script on the device (on_device/uninstall.sh), which can be run again wherever it ended.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import tomlkit
from tomlkit.exceptions import TOMLKitError

from edgert.errors import DeviceError, EdgeRTError
from edgert_deploy.bootstrap import runtime
from edgert_deploy.devices import service
from edgert_deploy.devices.claims import KNOWN, setting_up
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.remote import RemoteDaemon, script_path
from edgert_deploy.devices.transports import Result, Transport

REMOVE_S_MAX = 600.0
CREDENTIALS = ("username", "password_file", "ca", "cert", "key")

Say = Callable[[str], None]


@dataclass(frozen=True)
class Removal:
    """What went, or would go, and what stays."""

    device: str
    removed: tuple[str, ...]
    left: tuple[str, ...]


def uninstall(
    device: Device, transport: Transport, *, purge: bool, dry_run: bool = False, say: Say = lambda _: None
) -> Removal:
    """Take away what bootstrap made on `device`; with `purge` its models, keys and configuration, too.

    Raises DeviceError where something could not be removed, and DeployUnderWay where another host sets it up.
    """
    if dry_run:
        return _removal(device, _run("show", device, purge, transport))
    with setting_up(device, transport, make=False) as held:
        return _uninstall(device, held, purge, say)


def _uninstall(device: Device, transport: Transport, purge: bool, say: Say) -> Removal:
    say("stopping the daemon")
    first = _removal(device, _run("stop", device, purge, transport))
    _stop_daemon(device, transport)
    if not purge:
        _forget_broker(device, transport)
    say("removing what bootstrap made")
    result = _run("remove", device, purge, transport)
    rest = _removal(device, result)
    if not result.ok:
        raise DeviceError(f"{device.name}: not everything could be removed: {result.complaint()}; try again")
    return Removal(device.name, (*first.removed, *rest.removed), tuple(dict.fromkeys((*first.left, *rest.left))))


def _run(mode: str, device: Device, purge: bool, transport: Transport) -> Result:
    script = (files("edgert_deploy") / "bootstrap" / "on_device" / "uninstall.sh").read_text()
    words = [mode, device.home, device.state, "yes" if purge else "no"]
    return transport.run(
        [
            "sh",
            "-c",
            script,
            "sh",
            *words,
            service.UNIT,
            service.USER,
            service.USER_COMMENT,
            KNOWN,
            service.serves(device),
        ],
        REMOVE_S_MAX,
    )


def _stop_daemon(device: Device, transport: Transport) -> None:
    """The monitor's, which no service manager knows; by the script that needs no runtime, or this machine's own."""
    if not device.kind.needs_runtime:
        try:
            RemoteDaemon(transport, device).call("stop")
        except EdgeRTError:  # nothing was ever set up there
            return
        return
    words = ["sh", "-c", runtime.script_text().decode(), script_path(device), "stop", device.state]
    transport.run(words, REMOVE_S_MAX)  # fails where HOME is gone: then nothing runs from it


def _forget_broker(device: Device, transport: Transport) -> None:
    """What stays must not name credentials that go: a later bootstrap would hand over a password that is not there."""
    path = f"{device.state}/config.toml"
    present = transport.run(["cat", path], runtime.QUICK_S_MAX)
    if not present.ok:
        return
    try:
        document = tomlkit.parse(present.stdout)
    except TOMLKitError:
        return
    table = document.get("mqtt")
    if not isinstance(table, dict) or not any(key in table for key in CREDENTIALS):
        return
    for key in CREDENTIALS:
        table.pop(key, None)
    with tempfile.NamedTemporaryFile() as file:
        file.write(tomlkit.dumps(document).encode())
        file.flush()
        transport.put(Path(file.name), path)


def _removal(device: Device, result: Result) -> Removal:
    lines = [line.partition(" ") for line in result.stdout.splitlines()]
    return Removal(
        device.name,
        tuple(what for verb, _, what in lines if verb == "removed"),
        tuple(what for verb, _, what in lines if verb == "left"),
    )
