"""The counter loses no span, counts exactly, and keeps its memory bounded."""

from __future__ import annotations

import json
import os
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgert.machine import process_mb
from edgert.telemetry.span_counter import PENDING_MAX, SLICE, SpanCounter
from edgert.telemetry.spans import SLO_BOUNDS_MS, LiveStats, RequestSpan
from edgert.tensors import StageTimes
from edgert.typed_json import from_json, to_json
from tests.support.sketches import sketch_of


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def ok(total_us: int, **others: int) -> RequestSpan:
    return RequestSpan("ok", total_us, **others)  # type: ignore[arg-type]


def counter_of(*recorded: RequestSpan) -> SpanCounter:
    counter = SpanCounter("digits", Clock())
    for span in recorded:
        counter.record(span)
    return counter


def test_totals_accumulate_over_all_windows_and_sketches_cover_one_window() -> None:
    clock = Clock()
    counter = SpanCounter("digits", clock)
    counter.record(ok(3_000))
    counter.record(RequestSpan("error", 50))
    clock.now = 160.0
    first = counter.end_window()
    counter.record(ok(4_000))
    counter.record(RequestSpan("shed", 5))
    second = counter.end_window(now=200.0)

    assert (first.totals.requests, first.totals.errors, first.totals.shed) == (2, 1, 0)
    assert (second.totals.requests, second.totals.errors, second.totals.shed) == (4, 1, 1)
    assert (first.latency.count, second.latency.count) == (1, 1)
    assert second.latency.max == 4.0
    assert (first.window_s, second.window_s, second.uptime_s) == (60.0, 40.0, 100.0)
    assert second.totals.latency_sum_us == 7_000


def test_only_answered_requests_count_as_latency() -> None:
    report = counter_of(ok(9_000), RequestSpan("shed", 3), RequestSpan("error", 70_000)).end_window()
    assert (report.latency.count, report.latency.max) == (1, 9.0)
    assert sum(report.totals.within_ms) == sum(bound >= 10 for bound in SLO_BOUNDS_MS)


@given(st.lists(st.integers(min_value=0, max_value=3_000_000), max_size=200))
def test_slo_counters_are_exact(durations_us: list[int]) -> None:
    report = counter_of(*map(ok, durations_us)).end_window()
    exact = [sum(us <= bound * 1000 for us in durations_us) for bound in SLO_BOUNDS_MS]
    assert list(report.totals.within_ms) == exact


def requests_up_to(most_us: int) -> st.SearchStrategy[list[tuple[int, int, int, bool]]]:
    times_us = st.integers(0, most_us)
    return st.lists(st.tuples(times_us, times_us, st.integers(0, 3), st.booleans()), max_size=500)


