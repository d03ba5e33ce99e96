"""The daemon's status of a model in the form of Triton's statistics extension.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_statistics.md: durations are
nanoseconds. An inference is one item of a batch, an execution is one run of the engine; a cache hit is neither.
The figures of the queue include cache hits; the figures of the three stages of computing do not.
"""

from __future__ import annotations

from typing import Any

from edgert.checks.status import ServingStatus
from edgert.telemetry.spans import Totals


def model_statistics(model: str, status: ServingStatus) -> dict[str, Any]:
    """Return the statistics of `model`; figures count from the start of its worker process."""
    loaded, figures = status.loaded, status.figures
    totals = Totals() if figures is None else figures.requests.totals
    stages_us = totals.stage_sum_us
    hits, executed, answered = totals.cache_hits, totals.executed, totals.answered
    failed = totals.errors + totals.shed + totals.gone
    misses = 0 if figures is None else figures.cache.misses
    runs = [] if figures is None else sorted((size, count, ns) for size, (count, ns) in figures.runs.items())
    return {
        "name": model,
        "version": "" if loaded is None else str(loaded.release),
        "last_inference": 0,  # unknown
        "inference_count": 0 if figures is None else figures.inferences,
        "execution_count": 0 if figures is None else figures.executions,
        "inference_stats": {
            "success": _duration(answered, totals.latency_sum_us),
            "fail": _duration(failed, totals.failed_sum_us),
            "queue": _duration(answered, stages_us.get("queue", 0)),
            "compute_input": _duration(executed, stages_us.get("decode", 0) + stages_us.get("preprocess", 0)),
            "compute_infer": _duration(executed, stages_us.get("engine", 0)),
            "compute_output": _duration(executed, stages_us.get("postprocess", 0) + stages_us.get("encode", 0)),
            "cache_hit": _duration(hits, totals.hit_cache_sum_us),
            "cache_miss": _duration(misses, max(0, stages_us.get("cache", 0) - totals.hit_cache_sum_us)),
        },
        "batch_stats": [
            {"batch_size": size, "compute_infer": {"count": count, "ns": ns}} | _UNKNOWN for size, count, ns in runs
        ],
        "memory_usage": [],
        "response_stats": {},
    }


# The stages before and after the engine are timed for each request, not for each batch.
_UNKNOWN = {"compute_input": {"count": 0, "ns": 0}, "compute_output": {"count": 0, "ns": 0}}


def _duration(count: int, sum_us: int) -> dict[str, int]:
    return {"count": count, "ns": sum_us * 1000}
