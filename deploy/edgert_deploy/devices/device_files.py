"""The files that configure a device: config.toml, the trusted keys, the broker's secrets.

A file is written only if it differs, and not if the runtime on the device would refuse it.
"""

from __future__ import annotations

import hashlib
import socket
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from edgert.bundle.signing import PublicKey
from edgert.config import DeviceConfig, parse_config
from edgert.errors import ConfigInvalid, StorageFailed
from edgert_deploy.common.addresses import PORT_PLAIN, PORT_TLS, host_and_port
from edgert_deploy.devices.facts import MachineFacts
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.devices.transports import Transport, in_folder, sha256_command

QUICK_S_MAX = 60.0
BROKER_S_MAX = 3.0
PASSWORD_NAME = "mqtt-password"


@dataclass(frozen=True)
class Broker:
    """The broker that a device reports to. The files are the host's; their content is copied."""

    host: str
    port: int = 1883
    username: str = ""
    password_file: Path | None = None
    ca: Path | None = None
    tls: bool = False

    @classmethod
    def parse(
        cls, text: str, username: str, password_file: Path | None, ca: Path | None, *, tls: bool = False
    ) -> Broker:
        """Parse HOST[:PORT]. A certificate authority turns TLS on, and TLS the default port 8883. Raises ConfigInvalid."""
        tls = tls or ca is not None
        return cls(*host_and_port(text, PORT_TLS if tls else PORT_PLAIN), username, password_file, ca, tls)


@dataclass(frozen=True)
class DeviceFile:
    """A file that the device should have; `change` names its change for people."""

    path: str
    data: bytes
    change: str
    mode: int = 0o644


def wanted_files(
    device: Device,
    profile: DeviceProfile,
    facts: MachineFacts,
    keys: Sequence[PublicKey],
    broker: Broker | None,
    settings: Mapping[str, Any],
    has_unit: bool,
    transport: Transport,
) -> tuple[list[DeviceFile], DeviceConfig]:
    """Return the files that the device should have, and its configuration then. Raises ConfigInvalid."""
    state = device.state
    wanted = [DeviceFile(f"{state}/keys/{key.key_id}.pem", key.pem(), f"key {key.key_id}") for key in keys]
    ours: dict[str, Any] = {
        "device": device.name,
        "site": device.site,
        "profile": profile.name,
        "machine": facts.machine,
    }
    if has_unit and facts.uid == 0:
        ours["socket"] = profile.socket  # systemd makes its folder under /run
    if broker is not None:
        ours["mqtt"], secrets = _broker_files(broker, state)
        wanted += secrets
    for name, value in settings.items():
        ours[name] = {**ours.get(name, {}), **value} if isinstance(value, dict) else value
    present = _text_there(f"{state}/config.toml", transport)
    if broker is not None:
        present = _without_old_login(present, broker, f"{state}/{PASSWORD_NAME}")
    text = merged_config(present, ours)
    # Refuse here what the daemon would refuse later.
    config = parse_config(text, f"{state}/config.toml")
    return [*wanted, DeviceFile(f"{state}/config.toml", text.encode(), "configuration")], config


def config_there(device: Device, transport: Transport) -> DeviceConfig:
    return parse_config(_text_there(f"{device.state}/config.toml", transport), f"{device.state}/config.toml")


def _text_there(path: str, transport: Transport) -> str:
    present = transport.run(["cat", path], QUICK_S_MAX)
    return present.stdout if present.ok else ""


def check_settings(settings: dict[str, Any]) -> None:
    """Raise ConfigInvalid for invalid lines of config.toml, before any device is asked.

    Another broker needs --broker, which also removes the login for the old one.
    """
    mqtt = settings.get("mqtt")
    for key in ("host", "port"):
        if isinstance(mqtt, dict) and key in mqtt:
            raise ConfigInvalid(f"--set mqtt.{key} would keep the login of another broker: give --broker HOST:PORT")
    fixed = {"device": "any", "profile": "any"}
    parse_config(tomlkit.dumps({**fixed, **settings}), "--set")


def broker_doubt(broker: Broker) -> str:
    """Return why devices may not reach the broker; "" if this host can reach it."""
    try:
        socket.create_connection((broker.host, broker.port), BROKER_S_MAX).close()
        return ""
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        return (
            f"this host cannot reach the broker {broker.host}:{broker.port} ({reason}); "
            "devices keep their reports until they can"
        )


