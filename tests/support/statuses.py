"""Statuses as a daemon and a device report them, for tests of their readers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from edgert.checks.status import (
    BatcherStatus,
    CacheStatus,
    DaemonState,
    DeviceStatus,
    LoadedStatus,
    ModelStatus,
    WorkerFigures,
)
from edgert.telemetry.spans import LiveStats, Percentiles, Totals, WindowFigures

PERCENTILES = Percentiles(1.5, 2.5, 3.5, 4.5, 5.5)
WINDOW = WindowFigures(10.0, 100, 3.5, PERCENTILES, {"queue": PERCENTILES, "preprocess": Percentiles(0, 0, 0, 0, 0)})
LOADED = LoadedStatus(3, "digest", "tflite", "tflite-int8", "2.3.0", "int8", False, (), 8, 2, 1, 0.1)
TOTALS = Totals(103, 1, 2, 0, 150_000, (100,) * 10, 100, 0, 0, {"queue": 100, "engine": 140_000})


def worker_figures(requests: int, closed: dict[str, int], **changes: Any) -> WorkerFigures:
    """Return the figures of a worker; `closed` counts batches by the event that closed them."""
    figures = WorkerFigures(
        connections=4,
        reactor_connections=0,
        waiting=1,
        batches_closed=closed,
        runs={1: (60, 6_000_000), 2: (20, 3_000_000)},
        batcher=BatcherStatus(1, 0, 1, None),
        cache=CacheStatus(True, "on: hits saved 3.0 times the time of lookups", 3.0, 5, 10**6, 16 * 10**6, 10, 20),
        near=None,
        shadow=None,
        alarms=(),
        requests=LiveStats(60.0, requests, 1, 2, 0, TOTALS, PERCENTILES, WINDOW, None),
    )
    return replace(figures, **changes)


def device_status(*models: ModelStatus, **changes: Any) -> DeviceStatus:
    """Return the status of a device whose daemon runs and has the null engine."""
    status = DeviceStatus(
        device="board",
        profile="this-machine",
        machine="aarch64",
        edgert="0.1.0",
        daemon=DaemonState(True, 1),
        disk_free_bytes=10 * 1024**3,
        engines={"null": "1"},
        keys=(),
        models=models,
        delta_format=0,
        limits_format=0,
    )
    return replace(status, **changes)
