"""The stages of a model's requests over time. Pure.

Devices report stages as percentiles, which cannot be merged: these are figures of devices, not of requests.
"""

from __future__ import annotations

from collections.abc import Iterable
from statistics import median_low
from typing import Any

from edgert.telemetry.spans import STAGES
from edgert_deploy.fleet.store.query import StageReport


def stages_of(reports: Iterable[StageReport], since_ms: int, until_ms: int, step_ms: int) -> dict[str, Any]:
    """Return the middle and the greatest p99 of each stage in each step, for each model, and whose the greatest is.

    `devices` of `of_devices` are counted: of a large fleet, a sample.
    """
    steps = (until_ms - since_ms) // step_ms
    readings: dict[str, dict[tuple[str, int], list[tuple[float, str]]]] = {}
    devices: dict[str, set[str]] = {}
    of: dict[str, int] = {}
    for report in reports:
        step, name = (report.at_ms - since_ms) // step_ms, f"{report.site}/{report.device}"
        if not 0 <= step < steps:
            continue
        devices.setdefault(report.model, set()).add(name)
        of[report.model] = report.devices
        found = readings.setdefault(report.model, {})
        for stage in STAGES:
            reading = report.fields.get(f"{stage}_p99_ms")
            if isinstance(reading, (int, float)):
                found.setdefault((stage, step), []).append((float(reading), name))
    models = [
        {
            "model": model,
            "devices": len(devices[model]),
            "of_devices": of[model],
            "stages": [_stage(stage, found, steps) for stage in STAGES if any(stage == key for key, _ in found)],
        }
        for model, found in sorted(readings.items())
    ]
    return {"since_ms": since_ms, "step_ms": step_ms, "steps": steps, "models": models}


def _stage(stage: str, found: dict[tuple[str, int], list[tuple[float, str]]], steps: int) -> dict[str, Any]:
    readings = [found.get((stage, step), []) for step in range(steps)]
    slowest = [max(each, default=None) for each in readings]
    return {
        "stage": stage,
        "middle_ms": [round(median_low(ms for ms, _ in each), 4) if each else None for each in readings],
        "slowest_ms": [None if most is None else round(most[0], 4) for most in slowest],
        "slowest_device": [None if most is None else most[1] for most in slowest],
    }
