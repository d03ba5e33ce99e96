"""Curves and heat-maps from the store's merged histograms, step by step, by model and version.

Theory of operation: one query gives all data of a model's charts, because each answer is a sketch. The sketch's
quantiles are points of the curves. Its buckets, eight to a row, are a column of the heat-map. Steps begin at whole
multiples of their length, so a curve keeps its shape between two updates. Many pages send the same requests, so answers
are cached.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any, TypeVar

from edgert.errors import ConfigInvalid
from edgert.telemetry.sketch import PER_OCTAVE, Sketch, merged
from edgert_deploy.fleet.channels import EVENTS_MS, releases_of
from edgert_deploy.fleet.store.batch import HOUR_MIN, MINUTE_MS
from edgert_deploy.fleet.store.query import Answer, FleetQuery, Question
from edgert_deploy.fleet.store.results import DEFAULT_SHARES, QueryRequest, answer_row
from edgert_deploy.fleet.ui.breakdown import dimensions_of_breakdown, groups_of, share_within
from edgert_deploy.fleet.ui.fleet_state import release
from edgert_deploy.fleet.ui.period import Period, fresh_s
from edgert_deploy.fleet.ui.stages import stages_of

PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
MODELS_MAX = 6
VERSIONS_MAX = 6
INDICES_A_ROW = 8  # the number of buckets in a row of the heat-map; a row is a quarter of an octave (19 %)
CACHED_MAX = 128
NEWEST_FRESH_S = 5.0
BREAKDOWN_FRESH_S = 20.0
MINUTES_FRESH_S = 60.0
DEVICES_NAMED_MAX = 5
EVENTS_MAX = 200
EVENTS_EXPORTED_MAX = 10_000
BASELINE_STEP_MIN, BASELINE_STEPS, BASELINE_STEPS_MIN = 360, 28, 4
BASELINE_REQUESTS_MIN = 100
AHEAD_MAX_MS = 60 * MINUTE_MS  # a device's clock may be ahead by this much
ROWS_MAX = 60_000  # the maximum number of rows of minutes for one answer, which then takes about a second
QUERIES_AT_ONCE_MAX = 2  # each query takes a connection with its own cache
# The maximum number of rows of streams for one answer, which then takes 8 s, or 14 s with stages.
STREAM_ROWS_MAX = 400_000

T = TypeVar("T")


@dataclass
class _CacheEntry:
    """A cached answer. The thread that computes the answer holds the lock."""

    until: float = 0.0
    value: Any = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class History:
    """Queries the store for any number of pages at once. Every method raises StoreFailed.

    Args:
        wall_ms: Returns ms since 1970.
        rows_max: The largest number of per-minute rows that one answer may read.
        targets: The p99 target (ms) of each model.
    """

    def __init__(
        self,
        query: FleetQuery,
        wall_ms: Callable[[], int],
        rows_max: int = ROWS_MAX,
        targets: Mapping[str, float] | None = None,
    ) -> None:
        self._query, self._wall_ms, self._rows_max = query, wall_ms, rows_max
        self._targets = targets or {}
        self._cache: dict[object, _CacheEntry] = {}
        self._lock = threading.Lock()
        self._query_permit = threading.BoundedSemaphore(QUERIES_AT_ONCE_MAX)

    def curves(self, period: Period, where: Mapping[str, str]) -> dict[str, Any]:
        """Return percentiles and heat-maps of the models that match `where`, the busiest model first."""
        step_min = self._step_min(period, where)

        def compute() -> dict[str, Any]:
            question, now_ms = self._stepped(period, where, step_min)
            step_ms = question.step_min * MINUTE_MS
            answers = self._query.answer(question, now_ms)
            unsynced = self._query.unsynced(question, now_ms)
            return {
                "now_ms": now_ms,
                **curves_of(answers, question.since_ms, question.until_ms, step_ms, self._targets),
                "unsynced": unsynced[:DEVICES_NAMED_MAX],
                "unsynced_count": len(unsynced),
            }

        return self._cached(("curves", period, *sorted(where.items())), fresh_s(step_min), compute)

    def rows(self, period: Period, where: Mapping[str, str]) -> list[dict[str, Any]]:
        """Return the data of `curves` as rows by step, model and version."""
        question, now_ms = self._stepped(period, where, self._step_min(period, where))
        with self._query_permit:
            answers = self._query.answer(question, now_ms)
        return [answer_row(answer, DEFAULT_SHARES, stepped=True) for answer in answers]

    def breakdown(self, period: Period, by: str, where: Mapping[str, str], devices: int) -> dict[str, Any]:
        """Compare each group with the other groups of its model. Raises ConfigInvalid.

        `devices` is the number of devices that match `where`.
        """
        names = dimensions_of_breakdown(by)

        def compute() -> dict[str, Any]:
            now_ms = self._wall_ms()
            since_ms, until_ms = period.stepped_ms(now_ms, 1)
            if by == "device" and "device" not in where and devices * period.minutes > self._rows_max:
                since_ms, until_ms = self._whole_hours(since_ms, until_ms, devices)
            question = Question(since_ms, until_ms, ("model", *names), where)
            models = groups_of(self._query.answer(question, now_ms), self._targets)
            return {"since_ms": since_ms, "until_ms": until_ms, "by": by, "models": models}

        return self._cached(("breakdown", period, by, *sorted(where.items())), BREAKDOWN_FRESH_S, compute)

    def stages(self, period: Period, where: Mapping[str, str]) -> dict[str, Any]:
        """Return the times of the busiest models' stages, by step and by version."""
        step_min = self._step_min(period, where)

        def compute() -> dict[str, Any]:
            question, now_ms = self._stepped(period, where, step_min)
            step_ms = question.step_min * MINUTE_MS
            steps = (question.until_ms - question.since_ms) // step_ms
            models: dict[str, list[Answer]] = {}
            for answer in self._query.answer(replace(question, step_min=0, stages=True), now_ms):
                models.setdefault(answer.group["model"], []).append(answer)
            busiest = sorted(models, key=lambda name: (-sum(answer.latency.count for answer in models[name]), name))
            result = []
            for name in busiest[:MODELS_MAX]:  # one model at a time, which limits the memory
                of_model = replace(question, by=(), where={**where, "model": name}, stages=True)
                curve = self._query.answer(of_model, now_ms)
                result.append(stages_of(name, models[name], curve, question.since_ms, step_ms, steps))
            return {"since_ms": question.since_ms, "step_ms": step_ms, "steps": steps, "models": result}

        result: dict[str, Any] = self._cached(("stages", period, *sorted(where.items())), BREAKDOWN_FRESH_S, compute)
        return result

    def run(self, request: QueryRequest, devices: int) -> dict[str, Any]:
        """Return the JSON of `edgert fleet query`. Raises ConfigInvalid.

        `devices` is the number of devices that match the question.
        """
        question = request.question
        if question.names_devices and "device" not in question.where:
            self._whole_hours(question.since_ms, question.until_ms, devices)
        with self._query_permit:
            return request.run(self._query, self._wall_ms())

    def channels(self, site: str | None) -> list[dict[str, Any]]:
        """Return how many devices keep, try or rolled back each release of the channels.

        Only devices of `site` are included; None includes every site.
        """

        def compute() -> list[dict[str, Any]]:
            now_ms = self._wall_ms()
            devices = [device for device in self._query.devices() if site in (None, device["site"])]
            return releases_of(devices, self._query.failures(now_ms - EVENTS_MS, now_ms), now_ms)

        return self._cached(("channels", site), BREAKDOWN_FRESH_S, compute)

    def newest_ms(self) -> int:
        """Return when the newest message of any device was stored; 0 in an empty store."""
        return self._cached("newest", NEWEST_FRESH_S, self._query.newest_ms)

    def events(self, period: Period, where: Mapping[str, str], limit: int = EVENTS_MAX) -> dict[str, Any]:
        """Return the newest events, and the number of events of each type. `where` may have the key `event`."""
        named = {name: value for name, value in where.items() if name != "version"}
        untyped = {name: value for name, value in named.items() if name != "event"}

        def compute() -> tuple[list[dict[str, Any]], dict[str, int]]:
            since_ms, until_ms = period.bounds_ms(self._wall_ms())
            until_ms += AHEAD_MAX_MS if period.length_ms else 0
            events = self._query.events(since_ms, until_ms, limit + 1, named)
            events = [report for report in events if where.get("version") in (None, report.get("model_version"))]
            return events, self._query.event_types(since_ms, until_ms, untyped)

        events, types = self._cached(("events", period, limit, *sorted(where.items())), 1.0, compute)
        return {"events": events[:limit], "more": len(events) > limit, "types": types}

    def _stepped(self, period: Period, where: Mapping[str, str], step_min: int) -> tuple[Question, int]:
        """Return the question for curves with steps of `step_min` or longer, and the present time."""
        now_ms = self._wall_ms()
        if 1 < step_min < HOUR_MIN and "device" not in where:  # a device has few rows
            rows = self._query.groups_reporting(where, now_ms) * period.minutes
            step_min = HOUR_MIN if rows > self._rows_max else step_min
        since_ms, until_ms = period.stepped_ms(now_ms, step_min)
        return Question(since_ms, until_ms, ("model", "version"), where, step_min), now_ms

    def _step_min(self, period: Period, where: Mapping[str, str]) -> int:
        of_devices = "device" in where
        from_ms = self._cached(
            ("minutes", of_devices), MINUTES_FRESH_S, lambda: self._query.minutes_from_ms(of_devices)
        )
        return period.step_min(self._wall_ms(), from_ms)

    def _whole_hours(self, since_ms: int, until_ms: int, devices: int) -> tuple[int, int]:
        """Extend a period to whole hours, which have rows of their own.

        Raises ConfigInvalid if it is too long for this number of devices.
        """
        hour_ms = HOUR_MIN * MINUTE_MS
        first, end = since_ms // hour_ms, -(-until_ms // hour_ms)
        if devices * (end - first) > STREAM_ROWS_MAX:
            raise ConfigInvalid(
                f"{devices} devices over {end - first} h are too many to compare: choose a shorter time, a site or a model"
            )
        return first * hour_ms, end * hour_ms

    def _cached(self, key: object, fresh_s: float, compute: Callable[[], T]) -> T:
        """Return the cached answer, or a new one. `compute` must not call `_cached`: it could deadlock."""
        with self._lock:
            entry = self._cache.setdefault(key, _CacheEntry())
            while len(self._cache) > CACHED_MAX:
                del self._cache[next(iter(self._cache))]
        with entry.lock:
            if time.monotonic() >= entry.until:
                began = time.monotonic()
                with self._query_permit:
                    entry.value = compute()
                # A slow query runs less often, so that charts take at most a fifth of the time.
                entry.until = time.monotonic() + max(fresh_s, 4 * (time.monotonic() - began))
            value: T = entry.value
            return value