def merged_config(present: str, ours: dict[str, Any]) -> str:
    """Return the configuration with our values; other values and comments stay."""
    try:
        document = tomlkit.parse(present)
    except TOMLKitError as error:
        raise ConfigInvalid(f"the device's config.toml is not TOML ({error}): repair or remove it there") from error
    for key, value in ours.items():
        if isinstance(value, dict):
            table: Any = document.setdefault(key, tomlkit.table())
            if not isinstance(table, dict):
                raise ConfigInvalid(
                    f"the device's config.toml has {key} = {table!r}, which must be a table: repair it there"
                )
            for inner, given in value.items():
                if table.get(inner) != given:
                    table[inner] = given
        elif document.get(key) != value:
            document[key] = value
    return tomlkit.dumps(document)


def _without_old_login(present: str, broker: Broker, password_file: str) -> str:
    """Remove the login that an earlier bootstrap wrote for a broker at another address."""
    try:
        document = tomlkit.parse(present)
    except TOMLKitError:  # `merged_config` reports it
        return present
    table = document.get("mqtt")
    if not isinstance(table, dict) or table.get("password_file") != password_file:
        return present
    if (table.get("host"), table.get("port")) != (broker.host, broker.port):
        for key in ("username", "password_file"):
            table.pop(key, None)
    return tomlkit.dumps(document)


def _broker_files(broker: Broker, state: str) -> tuple[dict[str, Any], list[DeviceFile]]:
    """Return the table [mqtt] and the files that it names. Raises ConfigInvalid if one cannot be read here."""
    table: dict[str, Any] = {"host": broker.host, "port": broker.port, "tls": broker.tls or broker.ca is not None}
    if broker.username:
        table["username"] = broker.username
    wanted = []
    for source, name, key, mode in (
        (broker.password_file, PASSWORD_NAME, "password_file", 0o600),
        (broker.ca, "mqtt-ca.pem", "ca", 0o644),
    ):
        if source is None:
            continue
        try:
            data = source.read_bytes()
        except OSError as error:
            raise ConfigInvalid(f"cannot read {source}: {error.strerror}") from error
        table[key] = f"{state}/{name}"
        wanted.append(DeviceFile(table[key], data, name, mode))
    return table, wanted


def check_config(device: Device, file: DeviceFile, transport: Transport) -> None:
    """Check the configuration with the device's own runtime, which may be older. Raises ConfigInvalid."""
    if not device.kind.needs_runtime:
        return
    program = "import sys; from edgert.config import parse_config; parse_config(sys.stdin.read(), sys.argv[1])"
    words = [device.python, "-c", program, file.path]
    result = transport.run(words, QUICK_S_MAX, input=file.data)
    if not result.ok:
        said = (result.stderr.strip().splitlines() or [result.complaint()])[-1]
        raise ConfigInvalid(
            f"{device.name}: the runtime there refuses this configuration ({said}). Nothing was changed: omit the setting, "
            "or install a newer runtime with --upgrade"
        )


def holds(transport: Transport, file: DeviceFile) -> bool:
    """Return whether the device has the file with this content."""
    there = transport.run(sha256_command(file.path), QUICK_S_MAX)
    return there.ok and there.stdout.strip() == _sha256(file.data)


def put(transport: Transport, device: Device, file: DeviceFile) -> None:
    """Write the file on the device.

    The daemon's user can change STATE. There the file arrives in STATE/keys, which root keeps, and gets its name by one
    rename: nobody else can change what becomes root's.
    """
    target = PurePosixPath(file.path)
    keys = f"{device.state}/keys"
    arrives = (
        target if str(target.parent) != device.state else PurePosixPath(keys, f".{target.name}.{uuid.uuid4().hex}.part")
    )
    with tempfile.NamedTemporaryFile() as copy:  # only its owner can read it
        copy.write(file.data)
        copy.flush()
        transport.put(Path(copy.name), str(arrives), mode=file.mode)
    if arrives != target:
        moved = transport.run(in_folder(keys, ["mv", "-fT", f"./{arrives.name}", f"../{target.name}"]), QUICK_S_MAX)
        if not moved.ok:
            transport.run(in_folder(keys, ["rm", "-f", f"./{arrives.name}"]), QUICK_S_MAX)
            raise StorageFailed(f"{device.name}: {file.path} cannot be written: {moved.complaint()}")


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
