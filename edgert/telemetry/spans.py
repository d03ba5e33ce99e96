"""Spans of served requests, and the figures that are computed from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from edgert.telemetry.sketch import Sketch
from edgert.tensors import StageTimes

Outcome = Literal["ok", "error", "shed", "gone"]  # gone: the client left before its answer
STAGES = (*(name.removesuffix("_us") for name in StageTimes._fields), "encode")
SLO_BOUNDS_MS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


class RequestSpan(NamedTuple):
    """One served request. Durations are whole microseconds.

    `batch` counts the items of the engine run that answered the request, 0 if no engine ran.
    """

    outcome: Outcome
    total_us: int
    stages: StageTimes = StageTimes()
    encode_us: int = 0
    batch: int = 0
    cache_hit: bool = False


@dataclass(frozen=True)
class Totals:
    """Counts since the worker started; they only grow.

    Attributes:
        requests: The number of requests with any outcome.
        latency_sum_us: The total time of answered requests.
        within_ms: For each of SLO_BOUNDS_MS, the exact number of answered requests that took at most this time.
        executed: The number of requests that an engine run answered.
        failed_sum_us: The total time of the requests that failed, were refused, or lost their client.
        hit_cache_sum_us: The total time of cache hits in the stage `cache`.
        stage_sum_us: The total time of answered requests in each stage.
        gone: The number of requests whose client left before the answer.
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
    gone: int = 0

    @property
    def answered(self) -> int:
        return self.requests - self.errors - self.shed - self.gone


@dataclass(frozen=True)
class WindowReport:
    """One window of one model: cumulative totals, and sketches of this window alone (ms).

    `batch_mean` is the mean number of items per engine run in the window, 0 if the engine did not run.
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
    """Figures for `edgertd status`: since the start, and of two windows.

    `last_window` is None until the first window has ended.
    """

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
        """The current window, or the last window while the current window has no answers."""
        return self.last_window if self.last_window is not None and not self.window.answered else self.window
