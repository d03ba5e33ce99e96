"""The status of a worker, the daemon and a device, as types.

`ServingStatus` is the daemon's view of one model, `DaemonStatus` the daemon's answer on the control socket.
`ModelStatus` is a model with its slots, and `DeviceStatus` the output of `edgertd status --json`. The host reads the
same types.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgert.bundle.manifest import Accuracy
from edgert.checks.channel_status import ChannelStatus
from edgert.checks.trial_status import TrialStatus
from edgert.errors import DeviceError
from edgert.protocol.control import ask
from edgert.telemetry.broker_connection import BrokerConnection
from edgert.telemetry.spans import LiveStats
from edgert.typed_json import FLAT, Mistyped, from_json, to_json
from edgert.versions.slots import ON_TRIAL, RolledBackVersion, Version
from edgert.versions.trial_limits import TrialLimits

DELTA_FORMAT = 1  # the format of the deltas that `edgertd install` accepts
LIMITS_FORMAT = 1  # the format of the trial limits that `edgertd activate` accepts
DAMAGED = "damaged"  # the state of a model whose slots cannot be read
SERVES = ("ready", "degraded")
WILL_SERVE = (*SERVES, "unloaded", "waiting", "loading")


# --- one worker ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoadedStatus:
    """The version that a worker serves, and the version's engine.

    `tried` has the artifacts that did not load, each with the reason.
    """

    release: int
    digest: str
    engine: str
    artifact: str
    engine_version: str
    precision: str
    degraded: bool
    tried: tuple[str, ...]
    batch_cap: int
    threads: int
    instances: int
    load_s: float


@dataclass(frozen=True)
class CacheStatus:
    """The prediction cache.

    `worth` is the time that hits saved, divided by the time of lookups; None while it is unknown.
    """

    on: bool
    why: str
    worth: float | None
    entries: int
    bytes: int
    max_bytes: int
    hits: int
    misses: int


@dataclass(frozen=True)
class NearCacheStatus:
    """The near cache.

    `agreement` is the share of sampled hits whose kept answer agreed with the engine's answer; None before the first
    sample.
    """

    on: bool
    why: str
    distance: float
    lookups: int
    hits: int
    hit_rate: float
    distance_mean: float
    distance_max: float
    sampled: int
    agreed: int
    agreement: float | None


@dataclass(frozen=True)
class ShadowStatus:
    """The live comparison with the FP32 reference artifact, which also answers `share` of the requests."""

    on: bool
    fault: str | None
    share: float
    failed: int
    total: int
    agree_total: int
    dropped_total: int
    agreement: float
    cosine_mean: float
    cosine_min: float
    drift: float
    alarm: bool


@dataclass(frozen=True)
class TunerStatus:
    """The tuner, which keeps the p95 below the model's target."""

    target_p95_ms: float
    p95_ms: float | None
    state: str
    cap: int
    linger_share: float


@dataclass(frozen=True)
class BatcherStatus:
    """The numbers of waiting requests by priority, and the tuner (None if the model has no target)."""

    waiting_high: int
    waiting_low: int
    instances: int
    tuner: TunerStatus | None


@dataclass(frozen=True)
class WorkerFigures:
    """The counters of a worker.

    Attributes:
        waiting: The number of requests that wait in the batcher.
        batches_closed: The number of batches by the reason that ended the wait for more items.
        runs: The number of engine runs and their total ns, by the number of items of a run.
        shared_bytes: The shared memory of clients, which is not part of the worker's memory.
        session_bytes: The largest amount of memory that the sessions may keep.
    """

    connections: int
    reactor_connections: int
    waiting: int
    batches_closed: Mapping[str, int]
    runs: Mapping[int, tuple[int, int]]
    batcher: BatcherStatus
    cache: CacheStatus
    near: NearCacheStatus | None
    shadow: ShadowStatus | None
    alarms: tuple[str, ...]
    requests: LiveStats
    shared_bytes: int = 0
    sessions: int = 0
    session_bytes: int = 0

    @property
    def inferences(self) -> int:
        """The items that the engine computed."""
        return sum(items * count for items, (count, _) in self.runs.items())

    @property
    def executions(self) -> int:
        return sum(count for count, _ in self.runs.values())


# --- the daemon ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServingStatus:
    """One model in the daemon. `loaded` and `figures` are None if no worker serves or reports.

    In JSON, the fields of `loaded` and `figures` are on the same level as the other fields.
    """

    state: str
    fault: str | None = None
    loading: str | None = None
    crashes: int = 0
    retry_s: float | None = None
    pinned: bool = False
    trial: TrialStatus | None = None
    pid: int | None = None
    memory_mb: float | None = None
    loaded: LoadedStatus | None = field(default=None, metadata={FLAT: True})
    figures: WorkerFigures | None = field(default=None, metadata={FLAT: True})


