"""Curves are percentiles of merged histograms."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timezone

import pytest

from edgert_deploy.fleet.store.batch import MINUTE_MS
from edgert_deploy.fleet.store.query import FleetQuery
from edgert_deploy.fleet.store.retention import Retention
from edgert_deploy.fleet.store.store import Store
from edgert_deploy.fleet.ui import history
from edgert_deploy.fleet.ui.history import History
from edgert_deploy.fleet.ui.period import Period
from tests.support.devices import WAIT_S_MAX
from tests.support.fleet import NOW_MS, Pi, record


def test_curves_are_percentiles_of_merged_histograms_and_mark_the_begin_of_a_version(store_url: str) -> None:
    url, sent = store_url, list[tuple[str, bytes]]()
    slow, quick, new = Pi("slow"), Pi("quick"), Pi("quick", version="r2", boot="b2")
    for minute in range(10, 0, -1):
        ts_ms = NOW_MS - minute * MINUTE_MS
        sent += slow.window(ts_ms, [100.0] * 3) + (quick if minute > 4 else new).window(ts_ms, [1.0] * 97)
    record(url, slow.info() + quick.info() + sent)
    query = FleetQuery(url)
    said = History(query, lambda: NOW_MS).curves(Period.parse({"period": "15m"}), {})
    (model,) = said["models"]
    r1, r2 = model["versions"]
    # A mean of the devices' p95 would be 50.
    assert r1["p95"][4] == pytest.approx(1.0, rel=0.011)
    assert r1["p99"][4] == pytest.approx(100.0, rel=0.011)
    assert r2["p99"][11] == pytest.approx(1.0, rel=0.011)
    assert r2["p99"][:10] == [None] * 10
    assert model["marks"] == [{"version": "r2", "at_ms": (NOW_MS // MINUTE_MS - 4) * MINUTE_MS}]
    assert sum(number for _, _, number in model["heat"]["cells"]) == model["answered"] == 1000
    rows = {row for _, row, _ in model["heat"]["cells"]}
    assert rows == {-1, 26}  # 2^(-1/4) < 1 <= 2^0 and 2^(26/4) < 100 <= 2^(27/4)
    day = History(query, lambda: NOW_MS).curves(Period.parse({"period": "24h"}), {})
    many = History(query, lambda: NOW_MS, rows_max=100).curves(Period.parse({"period": "24h"}), {})
    assert (day["step_ms"], many["step_ms"]) == (15 * MINUTE_MS, 60 * MINUTE_MS)  # the query has two groups
    assert day["models"][0]["p99_ms"] == many["models"][0]["p99_ms"] == model["p99_ms"]
    query.close()


def test_an_incident_of_last_week_is_drawn_by_the_minute_while_the_store_keeps_minutes(store_url: str) -> None:
    pi, week_ms = Pi("pi-1"), 7 * 24 * 60 * MINUTE_MS
    hour_ms = NOW_MS // (60 * MINUTE_MS) * 60 * MINUTE_MS
    sent = [message for n in range(50) for message in pi.window(hour_ms + n * MINUTE_MS, [1.0 + n])]
    record(store_url, pi.info() + sent, hour_ms + 50 * MINUTE_MS)
    moments = [datetime.fromtimestamp((hour_ms + minute * MINUTE_MS) / 1000, timezone.utc) for minute in (10, 30)]
    incident = Period.parse({"from": moments[0].isoformat(), "to": moments[1].isoformat()})
    query = FleetQuery(store_url)
    page = History(query, lambda: hour_ms + week_ms)
    curves = page.curves(incident, {})
    assert (curves["since_ms"], curves["step_ms"], curves["steps"]) == (hour_ms, MINUTE_MS, 60)
    assert curves["models"][0]["versions"][0]["p99"][20] == pytest.approx(21.0, rel=0.011)
    assert all(0 <= step < 60 for step, _, _ in curves["models"][0]["heat"]["cells"])
    store = Store(store_url)
    store.prune(Retention(windows_h=72, minutes_h=72), hour_ms + week_ms)
    store.close()
    coarse = History(query, lambda: hour_ms + week_ms).curves(incident, {})
    assert (coarse["step_ms"], coarse["models"][0]["answered"]) == (60 * MINUTE_MS, 50)
    query.close()


def test_no_query_waits_for_a_permit_that_it_already_holds(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "QUERIES_AT_ONCE_MAX", 1)
    record(store_url, Pi("pi-1").window(NOW_MS, [1.0, 2.0]))
    period, query = Period.parse({"period": "1h"}), FleetQuery(store_url)
    questions: list[Callable[[History], object]] = [
        lambda page: page.stages(period, {}),
        lambda page: page.curves(period, {}),
        lambda page: page.rows(period, {}),
        lambda page: page.breakdown(period, "site", {}, 1),
        lambda page: page.events(period, {}),
        lambda page: page.channels(None),
    ]
    answers: list[object] = []
    for question in questions:
        page = History(query, lambda: NOW_MS)
        thread = threading.Thread(target=lambda: answers.append(question(page)), daemon=True)  # noqa: B023
        thread.start()
        thread.join(WAIT_S_MAX)
        assert not thread.is_alive()
    assert len(answers) == len(questions)
    query.close()
