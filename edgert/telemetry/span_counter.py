"""The span counter: turns the spans of served requests into one report per window.

Theory of operation: every serving thread calls `record` after it has sent its answer. `record` only writes the packed
integers of the span into a buffer. The spans are counted at the end of the window, when figures are requested, or when
PENDING_MAX of them wait. A computing thread delays the serving threads, so NumPy counts many spans (a slice) in a few
steps.

The buffer is a separate mapping. A bytearray would grow in the memory of the appending thread, and the C library would
keep some MB of this memory for each group of threads.
"""

from __future__ import annotations

import mmap
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from edgert.telemetry.sketch import INDEX_MIN, LOWER_BOUNDS_US, Sketch, merged
from edgert.telemetry.spans import (
    SLO_BOUNDS_MS,
    STAGES,
    LiveStats,
    Outcome,
    Percentiles,
    Totals,
    WindowFigures,
    WindowReport,
)

# Counting this number of spans takes 2 ms on a slow x86 core, and every client waits. With 8 clients, one request in
# 4,096 is delayed, which p99.9 does not show. A smaller number delays each request less, but delays more requests.
PENDING_MAX = 32768
SLICE = 2048  # smaller slices need more calls of NumPy; the columns of larger slices exceed the processor's cache

# A span's whole microseconds, in this order: the time of the request, then each stage.
_COLUMNS = ("total", *STAGES)
_QUEUE, _CACHE, _ENGINE = (_COLUMNS.index(name) for name in ("queue", "cache", "engine"))
_BOUNDS_US = np.asarray(LOWER_BOUNDS_US, np.int64)
_SLO_BOUNDS_US = np.asarray(SLO_BOUNDS_MS, np.int64) * 1000
_PLACES = len(LOWER_BOUNDS_US) + 1  # zero, then the buckets from INDEX_MIN
_NOWHERE = _PLACES * len(_COLUMNS)  # the place of values that are not counted
_FIRST_PLACES = (np.arange(len(_COLUMNS)) * _PLACES)[:, np.newaxis]
# A table with the place of each short time, because a search takes ten times as long. Forked workers share its 64 KiB.
_SHORT_PLACES = np.searchsorted(_BOUNDS_US, np.arange(32768)).astype(np.int16)
# A packed span: its outcome's place in `Outcome`, the columns, the items of its engine run, whether a cache answered.
_FIELDS = len(_COLUMNS) + 3
_OUTCOMES: dict[Outcome, int] = {outcome: place for place, outcome in enumerate(get_args(Outcome))}
_SPAN = struct.Struct(f"={_FIELDS}q")
_pack = _SPAN.pack

Integers = NDArray[np.int64]


