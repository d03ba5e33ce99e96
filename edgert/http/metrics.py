"""What the daemon's status says, as Prometheus text (https://prometheus.io/docs/instrumenting/exposition_formats/).

Counters count since the model's worker process began, and begin again with the next one, as Prometheus expects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from edgert.checks.status import DaemonStatus, ServingStatus, TotalsStatus, WorkerFigures
from edgert.telemetry.spans import SLO_BOUNDS_MS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("ready", "degraded", "loading", "waiting", "unloaded", "restarting", "quarantined", "failed", "stopped")

Sample = tuple[str, Mapping[str, str], float]


def exposition(status: DaemonStatus | None, responses: Mapping[int, int], version: str) -> bytes:
    """All metrics. `status` is the daemon's (None: it does not answer); `responses` counts ours by HTTP status."""
    models = {} if status is None else status.models
    lines: list[str] = []
    _family(lines, "edgert_up", "gauge", "Whether the daemon answers.", [("", {}, float(status is not None))])
    _family(lines, "edgert_build_info", "gauge", "The version that serves.", [("", {"version": version}, 1)])
    codes = [("_total", {"code": str(int(code))}, float(count)) for code, count in sorted(responses.items())]
    _family(lines, "edgert_http_responses", "counter", "HTTP responses by status code.", codes)
    _model_families(lines, models)
    _request_families(lines, {name: model.figures for name, model in models.items() if model.figures})
    return ("\n".join(lines) + "\n").encode()


def _model_families(lines: list[str], models: Mapping[str, ServingStatus]) -> None:
    states = [
        ("", {"model": name, "state": state}, float(model.state == state))
        for name, model in models.items()
        for state in STATES
    ]
    _family(lines, "edgert_model_state", "gauge", "1 for the state that the model is in.", states)
    info = [
        ("", {"model": name, "release": str(on.release), "engine": on.engine, "precision": on.precision}, 1.0)
        for name, model in models.items()
        if (on := model.loaded) is not None
    ]
    _family(lines, "edgert_model_info", "gauge", "What serves the model.", info)
    crashes = [("", {"model": name}, float(model.crashes)) for name, model in models.items()]
    _family(lines, "edgert_worker_crashes", "gauge", "Crashes of the model's worker in a row.", crashes)
    memory = [("", {"model": name}, model.memory_mb * 1e6) for name, model in models.items() if model.memory_mb]
    _family(lines, "edgert_worker_memory_bytes", "gauge", "Memory that the model's worker takes.", memory)


def _request_families(lines: list[str], models: Mapping[str, WorkerFigures]) -> None:
    totals = {name: model.requests.totals for name, model in models.items()}

    def each(suffix: str, get: Callable[[WorkerFigures], float]) -> list[Sample]:
        return [(suffix, {"model": name}, float(get(model))) for name, model in models.items()]

    def by(label: str, counts: Callable[[WorkerFigures], Mapping[str, int]], scale: float = 1.0) -> list[Sample]:
        return [
            ("_total", {"model": name, label: key}, count * scale)
            for name, model in models.items()
            for key, count in counts(model).items()
        ]

    outcomes = by("outcome", lambda m: {k: getattr(m.requests.totals, v) for k, v in _OUTCOMES.items()})
    _family(lines, "edgert_requests", "counter", "Requests by how they ended.", outcomes)
    durations = [sample for name, total in totals.items() for sample in _histogram(name, total)]
    _family(
        lines, "edgert_request_duration_seconds", "histogram", "Answered requests, from arrival to answer.", durations
    )
    stages = by("stage", lambda m: m.requests.totals.stage_sum_us, 1e-6)
    _family(lines, "edgert_stage_seconds", "counter", "Time that answered requests spent in each stage.", stages)
    items = each("_total", lambda m: sum(size * count for size, (count, _) in m.runs.items()))
    _family(lines, "edgert_inferences", "counter", "Items that the engine computed.", items)
    runs = each("_total", lambda m: sum(count for count, _ in m.runs.values()))
    _family(lines, "edgert_executions", "counter", "Runs of the engine.", runs)
    reasons = by("reason", lambda m: m.batches_closed)
    _family(lines, "edgert_batches", "counter", "Batches by what closed them.", reasons)
    looked_up = by("result", lambda m: {"hit": m.cache.hits, "miss": m.cache.misses})
    _family(lines, "edgert_cache_lookups", "counter", "Look-ups in the prediction cache.", looked_up)
    _family(lines, "edgert_cache_bytes", "gauge", "Bytes in the prediction cache.", each("", lambda m: m.cache.bytes))
    _family(lines, "edgert_cache_on", "gauge", "Whether the cache pays, and is on.", each("", lambda m: m.cache.on))
    _family(
        lines, "edgert_queue_requests", "gauge", "Requests that wait for the engine.", each("", lambda m: m.waiting)
    )
    _family(lines, "edgert_connections", "gauge", "Connections to the worker.", each("", lambda m: m.connections))


_OUTCOMES = {"ok": "answered", "error": "errors", "shed": "shed"}


def _histogram(model: str, totals: TotalsStatus) -> Iterable[Sample]:
    for bound_ms, count in zip(SLO_BOUNDS_MS, totals.within_ms, strict=True):
        yield "_bucket", {"model": model, "le": repr(bound_ms / 1000)}, float(count)
    yield "_bucket", {"model": model, "le": "+Inf"}, float(totals.answered)
    yield "_sum", {"model": model}, totals.latency_sum_us / 1e6
    yield "_count", {"model": model}, float(totals.answered)


def _family(lines: list[str], name: str, kind: str, help_text: str, samples: Iterable[Sample]) -> None:
    """One metric with its samples; in this format a counter's name carries its `_total`."""
    title = f"{name}_total" if kind == "counter" else name
    lines += [f"# HELP {title} {help_text}", f"# TYPE {title} {kind}"]
    for suffix, labels, value in samples:
        text = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
        where = f"{{{text}}}" if text else ""
        lines.append(f"{name}{suffix}{where} {round(value, 9)!r}")


def _escaped(label: str) -> str:
    return label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
