"""The time of each stage of a model's requests, over time and by version. This module does no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgert.telemetry.spans import STAGES
from edgert_deploy.fleet.store.query import Answer
from edgert_deploy.fleet.store.results import shares_of, stage_rows
from edgert_deploy.fleet.ui.fleet_state import release

VERSIONS_MAX = 6
_SHARES = shares_of("50,99")


def stages_of(
    model: str, versions: Sequence[Answer], curve: Sequence[Answer], since_ms: int, step_ms: int, steps: int
) -> dict[str, Any]:
    """Return the percentiles of each stage: in each step, and for each of the newest versions.

    Args:
        versions: An answer for each version, over the whole period.
        curve: An answer for each step.
        since_ms, step_ms, steps: The beginning of the period, the length of a step, the number of steps.
    """
    curves: dict[str, dict[str, list[float | None]]] = {}
    for answer in curve:
        step = (answer.start_ms - since_ms) // step_ms
        for row, _ in stage_rows(answer, _SHARES):
            stage = curves.setdefault(row["stage"], {"p50": [None] * steps, "p99": [None] * steps})
            stage["p50"][step], stage["p99"][step] = row["p50_ms"], row["p99_ms"]
    newest = sorted(versions, key=lambda answer: release(answer.group["version"]))[-VERSIONS_MAX:]
    return {
        "model": model,
        "stages": [{"stage": stage, **curves[stage]} for stage in STAGES if stage in curves],
        "versions": [
            {"version": answer.group["version"], "stages": [_shown(row) for row, _ in stage_rows(answer, _SHARES)]}
            for answer in newest
        ],
    }


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("stage", "answered", "share", "p50_ms", "p99_ms")}
