"""A group is compared exactly with all other groups of its model."""

from __future__ import annotations

import random

import pytest

from edgert.errors import ConfigInvalid
from edgert.telemetry.sketch import RELATIVE_ERROR_MAX, Sketch
from edgert_deploy.fleet.store.batch import MINUTE_MS
from edgert_deploy.fleet.store.query import FleetQuery
from edgert_deploy.fleet.ui import history
from edgert_deploy.fleet.ui.breakdown import share_within
from edgert_deploy.fleet.ui.history import History
from edgert_deploy.fleet.ui.period import Period
from tests.support.fleet import NOW_MS, Pi, Sent, record
from tests.support.sketches import sketch_of

HOUR = Period.parse({"period": "1h"})


def p99(values: list[float]) -> float:
    return sorted(values)[-(-99 * len(values) // 100) - 1]


def test_each_group_is_compared_with_the_rest_of_its_model_and_the_slowest_comes_first(store_url: str) -> None:
    dice, sent = random.Random(5), list[tuple[str, bytes]]()
    took: dict[str, list[float]] = {}
    for number, factor in enumerate((1.0, 1.0, 8.0, 1.1)):
        name = f"pi-{number}"
        pi = Pi(name, profile="board-b" if number == 2 else "board-a", site=f"plant-{number % 2}")
        took[name] = [factor * dice.lognormvariate(1, 0.3) for _ in range(300)]
        sent += pi.info() + [
            m for n in range(10) for m in pi.window(NOW_MS - n * MINUTE_MS, took[name][n * 30 : n * 30 + 30])
        ]
    few = Pi("few", profile="board-a")
    record(store_url, sent + few.info() + few.window(NOW_MS, [5000.0]))
    query = FleetQuery(store_url)
    page = History(query, lambda: NOW_MS, targets={"digits": 10.0})
    (model,) = page.breakdown(HOUR, "device", {}, 5)["models"]
    slow, *_, last = model["groups"]
    assert (slow["device"], last["device"]) == ("pi-2", "few"), "one request says little"
    rest = p99([value for name, values in took.items() if name != "pi-2" for value in values] + [5000.0])
    assert slow["rest_p99_ms"] == pytest.approx(rest, rel=0.011)
    assert slow["distance"] == pytest.approx(p99(took["pi-2"]) / rest, rel=0.022)
    assert slow["within_target"] == pytest.approx(sum(v <= 10.0 for v in took["pi-2"]) / 300, abs=0.02)
    assert (slow["profile"], slow["answered"], slow["errors"], slow["missing"]) == ("board-b", 300, 0, 0)
    by_profile = page.breakdown(HOUR, "profile", {}, 5)["models"][0]["groups"]
    assert [(row["profile"], row["answered"]) for row in by_profile] == [("board-b", 300), ("board-a", 901)]
    by_site = page.breakdown(HOUR, "site", {"profile": "board-a"}, 5)["models"][0]["groups"]
    assert {row["site"] for row in by_site} == {"plant-0", "plant-1", "plant-a"}
    assert page.curves(HOUR, {})["models"][0]["p99_target_ms"] == 10.0
    query.close()


def test_a_large_fleet_is_compared_by_whole_hours_and_a_larger_fleet_is_refused(store_url: str) -> None:
    pi = Pi("pi-1")
    sent: Sent = [message for n in range(50) for message in pi.window(NOW_MS - n * MINUTE_MS, [1.0])]
    record(store_url, pi.info() + sent)
    query = FleetQuery(store_url)
    page = History(query, lambda: NOW_MS)
    short = Period.parse({"period": "5m"})
    assert page.breakdown(short, "device", {}, 1)["models"][0]["answered"] == 5
    hours = History(query, lambda: NOW_MS).breakdown(short, "device", {}, history.ROWS_MAX)
    assert hours["until_ms"] - hours["since_ms"] == 60 * MINUTE_MS
    assert hours["models"][0]["answered"] == 21  # since the start of the hour
    with pytest.raises(ConfigInvalid, match="too many to compare"):
        page.breakdown(Period.parse({"period": "7d"}), "device", {}, history.STREAM_ROWS_MAX)
    query.close()


def test_the_share_within_a_target_is_exact_up_to_one_bucket() -> None:
    dice = random.Random(2)
    assert share_within(Sketch(), 1.0) is None
    values = [dice.lognormvariate(2, 1) for _ in range(5000)] + [0.0] * 10
    sketch = sketch_of(values)
    for limit_ms in (0.01, 2.0, 7.3, 40.0, 1e6):
        share = share_within(sketch, limit_ms)
        low, high = (
            sum(v <= limit_ms * (1 + sign * 2.1 * RELATIVE_ERROR_MAX) for v in values) / 5010 for sign in (-1, 1)
        )
        assert share is not None
        assert low - 1e-6 <= share <= high + 1e-6
