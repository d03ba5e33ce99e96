"""A project: the folder of a fleet's inventory and bundles, marked by its `edgert.toml`.

Commands look for that file in the working folder and its parents, like git. It gives the defaults of options; its paths
are relative to its folder. It holds no secret, and no signing key is below it.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from edgert.errors import ConfigInvalid
from edgert_deploy.common.trial_limits import check_table

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE_NAME = "edgert.toml"
INVENTORY = "inventory.toml"
FILE_BYTES_MAX = 64 * 1024
# The commands that listen to the broker, and those with a default selector. A roll-back and changes of the inventory need
# an explicit one.
_LISTEN: tuple[tuple[str, ...], ...] = (("fleet", "watch"), ("fleet", "record"), ("fleet", "export"), ("fleet", "ui"))
_SELECT = ("status", "doctor", "bootstrap", "deploy", "bench")
_PROFILES: tuple[tuple[str, ...], ...] = (
    *(("profiles",), ("build",), ("bootstrap",), ("doctor",)),
    *(("device", "add"), ("device", "set"), ("device", "probe")),
)


@dataclass(frozen=True)
class BrokerDefaults:
    """`[broker]`. `address` is HOST[:PORT]; the files are paths, "" for none."""

    address: str = ""
    tls: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""
    username: str = ""
    password_file: str = ""
    protocol: str = "auto"


@dataclass(frozen=True)
class Project:
    """The content of `edgert.toml`, with absolute paths; None and "" for missing keys."""

    root: Path
    inventory: Path
    selector: str = ""
    bundles: Path | None = None
    keys: Path | None = None
    profiles: Path | None = None
    broker: BrokerDefaults = BrokerDefaults()
    trial: dict[str, Any] = field(default_factory=dict)  # as edgert_deploy.common.trial_limits reads it

    def option_defaults(self) -> dict[str, Any]:
        """Return click's default_map: the defaults of the commands' parameters."""
        found: dict[str, Any] = {}

        def give(command: tuple[str, ...], values: dict[str, Any]) -> None:
            table = found
            for word in command:
                table = table.setdefault(word, {})
            table.update({name: value for name, value in values.items() if value})

        broker = self.broker
        if broker.address:
            listening = {f.name: getattr(broker, f.name) for f in fields(broker) if f.name != "address"}
            for command in _LISTEN:
                give(command, {"broker": broker.address, **listening})
            reporting = {"mqtt_username": broker.username, "mqtt_password_file": broker.password_file}
            secured = {"mqtt_tls": broker.tls, "mqtt_ca": broker.ca}
            give(("bootstrap",), {"broker": broker.address, **secured, **reporting})
        for name in _SELECT:
            give((name,), {"selector": self.selector})
        if self.profiles is not None:
            for words in _PROFILES:
                give(words, {"profiles_dir": str(self.profiles)})
        return found


def find_project(start: Path | None = None) -> Project | None:
    """Return the project around `start` (default: the working folder), or None. Raises ConfigInvalid for an invalid file."""
    try:
        here = (start or Path.cwd()).resolve()
    except OSError:  # the working folder was removed
        return None
    for folder in (here, *here.parents):
        file = folder / FILE_NAME
        if file.is_file():
            return read_project(file)
    return None


def read_project(file: Path) -> Project:
    """Read an `edgert.toml`. Raises ConfigInvalid."""
    try:
        owner = file.stat().st_uid
        if owner not in _trusted_users():
            raise ConfigInvalid(
                f"{file} belongs to user {owner}, but it decides which devices and brokers are used: chown it, or work "
                "in another folder"
            )
        data = file.read_bytes()
        if len(data) > FILE_BYTES_MAX:
            raise ConfigInvalid(f"{file} has {len(data)} bytes; the limit is {FILE_BYTES_MAX}")
        value = tomllib.loads(data.decode())
    except OSError as error:
        raise ConfigInvalid(f"cannot read {file}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigInvalid(f"{file} is not TOML: {error}") from error
    return _project(file, value)


def find_bundle(given: Path) -> Path:
    """Return `given`; for a name without a file here, the bundle of that name in the project's folder of bundles.

    Raises ConfigInvalid if there is none.
    """
    if given.parent == Path() and not given.is_absolute() and not given.exists():
        project = find_project()
        if project is not None and project.bundles is not None and (project.bundles / given).exists():
            return project.bundles / given
    if not given.exists():
        raise ConfigInvalid(f"there is no bundle {given}: give the path of one, or make it with edgert build")
    return given


def _project(file: Path, value: dict[str, Any]) -> Project:
    root = file.parent
    broker, trial = value.pop("broker", {}), value.pop("trial", {})
    known = ("inventory", "selector", "bundles", "keys", "profiles")
    if unknown := sorted(set(value) - set(known)):
        raise ConfigInvalid(f"{file} has an unknown key {unknown[0]!r}; known: {', '.join(known)}, [broker], [trial]")
    for key, given in value.items():
        if not isinstance(given, str) or not given:
            raise ConfigInvalid(f"{file}: {key} must be text, got {given!r}")

    def path(key: str) -> Path | None:
        return _path(root, value[key]) if key in value else None

    try:
        trial = check_table(trial)
    except ConfigInvalid as error:
        raise ConfigInvalid(f"{file}: {error.message}") from error
    profiles = path("profiles") or (root / "profiles" if (root / "profiles").is_dir() else None)
    if (keys := path("keys")) is not None and keys.resolve().is_relative_to(root):
        raise ConfigInvalid(f"{file}: keys = {value['keys']!r} is in the project: keep signing keys outside of it")
    return Project(
        root=root,
        inventory=path("inventory") or root / INVENTORY,
        selector=value.get("selector", ""),
        bundles=path("bundles"),
        keys=keys,
        profiles=profiles,
        broker=_broker(file, broker),
        trial=trial,
    )


def _broker(file: Path, table: Any) -> BrokerDefaults:
    known = {f.name: f for f in fields(BrokerDefaults)}
    if not isinstance(table, dict):
        raise ConfigInvalid(f"{file}: [broker] must be a table, got {table!r}")
    for key, given in table.items():
        if key not in known:
            raise ConfigInvalid(f"[broker] in {file} has an unknown key {key!r}; known: {', '.join(known)}")
        if type(given).__name__ != str(known[key].type):
            raise ConfigInvalid(f"[broker] in {file}: {key} must be {known[key].type}, got {given!r}")
    files = ("ca", "cert", "key", "password_file")
    paths = {key: str(_path(file.parent, table[key])) for key in files if table.get(key)}
    return BrokerDefaults(**{**table, **paths})


def _path(root: Path, text: str) -> Path:
    return root / Path(text).expanduser()


def _trusted_users() -> set[int]:
    """Return root, this user, and the user who became root by sudo."""
    sudo = os.environ.get("SUDO_UID", "")
    return {0, os.geteuid(), *([int(sudo)] if os.geteuid() == 0 and sudo.isdigit() else [])}
