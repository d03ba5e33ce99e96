"""The files that configure a device: config.toml, the trusted keys, the broker's secrets.

A file is written only if its content differs. A configuration is written only if the runtime on the device accepts it.
"""

from __future__ import annotations

import hashlib
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import tomlkit
from tomlkit.exceptions import TOMLKitError

from edgert.bundle.signing import PublicKey
from edgert.config import DeviceConfig, parse_config
from edgert.durable import os_error_as
from edgert.errors import ConfigInvalid, StorageFailed
from edgert.http.address import parse_address
from edgert.registry.address import parse_repository
from edgert.registry.login import read_credentials
from edgert_deploy.common.addresses import PORT_PLAIN, PORT_TLS, host_and_port
from edgert_deploy.devices.facts import MachineFacts
from edgert_deploy.devices.inventory import Device
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.devices.remote_daemon import QUICK_S_MAX
from edgert_deploy.devices.transports import PutOptions, Transport, in_folder, sha256_command

PASSWORD_NAME, BROKER_CA_NAME = "mqtt-password", "mqtt-ca.pem"
LOGIN_NAME, CA_NAME = "registry-login", "registry-ca.pem"
# Each entry is a key of the configuration, and the name of the key's file in STATE.
_OF_BROKER = (("password_file", PASSWORD_NAME), ("ca", BROKER_CA_NAME))
_OF_REGISTRY = (("credentials", LOGIN_NAME), ("ca", CA_NAME))
CONFIG_BYTES_MAX = 1024**2
_IF_PLAIN = 'test -f "$1" && test ! -L "$1" && shift && exec "$@"'


@dataclass(frozen=True)
class Broker:
    """The broker to which a device reports.

    `password` and `ca` are the contents of files. With `for_new`, a device that already logs in to this broker as
    another user keeps its own login.
    """

    host: str
    port: int = 1883
    username: str = ""
    password: bytes | None = field(default=None, repr=False)
    ca: bytes | None = None
    tls: bool = False
    for_new: bool = False

    @classmethod
    def parse(
        cls,
        text: str,
        username: str,
        password_file: Path | None,
        ca: Path | None,
        *,
        tls: bool = False,
        for_new: bool = False,
    ) -> Broker:
        """Parse HOST[:PORT] and read the files.

        A certificate authority turns TLS on. With TLS, the default port is 8883. Raises ConfigInvalid for an invalid
        address, and for a file that cannot be read.
        """
        tls = tls or ca is not None
        address = host_and_port(text, PORT_TLS if tls else PORT_PLAIN)
        return cls(*address, username, _content(password_file), _content(ca), tls, for_new)


@dataclass(frozen=True)
class Following:
    """The channel that a device follows. `ca` and `login` are the contents of files."""

    registry: str
    channel: str
    ca: bytes | None = None
    login: bytes | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, registry: str, channel: str, ca: Path | None, login: Path | None) -> Following:
        """Check the address and read the files. Raises ConfigInvalid."""
        repository = parse_repository(registry)
        if login is not None and read_credentials(login, repository.host) is None:
            raise ConfigInvalid(
                f"{login} has no login for {repository.host}: run docker login {repository.host} first, or omit "
                "--registry-login"
            )
        return cls(registry, channel, _content(ca), _content(login))


@dataclass(frozen=True)
class DeviceFile:
    """A file that the device should have. `change` names a change of this file in messages."""

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
    following: Following | None,
    settings: Mapping[str, Any],
    has_unit: bool,
    transport: Transport,
) -> tuple[list[DeviceFile], DeviceConfig]:
    """Return the files that the device should have, and its configuration. Raises ConfigInvalid.

    Args:
        broker: The broker to report to; None leaves the broker unchanged.
        following: The channel to follow; None leaves the channel unchanged.
        settings: The user's values for config.toml.
        has_unit: Whether systemd runs the daemon.
    """
    state = device.state
    files_of_device = [DeviceFile(f"{state}/keys/{key.key_id}.pem", key.pem(), f"key {key.key_id}") for key in keys]
    ours: dict[str, Any] = {
        "device": device.name,
        "site": device.site,
        "profile": profile.name,
        "machine": facts.machine,
    }
    if has_unit and facts.uid == 0:
        ours["socket"] = profile.socket  # systemd makes the socket's folder under /run
    document = _parsed(config_text(state, transport))
    if broker is not None:
        present = _table(document, "mqtt")
        _check_tls_stays(present, broker, settings)
        _forget_old_broker(present, broker, state)
        ours["mqtt"], secrets = _broker_files(broker, state)
        files_of_device += secrets
    if following is not None:
        table = {"registry": following.registry, "channel": following.channel, "tags": list(device.tags)}
        _forget_old_registry(_table(document, "follow"), following, state)
        ours["follow"], named = _named_files(
            table, state, ((following.login, LOGIN_NAME, "credentials", 0o600), (following.ca, CA_NAME, "ca", 0o644))
        )
        files_of_device += named
    elif (follows := _table(document, "follow")).get("registry") and follows.get("tags", []) != list(device.tags):
        ours["follow"] = {"tags": list(device.tags)}
    for name, value in settings.items():
        ours[name] = {**ours.get(name, {}), **value} if isinstance(value, dict) else value
    text = merged_config(document, ours)
    # Refuse here what the daemon would refuse later.
    config = parse_config(text, f"{state}/config.toml")
    if "http" in settings and config.http.listen:
        parse_address(config.http.listen, allow_remote=config.http.allow_remote)
    return [*files_of_device, DeviceFile(f"{state}/config.toml", text.encode(), "configuration")], config


