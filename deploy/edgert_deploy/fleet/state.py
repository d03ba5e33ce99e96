"""The fleet as its reports tell it, for who looks at it now: `FleetState`. Pure.

Theory of operation: each message is applied once. Reports of one stream carry a `seq` that grows by
one, so a repeated message is known by (boot, seq) and a missing one leaves a hole, which a late
arrival fills again. Percentiles come from sketches merged over the last windows: never from other
percentiles, as the mean of devices' p99.9 is not the fleet's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from sys import intern
from typing import Any, NamedTuple

from edgert.errors import ProtocolError
from edgert.telemetry import messages
from edgert.telemetry.alarms import CLEARED, RAISED
from edgert.telemetry.messages import HistMessage, MetricsMessage, Topic, parse_topic
from edgert.telemetry.sketch import Sketch
from edgert_deploy.fleet.packed import SCALARS, WINDOW, Pool, Scalars, pack, unpack
from edgert_deploy.fleet.reports import KINDS, EventMessage, parse_report
from edgert_deploy.fleet.sequence import SeqTracker

HORIZON_S = 600.0
WINDOWS_MAX = 64
DEVICES_MAX = 10_000
MODELS_PER_DEVICE_MAX = 64
BOOTS_KEPT_MAX = 4
ALARMS_MAX = 32  # of one model; a device names them as it likes
STALE_AFTER_WINDOWS = 2.5
WINDOW_S_DEFAULT = 60.0
# What an alarm begins and ends with besides RAISED and CLEARED, which name it as `alarm`: the shadow's own, and those that are one
# themselves, until the model serves anew.
ALARM, ALARM_ENDS = "_alarm", "_recovered"
ALARMING = frozenset(("crashed", "degraded", "no_room", "quarantined", "rolled_back"))
TREND_POINTS = 12
PERCENTILES = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99, "p999_ms": 0.999}


class Window(NamedTuple):
    """One window's latencies, packed: a fleet's last ten minutes are a great many. `heard_at` is monotonic seconds."""

    heard_at: float
    ts_ms: int
    window_s: float
    model_version: str
    scalars: Scalars
    buckets: bytes

    def sketch(self) -> Sketch:
        sketch, said = Sketch(), self.scalars
        sketch.buckets = unpack(self.buckets, WINDOW)
        sketch.zero, sketch.count, sketch.sum, sketch.min, sketch.max = (
            said.zero,
            said.count,
            said.sum,
            said.least,
            said.most,
        )
        return sketch

    @classmethod
    def of(cls, hist: HistMessage, heard_at: float) -> Window:
        sketch = hist.sketch
        scalars = Scalars(sketch.zero, sketch.count, sketch.sum, sketch.min, sketch.max)
        version = intern(hist.model_version)
        return cls(heard_at, hist.ts_ms, hist.window_s, version, scalars, pack(sketch.buckets, WINDOW))


def pooled(windows: Sequence[Window]) -> Sketch:
    """The sketch of all their requests together."""
    pool, groups = Pool(1), [0] * len(windows)
    pool.add(groups, [window.buckets for window in windows], WINDOW)
    pool.add_scalars(groups, [[getattr(window.scalars, name) for window in windows] for name in SCALARS])
    return pool.sketch(0)


@dataclass
class ModelState:
    """One model on one device: its last windows, and what it says of itself."""

    windows: deque[Window] = field(default_factory=lambda: deque(maxlen=WINDOWS_MAX))
    alarms: set[str] = field(default_factory=set)
    metrics: MetricsMessage | None = None
    duplicates: int = 0
    trackers: dict[tuple[str, str], SeqTracker] = field(default_factory=dict)

    def is_new(self, kind: str, boot: str, seq: int) -> bool:
        tracker = self.trackers.setdefault((kind, boot), SeqTracker())
        while len(self.trackers) > 2 * BOOTS_KEPT_MAX:
            del self.trackers[next(iter(self.trackers))]
        new = tracker.is_new(seq)
        self.duplicates += not new
        return new

    @property
    def missing(self) -> int:
        """Histograms that never came, at least. `metrics` travel at QoS 0 and are not held against the line."""
        return sum(tracker.lost_min for (kind, _), tracker in self.trackers.items() if kind == "hist")

    def keep(self, window: Window, horizon_s: float) -> None:
        """Remember it, and forget those that no question will reach again."""
        while self.windows and window.heard_at - self.windows[0].heard_at > horizon_s:
            self.windows.popleft()
        self.windows.append(window)

    def recent(self, now: float, horizon_s: float) -> list[Window]:
        """The windows of the last `horizon_s`, by when they came and by the device's own clock.

        Both, as a device that was cut off delivers hours of windows within seconds.
        """
        newest_ms = max((window.ts_ms for window in self.windows), default=0)
        return [
            window
            for window in self.windows
            if now - window.heard_at <= horizon_s and newest_ms - window.ts_ms <= horizon_s * 1000
        ]

    def note(self, said: EventMessage) -> None:
        note_alarm(self.alarms, said.event, said.alarm or "unnamed")


@dataclass
class DeviceState:
    """One device. Times are the subscriber's monotonic seconds."""

    site: str
    device: str
    known_since: float
    status: str = "unknown"
    info: dict[str, Any] = field(default_factory=dict)
    sys: dict[str, Any] = field(default_factory=dict)
    heard_at: float | None = None
    window_s: float = WINDOW_S_DEFAULT
    models: dict[str, ModelState] = field(default_factory=dict)
    events: ModelState = field(default_factory=ModelState)  # those of the device, whatever model they concern

    def age_s(self, now: float) -> float | None:
        """How long ago it last said something itself; None where only retained words are known."""
        return None if self.heard_at is None else now - self.heard_at

    def state(self, now: float) -> str:
        """`online`, `offline`, `lost`, or `stale`: said to be online and yet silent for too long."""
        silent_s = now - (self.known_since if self.heard_at is None else self.heard_at)
        if self.status in ("online", "unknown") and silent_s > STALE_AFTER_WINDOWS * self.window_s:
            return "stale"
        return self.status


