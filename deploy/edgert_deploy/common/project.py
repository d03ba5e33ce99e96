"""A project: the folder with a team's files about its fleet, marked by its `edgert.toml`.

Commands look for this file in the working folder and its parents, like git. If there is none, the user's configuration
folder is the project.

edgert.toml         defaults of options, the limits of trials, the store
inventory.toml      the devices
rollouts/           the rollouts, and with them the wanted releases (edgert_deploy.rollout.rollout_store)
keys/NAME.pem       public keys that devices trust
profiles/           the team's own device profiles

A team commits this folder, so commands refuse secrets in the folder. Paths in `edgert.toml` are relative to the folder.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import parse_qs, urlsplit

from edgert.config import BrokerLogin
from edgert.durable import os_error_as
from edgert.errors import ConfigInvalid
from edgert.toml_file import about, from_table, read_toml
from edgert.typed_json import Closed
from edgert_deploy.common.folders import config_folder
from edgert_deploy.common.trial_limits import check_table

FILE_NAME = "edgert.toml"
INVENTORY = "inventory.toml"
KEYS = "keys"
# The defaults that each command accepts. A rollback or a change of the inventory needs an explicit selector.
_ACCEPTED_DEFAULTS = {
    "bench": "selector",
    "bootstrap": "reporting selector profiles",
    "build": "profiles",
    "channel halt": "registry",
    "channel hint": "broker",
    "channel remove": "registry",
    "channel renew": "registry",
    "channel resume": "registry",
    "channel show": "registry store",
    "channel watch": "registry store",
    "deploy": "selector",
    "device add": "profiles",
    "device probe": "profiles",
    "device set": "profiles",
    "doctor": "selector profiles",
    "fleet export": "broker",
    "fleet forget": "broker store",
    "fleet query": "store",
    "fleet record": "broker store",
    "fleet ui": "broker store",
    "fleet watch": "broker",
    "profiles": "profiles",
    "promote": "registry",
    "publish": "registry",
    "publish-runtime": "registry profiles",
    "status": "selector",
}


@dataclass(frozen=True)
class BrokerDefaults(BrokerLogin):
    """The table `[broker]`. `address` is HOST[:PORT]."""

    address: str = ""


@dataclass(frozen=True)
class RegistryDefaults(Closed):
    """The table `[registry]`. `address` is oci://HOST/REPOSITORY.

    `ca` and `login` are the paths of files; "" means the default of the command.
    """

    address: str = ""
    ca: str = ""
    login: str = ""


Defaults = TypeVar("Defaults", BrokerDefaults, RegistryDefaults)


@dataclass(frozen=True)
class Project:
    """A project's folder and the keys of its `edgert.toml`.

    All paths are absolute. A missing key is None or "". `store` is the URL or the file of the fleet's store. The folder
    `keys` holds the user's signing keys.
    """

    root: Path
    inventory: Path
    keys: Path
    store: str = ""
    selector: str = ""
    bundles: Path | None = None
    profiles: Path | None = None
    broker: BrokerDefaults = BrokerDefaults()
    registry: RegistryDefaults = RegistryDefaults()
    trial: dict[str, Any] = field(default_factory=dict)  # the table that edgert_deploy.common.trial_limits reads
    p99_target_ms: dict[str, float] = field(default_factory=dict)  # by model

    @property
    def is_users(self) -> bool:
        """Whether this is the user's configuration folder. It may hold secrets, because no team commits it."""
        return _is_users(self.root)

    @property
    def rollouts(self) -> Path:
        return self.root / "rollouts"

    @property
    def public_keys(self) -> Path:
        return self.root / KEYS

    def name_of(self, path: Path) -> str:
        """Return a name of `path` for all hosts of the team: a relative path if `path` is in the project."""
        whole = path.resolve()
        return str(whole.relative_to(self.root)) if whole.is_relative_to(self.root) else str(whole)

    def path_of(self, name: str) -> Path:
        """Return the path for a name from `name_of`."""
        return self.root / name

    def option_defaults(self) -> dict[str, Any]:
        """Return click's default_map: the defaults of the commands' parameters."""
        broker, registry = self.broker, self.registry
        reporting = {f"mqtt_{name}": getattr(broker, name) for name in ("tls", "ca", "username", "password_file")}
        kinds: dict[str, dict[str, Any]] = {
            "broker": {"broker": broker.address, **broker.login} if broker.address else {},
            "reporting": {"broker": broker.address, **reporting} if broker.address else {},
            "registry": {"address": registry.address, "ca": registry.ca, "login": registry.login},
            "store": {"store_url": self.store},
            "selector": {"selector": self.selector},
            "profiles": {"profiles_dir": str(self.profiles or "")},
        }
        defaults: dict[str, Any] = {}
        for command, takes in _ACCEPTED_DEFAULTS.items():
            table = defaults
            for word in command.split():
                table = table.setdefault(word, {})
            table.update({name: value for kind in takes.split() for name, value in kinds[kind].items() if value})
        return defaults


def takes_default(command: str, kind: str) -> bool:
    """Return whether `command` (for example `channel show`) takes defaults of this kind from a project."""
    return kind in _ACCEPTED_DEFAULTS.get(command, "").split()


def find_project(start: Path | None = None) -> Project:
    """Return the project around `start` (default: the working folder), else the user's own project.

    Raises ConfigInvalid for an invalid file.
    """
    root = find_root(start) or config_folder().resolve()
    file = root / FILE_NAME
    return read_project(file) if os.path.lexists(file) else _project(file, {})


def find_root(start: Path | None = None) -> Path | None:
    """Return the nearest folder with `edgert.toml`: `start` or a parent of it; None if there is none.

    The default of `start` is the working folder.
    """
    try:
        first = (start or Path.cwd()).resolve()
    except OSError:  # the working folder was removed
        return None
    return next((folder for folder in (first, *first.parents) if os.path.lexists(folder / FILE_NAME)), None)


