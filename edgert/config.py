"""The device's own configuration: STATE/config.toml (docs/configuration.md)."""

from __future__ import annotations

import math
import os
import platform
import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from edgert.errors import ConfigInvalid, NotBootstrapped
from edgert.names import ID, checked_id
from edgert.printable import reason_of
from edgert.state_dir import StateDir
from edgert.toml_file import about, from_table, parse_toml, refuse_pipe
from edgert.typed_json import Closed

UNIT = "edgertd.service"  # the systemd unit that runs the daemon
OPTIMIZE_FOR = ("latency", "throughput")
# The names under which systemd passes secrets (LoadCredential).
PASSWORD_CREDENTIAL = "mqtt-password"  # the broker's password
LOGIN_CREDENTIAL = "registry-login"  # the login at the registry

# The ranges that the daemon can work with. A key without a range accepts any value of its type.
_RANGES: dict[str, tuple[float, float]] = {
    "threads": (0, 1024),
    "instances": (0, 256),
    "batch_max": (0, 4096),
    "queue_max": (1, 1_000_000),
    "cache_mb": (0, 1e6),
    "cache_ttl_s": (0, 1e9),
    "connections_max": (1, 100_000),
    "frame_mb": (0.01, 2048),
    "window_s": (0.5, 3600),
    "run_s_max": (0, 86_400),
    "worker_mb_max": (0, 1e7),
    "memory_mb": (0, 1e7),
    "sessions_max": (0, 100_000),
    "session_mb": (0, 1e6),
    "session_idle_s": (0.1, 1e9),
}


@dataclass(frozen=True, kw_only=True)
class BrokerLogin(Closed):
    """The login at an MQTT broker. Files are given as paths. "" means that the broker needs no value."""

    tls: bool = False
    ca: str = ""
    cert: str = ""
    key: str = ""
    username: str = ""
    password_file: str = ""
    protocol: str = "auto"

    @property
    def login(self) -> dict[str, Any]:
        """The fields of this class, by name, without the fields of subclasses."""
        return {field.name: getattr(self, field.name) for field in fields(BrokerLogin)}


@dataclass(frozen=True)
class MqttConfig(BrokerLogin):
    """`[mqtt]`. Without `host`, the device sends nothing, but the spool still fills up to its limit.

    `home_assistant` is Home Assistant's discovery prefix, usually "homeassistant".
    """

    host: str = ""
    port: int = 1883
    home_assistant: str = ""

    def __post_init__(self) -> None:
        if self.home_assistant and not all(map(ID.match, self.home_assistant.split("/"))):
            raise ConfigInvalid(
                f"home_assistant is {self.home_assistant!r}; give Home Assistant's discovery prefix: homeassistant"
            )


@dataclass(frozen=True)
class ServingConfig(Closed):
    """`[serving]`.

    Attributes:
        optimize_for: The goal when the worker chooses threads and instances: "latency" for the fastest answer,
            "throughput" for the highest rate of answers.
        threads: The number of engine threads; 0 to measure the best number.
        instances: The number of parallel engine runs; 0 to measure the best number. If threads cannot share an engine's
            session, each run has its own weights.
        batch_max: The batch cap; 0 to measure the best cap when the model is loaded, 1 for no batches.
        queue_max: The largest number of waiting requests of each priority.
        cache_mb: The size of a model's prediction cache; 0 for no cache.
        cache_ttl_s: The time for which a cached answer is valid.
        frame_mb: The largest size of a frame, which contains a request or an answer.
        window_s: The length of a window of telemetry.
        run_s_max: The time after which the daemon kills a worker whose engine run has not ended; 0 for no limit.
        worker_mb_max: The memory limit of one worker; 0 for no limit.
        memory_mb: The memory limit of all workers together; 0 for no limit.
        strict: Whether a version is served only on its preferred artifact.
        session_mb: The memory limit of all sessions of a model.
        session_idle_s: The time without a request after which a session ends.
        allow_uids: The users that may connect, besides root and the daemon's user. If `allow_uids` and `allow_gids` are
            empty, only the socket's mode decides who may connect.
        allow_gids: The groups that may connect.
    """

    optimize_for: str = "latency"
    threads: int = 0
    instances: int = 0
    batch_max: int = 0
    queue_max: int = 256
    cache_mb: float = 16.0
    cache_ttl_s: float = 300.0
    connections_max: int = 512
    frame_mb: float = 64.0
    window_s: float = 60.0
    run_s_max: float = 30.0
    worker_mb_max: float = 0.0
    memory_mb: float = 0.0
    strict: bool = False
    sessions_max: int = 256
    session_mb: float = 64.0
    session_idle_s: float = 300.0
    allow_uids: tuple[int, ...] = ()
    allow_gids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.optimize_for not in OPTIMIZE_FOR:
            raise ConfigInvalid(f"optimize_for is {self.optimize_for!r}; give one of {', '.join(OPTIMIZE_FOR)}")
        for name, (least, most) in _RANGES.items():
            _check_ranges(self, (name,), f"{least:g} to {most:g}", least, most)


