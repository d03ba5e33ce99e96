"""Stages over time are figures of devices."""

from __future__ import annotations

import pytest

from edgert_deploy.fleet.store import query as store_query
from edgert_deploy.fleet.store.batch import MINUTE_MS
from edgert_deploy.fleet.store.query import FleetQuery
from edgert_deploy.fleet.ui.history import History
from edgert_deploy.fleet.ui.span import Span
from tests.support.fleet import NOW_MS, Pi, Sent, changed, record

QUARTER = Span.parse({"window": "15m"})


def recorded(url: str, devices: int) -> FleetQuery:
    """Each device's engine takes as many ms as its number, its queue a hundred times that, until a new version begins."""
    sent: Sent = []
    for number in range(devices):
        pi = Pi(f"pi-{number:03}")
        sent += pi.info()
        for minute in range(10, 0, -1):
            pi.version = "r1" if minute > 4 else "r2"
            queue = {"queue_p99_ms": 100.0 * number} if minute > 4 else {}
            window = pi.window(NOW_MS - minute * MINUTE_MS, [1.0])
            sent += window[:1] + changed(window[1:], engine_p99_ms=float(number), **queue)
    record(url, sent)
    return FleetQuery(url)


def test_each_step_has_the_middle_and_the_slowest_device(store_url: str) -> None:
    query = recorded(store_url, 5)
    said = History(query, lambda: NOW_MS).stages(QUARTER, {})
    (model,) = said["models"]
    queue, engine = model["stages"]
    assert (model["devices"], queue["stage"], engine["stage"]) == (5, "queue", "engine")
    assert engine["middle_ms"] == [None] * 4 + [2.0] * 10 + [None]
    assert (engine["slowest_ms"][5], engine["slowest_device"][5]) == (4.0, "plant-a/pi-004")
    assert queue["middle_ms"] == [None] * 4 + [200.0] * 6 + [None] * 5
    one = History(query, lambda: NOW_MS).stages(QUARTER, {"device": "pi-003"})["models"][0]
    assert one["devices"] == 1
    assert one["stages"][1]["middle_ms"][5] == 3.0
    assert History(query, lambda: NOW_MS).stages(QUARTER, {"version": "r9"})["models"] == []
    query.close()


def test_a_large_fleet_is_sampled(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    query = recorded(store_url, 30)
    monkeypatch.setattr(store_query, "STAGE_DEVICES_MAX", 6)
    monkeypatch.setattr(store_query, "STAGE_REPORTS_MAX", 20)
    (model,) = History(query, lambda: NOW_MS).stages(QUARTER, {})["models"]
    assert (model["devices"], model["of_devices"]) == (6, 30)
    drawn = [ms for ms in model["stages"][1]["middle_ms"] if ms is not None]
    assert 3 <= len(drawn) < 10
    query.close()
