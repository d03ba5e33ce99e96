"""A model by device, profile or site: each group is compared with the other groups of its model.

This module does no I/O. Theory of operation: histograms are merged by adding counts. So the histogram of the other
groups is the model's histogram minus the group's histogram. The distance of a group is its p99 divided by the p99 of
the other groups. The slowest group comes first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgert.errors import ConfigInvalid
from edgert.telemetry.sketch import PER_OCTAVE, Sketch, merged, middle_ms
from edgert_deploy.fleet.store.query import Answer
from edgert_deploy.fleet.store.results import DEFAULT_SHARES, answer_row

BREAKDOWNS = {"device": ("site", "device", "profile"), "profile": ("profile",), "site": ("site",)}
REQUESTS_MIN = 20  # groups with fewer requests come last, because their p99 is not reliable


def dimensions_of_breakdown(by: str) -> tuple[str, ...]:
    """Return the dimensions of a query for `by`. Raises ConfigInvalid."""
    if by not in BREAKDOWNS:
        raise ConfigInvalid(f"by={by[:20]!r} is unknown; known: {', '.join(BREAKDOWNS)}")
    return BREAKDOWNS[by]


def groups_of(answers: Sequence[Answer], targets: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return each model with its groups. The busiest model and the slowest group come first."""
    by_model: dict[str, list[Answer]] = {}
    for answer in answers:
        by_model.setdefault(answer.group["model"], []).append(answer)
    models = [_model(name, groups, targets.get(name)) for name, groups in by_model.items()]
    return sorted(models, key=lambda model: (-model["answered"], model["model"]))


def share_within(latency: Sketch, limit_ms: float) -> float | None:
    """Return the share of requests within `limit_ms`; None if there are no requests.

    The limit is exact to one bucket (2.2 %).
    """
    if not latency.count:
        return None
    if limit_ms >= latency.max:
        return 1.0
    # A bucket is within the limit if its middle is within the limit, because percentiles also use the middle.
    within = sum(count for index, count in latency.buckets.items() if middle_ms(index) <= limit_ms)
    return round((latency.zero + within) / latency.count, 6)


def _model(name: str, answers: Sequence[Answer], target_ms: float | None) -> dict[str, Any]:
    whole = merged(answer.latency for answer in answers)
    rows = [_row(answer, whole, target_ms) for answer in answers]
    rows.sort(key=lambda row: (row["answered"] < REQUESTS_MIN, -(row["distance"] or 0), -row["answered"]))
    return {"model": name, "answered": whole.count, "groups": rows}


def _row(answer: Answer, whole: Sketch, target_ms: float | None) -> dict[str, Any]:
    latency, rest = answer.latency, _without(whole, answer.latency)
    rest_ms = rest.quantile(0.99) if rest.count else None
    distance = round(latency.quantile(0.99) / rest_ms, 3) if rest_ms and latency.count else None
    target = {} if target_ms is None else {"within_target": share_within(latency, target_ms)}
    row = {
        **answer_row(answer, DEFAULT_SHARES),
        "rest_p99_ms": None if rest_ms is None else round(rest_ms, 4),
        "distance": distance,
        **target,
    }
    return {key: value for key, value in row.items() if key != "model"}


def _without(whole: Sketch, part: Sketch) -> Sketch:
    """Return the requests of `whole` that are not in `part`. The extremes are the bounds of the buckets."""
    rest = Sketch()
    remaining = {index: count - part.buckets.get(index, 0) for index, count in whole.buckets.items()}
    rest.buckets = {index: count for index, count in remaining.items() if count > 0}
    rest.zero, rest.count = whole.zero - part.zero, whole.count - part.count
    if rest.buckets:
        rest.max = min(whole.max, float(2 ** ((max(rest.buckets) + 1) / PER_OCTAVE)))
        rest.min = 0.0 if rest.zero else max(whole.min, float(2 ** (min(rest.buckets) / PER_OCTAVE)))
    return rest