@dataclass(frozen=True)
class HttpConfig(Closed):
    """`[http]`: the Open Inference Protocol over HTTP (docs/http.md), off without `listen`.

    `timeout_s` applies to requests without a time-out. With `allow_remote`, other machines may connect, without
    authentication.
    """

    listen: str = ""
    allow_remote: bool = False
    connections_max: int = 64
    timeout_s: float = 30.0


@dataclass(frozen=True)
class AlarmConfig(Closed):
    """`[alarms]`: the limits of the alarms (docs/telemetry.md).

    0 turns an alarm off, if nothing else is stated.

    Attributes:
        p99_ms: The limit of the p99; 0 for twice the model's `p95_ms`, if this target is set.
        error_share: The limit of the share of requests that were refused or failed.
        worker_mb: The limit of a worker's memory; 0 for 90 % of `worker_mb_max`.
        silent_s: The limit of the time since the model's last request, if the model had one.
        channel_stale_s: The limit of the time without a valid answer of the registry; 0 turns this alarm off, except
            for an expired channel.
    """

    p99_ms: float = 0.0
    error_share: float = 0.05
    temp_c: float = 85.0
    throttled: bool = True
    worker_mb: float = 0.0
    silent_s: float = 0.0
    channel_stale_s: float = 86400.0

    def __post_init__(self) -> None:
        limits = ("p99_ms", "temp_c", "worker_mb", "silent_s", "channel_stale_s")
        _check_ranges(self, limits, "a limit, or 0 for no alarm")
        _check_ranges(self, ("error_share",), "a share from 0 to 1", most=1)


@dataclass(frozen=True)
class ModelConfig(Closed):
    """`[models.NAME]`. A pinned model loads when the daemon starts, and is never unloaded for another.

    All settings except `pinned`: 0 turns the setting off (docs/serving.md).

    Attributes:
        p95_ms: The target of the latency tuner.
        near: The largest difference between two camera frames that get the same answer, as a share of the range of
            values.
        shadow: The share of requests whose answer is compared with the answer of the FP32 reference.
        shadow_alarm: The agreement below which the device reports an event.
    """

    pinned: bool = False
    p95_ms: float = 0.0
    near: float = 0.0
    shadow: float = 0.0
    shadow_alarm: float = 0.9

    def __post_init__(self) -> None:
        _check_ranges(self, ("p95_ms",), "milliseconds, or 0 for no target")
        _check_ranges(self, ("near", "shadow", "shadow_alarm"), "a share from 0 to 1", most=1)


