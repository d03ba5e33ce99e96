"""The exporter's state: reports become cumulative histograms and counters, as scrapers and OTLP want them.

Theory of operation: a report is first entered in the ledger; when the ledger says that it counts, and is this
exporter's own, its histogram is added to its group's. So several exporters hold parts that add up to the whole fleet,
each report in exactly one of them. What is said of devices (online, heard) every exporter knows; the one that owns
the device shows it.

One lock guards it all: the network's thread applies messages, scrapes read.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from sys import intern

from edgert.errors import ProtocolError
from edgert.telemetry import messages
from edgert.telemetry.messages import HistMessage, MetricsMessage, Topic, parse_topic
from edgert.telemetry.sketch import Sketch
from edgert_deploy.fleet.export.ledger import Agreed, Entry, Ledger
from edgert_deploy.fleet.reports import (
    KINDS,
    EventMessage,
    Report,
    counters_began_now,
    counters_of,
    parse_report,
    printable,
    stream_of,
)
from edgert_deploy.fleet.stream_limit import Begun

DIMENSIONS = ("site", "device", "model", "version", "profile")
BY_DEFAULT = ("site", "model", "version", "profile")
SERIES_MAX = 200_000
DEVICES_MAX = 200_000
PENDING_MAX = 200_000
FORGET_AFTER_S = 86_400.0
PROFILE_UNKNOWN = "unknown"

# In the order of reports.COUNTER_FIELDS.
COUNTERS = {
    "edgert_requests_total": "Requests that came, however they ended.",
    "edgert_errors_total": "Requests answered with an error.",
    "edgert_shed_total": "Requests turned away.",
    "edgert_cache_hits_total": "Requests answered from the cache.",
}
# Shown where series are kept by device: the last that each said.
GAUGES = {
    "edgert_resident_memory_bytes": ("rss_bytes", "Resident memory of the model's worker."),
    "edgert_temperature_celsius": ("temp_c", "The hottest thermal zone."),
    "edgert_throttled": ("throttled", "1 while the board is held back by voltage or heat."),
    "edgert_batch_mean": ("batch_mean", "Mean items per engine run in the last window."),
    "edgert_queue_p99_milliseconds": ("queue_p99_ms", "99th percentile of the wait for the engine, last window."),
    "edgert_engine_p99_milliseconds": ("engine_p99_ms", "99th percentile of engine runs, last window."),
    "edgert_shadow_agreement": ("shadow_agreement", "Share of the shadow's last 50 that agreed."),
}

Labels = tuple[str, ...]


@dataclass
class Group:
    """One group's reports so far; `changed` grows with each, so that what was drawn from it can be kept."""

    latency: Sketch = field(default_factory=Sketch)
    counters: list[int] = field(default_factory=lambda: [0] * len(COUNTERS))
    gauges: dict[str, float] = field(default_factory=dict)
    changed: int = 0
    changed_at: float = 0.0


@dataclass
class KnownDevice:
    """What is known of a device: its last `status`, profile, and when it was heard (seconds since 1970)."""

    status: str = "unknown"
    profile: str = PROFILE_UNKNOWN
    heard_at: float = 0.0


