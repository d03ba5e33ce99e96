"""Removes the files that bootstrap made. Only `purge` removes models, keys and configuration.

An uninstall removes files by name, and then removes the folders that are empty. Other files stay, and the result lists
them. One shell script does the work on the device (on_device/uninstall.sh). After an interruption, you can run the
uninstall again. Before an uninstall removes the runtime and the credentials, the device clears its retained messages at
the broker.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from importlib.resources import files

import tomlkit
from tomlkit.exceptions import TOMLKitError

from edgert.config import UNIT
from edgert.errors import DeviceError, EdgeRTError, StorageFailed
from edgert_deploy.bootstrap.runtime import script_text
from edgert_deploy.devices import service
from edgert_deploy.devices.claims import OWN_FILES, setting_up
from edgert_deploy.devices.device_files import DeviceFile, config_text, put
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.remote_daemon import QUICK_S_MAX, RemoteDaemon, script_path
from edgert_deploy.devices.transports import LineSink, Result, Transport

REMOVE_S_MAX = 600.0
CREDENTIALS = {"mqtt": ("username", "password_file", "ca", "cert", "key"), "follow": ("credentials", "ca")}


@dataclass(frozen=True)
class Removal:
    """The result of an uninstall.

    `removed` lists the things that it removed, or would remove without `dry_run`. `left` lists the things that stay.
    """

    device: str
    removed: tuple[str, ...]
    left: tuple[str, ...]


def uninstall(
    device: Device, transport: Transport, *, purge: bool, dry_run: bool = False, progress: LineSink = lambda _: None
) -> Removal:
    """Remove the files of bootstrap from `device`.

    With `purge`, also remove models, keys and configuration.

    Raises DeviceError if something cannot be removed, and DeployUnderWay if another host sets the device up or deploys
    to it.
    """
    if dry_run:
        shown = _removal(device, _run("show", device, purge, transport))
        return replace(shown, removed=(*_retained(device, transport, "show").removed, *shown.removed))
    with setting_up(device, transport, make=False) as claim:
        return _uninstall(device, claim, purge, progress)


def _uninstall(device: Device, transport: Transport, purge: bool, progress: LineSink) -> Removal:
    progress("stopping the daemon")
    first = _removal(device, _run("stop", device, purge, transport))
    _stop_daemon(device, transport)
    retained = _retained(device, transport, "remove")
    if not purge:
        _forget_logins(device, transport)
    progress("removing bootstrap's files")
    result = _run("remove", device, purge, transport)
    rest = _removal(device, result)
    if not result.ok:
        raise DeviceError(f"{device.name}: could not remove everything: {result.failure_text()}. Try again")
    parts = (first, retained, rest)
    left = tuple(dict.fromkeys(path for part in parts for path in part.left))
    return Removal(device.name, tuple(path for part in parts for path in part.removed), left)


def _run(mode: str, device: Device, purge: bool, transport: Transport) -> Result:
    script = (files("edgert_deploy") / "bootstrap" / "on_device" / "uninstall.sh").read_text()
    words = [mode, device.home, device.state, "yes" if purge else "no", UNIT, service.USER, service.USER_COMMENT]
    return transport.run(["sh", "-c", script, "sh", *words, OWN_FILES, service.serves(device)], REMOVE_S_MAX)


def _stop_daemon(device: Device, transport: Transport) -> None:
    """Stop a daemon that no service manager runs. The host sends the script, so HOME may be incomplete."""
    if not device.kind.needs_runtime:
        with contextlib.suppress(EdgeRTError):  # the call fails if the device was never set up
            RemoteDaemon(transport, device).call("stop")
        return
    words = ["sh", "-c", script_text().decode(), script_path(device), "stop", device.state]
    transport.run(words, REMOVE_S_MAX)  # if HOME is missing, this fails, but then no daemon runs from HOME


def _retained(device: Device, transport: Transport, mode: str) -> Removal:
    """Make the device clear or show its retained messages at the broker, if it still has a runtime."""
    python = f"{device.home}/venv/bin/python" if device.kind.needs_runtime else device.python
    words = [python, "-m", "edgert.telemetry.forwarder_process", "--state", device.state, "--clear", mode]
    return _removal(device, transport.run(words, QUICK_S_MAX))


def _forget_logins(device: Device, transport: Transport) -> None:
    """Remove the logins from the configuration, because the script removes their files next."""
    path = f"{device.state}/config.toml"
    try:
        document = tomlkit.parse(config_text(device.state, transport))
    except (TOMLKitError, StorageFailed):
        return
    before = tomlkit.dumps(document)
    for name, keys in CREDENTIALS.items():
        if isinstance(table := document.get(name), dict):
            for key in keys:
                table.pop(key, None)
    if tomlkit.dumps(document) == before:
        return
    put(transport, device, DeviceFile(path, tomlkit.dumps(document).encode(), "configuration"))


def _removal(device: Device, result: Result) -> Removal:
    lines = [line.partition(" ") for line in result.stdout.splitlines()]
    return Removal(
        device.name,
        tuple(path for verb, _, path in lines if verb == "removed"),
        tuple(path for verb, _, path in lines if verb == "left"),
    )