def versions_seen(query: FleetQuery, now_ms: int) -> list[tuple[str, str, int]]:
    """Return (model, version, hour of the first report) of the last week, for the start of the page."""
    hour_ms = 60 * MINUTE_MS
    until_ms = (now_ms // hour_ms + 1) * hour_ms
    question = Question(until_ms - 7 * 24 * hour_ms, until_ms, ("model", "version"), {}, 60)
    return [
        (answer.group["model"], answer.group["version"], answer.start_ms) for answer in query.answer(question, now_ms)
    ]


def baselines(query: FleetQuery, now_ms: int) -> dict[tuple[str, str], float]:
    """Return the usual p99 (ms) of each (model, profile): the median of a week's six-hour steps.

    A (model, profile) with fewer than BASELINE_STEPS_MIN steps of enough requests has no baseline yet.
    """
    step_ms = BASELINE_STEP_MIN * MINUTE_MS
    until_ms = (now_ms // step_ms + 1) * step_ms
    question = Question(until_ms - BASELINE_STEPS * step_ms, until_ms, ("model", "profile"), {}, BASELINE_STEP_MIN)
    recent: dict[tuple[str, str], list[float]] = {}
    for answer in query.answer(question, now_ms):
        if answer.latency.count >= BASELINE_REQUESTS_MIN:
            key = answer.group["model"], answer.group["profile"]
            recent.setdefault(key, []).append(answer.latency.quantile(0.99))
    return {key: median_low(p99s) for key, p99s in recent.items() if len(p99s) >= BASELINE_STEPS_MIN}


def curves_of(
    answers: Sequence[Answer], since_ms: int, until_ms: int, step_ms: int, targets: Mapping[str, float]
) -> dict[str, Any]:
    """Build the models' charts from answers by model, version and step."""
    by_model: dict[str, dict[str, list[Answer]]] = {}
    for answer in answers:
        versions = by_model.setdefault(answer.group["model"], {})
        versions.setdefault(answer.group["version"], []).append(answer)
    steps = (until_ms - since_ms) // step_ms
    models = [
        {**_model(name, versions, since_ms, step_ms, steps), **target_of(name, versions, targets)}
        for name, versions in by_model.items()
    ]
    models.sort(key=lambda model: (-model["answered"], model["model"]))
    return {
        "since_ms": since_ms,
        "step_ms": step_ms,
        "steps": steps,
        "models": models[:MODELS_MAX],
        "left_out": [model["model"] for model in models[MODELS_MAX:]],
    }


def target_of(name: str, versions: Mapping[str, Sequence[Answer]], targets: Mapping[str, float]) -> dict[str, Any]:
    """Return a model's target, and the share of its requests within the target; {} without a target."""
    if name not in targets:
        return {}
    latency = merged(answer.latency for answers in versions.values() for answer in answers)
    return {"p99_target_ms": targets[name], "within_target": share_within(latency, targets[name])}


def _model(
    name: str, versions: Mapping[str, Sequence[Answer]], since_ms: int, step_ms: int, steps: int
) -> dict[str, Any]:
    everything = [answer for answers in versions.values() for answer in answers]
    first_ms = min(answer.start_ms for answer in everything)
    begins = {version: min(answer.start_ms for answer in answers) for version, answers in versions.items()}
    shown = sorted(versions, key=release)[-VERSIONS_MAX:]
    return {
        "model": name,
        **_summary(everything),
        "versions": [_version(version, versions[version], since_ms, step_ms, steps) for version in shown],
        "left_out": [version for version in sorted(versions, key=release) if version not in shown],
        # The version of the first report in this period has no mark, because it was deployed before.
        "marks": [{"version": version, "at_ms": begins[version]} for version in shown if begins[version] > first_ms],
        **_missing(everything, since_ms, step_ms, steps),
        "heat": _heat(everything, since_ms, step_ms),
    }


def _summary(answers: Sequence[Answer]) -> dict[str, Any]:
    latency = merged(answer.latency for answer in answers)
    return {
        "answered": latency.count,
        **{f"{name}_ms": _quantile(latency, share) for name, share in PERCENTILES.items()},
        "max_ms": round(latency.max, 4) if latency.count else None,
        **{name: sum(answer.counters[name] for answer in answers) for name in ("requests", "errors", "shed")},
    }


def _version(version: str, answers: Sequence[Answer], since_ms: int, step_ms: int, steps: int) -> dict[str, Any]:
    points: dict[str, list[float | None]] = {name: [None] * steps for name in PERCENTILES}
    counts = [0] * steps
    for answer in answers:
        step = (answer.start_ms - since_ms) // step_ms
        if 0 <= step < steps:
            counts[step] = answer.latency.count
            for name, share in PERCENTILES.items():
                points[name][step] = _quantile(answer.latency, share)
    return {"version": version, **_summary(answers), **points, "counts": counts}


def _missing(answers: Sequence[Answer], since_ms: int, step_ms: int, steps: int) -> dict[str, Any]:
    """Return the missing reports of each step and of each device, and the number of received reports."""
    counts, devices = [0] * steps, Counter[str]()
    for answer in answers:
        step = (answer.start_ms - since_ms) // step_ms
        if 0 <= step < steps:
            counts[step] += sum(answer.missing.values())
        devices.update(answer.missing)
    return {
        "windows": sum(answer.windows for answer in answers),
        "missing": counts,
        "missing_devices": devices.most_common(DEVICES_NAMED_MAX),
        "missing_devices_count": len(devices),
    }


def _heat(answers: Sequence[Answer], since_ms: int, step_ms: int) -> dict[str, Any]:
    """Count the requests of each step and row; row `r` begins at 2^(r * INDICES_A_ROW / 32) ms."""
    cells: dict[tuple[int, int], int] = {}
    for answer in answers:
        step = (answer.start_ms - since_ms) // step_ms
        for index, count in answer.latency.buckets.items():
            key = (step, index // INDICES_A_ROW)
            cells[key] = cells.get(key, 0) + count
    rows = [row for _, row in cells]
    return {
        "rows_an_octave": PER_OCTAVE // INDICES_A_ROW,
        "first_row": min(rows, default=0),
        "rows": max(rows, default=-1) - min(rows, default=0) + 1,
        "cells": [[step, row, count] for (step, row), count in sorted(cells.items())],
    }


def _quantile(latency: Sketch, share: float) -> float | None:
    return round(latency.quantile(share), 4) if latency.count else None
