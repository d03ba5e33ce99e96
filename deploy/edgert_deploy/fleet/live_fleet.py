"""The present state of a fleet, from its messages: devices and their models, without history.

The terminal's table (live_percentiles.py) and the page (ui/fleet_state.py) extend the class `Fleet`. A model takes
little memory: one record with its newest report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from sys import intern

from edgert.errors import ProtocolError
from edgert.names import ID, ID_CHARS_MAX
from edgert.telemetry.messages import MetricsMessage, Scalar, Topic
from edgert_deploy.fleet.listener import FleetListener
from edgert_deploy.fleet.reports import PROFILE_UNKNOWN, storable

MODELS_PER_DEVICE_MAX = 64
ALARMS_MAX = 32  # the maximum number of alarms of one model, because a device may send any names
STALE_AFTER_WINDOWS = 2.5
P99S_KEPT = 3
P99_REQUESTS_MIN = 20
WINDOW_S_DEFAULT = 60.0
_ALARMS = "_alarms"  # suffix of the `deploy` field with a model's alarms
_OWN_ALARMS = "alarms"  # the `deploy` field with the device's own alarms


@dataclass(slots=True)
class ReportedModel:
    """One model on one device, by its newest report.

    A report of a window without requests lacks some figures; they are None here. `p99s` has the p99 of each of the last
    windows with enough requests, the oldest first.
    """

    version: str = ""
    boot: str = ""
    ts_ms: int = 0
    window_s: float = WINDOW_S_DEFAULT
    p50_ms: float | None = None
    p99_ms: float | None = None
    p99s: tuple[float, ...] = ()
    per_s: float | None = None
    requests: int = 0
    errors: int = 0
    shed: int = 0
    cache_hits: int = 0
    batch_mean: float | None = None
    rss_bytes: int = 0

    def update(self, metrics: MetricsMessage) -> None:
        """Replace the figures with the figures of a newer report."""
        requests = int(metrics.number("req_total"))
        self._note_p99(requests - self.requests, metrics)
        self.per_s = self._rate(requests, metrics)
        self.version, self.boot = intern(metrics.model_version), intern(metrics.boot)
        self.ts_ms, self.window_s = metrics.ts_ms, metrics.window_s
        self.p50_ms, self.p99_ms = metrics.reading("lat_p50_ms"), metrics.reading("lat_p99_ms")
        self.requests, self.errors = requests, int(metrics.number("err_total"))
        self.shed, self.cache_hits = int(metrics.number("shed_total")), int(metrics.number("cache_hit_total"))
        self.batch_mean, self.rss_bytes = metrics.reading("batch_mean"), int(metrics.number("rss_bytes"))

    def _note_p99(self, requests: int, metrics: MetricsMessage) -> None:
        """Keep the p99 of this window if it has enough requests.

        A window without requests, or of another version, clears `p99s`.
        """
        if metrics.model_version != self.version or requests <= 0:
            self.p99s = ()
        p99_ms = metrics.reading("lat_p99_ms")
        if requests >= P99_REQUESTS_MIN and p99_ms is not None:
            self.p99s = (*self.p99s, p99_ms)[-P99S_KEPT:]

    def _rate(self, requests: int, metrics: MetricsMessage) -> float | None:
        """Return the requests a second of this window, or the last rate if the previous window is unknown."""
        grown = requests - self.requests
        if not self.ts_ms or grown < 0 or metrics.window_s <= 0 or metrics.ts_ms <= self.ts_ms:
            return self.per_s
        return grown / max(metrics.window_s, (metrics.ts_ms - self.ts_ms) / 1000)


@dataclass(slots=True)
class DeviceState:
    """One device.

    Attributes:
        known_since, heard_at: The times of the first and the newest message, in seconds of the fleet's clock.
        alarms: The alarms of each model in the newest `deploy`; the key "" has the alarms of the device itself.
        alarms_ms: The time at which `alarms` changed, in ms since 1970.
    """

    site: str
    device: str
    known_since: float
    status: str = "unknown"
    heard_at: float | None = None
    window_s: float = WINDOW_S_DEFAULT
    late_s: float = 0.0  # the age of the newest report when it arrived
    profile: str = PROFILE_UNKNOWN
    alarms_ms: int = 0
    models: dict[str, ReportedModel] = field(default_factory=dict)
    alarms: dict[str, tuple[str, ...]] = field(default_factory=dict)
    # the newest `info`, `sys` and `deploy`, if a subclass keeps them
    fields: dict[str, Mapping[str, Scalar]] = field(default_factory=dict)

    @property
    def model_names(self) -> set[str]:
        """The names of the models that reported or have an alarm. A model that does not load has only alarms."""
        return {*self.models, *self.alarms} - {""}

    def age_s(self, now: float) -> float | None:
        """Return the time since the device's last message; None if only retained messages arrived."""
        return None if self.heard_at is None else now - self.heard_at

    def is_stale(self, now: float) -> bool:
        """Return whether the device sent nothing for too long, although its status is online or unknown."""
        heard_at = self.known_since if self.heard_at is None else self.heard_at
        return self.status in ("online", "unknown") and now - heard_at > STALE_AFTER_WINDOWS * self.window_s

    def state(self, now: float) -> str:
        """Return `online`, `offline`, `lost`, `stale` or `unknown`."""
        return "stale" if self.is_stale(now) else self.status


