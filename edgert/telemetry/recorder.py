"""The recorder: turns the spans of served requests into one report a window.

Theory of operation: every serving thread calls `record` after its answer has left, so it only packs the span's integers
and appends them to a deque, which is atomic and takes no lock. `fold` (the reporter's thread, once a second) and `cut`
count the spans later, a slice at a time. A computing Python thread holds up the serving threads, so NumPy counts a
whole slice in a few steps. If nobody folds, `record` folds a slice itself once `PENDING_MAX` spans wait: memory stays
bounded and nothing is dropped.
"""

from __future__ import annotations

import struct
import threading
import time
from collections import deque
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

PENDING_MAX = 4096
# A slice takes 0.07 ms on a slow x86 core. It delays all clients that ask then: a larger slice would show in the tail
# of many clients, a smaller one takes more time in all.
FOLD_SLICE = 512

# A span's whole microseconds, in this order: the time of the request, then each stage.
_COLUMNS = ("total", *STAGES)
_QUEUE, _CACHE, _ENGINE = (_COLUMNS.index(name) for name in ("queue", "cache", "engine"))
_BOUNDS_US = np.asarray(LOWER_BOUNDS_US, np.int64)
_SLO_BOUNDS_US = np.asarray(SLO_BOUNDS_MS, np.int64) * 1000
_PLACES = len(LOWER_BOUNDS_US) + 1  # zero, then the buckets from INDEX_MIN
_NOWHERE = _PLACES * len(_COLUMNS)  # the place for values that are not counted
_FIRST_PLACES = (np.arange(len(_COLUMNS)) * _PLACES)[:, np.newaxis]
# The place of each short time, as a search takes ten times as long: 64 KiB, shared by workers that are forks.
_SHORT_PLACES = np.searchsorted(_BOUNDS_US, np.arange(32768)).astype(np.int16)
# A packed span: its outcome's place in `Outcome`, the columns, the items of its engine run, whether a cache answered.
_FIELDS = len(_COLUMNS) + 3
_OUTCOMES: dict[Outcome, int] = {outcome: place for place, outcome in enumerate(get_args(Outcome))}
_pack = struct.Struct(f"={_FIELDS}q").pack

Integers = NDArray[np.int64]


class WindowRecorder:
    """Collects the spans of one model. Every method may be called from any thread."""

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.model = model
        self._clock = clock
        self._pending: deque[bytes] = deque()
        self.crowded: Callable[[], object] = lambda: None  # called when PENDING_MAX spans wait for `fold`
        self._lock = threading.Lock()
        self._began_at = self._window_began_at = clock()
        self._totals = Totals()
        self._window = _Window()
        self._lifetime = Sketch()
        self._last_report: WindowReport | None = None

    def record(self, span: tuple[Any, ...]) -> None:
        """Record one request: a RequestSpan, or its values in a plain tuple, which is faster to make.

        It takes about 0.3 us, except occasionally under overload.
        """
        outcome, total_us, stages, encode_us, batch, cache_hit = span
        pending = self._pending
        pending.append(_pack(_OUTCOMES[outcome], total_us, *stages, encode_us, batch, cache_hit))
        if len(pending) > PENDING_MAX:
            self.crowded()
            self._fold_slice()

    def fold(self, pause: Callable[[], object] = lambda: None) -> bool:
        """Move the waiting spans into the sketches; return whether any waited.

        It calls `pause` between slices, so that other threads may run.
        """
        for i in range(len(self._pending) // FOLD_SLICE + 1):
            if not self._fold_slice():
                return i > 0
            pause()
        return True

    def cut(self, now: float | None = None) -> WindowReport:
        """End the window at `now` on the recorder's clock, start the next, and return its report."""
        self.fold()
        with self._lock:
            ended_at = self._clock() if now is None else now
            report = self._report(ended_at)
            self._lifetime.merge(report.latency)
            self._window = _Window()
            self._window_began_at = ended_at
            self._last_report = report
            return report

    def latency(self) -> Sketch:
        """Return the latencies since the recorder started."""
        self.fold()
        with self._lock:
            return merged((self._lifetime, self._window.sketch(0)))

    def snapshot(self) -> LiveStats:
        """Return the present figures; `cut` reports the same as without this call."""
        self.fold()
        with self._lock:
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

    def _fold_slice(self) -> bool:
        """Count up to FOLD_SLICE spans; return False where none waited."""
        with self._lock:
            # Other threads only append.
            spans = [self._pending.popleft() for _ in range(min(FOLD_SLICE, len(self._pending)))]
            if spans:
                self._count(spans)
            return bool(spans)

    def _count(self, spans: list[bytes]) -> None:
        """Count spans in the totals and in the window."""
        totals, fields = self._totals, np.frombuffer(b"".join(spans), np.int64).reshape(-1, _FIELDS).T.copy()
        outcomes = fields[0].astype(np.intp)  # `bincount` refuses int64 on a 32-bit processor
        answers, errors, shed, gone = np.bincount(outcomes, minlength=len(_OUTCOMES)).tolist()
        answered = fields if answers == len(spans) else fields[:, outcomes == _OUTCOMES["ok"]]
        times_us, batches, hits = answered[1:-2], answered[-2], answered[-1]
        column_sums_us = times_us.sum(axis=1)
        sums_us = column_sums_us.tolist()
        reached = np.searchsorted(_SLO_BOUNDS_US, times_us[0])
        within = np.bincount(reached, minlength=len(SLO_BOUNDS_MS) + 1)[:-1].cumsum().tolist()
        self._totals = replace(
            totals,
            requests=totals.requests + len(spans),
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


class _Window:
    """The accumulators of the present window; the recorder's lock guards them. Its columns are `_COLUMNS`."""

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
        if not ran.all():  # a request that the cache answers has no value for these two: no engine ran
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