class SpanCounter:
    """Collects the spans of one model. Every method may be called from any thread."""

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.model = model
        self._clock = clock
        self._lock = threading.Lock()
        self._pending = _buffer()  # packed spans; a write is atomic and needs no lock
        self._spare = _buffer()  # receives the next spans while the pending spans are counted
        self._began_at = self._window_began_at = clock()
        self._totals = Totals()
        self._window = _Window()
        self._lifetime = Sketch()
        self._last_report: WindowReport | None = None

    def record(self, span: tuple[Any, ...]) -> None:
        """Record one request: a RequestSpan, or its values in a plain tuple, which is faster to create.

        A call takes about 0.3 µs, and a few milliseconds once in PENDING_MAX requests.
        """
        outcome, total_us, stages, encode_us, batch, cache_hit = span
        packed = _pack(_OUTCOMES[outcome], total_us, *stages, encode_us, batch, cache_hit)
        try:
            self._pending.write(packed)
        except ValueError:  # the buffer is full
            with self._lock:
                self._count_pending()
            self._pending.write(packed)

    def end_window(self, now: float | None = None) -> WindowReport:
        """End the window at `now` on `clock`, return its report, and start the next window."""
        with self._lock:
            self._count_pending()
            if not self._spare.tell():
                self._spare.madvise(mmap.MADV_DONTNEED)  # returns its memory to the kernel
            ended_at = self._clock() if now is None else now
            report = self._report(ended_at)
            self._lifetime.merge(report.latency)
            self._window = _Window()
            self._window_began_at = ended_at
            self._last_report = report
            return report

    def latency(self) -> Sketch:
        """Return the latencies since the worker started."""
        with self._lock:
            self._count_pending()
            return merged((self._lifetime, self._window.sketch(0)))

    def snapshot(self) -> LiveStats:
        """Return the current figures. This does not change what `end_window` reports."""
        with self._lock:
            self._count_pending()
            latency = merged((self._lifetime, self._window.sketch(0)))
            at = self._clock()
            totals, last = self._totals, self._last_report
            return LiveStats(
                uptime_s=round(at - self._began_at, 3),
                requests=totals.requests,
                errors=totals.errors,
                shed=totals.shed,
                cache_hits=totals.cache_hits,
                totals=totals,
                latency_ms=Percentiles.of(latency),
                window=WindowFigures.of(self._report(at)),
                last_window=None if last is None else WindowFigures.of(last),
            )

    def _report(self, ended_at: float) -> WindowReport:
        window = self._window
        latency, *stages = map(window.sketch, range(len(_COLUMNS)))
        return WindowReport(
            model=self.model,
            window_s=ended_at - self._window_began_at,
            uptime_s=ended_at - self._began_at,
            totals=self._totals,
            latency=latency,
            stages=dict(zip(STAGES, stages, strict=True)),
            batch_mean=window.engine_answers / window.engine_runs if window.engine_runs else 0.0,
        )

    def _count_pending(self) -> None:
        """Count the waiting spans; the caller holds the lock."""
        waiting, self._pending, self._spare = self._pending, self._spare, self._pending
        counted = 0
        while count := min(waiting.tell() // _SPAN.size - counted, SLICE):
            spans = np.frombuffer(waiting, np.int64, count * _FIELDS, counted * _SPAN.size)
            self._count(spans.reshape(-1, _FIELDS).T.copy())
            counted += count
        waiting.seek(0)  # a span that another thread is still writing here counts the next time

    def _count(self, fields: Integers) -> None:
        """Count spans (one column each) in the totals and in the window."""
        totals, count = self._totals, fields.shape[1]
        outcomes = fields[0].astype(np.intp)  # `bincount` refuses int64 on a 32-bit processor
        answers, errors, shed, gone = np.bincount(outcomes, minlength=len(_OUTCOMES)).tolist()
        answered = fields if answers == count else fields[:, outcomes == _OUTCOMES["ok"]]
        times_us, batches, hits = answered[1:-2], answered[-2], answered[-1]
        column_sums_us = times_us.sum(axis=1)
        sums_us = column_sums_us.tolist()
        reached = np.searchsorted(_SLO_BOUNDS_US, times_us[0])
        within = np.bincount(reached, minlength=len(SLO_BOUNDS_MS) + 1)[:-1].cumsum().tolist()
        self._totals = replace(
            totals,
            requests=totals.requests + count,
            errors=totals.errors + errors,
            shed=totals.shed + shed,
            gone=totals.gone + gone,
            cache_hits=totals.cache_hits + int(hits.sum()),
            latency_sum_us=totals.latency_sum_us + sums_us[0],
            within_ms=tuple(before + count for before, count in zip(totals.within_ms, within, strict=True)),
            executed=totals.executed + int(np.count_nonzero(batches)),
            failed_sum_us=totals.failed_sum_us + int(fields[1].sum()) - sums_us[0],
            hit_cache_sum_us=totals.hit_cache_sum_us + int(times_us[_CACHE] @ hits),
            stage_sum_us={name: totals.stage_sum_us[name] + us for name, us in zip(STAGES, sums_us[1:], strict=True)},
        )
        if answers:
            self._window.add(times_us, column_sums_us, batches)


def _buffer() -> mmap.mmap:
    return mmap.mmap(-1, PENDING_MAX * _SPAN.size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


class _Window:
    """The counts of the current window, guarded by the span counter's lock. The columns are `_COLUMNS`."""

    def __init__(self) -> None:
        self.engine_answers = 0
        self.engine_runs = 0.0
        self._counts = np.zeros(_NOWHERE + 1, np.int64)
        self._sums_us = np.zeros(len(_COLUMNS), np.int64)
        self._least_us = np.full(len(_COLUMNS), np.iinfo(np.int64).max)
        self._most_us = np.full(len(_COLUMNS), -1)

    def add(self, times_us: Integers, sums_us: Integers, batches: Integers) -> None:
        """Count answers: times [columns, requests], their sums, the items of each engine run (0: none)."""
        ran = batches > 0
        least_us, most_us = times_us.min(axis=1), times_us.max(axis=1)
        short = most_us.max() < len(_SHORT_PLACES)
        places = (_SHORT_PLACES[times_us] if short else np.searchsorted(_BOUNDS_US, times_us)) + _FIRST_PLACES
        self._sums_us += sums_us
        if not ran.all():  # a request that the cache answered has no time in the queue and the engine
            for column in (_QUEUE, _ENGINE):
                by_engine = times_us[column, ran]
                places[column, ~ran] = _NOWHERE
                self._sums_us[column] += by_engine.sum() - sums_us[column]
                least_us[column] = by_engine.min(initial=np.iinfo(np.int64).max)
                most_us[column] = by_engine.max(initial=-1)
        self._counts += np.bincount(places.ravel(), minlength=_NOWHERE + 1)
        np.minimum(self._least_us, least_us, out=self._least_us)
        np.maximum(self._most_us, most_us, out=self._most_us)
        sizes = batches[ran]
        self.engine_answers += len(sizes)
        # Each of the b requests of a run adds 1/b, so the sum counts runs.
        self.engine_runs += float((1.0 / sizes).sum())

    def sketch(self, column: int) -> Sketch:
        sketch, counts = Sketch(), self._counts[column * _PLACES : (column + 1) * _PLACES]
        sketch.count = int(counts.sum())
        if sketch.count:
            filled = np.flatnonzero(counts[1:])
            sketch.zero = int(counts[0])
            sketch.buckets = dict(zip((filled + INDEX_MIN).tolist(), counts[filled + 1].tolist(), strict=True))
            sketch.sum = int(self._sums_us[column]) / 1000
            sketch.min, sketch.max = int(self._least_us[column]) / 1000, int(self._most_us[column]) / 1000
        return sketch