def device_config(device: Device, transport: Transport) -> DeviceConfig:
    return parse_config(config_text(device.state, transport), f"{device.state}/config.toml")


def config_text(state: str, transport: Transport) -> str:
    """Return the device's config.toml; "" if there is none. Raises StorageFailed if it cannot be read.

    Root reads the file with the rights of the owner of STATE. Otherwise this owner could replace the file with a link,
    and so make root read a file of root.
    """
    words = ["sh", "-c", 'test ! -e "$1" || exec head -c "$2" "$1"', "sh", "./config.toml", str(CONFIG_BYTES_MAX)]
    answer = transport.run(in_folder(state, words), QUICK_S_MAX)
    if answer.ok:
        return answer.stdout.removeprefix("\ufeff")  # editors on Windows may write this mark
    if not transport.run(["test", "-d", state], QUICK_S_MAX).ok:
        return ""
    raise StorageFailed(f"{state}/config.toml cannot be read: {answer.failure_text()}")


def check_settings(settings: dict[str, Any]) -> None:
    """Raise ConfigInvalid for invalid lines of config.toml, before any connection to a device.

    A new broker or registry needs its own option, because the option also removes the login for the old server.
    """
    mqtt = settings.get("mqtt")
    for key in ("host", "port"):
        if isinstance(mqtt, dict) and key in mqtt:
            raise ConfigInvalid(f"--set mqtt.{key} would keep the login of another broker: give --broker HOST:PORT")
    follow = settings.get("follow")
    if isinstance(follow, dict) and "registry" in follow:
        raise ConfigInvalid(
            "--set follow.registry would keep the login of another registry: give --follow oci://HOST/REPOSITORY"
        )
    fixed = {"device": "any", "profile": "any"}
    parse_config(tomlkit.dumps({**fixed, **settings}), "--set")


def _parsed(present: str) -> tomlkit.TOMLDocument:
    try:
        return tomlkit.parse(present)
    except TOMLKitError as error:
        raise ConfigInvalid(f"the device's config.toml is not TOML ({error}): repair or remove it there") from error


def merged_config(document: tomlkit.TOMLDocument, ours: dict[str, Any]) -> str:
    """Return the configuration with the values of `ours`. Other values and comments stay."""
    for key, value in ours.items():
        if isinstance(value, dict):
            table: Any = document.setdefault(key, tomlkit.table())
            if not isinstance(table, dict):
                raise ConfigInvalid(f"the device's config.toml has {key} = {table!r}, not a table: repair it there")
            for inner, inner_value in value.items():
                if table.get(inner) != inner_value:
                    table[inner] = inner_value
        elif document.get(key) != value:
            document[key] = value
    return tomlkit.dumps(document)


def own_user(broker: Broker, present: str) -> str:
    """Return the user of the device's own login; "" if the login of `broker` replaces this login."""
    table = _table(_parsed(present), "mqtt")
    user = str(table.get("username", ""))
    if not (broker.for_new and (broker.username or broker.password)):
        return ""
    if not _is_at(table, broker):
        return ""
    return user if user != broker.username else ""


def _table(document: tomlkit.TOMLDocument, name: str) -> dict[str, Any]:
    """Return a table of the configuration; {} if there is none."""
    table = document.get(name)
    return table if isinstance(table, dict) else {}


def _check_tls_stays(table: Mapping[str, Any], broker: Broker, settings: Mapping[str, Any]) -> None:
    """Raise ConfigInvalid if `broker` would turn off the TLS that the device uses with the same broker."""
    same_host = table.get("host") == broker.host
    if same_host and table.get("tls") is True and not broker.tls and "tls" not in settings.get("mqtt", {}):
        raise ConfigInvalid(
            f"the device reports to {broker.host} with TLS: add --mqtt-tls or --mqtt-ca FILE, "
            "or turn TLS off with --set mqtt.tls=false"
        )


def _forget_old_broker(table: dict[str, Any], broker: Broker, state: str) -> None:
    """Remove the login and the CA certificate that a bootstrap wrote for a broker at another address."""
    if not _is_at(table, broker) and "password_file" in _forget_files(table, _OF_BROKER, state):
        table.pop("username", None)