@dataclass(frozen=True)
class Row:
    """One line of the fleet's table: a model on a device, a device without one, or a model fleet-wide.

    `device` and `site` are None for the fleet's line, `model` is None where a device reports none.
    Rates and percentiles cover the horizon; counters count since the model's worker began.
    """

    site: str | None
    device: str | None
    model: str | None
    state: str
    model_version: str = ""
    devices: int = 1
    rate_per_s: float | None = None
    p50_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    p999_ms: float | None = None
    max_ms: float | None = None
    answered: int = 0
    errors: int = 0
    shed: int = 0
    cache_hit_share: float | None = None
    batch_mean: float | None = None
    missing: int = 0
    duplicates: int = 0
    age_s: float | None = None
    alarms: tuple[str, ...] = ()
    trend_p95_ms: tuple[float, ...] = ()

    def as_json(self) -> dict[str, Any]:
        return {name: _rounded(value) for name, value in vars(self).items()}


def _rounded(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_rounded(each) for each in value]
    return round(value, 4) if isinstance(value, float) else value


class FleetState:
    """What all devices have said. Pure: it is given messages and times, and answers with rows."""

    def __init__(self, horizon_s: float = HORIZON_S) -> None:
        self.devices: dict[tuple[str, str], DeviceState] = {}
        self.refused = 0
        self.last_refusal = ""
        self._horizon_s = horizon_s

    def apply(self, topic: str, payload: bytes, retained: bool, now: float) -> Topic | None:
        """Take one message in. Returns its topic, or None where it is repeated or not of this contract."""
        try:
            parsed = parse_topic(topic)
            changed = self._apply(parsed, payload, retained, now)
        except ProtocolError as error:
            self.refused += 1
            self.last_refusal = f"{topic[:120]}: {error.message}"
            return None
        return parsed if changed else None

    def rows(self, now: float) -> list[Row]:
        """Every device's models, ordered by site and device, then one line per model for the whole fleet."""
        ordered = [self.devices[key] for key in sorted(self.devices)]
        return [row for device in ordered for row in self._device_rows(device, now)] + self.fleet_rows(now)

    def fleet_rows(self, now: float) -> list[Row]:
        names = sorted({name for device in self.devices.values() for name in device.models})
        return [self._fleet_row(name, now) for name in names]

    def latency(self, model: str, now: float) -> Sketch:
        """The latencies of `model` over all devices and the horizon, merged exactly."""
        states = [device.models[model] for device in self.devices.values() if model in device.models]
        return pooled([window for state in states for window in state.recent(now, self._horizon_s)])

    def _apply(self, topic: Topic, payload: bytes, retained: bool, now: float) -> bool:
        device = self._device(topic, now)
        if not retained:
            device.heard_at = now
        if topic.kind == "status":
            device.status = messages.parse_status(payload)
        elif topic.kind == "info":
            device.info = messages.load(payload)
        elif topic.kind == "sys":
            device.sys = messages.load(payload)
        elif topic.kind in KINDS:
            report = parse_report(topic, payload)
            if isinstance(report, HistMessage):
                return self._apply_hist(device, topic, report, now)
            if isinstance(report, MetricsMessage):
                return self._apply_metrics(device, topic, report)
            return self._apply_event(device, topic, report)
        return True

    def _apply_hist(self, device: DeviceState, topic: Topic, hist: HistMessage, now: float) -> bool:
        model = _model(device, topic)
        if not model.is_new("hist", hist.boot, hist.seq):
            return False
        model.keep(Window.of(hist, now), self._horizon_s)
        return True

    def _apply_event(self, device: DeviceState, topic: Topic, said: EventMessage) -> bool:
        if not device.events.is_new("event", said.boot, said.seq):
            return False
        if said.model:
            _model(device, Topic(topic.site, topic.device, "event", said.model)).note(said)
        else:
            device.events.note(said)
        return True

    def _apply_metrics(self, device: DeviceState, topic: Topic, metrics: MetricsMessage) -> bool:
        model = _model(device, topic)
        if not model.is_new("metrics", metrics.boot, metrics.seq):
            return False
        device.window_s = max(metrics.window_s, 1.0)
        if model.metrics is None or metrics.ts_ms >= model.metrics.ts_ms or metrics.boot != model.metrics.boot:
            model.metrics = metrics
        return True

    def _device(self, topic: Topic, now: float) -> DeviceState:
        key = (topic.site, topic.device)
        if key not in self.devices:
            if len(self.devices) >= DEVICES_MAX:
                raise ProtocolError(f"more than {DEVICES_MAX} devices; watch one site at a time")
            self.devices[key] = DeviceState(topic.site, topic.device, known_since=now)
        return self.devices[key]

    def _device_rows(self, device: DeviceState, now: float) -> Iterator[Row]:
        if not device.models:
            alarms = tuple(sorted(device.events.alarms))
            yield Row(device.site, device.device, None, device.state(now), age_s=device.age_s(now), alarms=alarms)
        for name, model in sorted(device.models.items()):
            yield self._model_row(device, name, model, now)

    def _model_row(self, device: DeviceState, name: str, model: ModelState, now: float) -> Row:
        recent = model.recent(now, self._horizon_s)
        metrics = model.metrics
        version = metrics.model_version if metrics else recent[-1].model_version if recent else ""
        return Row(
            device.site,
            device.device,
            name,
            device.state(now),
            model_version=version,
            **_latency_fields(recent),
            **_counter_fields([metrics] if metrics else []),
            missing=model.missing,
            duplicates=model.duplicates,
            age_s=device.age_s(now),
            alarms=tuple(sorted(model.alarms | device.events.alarms)),
            trend_p95_ms=_trend(recent),
        )

    def _fleet_row(self, name: str, now: float) -> Row:
        holders = [device for device in self.devices.values() if name in device.models]
        models = [device.models[name] for device in holders]
        windows = [window for model in models for window in model.recent(now, self._horizon_s)]
        fields = _latency_fields(windows)
        rates = [_rate(model.recent(now, self._horizon_s)) for model in models]
        fields["rate_per_s"] = sum(rate for rate in rates if rate is not None) if windows else None
        metrics = [model.metrics for model in models if model.metrics]
        return Row(
            None,
            None,
            name,
            f"{sum(device.state(now) == 'online' for device in holders)}/{len(holders)} online",
            model_version=",".join(sorted({said.model_version for said in metrics})),
            devices=len(holders),
            **fields,
            **_counter_fields(metrics),
            missing=sum(model.missing for model in models),
            duplicates=sum(model.duplicates for model in models),
            alarms=tuple(sorted({alarm for model in models for alarm in model.alarms})),
            trend_p95_ms=_fleet_trend(windows, now),
        )