@dataclass(frozen=True)
class MemoryStatus:
    """The memory of all workers, and the budget `limit_mb` (0: no limit).

    `shared_mb` is memory that workers share with clients; it is not part of `used_mb`.
    """

    used_mb: float
    limit_mb: float
    shared_mb: float = 0.0


@dataclass(frozen=True)
class DaemonStatus:
    """The daemon's answer on its control socket. On `read_only` storage it refuses changes."""

    pid: int
    boot: str
    memory: MemoryStatus
    models: Mapping[str, ServingStatus]
    read_only: bool = False


def ask_daemon(control_socket: Path) -> DaemonStatus:
    """Request the daemon's status. Raises DaemonUnreachable, DaemonEnded, DaemonBusy or DeviceError."""
    try:
        return from_json(DaemonStatus, ask(control_socket, {"op": "status"}))
    except Mistyped as error:
        raise DeviceError(
            f"the daemon's status cannot be read: {error}. The daemon has another version than this command: "
            "restart it with: systemctl restart edgertd (systemctl --user for a unit of your user); or, if no systemd runs "
            "it: edgertd stop && edgertd start"
        ) from error


# --- the device ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelStatus:
    """A model's slots, and the model's status in the daemon.

    Attributes:
        live, spare: The version that serves, and the version in the other slot.
        ratchet: The highest release that was marked good on this device.
        damaged: The reason why the slots cannot be read; then no other field is known.
        serving: The model's status in the daemon; None if no daemon serves the model.
        accuracy: The gate's result for the preferred artifact of the live version.
    """

    model: str
    state: str
    live: Version | None
    spare: Version | None
    ratchet: int = 0
    trial_limits: TrialLimits | None = None
    rolled_back: RolledBackVersion | None = None
    damaged: str = ""
    serving: ServingStatus | None = None
    accuracy: Accuracy | None = None

    @property
    def on_trial(self) -> bool:
        return self.state in ON_TRIAL

    @property
    def release(self) -> int | None:
        return None if self.live is None else self.live.release


@dataclass(frozen=True)
class DaemonState:
    """Whether the daemon runs and whether its storage is read-only."""

    running: bool
    pid: int | None = None
    memory: MemoryStatus | None = None
    read_only: bool = False


@dataclass(frozen=True)
class HttpStatus:
    """The address of the HTTP server ("": no server), and the fault that prevents its start.

    `lacks_package` tells whether the fault is a missing Python package.
    """

    listen: str = ""
    fault: str = ""
    lacks_package: bool = False


@dataclass(frozen=True)
class TelemetryStatus:
    """The broker ("": no broker), the connection to it, and the numbers of waiting and lost reports."""

    broker: str = ""
    connection: BrokerConnection = field(default_factory=BrokerConnection)
    waiting: int = 0
    lost: int = 0


@dataclass(frozen=True)
class ClaimStatus:
    """A deployment in progress. Its claim expires in `left_s` unless the host renews the claim."""

    model: str
    by: str
    since: str
    left_s: float


@dataclass(frozen=True)
class DeviceStatus:
    """The facts that a host needs to plan a deployment to this device.

    `engines` has the version of each installed engine. `text` tells whether the device can serve models that read text.
    `code` is the digest of the device's edgert code; "" if the device does not state it.
    """

    device: str
    profile: str
    machine: str
    edgert: str
    daemon: DaemonState
    disk_free_bytes: int
    engines: Mapping[str, str]
    keys: tuple[str, ...]
    models: tuple[ModelStatus, ...]
    delta_format: int = 0
    limits_format: int = 0
    code: str = ""
    python: str = ""
    site: str = ""
    socket: str = ""
    boot_id: str = ""
    temp_c: float | None = None
    memory_total_bytes: int = 0
    damaged_keys: tuple[str, ...] = ()
    http: HttpStatus = HttpStatus()
    telemetry: TelemetryStatus = TelemetryStatus()
    claims: tuple[ClaimStatus, ...] = ()
    text: bool = False
    channel: ChannelStatus = field(default_factory=ChannelStatus)

    def as_json(self) -> dict[str, Any]:
        value: dict[str, Any] = to_json(self)
        return value

    def model(self, name: str) -> ModelStatus | None:
        return next((model for model in self.models if model.model == name), None)