@dataclass(frozen=True)
class FollowConfig(Closed):
    """`[follow]`: the channel that this device follows (docs/channels.md); off without `registry`.

    Attributes:
        registry: The repository, as oci://HOST/REPOSITORY.
        interval_s: The time between two readings of the channel.
        window: The local hours in which the device fetches, such as 22:00-05:00; "" for any time.
        kbit_max: The largest rate of a download in kbit/s; 0 for no limit.
        ca: The file with the certificate of the registry's CA; "" for the system's CAs.
        credentials: The file with the login at the registry; "" for no login.
        tags: Tags of this device, by which a channel may select devices.
    """

    registry: str = ""
    channel: str = "stable"
    interval_s: float = 3600.0
    window: str = ""
    kbit_max: float = 0.0
    ca: str = ""
    credentials: str = ""
    tags: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_ranges(self, ("interval_s",), "1 second to 30 days", 1, 30 * 86400)
        _check_ranges(self, ("kbit_max",), "kilobits per second, or 0 for no limit", most=1e9)
        if self.window and self.minutes is None:
            raise ConfigInvalid(f"window is {self.window[:40]!r}; give local hours such as 22:00-05:00")

    @property
    def minutes(self) -> tuple[int, int] | None:
        """The minutes of the day at which the window starts and ends; None for no window."""
        if (match := re.fullmatch(r"(\d\d):(\d\d)-(\d\d):(\d\d)", self.window)) is None:
            return None
        hours = [int(text) for text in match.groups()]
        begin, end = hours[0] * 60 + hours[1], hours[2] * 60 + hours[3]
        whole = max(hours[0], hours[2]) < 24 and max(hours[1], hours[3]) < 60 and begin != end
        return (begin, end) if whole else None


@dataclass(frozen=True)
class DeviceConfig(Closed):
    """`config.toml`.

    Attributes:
        device: The name of the device, a part of MQTT topics.
        site: The site of the device, a part of MQTT topics.
        machine: The processor, as `uname -m` names it; "" for the processor of this machine.
        socket: The path of the apps' socket; "" for the default path.
        socket_group: The group whose members may connect; "" for the daemon's own group.
        models: `[models.NAME]`, by name.
    """

    device: str
    profile: str
    site: str = "default"
    machine: str = ""
    socket: str = ""
    socket_group: str = ""
    serving: ServingConfig = field(default_factory=ServingConfig)
    mqtt: MqttConfig = field(default_factory=MqttConfig)
    http: HttpConfig = field(default_factory=HttpConfig)
    alarms: AlarmConfig = field(default_factory=AlarmConfig)
    follow: FollowConfig = field(default_factory=FollowConfig)
    models: dict[str, ModelConfig] = field(default_factory=dict)

    def model(self, name: str) -> ModelConfig:
        """Return the configuration of the model `name`, or the defaults."""
        return self.models.get(name, ModelConfig())


def _check_ranges(config: Any, names: Iterable[str], wanted: str, least: float = 0, most: float = math.inf) -> None:
    """Raise ConfigInvalid if a value is out of its range; the message names the `wanted` values."""
    for name in names:
        if not least <= getattr(config, name) <= most:
            raise ConfigInvalid(f"{name} is {getattr(config, name)}; give {wanted}")


def credential(name: str, configured: str) -> str:
    """Return the path of the secret `name`: the file that systemd passed, else the `configured` path."""
    passed = Path(os.environ.get("CREDENTIALS_DIRECTORY") or "/nonexistent", name)
    return os.fspath(passed) if passed.exists() else configured


def read_config(state: StateDir) -> DeviceConfig:
    """Read `config.toml`. Raises NotBootstrapped if it is missing, ConfigInvalid if it is not valid."""
    try:
        refuse_pipe(state.config)
        text = state.config.read_text("utf-8-sig")  # UTF-8 in every locale; editors on Windows write a byte order mark
    except FileNotFoundError as error:
        raise NotBootstrapped(
            f"{state.config} is missing: run edgert bootstrap from the host, or give --state"
        ) from error
    except OSError as error:
        raise ConfigInvalid(f"{state.config} cannot be read: {reason_of(error)}") from error
    except ValueError as error:
        raise ConfigInvalid(f"{state.config} cannot be read: {error}") from error
    config = parse_config(text, os.fspath(state.config))
    return config if config.machine else replace(config, machine=platform.machine())


def check_is_device(state: StateDir) -> None:
    """Raise NotBootstrapped if the folder has no `config.toml`, for example because its path is mistyped."""
    if not state.config.is_file():
        read_config(state)


def parse_config(text: str, where: str) -> DeviceConfig:
    """Parse a configuration; `where` names it in errors. Raises ConfigInvalid."""
    config = from_table(DeviceConfig, parse_toml(text, where), where)
    with about(where):
        checked_id("device", config.device)
        checked_id("site", config.site)
    return config
