"""The fleet's last minutes for the terminal's table: latencies, gaps and repeated reports.

This module does no I/O. Theory of operation: each report is applied once. In each stream, `seq` grows by one with each
report. So (boot, seq) identifies a repeated report, and a missing report leaves a gap until it arrives late.
Percentiles are computed from sketches that are merged over the last windows. They are never computed from other
percentiles, because the mean of the devices' p99.9 is not the fleet's p99.9.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from sys import intern
from typing import Any

from edgert.telemetry.messages import HistMessage, MetricsMessage, Topic, wall_ms
from edgert.telemetry.sketch import Sketch
from edgert_deploy.fleet.live_fleet import WINDOW_S_DEFAULT, DeviceState, Fleet, ReportedModel
from edgert_deploy.fleet.packed_histograms import WINDOW_FORM, HistogramPool, pack
from edgert_deploy.fleet.reports import Report
from edgert_deploy.fleet.sequence import StreamTracker

HORIZON_S = 600.0
WINDOWS_MAX = 64
DEVICES_MAX = 10_000
TREND_POINTS = 12
PERCENTILES = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99, "p999_ms": 0.999}


@dataclass(frozen=True, slots=True)
class Window:
    """The latencies of one window. They are packed, because ten minutes of a fleet have many windows.

    `heard_at` is monotonic seconds.
    """

    heard_at: float
    ts_ms: int
    window_s: float
    model_version: str
    count: int
    p95_ms: float
    scalars: tuple[float, ...]  # the other figures, in the order that `HistogramPool` needs
    buckets: bytes

    @classmethod
    def of(cls, hist: HistMessage, heard_at: float) -> Window:
        sketch, version = hist.sketch, intern(hist.model_version)
        scalars = (sketch.zero, sketch.count, sketch.sum, sketch.min, sketch.max)
        figures = (sketch.count, sketch.quantile(0.95), scalars, pack(sketch.buckets, WINDOW_FORM))
        return cls(heard_at, hist.ts_ms, hist.window_s, version, *figures)


def pooled(windows: Sequence[Window]) -> Sketch:
    if not windows:
        return Sketch()
    pool, groups = HistogramPool(1), [0] * len(windows)
    pool.add(groups, [window.buckets for window in windows], WINDOW_FORM)
    pool.add_scalars(groups, list(zip(*(window.scalars for window in windows), strict=True)))
    return pool.sketch(0)


@dataclass
class Stream:
    """The reports of one model on one device: the last windows, and the sequence numbers that arrived."""

    windows: deque[Window] = field(default_factory=lambda: deque(maxlen=WINDOWS_MAX))
    duplicates: int = 0
    numbers: dict[str, StreamTracker] = field(
        default_factory=lambda: {"hist": StreamTracker(), "metrics": StreamTracker()}
    )

    def is_new(self, kind: str, report: Report) -> bool:
        new = self.numbers[kind].is_new(report.boot, report.seq)
        self.duplicates += not new
        return new

    @property
    def missing(self) -> int:
        """The minimum number of missing histograms. `metrics` are not included: at QoS 0, they may be lost."""
        return self.numbers["hist"].lost_min

    def keep(self, window: Window, horizon_s: float) -> None:
        """Add a window and drop the windows that are older than the horizon."""
        while self.windows and window.heard_at - self.windows[0].heard_at > horizon_s:
            self.windows.popleft()
        self.windows.append(window)

    def recent(self, now: float, horizon_s: float) -> list[Window]:
        """Return the windows of the last `horizon_s`, by their time of receipt and by the device's clock.

        The time of receipt alone is not enough: after a loss of connection, a device delivers hours of windows within
        seconds.
        """
        newest_ms = max((window.ts_ms for window in self.windows), default=0)
        return [
            window
            for window in self.windows
            if now - window.heard_at <= horizon_s and newest_ms - window.ts_ms <= horizon_s * 1000
        ]


@dataclass(frozen=True)
class Row:
    """One line of the fleet's table: a model on a device, a device itself, or a model of the whole fleet.

    `device` and `site` are None in a row of the whole fleet. `model` is None in a row about a device itself; a
    device has such a row if it has no models, or if it has alarms of its own. Rates and percentiles cover the horizon.
    Counters start at 0 when the model's worker starts.
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


