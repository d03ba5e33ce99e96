"""The device's own configuration and where everything lies under its state folder.

STATE/config.toml            who the device is, its profile, its broker (this file's dataclasses)
STATE/keys/*.pem             public keys whose bundles are accepted
STATE/models/<model>/        slots (edgert.slots)
STATE/incoming/              bundles on their way in
STATE/cache/                 what engines compiled; may be removed at any time
STATE/learned/               what was measured when a model was loaded; likewise
STATE/spool/telemetry.db     reports not yet taken by the broker
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from edgert.errors import ConfigInvalid

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SOCKET_PATH_BYTES_MAX = 107  # sun_path of AF_UNIX on Linux, less its terminating zero


@dataclass(frozen=True)
class MqttConfig:
    """`[mqtt]`. Without `host` nothing is sent; the spool still fills up to its bound."""

    host: str = ""
    port: int = 1883
    tls: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""
    username: str = ""
    password_file: str = ""
    protocol: str = "auto"


@dataclass(frozen=True)
class ServingConfig:
    """`[serving]`. `batch_max` 0 lets the batcher learn its cap when the model is loaded; 1 never batches."""

    threads: int = 0
    batch_max: int = 0
    queue_max: int = 256
    cache_mb: float = 16.0
    cache_ttl_s: float = 300.0
    connections_max: int = 512
    frame_mb: float = 64.0
    window_s: float = 60.0


@dataclass(frozen=True)
class DeviceConfig:
    """`config.toml`. `device` and `site` become MQTT topic segments; `socket` is where apps connect."""

    device: str
    profile: str
    site: str = "default"
    machine: str = ""
    socket: str = ""
    serving: ServingConfig = field(default_factory=ServingConfig)
    mqtt: MqttConfig = field(default_factory=MqttConfig)


@dataclass(frozen=True)
class StateDir:
    """The paths of a device's state folder."""

    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.toml"

    @property
    def keys(self) -> Path:
        return self.root / "keys"

    @property
    def models(self) -> Path:
        return self.root / "models"

    @property
    def incoming(self) -> Path:
        return self.root / "incoming"

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    @property
    def learned(self) -> Path:
        return self.root / "learned"

    @property
    def spool(self) -> Path:
        return self.root / "spool" / "telemetry.db"

    @property
    def control_socket(self) -> Path:
        return self.root / "control.sock"

    @property
    def log(self) -> Path:
        return self.root / "edgertd.log"

    @property
    def pid(self) -> Path:
        return self.root / "edgertd.pid"

    def make(self) -> None:
        """Create the folders that a daemon writes into."""
        for folder in (self.models, self.incoming, self.cache, self.learned, self.spool.parent):
            folder.mkdir(parents=True, exist_ok=True)

    def socket(self, config: DeviceConfig) -> Path:
        """Where apps connect: what the configuration says, else `STATE/edgert.sock`."""
        path = Path(config.socket) if config.socket else self.root / "edgert.sock"
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
            raise ConfigInvalid(
                f"socket path {path} is longer than {SOCKET_PATH_BYTES_MAX} bytes: set a shorter `socket` in {self.config}"
            )
        return path

    def model_names(self) -> list[str]:
        """Every model that was ever installed here, in name order."""
        try:
            return sorted(entry.name for entry in self.models.iterdir() if (entry / "state.json").exists())
        except FileNotFoundError:
            return []


def default_state_dir() -> Path:
    """$EDGERT_STATE, else /var/lib/edgert for root, else ~/.local/state/edgert."""
    if given := os.environ.get("EDGERT_STATE"):
        return Path(given)
    return Path("/var/lib/edgert") if os.geteuid() == 0 else Path.home() / ".local/state/edgert"


def default_socket() -> Path:
    """$EDGERT_SOCKET, else the socket of the default state folder."""
    if given := os.environ.get("EDGERT_SOCKET"):
        return Path(given)
    state = StateDir(default_state_dir())
    return state.socket(read_config(state)) if state.config.exists() else state.root / "edgert.sock"


def read_config(state: StateDir) -> DeviceConfig:
    """Raises ConfigInvalid when `config.toml` is missing, is no TOML or has a key that is not known."""
    try:
        text = state.config.read_text()
    except FileNotFoundError as error:
        raise ConfigInvalid(
            f"{state.config} is missing: run edgert bootstrap from the host, or give --state"
        ) from error
    except (OSError, ValueError) as error:
        raise ConfigInvalid(f"{state.config} cannot be read: {error}") from error
    config = parse_config(text, os.fspath(state.config))
    return config if config.machine else replace(config, machine=platform.machine())


def parse_config(text: str, where: str) -> DeviceConfig:
    """The configuration that `text` holds; `where` names it in errors. Raises ConfigInvalid."""
    try:
        value = tomllib.loads(text)
    except ValueError as error:
        raise ConfigInvalid(f"{where} is not TOML: {error}") from error
    serving = _section(ServingConfig, value.pop("serving", {}), f"[serving] in {where}")
    mqtt = _section(MqttConfig, value.pop("mqtt", {}), f"[mqtt] in {where}")
    return _section(DeviceConfig, {**value, "serving": serving, "mqtt": mqtt}, where)


T = TypeVar("T")


def _section(cls: type[T], value: dict[str, Any], where: str) -> T:
    """An instance of the dataclass `cls` from a TOML table, each value of the type its field has."""
    if not isinstance(value, dict):
        raise ConfigInvalid(f"{where} must be a table, got {value!r}")
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]  # every caller gives a dataclass
    for key, given in value.items():
        if key not in known:
            raise ConfigInvalid(f"{where} has an unknown key {key!r}; known: {', '.join(known)}")
        wanted = str(known[key].type)
        if not _is_a(given, wanted):
            raise ConfigInvalid(f"{where}: {key} must be a {wanted}, got {given!r}")
    try:
        return cls(**value)
    except TypeError as error:
        raise ConfigInvalid(f"{where}: {error}") from error


def _is_a(value: Any, wanted: str) -> bool:
    if wanted == "bool":
        return isinstance(value, bool)
    if wanted in ("int", "float"):
        return isinstance(value, int if wanted == "int" else (int, float)) and not isinstance(value, bool)
    return isinstance(value, str) if wanted == "str" else True