def note_alarm(alarms: set[str], event: str, alarm: str) -> None:
    """An alarm lasts from its event until the one that ends it; a version that serves anew begins without any."""
    if event == "serving":
        alarms.clear()
    elif event == CLEARED:
        alarms.discard(alarm)
    elif event.endswith(ALARM_ENDS):
        alarms.discard(event.removesuffix(ALARM_ENDS))
    elif len(alarms) >= ALARMS_MAX:
        return
    elif event == RAISED:
        alarms.add(alarm)
    elif event.endswith(ALARM) or event in ALARMING:
        alarms.add(event.removesuffix(ALARM))


def _model(device: DeviceState, topic: Topic) -> ModelState:
    assert topic.model is not None
    if topic.model not in device.models and len(device.models) >= MODELS_PER_DEVICE_MAX:
        raise ProtocolError(f"device {device.device} reports more than {MODELS_PER_DEVICE_MAX} models")
    return device.models.setdefault(topic.model, ModelState())


def _latency_fields(windows: list[Window]) -> dict[str, Any]:
    sketch = pooled(windows)
    if not sketch.count:
        return {"rate_per_s": _rate(windows)}
    percentiles = {name: sketch.quantile(q) for name, q in PERCENTILES.items()}
    return {**percentiles, "max_ms": sketch.max, "answered": sketch.count, "rate_per_s": _rate(windows)}


