"""Spans of served requests, and the recorder that turns them into one report a window.

Theory of operation: every serving thread calls `record` after its answer has left, so it only appends a tuple to a deque,
which is atomic and takes no lock. `fold` (the reporter's thread, once a second) and `cut` fill the sketches later, a
slice at a time. Slices are short because a computing Python thread holds up the serving threads. If nobody folds,
`record` folds a slice itself once `PENDING_MAX` spans wait: memory stays bounded and nothing is dropped.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, NamedTuple

from edgert.telemetry.sketch import Sketch
from edgert.tensors import StageTimes

Outcome = Literal["ok", "error", "shed"]
_Columns = dict[str, tuple[int, ...]]  # microseconds, by stage
STAGES = (*(name.removesuffix("_us") for name in StageTimes._fields), "encode")
SLO_BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
PENDING_MAX = 4096
FOLD_SLICE = 32  # about 80 us of computing on a slow x86 core

_SLO_BOUNDS_US = [bound * 1000 for bound in SLO_BOUNDS_MS]
# A request that the cache answers has no value for these two: no engine ran.
_ENGINE_STAGES = ("queue", "engine")


class RequestSpan(NamedTuple):
    """One served request. Durations are whole microseconds.

    `batch` counts the items of the engine run that answered it, 0 where none ran.
    """

    outcome: Outcome
    total_us: int
    stages: StageTimes = StageTimes()
    encode_us: int = 0
    batch: int = 0
    cache_hit: bool = False


@dataclass(frozen=True)
class Totals:
    """Counters since the recorder started; they only grow.

    `requests` counts every outcome. Latency counters cover the requests answered `ok`;
    `within_ms[i]` counts those that took at most SLO_BOUNDS_MS[i], exactly. `executed` counts those that an engine
    run answered. `stage_sum_us` is the time that answered requests spent in each stage, `hit_cache_sum_us` the part of
    the cache stage that belongs to hits, `failed_sum_us` the time of the other requests until they were refused.
    """

    requests: int = 0
    errors: int = 0
    shed: int = 0
    cache_hits: int = 0
    latency_sum_us: int = 0
    within_ms: tuple[int, ...] = (0,) * len(SLO_BOUNDS_MS)
    executed: int = 0
    failed_sum_us: int = 0
    hit_cache_sum_us: int = 0
    stage_sum_us: Mapping[str, int] = field(default_factory=lambda: dict.fromkeys(STAGES, 0))

    @property
    def answered(self) -> int:
        return self.requests - self.errors - self.shed


@dataclass(frozen=True)
class WindowReport:
    """One window of one model: cumulative totals, and sketches of this window alone (ms).

    `batch_mean` is the mean number of items per engine run in the window, 0 where none ran.
    """

    model: str
    window_s: float
    uptime_s: float
    totals: Totals
    latency: Sketch
    stages: dict[str, Sketch]
    batch_mean: float


@dataclass(frozen=True)
class Percentiles:
    """Percentiles in ms, rounded to the precision of the sketch."""

    p50: float
    p95: float
    p99: float
    p999: float
    max: float

    @classmethod
    def of(cls, sketch: Sketch) -> Percentiles:
        shares = (sketch.quantile(share) for share in (0.5, 0.95, 0.99, 0.999))
        return cls(*(round(value, 4) for value in (*shares, sketch.max)))


@dataclass(frozen=True)
class WindowFigures:
    """The answered requests of one window."""

    window_s: float
    answered: int
    batch_mean: float
    latency_ms: Percentiles
    stages_ms: Mapping[str, Percentiles]

    @classmethod
    def of(cls, report: WindowReport) -> WindowFigures:
        return cls(
            window_s=round(report.window_s, 3),
            answered=report.latency.count,
            batch_mean=round(report.batch_mean, 3),
            latency_ms=Percentiles.of(report.latency),
            stages_ms={name: Percentiles.of(sketch) for name, sketch in report.stages.items()},
        )


@dataclass(frozen=True)
class LiveStats:
    """Figures for `edgertd status`: since the recorder started, of the present window, of the last one (or None)."""

    uptime_s: float
    requests: int
    errors: int
    shed: int
    cache_hits: int
    totals: Totals
    latency_ms: Percentiles
    window: WindowFigures
    last_window: WindowFigures | None

    @property
    def recent(self) -> WindowFigures:
        """The present window, or the last one if the present one has no answers yet."""
        return self.last_window if self.last_window is not None and not self.window.answered else self.window


class WindowRecorder:
    """Collects the spans of one model. Every method may be called from any thread."""

    def __init__(self, model: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.model = model
        self._clock = clock
        self._pending: deque[tuple[Any, ...]] = deque()
        self.crowded: Callable[[], object] = lambda: None  # called when PENDING_MAX spans wait for `fold`
        self._lock = threading.Lock()
        self._began_at = self._window_began_at = clock()
        self._totals = Totals()
        self._window = _Window()
        self._lifetime = Sketch()
        self._last_report: WindowReport | None = None

    def record(self, span: tuple[Any, ...]) -> None:
        """Record one request: a RequestSpan, or its values in a plain tuple, which is faster to make.

        It takes about 0.1 us, except occasionally under overload.
        """
        pending = self._pending
        pending.append(span)
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
        """End the window at `now` on the recorder's clock, start the next, and return the report of the ended one."""
        self.fold()
        with self._lock:
            ended_at = self._clock() if now is None else now
            report = self._report(ended_at)
            self._lifetime.merge(report.latency)
            self._window = _Window()
            self._window_began_at = ended_at
            self._last_report = report
            return report

    def snapshot(self, now: float | None = None) -> LiveStats:
        """Return the present figures; `cut` reports the same as without this call."""
        self.fold()
        with self._lock:
            latency = self._lifetime.copy()
            latency.merge(self._window.latency)
            at = self._clock() if now is None else now
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
        return WindowReport(
            model=self.model,
            window_s=ended_at - self._window_began_at,
            uptime_s=ended_at - self._began_at,
            totals=self._totals,
            latency=window.latency,
            stages=window.stages,
            batch_mean=window.engine_answers / window.engine_runs if window.engine_runs else 0.0,
        )

    def _fold_slice(self) -> bool:
        """Move up to FOLD_SLICE spans into the sketches; return False where none waited."""
        with self._lock:
            spans = _take(self._pending, FOLD_SLICE)
            if spans:
                answered = [span for span in spans if span.outcome == "ok"]
                columns = _stage_columns(answered)
                self._totals = _counted(self._totals, spans, answered, columns)
                self._window.add(answered, columns)
            return bool(spans)


