"""The stages of a model, over time and by version, include all requests."""

from __future__ import annotations

from typing import Any

import pytest

from edgert_deploy.fleet.store.batch import MINUTE_MS
from edgert_deploy.fleet.store.query import FleetQuery
from edgert_deploy.fleet.ui import history as history_module
from edgert_deploy.fleet.ui.history import History
from edgert_deploy.fleet.ui.period import Period
from tests.support.fleet import NOW_MS, Pi, Sent, record

QUARTER = Period.parse({"period": "15m"})


@pytest.fixture
def history(store_url: str) -> History:
    """Five devices. The engine takes 2 ms, on one device 200 ms for a quarter of requests. r2 adds a queue time."""
    sent: Sent = []
    for number in range(5):
        pi = Pi(f"pi-{number}")
        sent += pi.info()
        for minute in range(10, 0, -1):
            pi.version = "r1" if minute > 4 else "r2"
            queue = [0.0 if pi.version == "r1" else 1.0] * 20
            engine = [2.0, 2.0, 2.0, 200.0] * 5 if number == 4 else [2.0] * 20
            sent += pi.window(NOW_MS - minute * MINUTE_MS, [9.0] * 20, queue=queue, engine=engine)
    sent += Pi("old").window(NOW_MS - MINUTE_MS, [9.0])  # reports no stages
    assert record(store_url, sent).refused == 0
    return History(FleetQuery(store_url), lambda: NOW_MS)


def near(value: float) -> Any:
    return pytest.approx(value, rel=0.011)


def test_each_step_and_each_version_has_the_percentiles_of_all_requests(history: History) -> None:
    said = history.stages(QUARTER, {})
    (model,) = said["models"]
    queue, engine = model["stages"]
    assert (said["steps"], queue["stage"], engine["stage"]) == (15, "queue", "engine")
    assert engine["p50"] == [None] * 4 + [near(2.0)] * 10 + [None]
    # One request of twenty is slow, so the fleet's p99 is the p99 of the slow device.
    assert engine["p99"] == [None] * 4 + [near(200.0)] * 10 + [None]
    assert queue["p99"] == [None] * 4 + [0.0] * 6 + [near(1.0)] * 4 + [None]
    old, new = model["versions"]
    assert [old["version"], new["version"]] == ["r1", "r2"]
    queue, engine = new["stages"]
    assert (engine["answered"], engine["p50_ms"], engine["p99_ms"]) == (5 * 20 * 4, near(2.0), near(200.0))
    mean_ms = (95 * 2.0 + 5 * 200.0) / 100
    assert (queue["share"], engine["share"]) == (near(1 / (1 + mean_ms)), near(mean_ms / (1 + mean_ms)))


def test_a_filter_leaves_only_the_stages_of_matching_reports(history: History) -> None:
    (fast,) = history.stages(QUARTER, {"device": "pi-3"})["models"]
    assert fast["stages"][1]["p99"][5] == near(2.0)
    (new,) = history.stages(QUARTER, {"version": "r2"})["models"]
    assert [each["version"] for each in new["versions"]] == ["r2"]
    assert history.stages(QUARTER, {"version": "r9"})["models"] == []


def test_a_model_whose_devices_report_no_stages_is_empty(history: History, monkeypatch: pytest.MonkeyPatch) -> None:
    (model,) = history.stages(QUARTER, {"device": "old"})["models"]
    assert (model["stages"], [each["stages"] for each in model["versions"]]) == ([], [[]])
    monkeypatch.setattr(history_module, "MODELS_MAX", 0)
    assert history.stages(QUARTER, {"device": "pi-3"})["models"] == []