def _rate(windows: list[Window]) -> float | None:
    """Requests answered per second over the windows, which follow one another."""
    seconds = sum(window.window_s for window in windows)
    return sum(window.scalars.count for window in windows) / seconds if seconds > 0 else None


def _trend(windows: list[Window]) -> tuple[float, ...]:
    """p95 of the last windows that held a request, oldest first."""
    last = [window for window in sorted(windows, key=lambda each: each.ts_ms) if window.scalars.count][-TREND_POINTS:]
    return tuple(window.sketch().quantile(0.95) for window in last)


def _fleet_trend(windows: list[Window], now: float) -> tuple[float, ...]:
    """p95 of all devices' windows by when they were heard, in steps of a window's length."""
    step_s = max((window.window_s for window in windows), default=WINDOW_S_DEFAULT) or WINDOW_S_DEFAULT
    steps: dict[int, list[Window]] = {}
    for window in windows:
        if window.scalars.count:
            steps.setdefault(int((now - window.heard_at) / step_s), []).append(window)
    return tuple(pooled(steps[step]).quantile(0.95) for step in sorted(steps, reverse=True)[-TREND_POINTS:])


def _counter_fields(said: list[MetricsMessage]) -> dict[str, Any]:
    if not said:
        return {}
    requests = sum(metrics.number("req_total") for metrics in said)
    hits = sum(metrics.number("cache_hit_total") for metrics in said)
    batches = [mean for metrics in said if (mean := metrics.number("batch_mean")) > 0]
    return {
        "errors": int(sum(metrics.number("err_total") for metrics in said)),
        "shed": int(sum(metrics.number("shed_total") for metrics in said)),
        "cache_hit_share": hits / requests if requests else None,
        "batch_mean": sum(batches) / len(batches) if batches else None,
    }
