"""The daemon's status as Prometheus text.

The format: https://prometheus.io/docs/instrumenting/exposition_formats/.

Counters start at 0 with each worker process of a model, as Prometheus expects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from edgert.checks.status import DaemonStatus, ServingStatus, WorkerFigures
from edgert.telemetry.spans import SLO_BOUNDS_MS, Totals

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("ready", "degraded", "loading", "waiting", "unloaded", "restarting", "quarantined", "failed", "stopped")

Sample = tuple[str, Mapping[str, str], float]


def exposition(status: DaemonStatus | None, responses: Mapping[int, int], version: str) -> bytes:
    """Return all metrics. `status` is None if no daemon answers; `responses` are counts by HTTP status."""
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
    _family(lines, "edgert_model_state", "gauge", "1 for the present state of the model.", states)
    info = [
        ("", {"model": name, "release": str(on.release), "engine": on.engine, "precision": on.precision}, 1.0)
        for name, model in models.items()
        if (on := model.loaded) is not None
    ]
    _family(lines, "edgert_model_info", "gauge", "The release, engine and precision that serve the model.", info)
    crashes = [("", {"model": name}, float(model.crashes)) for name, model in models.items()]
    _family(lines, "edgert_worker_crashes", "gauge", "Crashes of the model's worker in a row.", crashes)
    memory = [("", {"model": name}, model.memory_mb * 1e6) for name, model in models.items() if model.memory_mb]
    _family(lines, "edgert_worker_memory_bytes", "gauge", "Memory of the model's worker.", memory)


def _request_families(lines: list[str], models: Mapping[str, WorkerFigures]) -> None:
    for name, help_text, label, counts, scale in _BY_LABEL:
        samples: list[Sample] = [
            ("_total", {"model": model, label: key}, count * scale)
            for model, figures in models.items()
            for key, count in counts(figures).items()
        ]
        _family(lines, name, "counter", help_text, samples)
    durations = [sample for model, figures in models.items() for sample in _histogram(model, figures.requests.totals)]
    _family(
        lines, "edgert_request_duration_seconds", "histogram", "Answered requests, from arrival to answer.", durations
    )
    for name, kind, help_text, value in _BY_MODEL:
        suffix = "_total" if kind == "counter" else ""
        samples = [(suffix, {"model": model}, float(value(figures))) for model, figures in models.items()]
        _family(lines, name, kind, help_text, samples)


def _outcomes(figures: WorkerFigures) -> Mapping[str, int]:
    totals = figures.requests.totals
    return {"ok": totals.answered, "error": totals.errors, "shed": totals.shed, "gone": totals.gone}


# Counters with one more label: name, help, label, the values by that label, their scale.
_BY_LABEL: tuple[tuple[str, str, str, Callable[[WorkerFigures], Mapping[str, int]], float], ...] = (
    ("edgert_requests", "Requests by outcome.", "outcome", _outcomes, 1),
    (
        "edgert_stage_seconds",
        "Time that answered requests spent in each stage.",
        "stage",
        lambda m: m.requests.totals.stage_sum_us,
        1e-6,
    ),
    ("edgert_batches", "Batches by the reason that closed them.", "reason", lambda m: m.batches_closed, 1),
    (
        "edgert_cache_lookups",
        "Lookups in the prediction cache.",
        "result",
        lambda m: {"hit": m.cache.hits, "miss": m.cache.misses},
        1,
    ),
)
# Metrics with one value per model: name, kind, help, the value.
_BY_MODEL: tuple[tuple[str, str, str, Callable[[WorkerFigures], float]], ...] = (
    ("edgert_inferences", "counter", "Items that the engine computed.", lambda m: m.inferences),
    ("edgert_executions", "counter", "Runs of the engine.", lambda m: m.executions),
    ("edgert_cache_bytes", "gauge", "Bytes in the prediction cache.", lambda m: m.cache.bytes),
    ("edgert_cache_on", "gauge", "Whether the cache is on, because it saves time.", lambda m: m.cache.on),
    ("edgert_queue_requests", "gauge", "Requests that wait for the engine.", lambda m: m.waiting),
    ("edgert_connections", "gauge", "Connections to the worker.", lambda m: m.connections),
)


def _histogram(model: str, totals: Totals) -> Iterable[Sample]:
    for bound_ms, count in zip(SLO_BOUNDS_MS, totals.within_ms, strict=True):
        yield "_bucket", {"model": model, "le": repr(bound_ms / 1000)}, float(count)
    yield "_bucket", {"model": model, "le": "+Inf"}, float(totals.answered)
    yield "_sum", {"model": model}, totals.latency_sum_us / 1e6
    yield "_count", {"model": model}, float(totals.answered)


def _family(lines: list[str], name: str, kind: str, help_text: str, samples: Iterable[Sample]) -> None:
    """Append one metric and its samples; in this format, a counter's name ends in `_total`."""
    title = f"{name}_total" if kind == "counter" else name
    lines += [f"# HELP {title} {help_text}", f"# TYPE {title} {kind}"]
    for suffix, labels, value in samples:
        lines.append(f"{name}{suffix}{labels_text(labels)} {round(value, 9)!r}")


def labels_text(labels: Mapping[str, str]) -> str:
    """Return labels in the text format, `{site="a",device="b"}`; "" for none."""
    escaped = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
    text = ",".join(f'{key}="{value.translate(escaped)}"' for key, value in labels.items())
    return f"{{{text}}}" if text else ""