class LivePercentiles(Fleet):
    """The fleet with the latencies of its last `horizon_s`. Receives messages and times; returns rows."""

    def __init__(self, horizon_s: float = HORIZON_S, wall_ms: Callable[[], int] = wall_ms) -> None:
        super().__init__(wall_ms, DEVICES_MAX)
        self._horizon_s = horizon_s
        self._streams: dict[tuple[str, str, str], Stream] = {}

    def on_hist(self, topic: Topic, hist: HistMessage | None, now: float) -> None:
        assert hist is not None
        self.model(topic, topic.model or "", now)
        if (stream := self._stream(topic)).is_new("hist", hist):
            stream.keep(Window.of(hist, now), self._horizon_s)

    def on_metrics(self, topic: Topic, metrics: MetricsMessage, now: float) -> None:
        self.model(topic, topic.model or "", now)
        if self._stream(topic).is_new("metrics", metrics):
            super().on_metrics(topic, metrics, now)

    def rows(self, now: float) -> list[Row]:
        """Return every device's models, by site and device, then a row for each model of the fleet."""
        ordered = [self.devices[key] for key in sorted(self.devices)]
        return [row for device in ordered for row in self._device_rows(device, now)] + self.fleet_rows(now)

    def fleet_rows(self, now: float) -> list[Row]:
        names = sorted({name for device in self.devices.values() for name in device.model_names})
        return [self._fleet_row(name, now) for name in names]

    def _stream(self, topic: Topic) -> Stream:
        return self._streams.setdefault((topic.site, topic.device, topic.model or ""), Stream())

    def _stream_of(self, device: DeviceState, model: str) -> Stream:
        return self._streams.get((device.site, device.device, model)) or Stream()

    def _device_rows(self, device: DeviceState, now: float) -> Iterator[Row]:
        device_alarms = device.alarms.get("", ())
        if device_alarms or not device.model_names:
            yield Row(
                device.site, device.device, None, device.state(now), age_s=device.age_s(now), alarms=device_alarms
            )
        for name in sorted(device.model_names):
            yield self._model_row(device, name, device.models.get(name) or ReportedModel(), now)

    def _model_row(self, device: DeviceState, name: str, model: ReportedModel, now: float) -> Row:
        stream = self._stream_of(device, name)
        recent = stream.recent(now, self._horizon_s)
        return Row(
            device.site,
            device.device,
            name,
            device.state(now),
            model_version=model.version or (recent[-1].model_version if recent else ""),
            **_latency_fields(recent),
            **_counter_fields([model]),
            missing=stream.missing,
            duplicates=stream.duplicates,
            age_s=device.age_s(now),
            alarms=device.alarms.get(name, ()),
            trend_p95_ms=_trend(recent),
        )

    def _fleet_row(self, name: str, now: float) -> Row:
        holders = [device for device in self.devices.values() if name in device.model_names]
        models = [device.models.get(name) or ReportedModel() for device in holders]
        streams = [self._stream_of(device, name) for device in holders]
        recent = [stream.recent(now, self._horizon_s) for stream in streams]
        windows = [window for each in recent for window in each]
        fields = _latency_fields(windows)
        rates = [rate for each in recent if (rate := _rate(each)) is not None]
        fields["rate_per_s"] = sum(rates) if windows else None
        return Row(
            None,
            None,
            name,
            f"{sum(device.state(now) == 'online' for device in holders)}/{len(holders)} online",
            model_version=",".join(sorted({model.version for model in models if model.version})),
            devices=len(holders),
            **fields,
            **_counter_fields(models),
            missing=sum(stream.missing for stream in streams),
            duplicates=sum(stream.duplicates for stream in streams),
            alarms=tuple(sorted({alarm for device in holders for alarm in device.alarms.get(name, ())})),
            trend_p95_ms=_fleet_trend(windows, now),
        )


def _latency_fields(windows: list[Window]) -> dict[str, Any]:
    sketch = pooled(windows)
    if not sketch.count:
        return {"rate_per_s": _rate(windows)}
    percentiles = {name: sketch.quantile(q) for name, q in PERCENTILES.items()}
    return {**percentiles, "max_ms": sketch.max, "answered": sketch.count, "rate_per_s": _rate(windows)}


def _rate(windows: list[Window]) -> float | None:
    """Return the answered requests a second over consecutive windows."""
    seconds = sum(window.window_s for window in windows)
    return sum(window.count for window in windows) / seconds if seconds > 0 else None


def _trend(windows: list[Window]) -> tuple[float, ...]:
    """Return the p95 of the last windows with requests, the oldest first."""
    last = [window for window in sorted(windows, key=lambda each: each.ts_ms) if window.count][-TREND_POINTS:]
    return tuple(window.p95_ms for window in last)


def _fleet_trend(windows: list[Window], now: float) -> tuple[float, ...]:
    """Return the p95 of all devices' windows by their time of receipt, in steps of one window."""
    step_s = max((window.window_s for window in windows), default=WINDOW_S_DEFAULT) or WINDOW_S_DEFAULT
    steps: dict[int, list[Window]] = {}
    for window in windows:
        if window.count:
            steps.setdefault(int((now - window.heard_at) / step_s), []).append(window)
    return tuple(pooled(steps[step]).quantile(0.95) for step in sorted(steps, reverse=True)[-TREND_POINTS:])


def _counter_fields(models: list[ReportedModel]) -> dict[str, Any]:
    reported = [model for model in models if model.ts_ms]
    if not reported:
        return {}
    requests = sum(model.requests for model in reported)
    hits = sum(model.cache_hits for model in reported)
    batches = [model.batch_mean for model in reported if model.batch_mean]
    return {
        "errors": sum(model.errors for model in reported),
        "shed": sum(model.shed for model in reported),
        "cache_hit_share": hits / requests if requests else None,
        "batch_mean": sum(batches) / len(batches) if batches else None,
    }