class _Window:
    """The accumulators of the present window; the recorder's lock guards them."""

    def __init__(self) -> None:
        self.latency = Sketch()
        self.stages = {name: Sketch() for name in STAGES}
        self.engine_answers = 0
        self.engine_runs = 0.0

    def add(self, answered: Sequence[RequestSpan], columns: _Columns) -> None:
        if not answered:
            return
        self.latency.record_many_us([span.total_us for span in answered])
        by_engine = [span for span in answered if span.batch > 0]
        engine_columns = columns if len(by_engine) == len(answered) else _stage_columns(by_engine)
        for name, sketch in self.stages.items():
            sketch.record_many_us((engine_columns if name in _ENGINE_STAGES else columns)[name])
        self.engine_answers += len(by_engine)
        # Each of the b requests of a run adds 1/b, so the sum counts runs.
        self.engine_runs += sum(1 / span.batch for span in by_engine)


def _stage_columns(spans: Sequence[RequestSpan]) -> _Columns:
    """Return the times of each stage, in the order of the spans."""
    columns = zip(*[(*span.stages, span.encode_us) for span in spans], strict=True) if spans else [()] * len(STAGES)
    return dict(zip(STAGES, columns, strict=True))


def _take(pending: deque[tuple[Any, ...]], limit: int) -> list[RequestSpan]:
    """Remove and return up to `limit` of the oldest spans; safe while other threads append."""
    taken = []
    try:
        for _ in range(limit):
            taken.append(RequestSpan._make(pending.popleft()))
    except IndexError:
        pass
    return taken


def _counted(
    totals: Totals, spans: Sequence[RequestSpan], answered: Sequence[RequestSpan], columns: _Columns
) -> Totals:
    outcomes = Counter(span.outcome for span in spans)
    answered_us = [span.total_us for span in answered]
    return replace(
        totals,
        requests=totals.requests + len(spans),
        errors=totals.errors + outcomes["error"],
        shed=totals.shed + outcomes["shed"],
        cache_hits=totals.cache_hits + sum(span.cache_hit for span in spans),
        latency_sum_us=totals.latency_sum_us + sum(answered_us),
        within_ms=_within(totals.within_ms, answered_us),
        executed=totals.executed + sum(span.batch > 0 for span in answered),
        failed_sum_us=totals.failed_sum_us + sum(span.total_us for span in spans if span.outcome != "ok"),
        hit_cache_sum_us=totals.hit_cache_sum_us + sum(span.stages.cache_us for span in answered if span.cache_hit),
        stage_sum_us={name: totals.stage_sum_us[name] + sum(column) for name, column in columns.items()},
    )


def _within(before: tuple[int, ...], answered_us: Sequence[int]) -> tuple[int, ...]:
    """Return the cumulative counts of `before` with these durations added."""
    first_bound = Counter(map(partial(bisect_left, _SLO_BOUNDS_US), answered_us))
    reached = 0
    after = []
    for position, count in enumerate(before):
        reached += first_bound[position]
        after.append(count + reached)
    return tuple(after)
