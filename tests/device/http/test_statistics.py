"""A model's figures in the shape of Triton's statistics."""

from __future__ import annotations

from dataclasses import replace

from edgert.checks.status import ServingStatus
from edgert.http.statistics import model_statistics
from tests.support.statuses import LOADED, TOTALS, worker_figures


def test_a_model_that_no_worker_serves_has_zeros() -> None:
    found = model_statistics("m", ServingStatus("waiting"))
    assert (found["name"], found["version"], found["inference_count"], found["batch_stats"]) == ("m", "", 0, [])
    assert all(value == {"count": 0, "ns": 0} for value in found["inference_stats"].values())


def test_each_duration_in_nanoseconds_belongs_to_its_count() -> None:
    figures = worker_figures(103, {})
    found = model_statistics("m", ServingStatus("ready", loaded=LOADED, figures=figures))
    assert found["version"] == "3"
    stats = found["inference_stats"]
    assert stats["success"] == {"count": 100, "ns": 150_000_000}
    assert stats["compute_infer"] == {"count": 100, "ns": 140_000_000}
    assert stats["queue"] == {"count": 100, "ns": 100_000}
    assert stats["fail"]["count"] == 3
    assert [(each["batch_size"], each["compute_infer"]["count"]) for each in found["batch_stats"]] == [(1, 60), (2, 20)]


def test_lookups_that_hit_are_not_counted_as_misses() -> None:
    totals = replace(TOTALS, cache_hits=10, hit_cache_sum_us=50, stage_sum_us={"cache": 40})
    figures = worker_figures(103, {})
    figures = replace(figures, requests=replace(figures.requests, totals=totals))
    stats = model_statistics("m", ServingStatus("ready", figures=figures))["inference_stats"]
    assert stats["cache_hit"] == {"count": 10, "ns": 50_000}
    assert stats["cache_miss"] == {"count": figures.cache.misses, "ns": 0}