def read_project(file: Path) -> Project:
    """Read an `edgert.toml`. Raises ConfigInvalid."""
    with os_error_as(ConfigInvalid, f"cannot read {file}"):
        owner = file.stat().st_uid
    if owner not in _trusted_users():
        raise ConfigInvalid(
            f"{file} belongs to user {owner}, but it decides which devices and brokers are used: chown it, or work in "
            "another folder"
        )
    return _project(file, read_toml(file))


def find_bundle(given: Path) -> Path:
    """Return the path of a bundle. Raises ConfigInvalid if there is none.

    If `given` is only a file name that the working folder lacks, look in the project's folder of bundles.
    """
    if given.parent == Path() and not given.is_absolute() and not given.exists():
        project = find_project()
        if project.bundles is not None and (project.bundles / given).exists():
            return project.bundles / given
    if not given.exists():
        raise ConfigInvalid(f"there is no bundle {given}: give the path of a bundle, or build one with edgert build")
    if given.is_dir():
        raise ConfigInvalid(f"{given} is a folder, not a bundle: give the .edgert file")
    return given


def _project(file: Path, value: dict[str, Any]) -> Project:
    root = file.parent
    tables = ("broker", "registry", "trial", "p99_target_ms")
    broker, registry, trial, targets = (value.pop(table, {}) for table in tables)
    known = ("inventory", "selector", "bundles", "keys", "profiles", "store")
    if unknown := sorted(set(value) - set(known)):
        shown = ", ".join((*known, *(f"[{table}]" for table in tables)))
        raise ConfigInvalid(f"{file} has an unknown key {unknown[0]!r}; known: {shown}")
    for key, setting in value.items():
        if not isinstance(setting, str) or not setting:
            raise ConfigInvalid(f"{file}: {key} must be text, got {setting!r}: write it in quotes, or remove the line")

    def path(key: str) -> Path | None:
        return _path(root, value[key]) if key in value else None

    with about(file):
        trial = check_table(trial)
    profiles = path("profiles") or (root / "profiles" if (root / "profiles").is_dir() else None)
    if (keys := path("keys")) is not None:
        _check_secret(file, "keys", keys)
    return Project(
        root=root,
        inventory=path("inventory") or root / INVENTORY,
        store=_store(file, value.get("store", "")),
        selector=value.get("selector", ""),
        bundles=path("bundles"),
        keys=keys or config_folder().resolve() / KEYS,
        profiles=profiles,
        broker=_login(file, "broker", BrokerDefaults, broker, ("ca", "cert"), ("key", "password_file")),
        registry=_login(file, "registry", RegistryDefaults, registry, ("ca",), ("login",)),
        trial=trial,
        p99_target_ms=_targets(file, targets),
    )


def _check_secret(file: Path, key: str, path: Path) -> None:
    """Raise ConfigInvalid if a secret is in a folder that the team commits."""
    if not _is_users(file.parent) and path.resolve().is_relative_to(file.parent.resolve()):
        raise ConfigInvalid(f"{file}: {key} = {str(path)!r} is in the project, which a team commits: keep it outside")


def _store(file: Path, text: str) -> str:
    """Return the store's URL, or the absolute path of its file. Raises ConfigInvalid."""
    if "://" not in text:
        return str(_path(file.parent, text)) if text else ""
    parts = urlsplit(text)
    if not parts.scheme.startswith("postgres"):
        raise ConfigInvalid(f"{file}: store = {text!r} is not a store: give a file or postgresql://USER@HOST/DATABASE")
    if parts.password or "password" in parse_qs(parts.query):
        raise ConfigInvalid(f"{file}: store holds a password, and a team commits this file: keep it in ~/.pgpass")
    return text


def _targets(file: Path, table: Any) -> dict[str, float]:
    """Return the latency target of each model. Raises ConfigInvalid."""
    if not isinstance(table, dict):
        raise ConfigInvalid(
            f"{file}: [p99_target_ms] must be a table, got {table!r}: write it as a heading, and a line for each model below it"
        )
    for model, target_ms in table.items():
        if isinstance(target_ms, bool) or not isinstance(target_ms, (int, float)) or not 0 < target_ms < float("inf"):
            raise ConfigInvalid(f"{file}: [p99_target_ms] {model} = {target_ms!r}: give ms, such as {model} = 20")
    return {model: float(target_ms) for model, target_ms in table.items()}


def _login(
    file: Path, name: str, kind: type[Defaults], table: Any, files: tuple[str, ...], secrets: tuple[str, ...]
) -> Defaults:
    """Return the table `name` with absolute paths.

    Raises ConfigInvalid, also if a secret is in the project.

    Args:
        name: The name of the table, for messages.
        files: The keys whose values are paths.
        secrets: The keys whose values are paths of secrets, which must be outside the project.
    """
    login = from_table(kind, table, f"[{name}] in {file}")
    paths: dict[str, Any] = {
        key: str(_path(file.parent, getattr(login, key))) for key in (*files, *secrets) if getattr(login, key)
    }
    for key in secrets:
        if key in paths:
            _check_secret(file, f"[{name}] {key}", Path(paths[key]))
    return replace(login, **paths)


def _path(root: Path, text: str) -> Path:
    return root / Path(text).expanduser()


def _is_users(root: Path) -> bool:
    return root.resolve() == config_folder().resolve()


def _trusted_users() -> set[int]:
    """Return the ids of root, of this user, and of the user who became root by sudo."""
    sudo = os.environ.get("SUDO_UID", "")
    return {0, os.geteuid(), *([int(sudo)] if os.geteuid() == 0 and sudo.isdigit() else [])}