@given(st.sampled_from([1_000, 40_000, 2**30]).flatmap(requests_up_to))
def test_the_sketches_of_a_window_equal_sketches_of_single_values(requests: list[tuple[int, int, int, bool]]) -> None:
    wanted: dict[str, list[float]] = {"latency": [], "cache": [], "engine": [], "encode": []}
    counter = SpanCounter("digits", Clock())
    for total_us, stage_us, batch, answered in requests:
        stages = StageTimes(cache_us=stage_us // 2, engine_us=stage_us)
        counter.record(RequestSpan("ok" if answered else "error", total_us, stages, stage_us // 3, batch))
        if answered:
            wanted["latency"].append(total_us / 1000)
            wanted["cache"].append(stage_us // 2 / 1000)
            wanted["encode"].append(stage_us // 3 / 1000)
        if answered and batch:
            wanted["engine"].append(stage_us / 1000)
    report = counter.end_window()
    made = {"latency": report.latency, **report.stages}
    for name, times_ms in wanted.items():
        assert made[name] == sketch_of(times_ms)
        assert made[name].sum == pytest.approx(sum(times_ms))


def test_a_cache_hit_does_not_count_in_the_figures_of_the_engine() -> None:
    hit = RequestSpan("ok", 40, StageTimes(cache_us=5), batch=0, cache_hit=True)
    ran = RequestSpan("ok", 900, StageTimes(cache_us=6, queue_us=20, engine_us=800), batch=1)
    report = counter_of(hit, ran).end_window()
    assert report.totals.cache_hits == 1
    assert report.stages["cache"].count == 2
    assert (report.stages["engine"].count, report.stages["queue"].count) == (1, 1)
    assert report.stages["engine"].min == 0.8


def test_batch_mean_is_the_mean_over_engine_runs_not_over_requests() -> None:
    # One run has four items, and one run has one item: 2.5 items per run, although most requests had a batch of four.
    report = counter_of(*[ok(10, batch=4)] * 4, ok(10, batch=1)).end_window()
    assert report.batch_mean == pytest.approx(2.5)
    assert counter_of().end_window().batch_mean == 0


def test_each_span_of_many_threads_is_counted_once_while_windows_are_cut() -> None:
    counter = SpanCounter("digits")

    def serve() -> None:
        for _ in range(5_000):
            counter.record(ok(5))

    threads = [threading.Thread(target=serve) for _ in range(4)]
    for thread in threads:
        thread.start()
    reports = []
    while any(thread.is_alive() for thread in threads):
        reports.append(counter.end_window())
    reports.append(counter.end_window())
    assert sum(report.latency.count for report in reports) == 20_000
    assert reports[-1].totals.requests == 20_000


def test_more_spans_than_the_buffer_holds_are_all_counted() -> None:
    counter = counter_of(*[ok(5)] * (PENDING_MAX * 2 + 3))
    assert counter.end_window().totals.requests == PENDING_MAX * 2 + 3


def test_many_threads_need_no_more_memory_than_one_thread() -> None:
    """A bytearray left 4.6 MB in the C library's memory of each thread that filled it: 74 MB on two cores."""
    counter, turn, done = SpanCounter("digits", Clock()), threading.Lock(), threading.Event()

    def serve() -> None:
        with turn:
            for _ in range(PENDING_MAX + 1):
                counter.record(ok(5))
        done.wait()  # a thread that ends would leave its memory to the next one

    threads = [threading.Thread(target=serve) for _ in range(12)]
    before = process_mb(os.getpid()) or 0.0
    for thread in threads:
        thread.start()
    while counter.snapshot().requests < 12 * (PENDING_MAX + 1):
        time.sleep(0.01)
    grown = (process_mb(os.getpid()) or 0.0) - before
    done.set()
    for thread in threads:
        thread.join()
    assert grown < 25


def test_more_spans_than_one_slice_are_all_counted() -> None:
    counter = counter_of(*[ok(i % 7) for i in range(SLICE * 2 + 5)])
    report = counter.end_window()
    assert report.latency.count == SLICE * 2 + 5
    assert report.totals.latency_sum_us == sum(i % 7 for i in range(SLICE * 2 + 5))


def test_a_snapshot_covers_all_time_since_the_start_and_leaves_the_window_unchanged() -> None:
    counter = counter_of(ok(1_000))
    counter.end_window()
    counter.record(ok(2_000))
    live = counter.snapshot()
    assert (live.totals.answered, live.requests) == (2, 2)
    assert live.last_window is not None
    assert live.last_window.answered == 1
    assert counter.end_window().latency.count == 1
    assert from_json(LiveStats, json.loads(json.dumps(to_json(live)))) == live
    assert live.latency_ms.max == 2.0


def test_a_snapshot_before_the_end_of_the_first_window_has_no_last_window() -> None:
    assert counter_of().snapshot().last_window is None


def test_the_totals_of_the_stages_do_not_include_refused_requests() -> None:
    counter = counter_of()
    counter.record(RequestSpan("ok", 100, StageTimes(1, 2, 3, 4, 50, 6), 7, batch=2))
    counter.record(RequestSpan("ok", 20, StageTimes(1, 2, 5, 0, 0, 6), 7, cache_hit=True))
    counter.record(RequestSpan("error", 9))
    counter.record(RequestSpan("shed", 1))
    totals = counter.snapshot().totals
    assert (totals.answered, totals.executed) == (2, 1)
    assert totals.failed_sum_us == 10
    assert totals.hit_cache_sum_us == 5
    assert totals.stage_sum_us == {
        "decode": 2, "preprocess": 4, "cache": 8, "queue": 4, "engine": 50, "postprocess": 12, "encode": 14
    }  # fmt: skip
