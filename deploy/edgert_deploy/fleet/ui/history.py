"""Curves and heat-maps from the store: percentiles of merged histograms, step by step, for each model and version.

Theory of operation: one query gives all data of a model's charts, because each answer is a sketch. Its quantiles are the
points of the curves; its buckets, eight to a row, are a column of the heat-map. Steps begin at whole multiples of their
length, so that curves do not wobble. Answers are cached for a while, because many pages ask the same.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgert.errors import ConfigInvalid
from edgert.telemetry.sketch import PER_OCTAVE, Sketch, merged
from edgert_deploy.fleet.store.batch import MINUTE_MS
from edgert_deploy.fleet.store.query import Answer, FleetQuery, Question
from edgert_deploy.fleet.ui.board import release

PERCENTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
MODELS_MAX = 6
VERSIONS_MAX = 6
INDICES_A_ROW = 8  # of the heat-map: a quarter of an octave, 19 %
KEPT_MAX = 128
NEWEST_FRESH_S = 5.0
DEVICES_NAMED_MAX = 5
EVENTS_MAX = 200
AHEAD_MAX_MS = 60 * MINUTE_MS  # a device's clock may be ahead by this much
ROWS_MAX = 60_000  # the rows of minutes for one answer: about a second
ASKED_AT_ONCE_MAX = 2  # each query takes a connection with its own cache


@dataclass(frozen=True)
class Span:
    """A period that a page shows, in steps of `step_min` minutes, queried at most every `fresh_s` seconds.

    Steps are `coarse_min` long if minutes would be too many rows: whole hours have rows of their own.
    """

    minutes: int
    step_min: int
    coarse_min: int
    fresh_s: float


SPANS = {
    "15m": Span(15, 1, 1, 1.0),
    "1h": Span(60, 1, 1, 2.0),
    "24h": Span(24 * 60, 15, 60, 30.0),
    "7d": Span(7 * 24 * 60, 60, 60, 120.0),
}


@dataclass
class _Kept:
    """An answer, or its place while a thread that holds the lock computes it."""

    until: float = 0.0
    value: Any = None
    lock: threading.Lock = field(default_factory=threading.Lock)


class History:
    """Queries the store for any number of pages at once. Every method raises StoreFailed."""

    def __init__(
        self,
        query: FleetQuery,
        wall_ms: Callable[[], int],
        clock: Callable[[], float] = time.monotonic,
        rows_max: int = ROWS_MAX,
    ) -> None:
        self._query, self._wall_ms, self._clock, self._rows_max = query, wall_ms, clock, rows_max
        self._kept: dict[object, _Kept] = {}
        self._lock = threading.Lock()
        self._turn = threading.BoundedSemaphore(ASKED_AT_ONCE_MAX)

    def curves(self, window: str, where: Mapping[str, str]) -> dict[str, Any]:
        """Return percentiles and heat-maps of the models that fit `where`, the busiest first. Raises ConfigInvalid."""
        span = span_of(window)

        def asked() -> dict[str, Any]:
            now_ms = self._wall_ms()
            step_min = self._step_min(span, where, now_ms)
            step_ms = step_min * MINUTE_MS
            until_ms = (now_ms // step_ms + 1) * step_ms
            since_ms = until_ms - span.minutes * MINUTE_MS
            question = Question(since_ms, until_ms, ("model", "version"), where, step_min)
            curves = curves_of(self._query.answer(question, now_ms), since_ms, until_ms, step_ms)
            unsynced = self._query.unsynced(question, now_ms)
            return {
                "now_ms": now_ms,
                **curves,
                "unsynced": unsynced[:DEVICES_NAMED_MAX],
                "unsynced_count": len(unsynced),
            }

        found: dict[str, Any] = self._fresh(("curves", window, *sorted(where.items())), span.fresh_s, asked)
        return found

    def newest_ms(self) -> int:
        """Return when the newest message of any device was stored; 0 in an empty store."""
        found: int = self._fresh("newest", NEWEST_FRESH_S, self._query.newest_ms)
        return found

    def events(self, window: str, where: Mapping[str, str]) -> dict[str, Any]:
        """Return events, the newest first. Raises ConfigInvalid."""
        span, named = span_of(window), {name: value for name, value in where.items() if name != "version"}

        def asked() -> list[dict[str, Any]]:
            now_ms = self._wall_ms()
            since_ms, until_ms = now_ms - span.minutes * MINUTE_MS, now_ms + AHEAD_MAX_MS
            found = self._query.events(since_ms, until_ms, EVENTS_MAX + 1, named)
            return [said for said in found if where.get("version") in (None, said.get("model_version"))]

        found = self._fresh(("events", window, *sorted(where.items())), 1.0, asked)
        return {"events": found[:EVENTS_MAX], "more": len(found) > EVENTS_MAX}

    def _step_min(self, span: Span, where: Mapping[str, str], now_ms: int) -> int:
        if span.step_min == span.coarse_min or "device" in where:  # a device has few rows
            return span.step_min
        rows = self._query.groups_reporting(where, now_ms) * span.minutes
        return span.coarse_min if rows > self._rows_max else span.step_min

    def _fresh(self, key: object, fresh_s: float, ask: Callable[[], Any]) -> Any:
        with self._lock:
            kept = self._kept.setdefault(key, _Kept())
            while len(self._kept) > KEPT_MAX:
                del self._kept[next(iter(self._kept))]
        with kept.lock:
            if self._clock() >= kept.until:
                began = self._clock()
                with self._turn:
                    kept.value = ask()
                # A slow query runs less often: charts take at most a fifth of the time.
                kept.until = self._clock() + max(fresh_s, 4 * (self._clock() - began))
            return kept.value


def span_of(window: str) -> Span:
    """Raises ConfigInvalid."""
    if window not in SPANS:
        raise ConfigInvalid(f"window={window[:20]!r} is unknown; known: {', '.join(SPANS)}")
    return SPANS[window]


def versions_seen(query: FleetQuery, now_ms: int) -> list[tuple[str, str, int]]:
    """Return (model, version, time of its first report) of the last week, to the hour, for the board's start."""
    hour_ms = 60 * MINUTE_MS
    until_ms = (now_ms // hour_ms + 1) * hour_ms
    question = Question(until_ms - 7 * 24 * hour_ms, until_ms, ("model", "version"), {}, 60)
    return [(each.group["model"], each.group["version"], each.start_ms) for each in query.answer(question, now_ms)]


def curves_of(answers: Sequence[Answer], since_ms: int, until_ms: int, step_ms: int) -> dict[str, Any]:
    """Build the models' charts from answers by model, version and step."""
    by_model: dict[str, dict[str, list[Answer]]] = {}
    for answer in answers:
        versions = by_model.setdefault(answer.group["model"], {})
        versions.setdefault(answer.group["version"], []).append(answer)
    steps = (until_ms - since_ms) // step_ms
    models = [_model(name, versions, since_ms, step_ms, steps) for name, versions in by_model.items()]
    models.sort(key=lambda model: (-model["answered"], model["model"]))
    return {
        "since_ms": since_ms,
        "step_ms": step_ms,
        "steps": steps,
        "models": models[:MODELS_MAX],
        "left_out": [model["model"] for model in models[MODELS_MAX:]],
    }


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
        # The version of the model's first report was not deployed within this period.
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
    """Return how many reports never came in each step, of which devices, and how many came."""
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
