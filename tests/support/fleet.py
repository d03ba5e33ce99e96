"""Devices that report, and helpers that read their reports in a broker, a store and an exporter."""

from __future__ import annotations

import json
import random
import tempfile
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from edgert.telemetry import messages, stages
from edgert.telemetry.messages import Topics
from edgert.telemetry.mqtt import Connection
from edgert.telemetry.sketch import Sketch
from edgert.telemetry.span_counter import SpanCounter
from edgert.telemetry.spans import RequestSpan
from edgert_deploy.fleet.export.exporter import Exporter
from edgert_deploy.fleet.store.batch import MINUTE_MS
from edgert_deploy.fleet.store.query import Answer, FleetQuery, Question
from edgert_deploy.fleet.store.recorder import Recorder
from edgert_deploy.fleet.store.store import Store
from edgert_deploy.fleet.subscriber import Listener
from edgert_deploy.fleet.ui.fleet_state import FleetState
from tests.support.devices import WAIT_S_MAX
from tests.support.servers.brokers import Broker
from tests.support.sketches import sketch_of

NOW_MS = 1_790_000_000_000 // 3_600_000 * 3_600_000 + 20 * MINUTE_MS  # 20 minutes past an hour
Sent = list[tuple[str, bytes]]


class Pi:
    """A device's reports, with the sketches that they hold."""

    def __init__(
        self, device: str, version: str = "r1", profile: str = "pi", boot: str = "b1", site: str = "plant-a"
    ) -> None:
        self.topics, self.version, self.boot, self.profile = Topics(site, device), version, boot, profile
        self.seq = self.requests = self.errors = 0
        self.sketches: list[tuple[int, Sketch]] = []

    def info(self, channel: str = "") -> Sent:
        said = messages.envelope(ts_ms=NOW_MS, boot=self.boot) | {"profile": self.profile}
        said |= {"channel": channel, "channel_tags": ""} if channel else {}
        return [(self.topics.info, messages.dump(said)), (self.topics.status, b"online")]

    def deploy(self, ts_ms: int, *alarms: str) -> Sent:
        """Return the retained message of the device's slots, with the alarms of its model."""
        said = messages.envelope(ts_ms=ts_ms, boot=self.boot) | {
            "digits_state": "steady",
            "digits_active": self.version,
        }
        return [(self.topics.deploy, messages.dump({**said, "digits_alarms": ",".join(alarms) or None}))]

    def rolled_back(self, release: int, reason: str, ts_ms: int = NOW_MS) -> Sent:
        said = messages.envelope(ts_ms=ts_ms, boot=self.boot, seq=1)
        said |= {"event": "rolled_back", "model": "digits", "release": release, "reason": reason}
        return [(self.topics.event, messages.dump(said))]

    def window(
        self,
        ts_ms: int,
        latencies_ms: Sequence[float],
        errors: int = 0,
        uptime_s: float = 1e6,
        clock_synced: int = 1,
        **stages_ms: Sequence[float],
    ) -> Sent:
        """Return the reports of a window. If no stage has times, they look like reports of an older device."""
        sketch = sketch_of(latencies_ms)
        self.sketches.append((ts_ms, sketch))
        self.seq += 1
        self.requests += len(latencies_ms) + errors
        self.errors += errors
        common = messages.envelope(ts_ms=ts_ms, boot=self.boot, seq=self.seq)
        common |= {"window_s": 60.0, "model_version": self.version, "clock_synced": clock_synced}
        scalars = {"zero": sketch.zero, "count": sketch.count, "sum": sketch.sum, "min": sketch.min, "max": sketch.max}
        shape = {"unit": "ms", "temporality": "delta", "scale": 5, "buckets": sketch.encode()}
        packed = stages.text_of({name: sketch_of(stages_ms.get(name, ())) for name in stages.NUMBERED})
        counters = {"req_total": self.requests, "err_total": self.errors, "shed_total": 0, "cache_hit_total": 0}
        return [
            (self.topics.hist("digits"), messages.dump({**common, **shape, **scalars, "stages": packed})),
            (self.topics.metrics("digits"), messages.dump({**common, **counters, "uptime_s": uptime_s, "up": 1})),
        ]


class Sender:
    """A device with the real span counter; `window` returns the messages of one window of latencies."""

    def __init__(self, device: str, model: str = "digits", boot: str = "b1", site: str = "plant-a") -> None:
        self.topics = Topics(site, device)
        self.model, self.boot, self.seq = model, boot, 0
        self._clock_s = 0.0
        self._spans = SpanCounter(model, lambda: 0.0)

    def window(self, latencies_ms: Sequence[float] = (), *, errors: int = 0, window_s: float = 60) -> Sent:
        for latency in latencies_ms:
            self._spans.record(RequestSpan("ok", round(latency * 1000), batch=1))
        for _ in range(errors):
            self._spans.record(RequestSpan("error", 1))
        self.seq += 1
        self._clock_s += window_s
        report = self._spans.end_window(now=self._clock_s)
        envelope = messages.envelope(ts_ms=int(self._clock_s * 1000), boot=self.boot, seq=self.seq)
        hist = messages.hist_fields(report, model_version="r7")
        metrics = messages.metrics_fields(report, up=True, model_version="r7", facts={})
        return [
            (self.topics.hist(self.model), messages.dump({**envelope, **hist})),
            (self.topics.metrics(self.model), messages.dump({**envelope, **metrics})),
        ]


def publish(broker: Broker, sent: Sent, *, retain: bool = False) -> None:
    """Publish messages and wait until the broker has acknowledged each."""
    waiting: set[int | None] = set()
    connection = Connection(broker.settings, on_acknowledged=lambda number, _: waiting.discard(number))
    connection.open()
    waiting |= {connection.publish(topic, payload, 1, retain=retain) for topic, payload in sent}
    while waiting - {None}:
        connection.pump(0.1)
    connection.close()