def _forget_old_registry(table: dict[str, Any], following: Following, state: str) -> None:
    """Remove the login and the CA certificate that a bootstrap wrote for a registry at another address."""
    try:
        before = parse_repository(str(table.get("registry", ""))).host
    except ConfigInvalid:
        before = ""
    if before != parse_repository(following.registry).host:
        _forget_files(table, _OF_REGISTRY, state)


def _forget_files(table: dict[str, Any], files: Sequence[tuple[str, str]], state: str) -> list[str]:
    """Remove the keys whose value is a file that bootstrap wrote; return these keys."""
    ours = [key for key, name in files if table.get(key) == f"{state}/{name}"]
    for key in ours:
        table.pop(key)
    return ours


def unnamed_files(config: DeviceConfig, state: str) -> list[str]:
    """Return the files of logins and CA certificates that the configuration no longer names."""
    mqtt, follow = config.mqtt, config.follow
    paths = (mqtt.password_file, mqtt.ca, mqtt.cert, mqtt.key, follow.credentials, follow.ca)
    named = {PurePosixPath(path).name for path in paths}
    return [f"{state}/{name}" for _, name in (*_OF_BROKER, *_OF_REGISTRY) if name not in named]


def _is_at(table: Mapping[str, Any], broker: Broker) -> bool:
    """Return whether the table [mqtt] of a device has the address of `broker`."""
    return (table.get("host"), table.get("port")) == (broker.host, broker.port)


def _broker_files(broker: Broker, state: str) -> tuple[dict[str, Any], list[DeviceFile]]:
    """Return the table [mqtt], and the files whose paths are in the table."""
    table: dict[str, Any] = {"host": broker.host, "port": broker.port, "tls": broker.tls}
    if broker.username:
        table["username"] = broker.username
    files = ((broker.password, PASSWORD_NAME, "password_file", 0o600), (broker.ca, BROKER_CA_NAME, "ca", 0o644))
    return _named_files(table, state, files)


def _named_files(
    table: dict[str, Any], state: str, files: Sequence[tuple[bytes | None, str, str, int]]
) -> tuple[dict[str, Any], list[DeviceFile]]:
    """Return `table` with the path of each file that has a content, and these files.

    Each of `files` is (content or None, name, key in the table, mode).
    """
    present = [each for each in files if each[0] is not None]
    paths = {key: f"{state}/{name}" for _, name, key, _ in present}
    return table | paths, [DeviceFile(paths[key], data or b"", name, mode) for data, name, key, mode in present]


def _content(file: Path | None) -> bytes | None:
    with os_error_as(ConfigInvalid, f"cannot read {file}"):
        return None if file is None else file.read_bytes()


def check_config(device: Device, file: DeviceFile, transport: Transport) -> None:
    """Check the configuration with the device's own runtime, which may be older. Raises ConfigInvalid."""
    if not device.kind.needs_runtime:
        return
    program = "import sys; from edgert.config import parse_config; parse_config(sys.stdin.read(), sys.argv[1])"
    words = [device.python, "-c", program, file.path]
    result = transport.run(words, QUICK_S_MAX, input=file.data)
    if not result.ok:
        answer = (result.stderr.strip().splitlines() or [result.failure_text()])[-1]
        raise ConfigInvalid(
            f"{device.name}: its runtime refuses this configuration ({answer}). Nothing was changed: omit the setting, "
            "or install a newer runtime with --upgrade"
        )


def holds(transport: Transport, file: DeviceFile) -> bool:
    """Return whether the device has the file with this content. Return False for a link."""
    words = ["sh", "-c", _IF_PLAIN, "sh", file.path, *sha256_command(file.path)]
    result = transport.run(words, QUICK_S_MAX)
    return result.ok and result.stdout.strip() == hashlib.sha256(file.data).hexdigest()


def put(transport: Transport, device: Device, file: DeviceFile) -> None:
    """Write the file on the device.

    The daemon's user can change STATE, but only root can change STATE/keys. So a file for STATE is first written into
    STATE/keys, and then renamed. Otherwise the daemon's user could make root overwrite another file, by a link.
    """
    target = PurePosixPath(file.path)
    keys = f"{device.state}/keys"
    arrives = (
        target if str(target.parent) != device.state else PurePosixPath(keys, f".{target.name}.{uuid.uuid4().hex}.part")
    )
    with tempfile.NamedTemporaryFile() as copy:  # only the owner can read this temporary file
        copy.write(file.data)
        copy.flush()
        transport.put(Path(copy.name), str(arrives), PutOptions(mode=file.mode))
    if arrives != target:
        moved = transport.run(in_folder(keys, ["mv", "-fT", f"./{arrives.name}", f"../{target.name}"]), QUICK_S_MAX)
        if not moved.ok:
            transport.run(in_folder(keys, ["rm", "-f", f"./{arrives.name}"]), QUICK_S_MAX)
            raise StorageFailed(f"{device.name}: {file.path} cannot be written: {moved.failure_text()}")