class Fleet(FleetListener):
    """Every device. `wall_ms` returns ms since 1970."""

    def __init__(self, wall_ms: Callable[[], int], devices_max: int) -> None:
        super().__init__(wall_ms)
        self.devices: dict[tuple[str, str], DeviceState] = {}
        self._devices_max = devices_max

    def on_message(self, topic: Topic, retained: bool, now: float) -> None:
        device = self.device(topic, now)
        if not retained:
            device.heard_at = now

    def on_cleared(self, topic: Topic) -> None:
        self.devices.pop((topic.site, topic.device), None)

    def on_status(self, topic: Topic, status: str, now: float) -> None:
        self.device(topic, now).status = status

    def on_fields(self, topic: Topic, fields: Mapping[str, Scalar], now: float) -> None:
        device = self.device(topic, now)
        if topic.kind == "info" and isinstance(profile := fields.get("profile"), str):
            device.profile = intern(storable(profile)) or PROFILE_UNKNOWN
        if topic.kind == "deploy" and (alarms := alarms_of(fields)) != device.alarms:
            wall_ms, said_ms = self._wall_ms(), fields.get("ts")
            device.alarms = alarms
            device.alarms_ms = min(said_ms, wall_ms) if isinstance(said_ms, int) else wall_ms

    def on_metrics(self, topic: Topic, metrics: MetricsMessage, now: float) -> None:
        device, model = self.device(topic, now), self.model(topic, topic.model or "", now)
        wall_ms = self._wall_ms()
        if metrics.ts_ms <= model.ts_ms <= wall_ms and metrics.boot == model.boot:
            return  # a late or repeated report
        window_s, before_s = max(metrics.window_s, 1.0), model.window_s
        if not model.ts_ms or window_s > device.window_s or abs(window_s - before_s) < 0.1 * window_s:
            device.window_s = window_s  # a single shorter window means only that the worker ended in it
        model.update(metrics)
        synced = metrics.fields.get("clock_synced", 1)
        device.late_s = max(0.0, (wall_ms - metrics.ts_ms) / 1000) if synced else 0.0

    def device(self, topic: Topic, now: float) -> DeviceState:
        """Return the device of a message. Raises ProtocolError if there are too many devices."""
        key = (topic.site, topic.device)
        state = self.devices.get(key)
        if state is None:
            if len(self.devices) >= self._devices_max:
                raise ProtocolError(f"more than {self._devices_max} devices; choose one site with --site")
            state = self.devices[key] = DeviceState(intern(topic.site), topic.device, known_since=now)
        return state

    def model(self, topic: Topic, name: str, now: float) -> ReportedModel:
        """Return a model of the device. Raises ProtocolError if the device has too many models."""
        models = self.device(topic, now).models
        state = models.get(name)
        if state is None:
            if len(models) >= MODELS_PER_DEVICE_MAX:
                raise ProtocolError(f"device {topic.device} reports more than {MODELS_PER_DEVICE_MAX} models")
            state = models[intern(name)] = ReportedModel()
        return state


def alarms_of(deploy: Mapping[str, Scalar]) -> dict[str, tuple[str, ...]]:
    """Return the alarms of each model in a `deploy` message. The key "" has the device's own alarms.

    A device may send any names. So the function limits their number and ignores names that are not ids. An exporter
    could not write such a name as a label, so every scrape of the fleet would fail.
    """
    alarms: dict[str, tuple[str, ...]] = {}
    for key, value in deploy.items():
        model = "" if key == _OWN_ALARMS else key.removesuffix(_ALARMS)
        named = key == _OWN_ALARMS or (key.endswith(_ALARMS) and _is_id(model))
        if named and isinstance(value, str) and len(alarms) < MODELS_PER_DEVICE_MAX:
            names = {intern(name) for name in value.split(",", ALARMS_MAX)[:ALARMS_MAX] if _is_id(name)}
            if names:
                alarms[intern(model)] = tuple(sorted(names))
    return alarms


def _is_id(text: str) -> bool:
    return len(text) <= ID_CHARS_MAX and ID.match(text) is not None