class Exporter:
    """Feed it with `apply`, send what `due` yields, read it with `lock` held.

    `clock` is monotonic seconds, `wall_clock` seconds since 1970.
    """

    def __init__(
        self,
        ledger: Ledger,
        by: tuple[str, ...] = BY_DEFAULT,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self.lock = threading.Lock()
        self.ledger, self.by = ledger, by
        self.groups: dict[Labels, Group] = {}
        self.devices: dict[tuple[str, str], KnownDevice] = {}
        self.events: dict[Labels, int] = {}
        self.heard: dict[str, int] = {}
        self.refused = self.series_refused = 0
        self.last_refusal = ""
        self.started_at = wall_clock()
        self._clock, self._wall_clock = clock, wall_clock
        self._pending: dict[Entry, tuple[Report, int]] = {}
        self._applied = 0
        self._begun = Begun()
        self._swept_at = clock()

    @property
    def per_device(self) -> bool:
        return "device" in self.by

    @property
    def waiting(self) -> int:
        """Reports taken that the ledger has not shown yet."""
        return len(self._pending)

    @property
    def settled(self) -> int:
        """So many of the messages applied, from the first, are agreed on: none of them is needed again."""
        oldest = next(iter(self._pending.values()), None)
        return self._applied if oldest is None else oldest[1] - 1

    def apply(self, topic: str, payload: bytes, retained: bool, now: float) -> None:
        """Take one message in, of the fleet or of the ledger."""
        with self.lock:
            self._applied += 1
            try:
                if topic == self.ledger.topic:
                    for agreed in self.ledger.read(payload, now):
                        self._settle(agreed)
                else:
                    self._hear(parse_topic(topic), payload, retained)
            except ProtocolError as error:
                self.refused += 1
                self.last_refusal = f"{topic[:120]}: {error.message}"

    def due(self, now: float, messages_max: int = PENDING_MAX) -> list[tuple[str, bytes]]:
        """What to publish to the ledger now."""
        with self.lock:
            if now - self._swept_at > FORGET_AFTER_S / 24:
                self._swept_at = now
                self._forget(now)
            if self.ledger.topic is None:
                return []
            return [(self.ledger.topic, payload) for payload in self.ledger.due(now, messages_max)]

    def devices_shown(self) -> Iterator[tuple[tuple[str, str], KnownDevice]]:
        """The devices that this exporter speaks for."""
        now = self._clock()
        for key, device in self.devices.items():
            if self.ledger.topic is None or self.ledger.owns("/".join(key), now):
                yield key, device

    def _hear(self, topic: Topic, payload: bytes, retained: bool) -> None:
        self.heard[topic.kind] = self.heard.get(topic.kind, 0) + 1
        device = self._device(topic.site, topic.device)
        if not retained:
            device.heard_at = self._wall_clock()
        if topic.kind == "status":
            device.status = messages.parse_status(payload)
        elif topic.kind == "info":
            profile = messages.load(payload).get("profile")
            device.profile = printable(profile) if isinstance(profile, str) and profile else PROFILE_UNKNOWN
        elif topic.kind in KINDS:
            self._enter_report(topic, payload)

    def _enter_report(self, topic: Topic, payload: bytes) -> None:
        report, model, version = parse_report(topic, payload), topic.model or "", ""
        self._begun.check(topic.site, topic.device, stream_of(topic, report), self._clock())
        counters: tuple[int, ...] = ()
        fresh = blind = False
        site, device, boot = intern(topic.site), intern(topic.device), intern(report.boot)
        if isinstance(report, MetricsMessage):
            counters, fresh, version = counters_of(report), counters_began_now(report), intern(report.model_version)
            blind = not fresh and not self.ledger.knows(site, device, model, boot)
        elif isinstance(report, EventMessage):
            model = report.model
        entry = Entry(topic.kind, site, device, intern(model), boot, report.seq, counters, fresh, blind, version)
        self._enter(entry, report)

    def told_nothing(self) -> None:
        """The connection was lost: what was taken and is not agreed on yet is told again."""
        with self.lock:
            if self.ledger.topic is not None:
                self.ledger.tell_again(list(self._pending))

    def _enter(self, entry: Entry, report: Report) -> None:
        if self.ledger.topic is None:
            for agreed in self.ledger.agree([entry], mine=True):
                if agreed.grown is not None:
                    self._count(entry, report, agreed.grown)
        elif len(self._pending) >= PENDING_MAX:
            raise ProtocolError(f"{PENDING_MAX} reports wait for the ledger: may this user write {self.ledger.topic}?")
        else:
            self._pending.setdefault(entry, (report, self._applied))
            self.ledger.take(entry)

    def _settle(self, agreed: Agreed) -> None:
        """What the ledger says of a report. Of another exporter's that its device lives, and what that cannot count."""
        entry, grown, mine = agreed
        if mine:
            taken = self._pending.pop(entry, None)
            if taken is not None and grown is not None:
                self._count(entry, taken[0], grown)
            return
        self._device(entry.site, entry.device).heard_at = self._wall_clock()
        if grown and any(grown):
            self._count_counters(entry, entry.version, grown)

    def _count(self, entry: Entry, report: Report, grown: tuple[int, ...]) -> None:
        if isinstance(report, EventMessage):
            labels = (entry.site, entry.model, report.event)
            if labels in self.events or len(self.events) < SERIES_MAX:
                self.events[labels] = self.events.get(labels, 0) + 1
            return
        if isinstance(report, HistMessage):
            self._group(entry, report.model_version).latency.merge(report.sketch)
            return
        group = self._count_counters(entry, report.model_version, grown)
        if self.per_device and self.ledger.topic is None:  # else another exporter may have newer ones
            group.gauges = {
                name: float(value)
                for name, (said, _) in GAUGES.items()
                if isinstance(value := report.fields.get(said), (int, float)) and math.isfinite(value)
            }

    def _count_counters(self, entry: Entry, version: str, grown: tuple[int, ...]) -> Group:
        group = self._group(entry, version)
        group.counters = [so_far + more for so_far, more in zip(group.counters, grown, strict=True)]
        return group

    def _group(self, entry: Entry, version: str) -> Group:
        profile = self._device(entry.site, entry.device).profile
        values = {"site": entry.site, "device": entry.device, "model": entry.model, "version": version}
        labels = tuple(profile if name == "profile" else values[name] for name in self.by)
        group = self.groups.get(labels)
        if group is None:
            if len(self.groups) >= SERIES_MAX:
                self.series_refused += 1
                raise ProtocolError(f"more than {SERIES_MAX} series; group by fewer words (--by)")
            group = self.groups[labels] = Group()
        group.changed += 1
        group.changed_at = self._clock()
        return group

    def _device(self, site: str, name: str) -> KnownDevice:
        device = self.devices.get((site, name))
        if device is None:
            if len(self.devices) >= DEVICES_MAX:
                raise ProtocolError(f"more than {DEVICES_MAX} devices; give each site an exporter of its own (--site)")
            device = self.devices[site, name] = KnownDevice()
        return device

    def _forget(self, now: float) -> None:
        """Groups that have long said nothing go: a device that was renamed, a version that nobody runs."""
        for labels in [key for key, group in self.groups.items() if now - group.changed_at > FORGET_AFTER_S]:
            del self.groups[labels]
