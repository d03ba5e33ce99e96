"""Windows become spooled messages. If the spool fails, messages are lost, but no request fails."""

from __future__ import annotations

import gc
import json
import shutil
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from edgert.telemetry import alarms
from edgert.telemetry.messages import HistMessage, MetricsMessage, Topics
from edgert.telemetry.reporter import Reporter, ReporterSettings
from edgert.telemetry.span_counter import SpanCounter
from edgert.telemetry.spans import RequestSpan
from edgert.telemetry.spool import ROWS_MAX, Spool
from tests.support.devices import wait_until

TOPICS = Topics("plant-a", "pi-07")


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Bench:
    """A reporter with clocks that the test sets."""

    def __init__(self, folder: Path, rows: int = ROWS_MAX) -> None:
        self.clock = Clock()
        self.said: list[str] = []
        self.spool = Spool(folder / "telemetry.db", rows_max=rows)
        self.counter = SpanCounter("digits", self.clock)
        self.reporter = Reporter(
            self.counter,
            self.spool,
            ReporterSettings(TOPICS, "b1", "r7"),
            clock=self.clock,
            wall_clock=lambda: 1_700_000_000.5,
            facts=lambda: {"rss_bytes": 7},
            log=self.said.append,
        )

    def after(self, seconds: float) -> bool:
        self.clock.now += seconds
        return self.reporter.tick()


@pytest.fixture(autouse=True)
def memory_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not measure the memory of this process, which is so large that the kernel takes 10 ms for each window."""
    monkeypatch.setattr(alarms, "process_mb", lambda pid: 100.0)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def test_a_window_is_reported_at_its_end_and_not_before(bench: Bench) -> None:
    bench.counter.record(RequestSpan("ok", 2_000))
    assert not bench.after(59)
    assert bench.spool.take(10) == []
    assert bench.after(1)
    hist, metrics = bench.spool.take(10)
    assert (hist.topic, hist.qos, metrics.topic, metrics.qos) == (TOPICS.hist("digits"), 1, TOPICS.metrics("digits"), 0)
    assert HistMessage.from_json(hist.payload).sketch.max == 2.0
    read = MetricsMessage.from_json(metrics.payload)
    assert (read.ts_ms, read.boot, read.window_s, read.model_version) == (1_700_000_000_500, "b1", 60, "r7")
    assert (read.number("req_total"), read.number("up"), read.number("rss_bytes")) == (1, 1, 7)


def test_after_a_suspend_one_long_window_is_reported_and_not_many_short_windows(bench: Bench) -> None:
    assert bench.after(3600)
    assert not bench.after(1)
    assert MetricsMessage.from_json(bench.spool.take(2)[1].payload).window_s == 3600


def test_a_stop_reports_the_rest_of_the_window_and_that_the_model_is_down(bench: Bench) -> None:
    bench.counter.record(RequestSpan("ok", 2_000))
    bench.clock.now += 7
    bench.reporter.stop()
    hist, metrics = (message.payload for message in bench.spool.take(10))
    assert HistMessage.from_json(hist).sketch.count == 1
    assert (MetricsMessage.from_json(metrics).window_s, MetricsMessage.from_json(metrics).number("up")) == (7, 0)


def test_an_event_names_model_and_version(bench: Bench) -> None:
    bench.reporter.event("engine_failed", detail="out of memory", tries=3)
    (event,) = bench.spool.take(1)
    fields = json.loads(event.payload)
    assert (event.topic, event.qos, event.kind) == (TOPICS.event, 1, "event")
    assert fields["event"] == "engine_failed"
    assert (fields["model"], fields["model_version"], fields["tries"]) == ("digits", "r7", 3)


def test_a_failing_spool_is_logged_once_and_reports_continue_when_it_works_again(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    folder.mkdir()
    bench = Bench(folder)
    shutil.rmtree(folder)
    assert bench.after(60)
    assert bench.after(60)
    bench.reporter.event("something")
    assert len(bench.said) == 1
    folder.mkdir()
    assert bench.after(60)
    assert len(bench.spool.take(10)) == 2
    assert len(bench.said) == 2


def test_the_thread_sends_reports_and_stops(tmp_path: Path) -> None:
    spool = Spool(tmp_path / "telemetry.db")
    reporter = Reporter(SpanCounter("digits"), spool, ReporterSettings(TOPICS, "b1", "r7", 0.05))
    reporter.start()
    wait_until(lambda: len(spool.take(10)) >= 4, "two windows in the spool")
    reporter.stop()
    rows = spool.stats().rows
    assert rows % 2 == 0
    assert json.loads(spool.take(100)[-1].payload)["up"] == 0


def test_the_reporter_sleeps_to_the_end_of_the_window(bench: Bench) -> None:
    assert bench.reporter.pause_s() == 60
    bench.counter.record(RequestSpan("ok", 2_000))
    bench.after(20)
    assert bench.reporter.pause_s() == 40
    bench.after(40)
    assert bench.reporter.pause_s() == 60


def test_hours_without_a_broker_lose_no_event_and_every_lost_window_is_counted(tmp_path: Path) -> None:
    hours, rows = 6, 250
    bench = Bench(tmp_path, rows=rows)
    held: list[int] = []
    for minute in range(hours * 60):
        if minute == 150:  # the spool has been full for 25 minutes; tracing makes each window three times as expensive
            tracemalloc.start()
        bench.counter.record(RequestSpan("ok", 2_000, batch=1))
        bench.after(60)
        if minute % 60 == 0:
            bench.reporter.event("worker_crashed", restarts=minute)
        if minute in (180, hours * 60 - 1):
            gc.collect()
            held.append(tracemalloc.get_traced_memory()[0] // 1000)
    tracemalloc.stop()
    stats = bench.spool.stats()
    kinds = Counter(message.kind for message in bench.spool.take(2 * rows, 0))
    assert kinds == {"event": hours, "hist": rows - hours}
    assert stats.lost == {"metrics": hours * 60, "hist": hours * 60 - (rows - hours)}
    events = [json.loads(m.payload)["seq"] for m in bench.spool.take(2 * rows, 0) if m.kind == "event"]
    assert events == list(range(events[0], events[0] + hours))
    assert held[1] - held[0] < 48, "KB that the reporter holds on to, in 180 windows"
