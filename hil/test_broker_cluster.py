"""Telemetry through a real cluster of brokers while its nodes are killed; no operator acts.

`make hil-brokers` runs these tests in about three minutes. Most of this time is the start of the nodes.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import sqlalchemy as sa

from edgert.telemetry.messages import Topics
from edgert.telemetry.mqtt import Connection, MqttSettings
from edgert.telemetry.sketch import Sketch
from edgert_deploy.fleet.store import database, schema
from edgert_deploy.fleet.store.query import FleetQuery, Question
from hil.support.broker_cluster import NODES, BrokerCluster, why_not
from tests.support.devices import WAIT_S_MAX, wait_until
from tests.support.fleet import scraped
from tests.support.sketches import sketch_of
from tests.support.stand_ins.forwarder import ForwardingDevice

DEVICES = 6
REPORT_EVERY_S = 0.2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerCluster]:
    if not os.environ.get("EDGERT_HIL_BROKERS"):
        pytest.skip("three RabbitMQ nodes take minutes to start: make hil-brokers")
    if reason := why_not():
        pytest.fail(reason)
    with BrokerCluster(tmp_path_factory.mktemp("cluster")) as running:
        yield running


@dataclass
class Reporting:
    """A reporting device: the real forwarder with its spool, and the number of reports appended."""

    device: ForwardingDevice
    topics: Topics
    latencies: Sketch = field(default_factory=Sketch)
    sent: dict[str, int] = field(default_factory=lambda: {"hist": 0, "metrics": 0, "event": 0})

    @classmethod
    def start(cls, folder: Path, name: str, settings: MqttSettings) -> Reporting:
        folder.mkdir()
        topics = Topics("plant-a", name)
        reporting = cls(ForwardingDevice(folder, settings, topics=topics), topics)
        reporting.device.start()
        return reporting

    def report(self) -> None:
        """Append the reports of a window: histogram, metrics and an event."""
        window = sketch_of(1.0 + n + self.sent["hist"] % 7 for n in range(5))
        self.latencies.merge(window)
        now = {"v": 1, "ts": time.time_ns() // 1_000_000, "boot": "b1", "model_version": "r1", "window_s": 60.0}
        scalars = {"zero": 0, "count": window.count, "sum": window.sum, "min": window.min, "max": window.max}
        hist = {**now, **scalars, "unit": "ms", "temporality": "delta", "scale": 5, "buckets": window.encode()}
        counters = {"req_total": self.latencies.count, "err_total": 0, "shed_total": 0, "cache_hit_total": 0}
        self._append("hist", self.topics.hist("digits"), 1, hist)
        self._append("metrics", self.topics.metrics("digits"), 0, {**now, **counters, "uptime_s": 1e6, "up": 1})
        self._append("event", self.topics.event, 1, {**now, "event": "recycled", "model": "digits"})

    def _append(self, kind: str, topic: str, qos: int, said: dict[str, object]) -> None:
        self.sent[kind] += 1
        self.device.spool.append(f"{kind}/digits", topic, lambda seq: {**said, "seq": seq}, qos, kind)

    @property
    def idle(self) -> bool:
        return not self.device.spool.take(1, 0)


@contextmanager
def command(settings: MqttSettings, *words: str) -> Iterator[str]:
    """Run an `edgert fleet` command and yield its first line. At the end of the block, it must exit with 0."""
    program = [sys.executable, "-m", "edgert_deploy.cli", "fleet", words[0], "--broker", settings.address, *words[1:]]
    process = subprocess.Popen(program, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        yield process.stderr.readline()
    finally:
        process.send_signal(signal.SIGTERM)
        said = process.stderr.read()
        code = process.wait(WAIT_S_MAX)
        print(said)
        assert code == 0, said


@pytest.mark.timeout(900)
def test_events_and_histograms_are_complete_although_nodes_are_killed_under_load(
    cluster: BrokerCluster, tmp_path: Path
) -> None:
    store = tmp_path / "fleet.db"
    fleet = [Reporting.start(tmp_path / f"pi-{n}", f"pi-{n}", cluster.settings) for n in range(DEVICES)]

    def report_for(seconds: float) -> None:
        ends_at = time.monotonic() + seconds
        while time.monotonic() < ends_at:
            for each in fleet:
                each.report()
            time.sleep(REPORT_EVERY_S)

    with (
        command(cluster.settings, "record", "--store", str(store), "--session", "main") as said,
        command(cluster.settings, "export", "--listen", "127.0.0.1:0", "--session", "main") as bridging,
    ):
        assert "recording from" in said
        port = re.search(r"reads port (\d+)", bridging)
        assert port, bridging
        report_for(3.0)
        for number in range(NODES):  # every node dies once, so one of them served the recorder
            cluster.kill(number)
            report_for(8.0)
            cluster.start(number)
            report_for(3.0)
        wait_until(lambda: all(each.idle for each in fleet), "every spool is empty")
        sent = {kind: sum(each.sent[kind] for each in fleet) for kind in ("hist", "event", "metrics")}
        wait_until(lambda: stored(store)["event"] >= sent["event"], "every event is in the store")
        wait_until(lambda: stored(store)["hist"] >= sent["hist"], "every histogram is in the store")
        latencies = sum(each.latencies.count for each in fleet)
        counted = "edgert_latency_milliseconds_count"
        wait_until(lambda: scraped(int(port[1]), counted) >= latencies, "the exporter has counted them")
        assert scraped(int(port[1]), counted) == latencies
    for each in fleet:
        each.device.stop()
    there = stored(store)
    assert (there["hist"], there["event"]) == (sent["hist"], sent["event"])
    # `metrics` have QoS 0 and may be lost with a node; gaps in their numbers show the loss.
    assert gaps(store) == sent["metrics"] - there["metrics"]
    query = FleetQuery(str(store))
    now_ms = time.time_ns() // 1_000_000
    (answer,) = query.answer(Question(now_ms - 3_600_000, now_ms + 60_000, (), {"model": "digits"}), now_ms)
    query.close()
    expected = Sketch()
    for each in fleet:
        expected.merge(each.latencies)
    assert answer.latency == expected
    print(f"sent {sent}, metrics lost {sent['metrics'] - there['metrics']}")


def stored(store: Path) -> dict[str, int]:
    engine = database.open_engine(str(store), writes=False)
    tables = {"hist": schema.hist_window, "metrics": schema.metrics_window, "event": schema.event}
    try:
        with engine.connect() as connection:
            return {
                kind: connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0
                for kind, table in tables.items()
            }
    finally:
        engine.dispose()


def gaps(store: Path) -> int:
    """Return how many `metrics` are missing between the first and the last number of each stream."""
    engine, seq = database.open_engine(str(store), writes=False), schema.metrics_window.c.seq
    asked = sa.select(sa.func.max(seq) - sa.func.min(seq) + 1 - sa.func.count()).group_by(schema.metrics_window.c.stream)  # fmt: skip
    try:
        with engine.connect() as connection:
            return sum(connection.scalars(asked))
    finally:
        engine.dispose()


def test_the_cluster_has_the_limits_that_the_documentation_lists(cluster: BrokerCluster) -> None:
    """docs/scale.md lists them: only MQTT 3.1.1, retained messages of the own node, and no `$share`."""
    heard: dict[str, list[tuple[str, bool]]] = {"plain": [], "shared": [], "elsewhere": []}

    def listening(to: str, topic_filter: str, node: int) -> Connection:
        connection = Connection(
            cluster.node(node), f"lacks-{to}", on_message=lambda topic, _, retained: heard[to].append((topic, retained))
        )
        connection.open()
        connection.subscribe((topic_filter,), 1)
        return connection

    topic = Topics("plant-b", "pi-1").status
    listeners = [listening("plain", topic, 1), listening("shared", f"$share/s/{topic}", 0)]
    assert [each.protocol for each in listeners] == ["3.1.1", "3.1.1"]
    publisher = Connection(cluster.node(0), "lacks-publisher")
    publisher.open()
    publisher.publish(topic, b"online", 1, retain=True)

    def pumped() -> bool:
        for each in (publisher, *listeners):
            each.pump(0.05)
        return bool(heard["plain"])

    wait_until(pumped, "a subscriber on another node hears what is published")
    listeners += [listening("elsewhere", topic, 1)]
    ends_at = time.monotonic() + 2.0
    while time.monotonic() < ends_at:
        pumped()
    assert heard == {"plain": [(topic, False)], "shared": [], "elsewhere": []}
    for each in (publisher, *listeners):
        each.close()