def retained(broker: Broker) -> set[str]:
    """Return the topics that the broker retains."""
    heard: set[str] = set()
    connection = Connection(broker.settings, on_message=lambda topic, payload, _: heard.add(topic) if payload else None)
    connection.open()
    connection.subscribe(("#",), 1)
    connection.publish("last", b"1", 1)  # the broker sends retained messages before this message
    while "last" not in heard:
        connection.pump(0.1)
    connection.close()
    return heard - {"last"}


def record(url: str, sent: Sent, now_ms: int = NOW_MS) -> Recorder:
    """Record messages in the store at `url`."""
    with recording(url, now_ms) as take:
        return take(sent)


@cache
def _empty_store() -> bytes:
    """Return the file of an empty store. To make its tables and views takes four times as long as to copy it."""
    with tempfile.TemporaryDirectory() as folder:
        Store(f"sqlite:///{folder}/fleet.db").close()
        return Path(folder, "fleet.db").read_bytes()


@contextmanager
def recording(url: str, now_ms: int = NOW_MS) -> Iterator[Callable[[Sent], Recorder]]:
    """Open the store at `url`. Yield a function that records messages there and writes them at once."""
    file = Path(url.removeprefix("sqlite:///"))
    if not url.startswith("postgresql:") and not file.exists():
        file.write_bytes(_empty_store())
    with closing(Store(url)) as store:
        recorder = Recorder(store, lambda: now_ms)

        def take(sent: Sent) -> Recorder:
            feed(recorder, sent)
            recorder.flush()
            return recorder

        yield take


def ask(
    url: str, hours: float, by: tuple[str, ...] = (), step_min: int = 0, stages: bool = False, **where: str
) -> list[Answer]:
    """Query the last hours of the store at `url`."""
    fleet = FleetQuery(url)
    since_ms = NOW_MS - int(hours * 3_600_000)
    answers = fleet.answer(Question(since_ms, NOW_MS, by, where, step_min, stages), NOW_MS)
    fleet.close()
    return answers


def scraped(port: int, name: str, **labels: str) -> float:
    """Return the sum of an exporter's series of `name` with these labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=WAIT_S_MAX) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = (sample for family in families for sample in family.samples)
    return sum(sample.value for sample in samples if sample.name == name and labels.items() <= sample.labels.items())


class Watched(FleetState):
    """A FleetState whose wall clock the tests set."""

    def __init__(self, targets: Mapping[str, float] | None = None) -> None:
        super().__init__(lambda: self.wall_ms, targets)
        self.wall_ms = NOW_MS


def tell(fleet_state: Watched, sent: Sent, now: float = 1000.0, wall_ms: int = NOW_MS) -> None:
    """Apply messages to the state at `wall_ms`."""
    fleet_state.wall_ms = wall_ms
    feed(fleet_state, sent, now)


def feed(listener: Listener, sent: Iterable[tuple[str, bytes]], now: float = 0.0, *, retained: bool = False) -> None:
    """Apply messages to a listener."""
    for topic, payload in sent:
        listener.apply(topic, payload, retained, now)


def an_exporter(by: str = "site,model,version,profile") -> Exporter:
    return Exporter("b1", tuple(by.split(",")), wall_clock=lambda: 1_790_000_000.0)


def counted(exporters: list[Exporter]) -> tuple[Sketch, list[int]]:
    """Return the sum of the groups of all exporters: their latencies, and their counters."""
    total, counters = Sketch(), [0, 0, 0, 0]
    for exporter in exporters:
        for group in exporter.groups.values():
            total.merge(group.latency)
            counters = [a + b for a, b in zip(counters, group.counters, strict=True)]
    return total, counters


def changed(sent: Sent, **fields: Any) -> Sent:
    """Return the messages with `fields` replaced."""
    return [(topic, messages.dump({**json.loads(payload), **fields})) for topic, payload in sent]


def without(sent: Sent, *seqs: int) -> Sent:
    """Return the messages without the reports with these sequence numbers."""
    return [(topic, payload) for topic, payload in sent if "/m/" not in topic or json.loads(payload)["seq"] not in seqs]


def a_fleet(devices: int = 6, minutes: int = 200) -> list[Pi]:
    dice = random.Random(3)
    fleet = [Pi(f"pi-{n}", version=f"r{n % 2 + 1}", profile=f"board-{n % 3}") for n in range(devices)]
    for pi in fleet:
        for minute in range(minutes):
            pi.window(NOW_MS - minute * MINUTE_MS - 1, [dice.lognormvariate(1, 1) for _ in range(dice.randrange(6))])
    return fleet


def replayed(fleet: list[Pi]) -> Sent:
    """Return all messages of the fleet: the devices take turns, and some messages come twice."""
    sent: Sent = []
    for pi in fleet:
        sent += pi.info()
        twin = Pi(pi.topics.device, pi.version, pi.profile)
        for ts_ms, sketch in pi.sketches:
            window = twin.window(ts_ms, [])
            fields = json.loads(window[0][1]) | {
                "buckets": sketch.encode(), "zero": sketch.zero, "count": sketch.count,
                "sum": sketch.sum, "min": sketch.min, "max": sketch.max,
            }  # fmt: skip
            sent += [(window[0][0], messages.dump(fields)), window[1]]
    dice = random.Random(4)
    reports = [message for message in sent if "/m/" in message[0]]
    again = dice.sample(reports, 300)
    dice.shuffle(reports)
    return [message for message in sent if "/m/" not in message[0]] + reports + again
