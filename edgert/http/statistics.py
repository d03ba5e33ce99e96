"""What the daemon's status says of a model, in the shape of Triton's statistics extension.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_statistics.md: durations are
nanoseconds; an inference is one item of a batch, an execution one run of the engine; what the cache answered
counts as neither.
"""

from __future__ import annotations

from typing import Any


def model_statistics(model: str, status: dict[str, Any]) -> dict[str, Any]:
    """`status` is what the daemon says of `model`; figures count since its worker process began."""
    totals = status.get("requests", {}).get("totals", {})
    stages_us: dict[str, int] = totals.get("stage_sum_us", {})
    hits, executed = totals.get("cache_hits", 0), totals.get("executed", 0)
    answered = totals.get("answered", 0)
    failed = totals.get("errors", 0) + totals.get("shed", 0)
    misses = status.get("cache", {}).get("misses", 0)
    runs = [(int(size), count, ns) for size, (count, ns) in status.get("runs", {}).items()]
    return {
        "name": model,
        "version": str(status.get("release", "")),
        "last_inference": 0,  # not kept
        "inference_count": sum(size * count for size, count, _ in runs),
        "execution_count": sum(count for _, count, _ in runs),
        "inference_stats": {
            "success": _duration(answered, totals.get("latency_sum_us", 0)),
            "fail": _duration(failed, totals.get("failed_sum_us", 0)),
            "queue": _duration(executed, stages_us.get("queue", 0)),
            "compute_input": _duration(answered, stages_us.get("decode", 0) + stages_us.get("preprocess", 0)),
            "compute_infer": _duration(executed, stages_us.get("engine", 0)),
            "compute_output": _duration(answered, stages_us.get("postprocess", 0) + stages_us.get("encode", 0)),
            "cache_hit": _duration(hits, totals.get("hit_cache_sum_us", 0)),
            "cache_miss": _duration(misses, max(0, stages_us.get("cache", 0) - totals.get("hit_cache_sum_us", 0))),
        },
        "batch_stats": [
            {"batch_size": size, "compute_infer": {"count": count, "ns": ns}} | _UNKNOWN
            for size, count, ns in sorted(runs)
        ],
        "memory_usage": [],
        "response_stats": {},
    }


# The stages around the engine are timed for each request, not for each batch.
_UNKNOWN = {"compute_input": {"count": 0, "ns": 0}, "compute_output": {"count": 0, "ns": 0}}


def _duration(count: int, sum_us: int) -> dict[str, int]:
    return {"count": count, "ns": sum_us * 1000}
