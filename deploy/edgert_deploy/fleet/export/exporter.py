"""The exporter's state: reports as cumulative histograms and counters, for scrapers and OTLP.

An exporter holds the streams and groups of every device whose messages it receives. `--site` divides a large fleet:
each exporter receives one site, and the series of all exporters together cover the fleet.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from sys import intern

from edgert.errors import ProtocolError
from edgert.telemetry.messages import HistMessage, MetricsMessage, Topic
from edgert.telemetry.sketch import Sketch
from edgert_deploy.fleet.export.counting import Counting
from edgert_deploy.fleet.live_fleet import Fleet
from edgert_deploy.fleet.packed_histograms import WINDOW_FORM, StageCounts, cells_of
from edgert_deploy.fleet.reports import EventMessage

BY_DEFAULT = ("site", "model", "version", "profile")
SERIES_MAX = 200_000
DEVICES_MAX = 200_000
FORGET_AFTER_S = 86_400.0

# The counters are in the order of reports.COUNTER_FIELDS.
COUNTERS = {
    "edgert_requests_total": "Requests, with any result.",
    "edgert_errors_total": "Requests answered with an error.",
    "edgert_shed_total": "Requests refused because of overload.",
    "edgert_cache_hits_total": "Requests answered from the cache.",
}
# The gauges have the values of the last report. They are exported only if `device` is a dimension of the series.
GAUGES = {
    "edgert_resident_memory_bytes": ("rss_bytes", "Resident memory of the model's worker."),
    "edgert_temperature_celsius": ("temp_c", "The hottest thermal zone."),
    "edgert_throttled": ("throttled", "1 while voltage or heat throttles the board."),
    "edgert_batch_mean": ("batch_mean", "Mean items per engine run in the last window."),
    "edgert_queue_p99_milliseconds": ("queue_p99_ms", "99th percentile of the wait for the engine in the last window."),
    "edgert_engine_p99_milliseconds": ("engine_p99_ms", "99th percentile of engine runs in the last window."),
    "edgert_shadow_agreement": ("shadow_agreement", "Share of the shadow's last 50 answers that agreed."),
}

Labels = tuple[str, ...]


@dataclass
class Group:
    """The reports of one group so far.

    `changed` grows with each report: a rendered text of the group is valid until `changed` grows.
    """

    latency: Sketch = field(default_factory=Sketch)
    stage_counts: StageCounts | None = None
    counters: list[int] = field(default_factory=lambda: [0] * len(COUNTERS))
    gauges: dict[str, float] = field(default_factory=dict)
    changed: int = 0
    changed_at: float = 0.0
    _stages: dict[str, Sketch] = field(default_factory=dict)

    def count_stages(self, packed: bytes) -> None:
        """Add the stage times of a report."""
        if packed:
            self.stage_counts = self.stage_counts or StageCounts()
            self.stage_counts.add(cells_of(packed, WINDOW_FORM))
            self._stages = {}

    @property
    def stages(self) -> Mapping[str, Sketch]:
        """The sketch of each stage. The sketches are made again if reports arrived since the last call."""
        if self.stage_counts is not None and not self._stages:
            self._stages = self.stage_counts.sketches()
        return self._stages


class Exporter(Fleet):
    """The fleet's figures. One thread calls `apply`; other threads hold `lock` while they read.

    Args:
        name: Distinguishes this exporter from other exporters.
        by: The dimensions of the series.
        wall_clock: Returns the time in seconds since 1970.
    """

    def __init__(self, name: str, by: tuple[str, ...] = BY_DEFAULT, *, wall_clock: Callable[[], float]) -> None:
        super().__init__(lambda: int(wall_clock() * 1000), DEVICES_MAX)
        self.lock = threading.Lock()
        self.name, self.by = name, by
        self.counting = Counting()
        self.groups: dict[Labels, Group] = {}
        self.events: dict[Labels, int] = {}
        self.messages: dict[str, int] = {}
        self.applied = 0
        self.started_at = wall_clock()
        self._wall_clock = wall_clock
        self._swept_at = 0.0

    def apply(self, topic: str, payload: bytes, retained: bool, now: float) -> None:
        with self.lock:
            self.applied += 1
            super().apply(topic, payload, retained, now)
            if now - self._swept_at > FORGET_AFTER_S / 24:
                self._swept_at = now
                self._forget(now)

    def on_message(self, topic: Topic, retained: bool, now: float) -> None:
        self.messages[topic.kind] = self.messages.get(topic.kind, 0) + 1
        super().on_message(topic, retained, self._wall_clock())

    def on_cleared(self, topic: Topic) -> None:
        super().on_cleared(topic)
        if {"site", "device"} <= set(self.by):
            device_labels = (self.by.index("site"), topic.site), (self.by.index("device"), topic.device)
            for labels in [key for key in self.groups if all(key[at] == name for at, name in device_labels)]:
                del self.groups[labels]

    def on_hist(self, topic: Topic, hist: HistMessage | None, now: float) -> None:
        if hist is None or not self.counting.is_new(topic, hist):
            return
        group = self._group(topic, hist.model_version, now)
        group.latency.merge(hist.sketch)
        if "device" not in self.by:  # series by device have gauges instead: stages would take too much memory
            group.count_stages(hist.stages)

    def on_metrics(self, topic: Topic, metrics: MetricsMessage, now: float) -> None:
        if not self.counting.is_new(topic, metrics):
            return
        grown = self.counting.increase(topic, metrics)
        group = self._group(topic, metrics.model_version, now)
        group.counters = [so_far + more for so_far, more in zip(group.counters, grown, strict=True)]
        if "device" in self.by:
            group.gauges = {
                name: float(value)
                for name, (field_name, _) in GAUGES.items()
                if isinstance(value := metrics.fields.get(field_name), (int, float)) and math.isfinite(value)
            }

    def on_event(self, topic: Topic, event: EventMessage, now: float) -> None:
        labels = (topic.site, event.model, event.event)
        if self.counting.is_new(topic, event) and (labels in self.events or len(self.events) < SERIES_MAX):
            self.events[labels] = self.events.get(labels, 0) + 1

    def _labels(self, topic: Topic, version: str, now: float) -> Labels:
        values = {
            "site": topic.site,
            "device": topic.device,
            "model": topic.model or "",
            "version": intern(version),
            "profile": self.device(topic, now).profile,
        }
        return tuple(values[name] for name in self.by)

    def _group(self, topic: Topic, version: str, now: float) -> Group:
        labels = self._labels(topic, version, now)
        group = self.groups.get(labels)
        if group is None:
            if len(self.groups) >= SERIES_MAX:
                raise ProtocolError(
                    f"more than {SERIES_MAX} series; group by fewer dimensions (--by), or export one site (--site)"
                )
            group = self.groups[labels] = Group()
        group.changed += 1
        group.changed_at = now
        return group

    def _forget(self, now: float) -> None:
        """Remove groups whose last report is old: their device was renamed, or no device runs their version."""
        for labels in [key for key, group in self.groups.items() if now - group.changed_at > FORGET_AFTER_S]:
            del self.groups[labels]
