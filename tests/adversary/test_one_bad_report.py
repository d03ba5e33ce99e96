"""A device sends reports that break the contract: every view of the fleet still shows all other devices."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from edgert_deploy.fleet.export.exporter import Exporter
from edgert_deploy.fleet.live_percentiles import LivePercentiles
from tests.support.fleet import NOW_MS, Pi, Sent, ask, feed, publish, record
from tests.support.fleet_page import event, page_of, seen
from tests.support.servers.brokers import Broker
from tests.support.servers.browser import Browser

BAD_ALARM = {"event": "alarm_raised", "alarm": "temp_c", "model": "digits"}
BAD: list[dict[str, Any]] = [
    {**BAD_ALARM, "value": "hot", "limit": 85.0},
    {**BAD_ALARM, "value": 91.0, "limit": "<b>"},
    {**BAD_ALARM, "value": "NaN", "limit": "NaN"},
    {**BAD_ALARM, "value": None},
    {"event": "recycled", "reason": 5},
    {"event": "recycled", "reason": "x" * 501},
    {"event": "recycled", "release": -1},
    {"event": "recycled", "error_rate": 7},
    {"event": "recycled", "unknown": True},
    {"event": "recycled", "unknown": None},
]


def odd(pi: Pi, seq: int, ts_ms: int, fields: dict[str, Any]) -> Sent:
    envelope = {"v": 1, "ts": ts_ms, "boot": pi.boot, "seq": seq}
    return [(pi.topics.event, json.dumps(envelope | fields).encode())]


@pytest.mark.parametrize("fields", BAD, ids=json.dumps)
def test_an_event_that_breaks_its_schema_is_refused_and_counted(fields: dict[str, Any], tmp_path: Path) -> None:
    pi, now_ms = Pi("pi-1"), time.time_ns() // 1_000_000
    sent = [*odd(pi, 1, now_ms, fields), *event(pi, 2, now_ms, event="recycled", reason="good")]
    recorder = record(str(tmp_path / "fleet.db"), sent, now_ms)
    assert (recorder.refused, recorder.recorded) == (1, 1)
    assert "docs/telemetry.md does not allow" in recorder.last_refusal


@pytest.mark.parametrize("kind", ["info", "sys", "deploy", "m/digits/metrics"])
def test_a_message_of_another_kind_is_refused_and_counted(kind: str) -> None:
    wrong: dict[str, dict[str, Any]] = {"info": {"edgert": 5}, "sys": {"temp_c": "hot"}, "deploy": {"digits_active": 7}}
    state, pi = LivePercentiles(), Pi("pi-1")
    fields = {"v": 1, "ts": 1, "boot": "b1", **wrong.get(kind, {})}
    if kind not in wrong:
        fields = {**json.loads(pi.window(1, [1.0])[1][1]), "lat_p99_ms": "slow"}
    state.apply(f"edgert/v1/plant-a/pi-1/{kind}", json.dumps(fields).encode(), False, 0.0)
    assert state.refused == 1


def test_a_report_with_broken_stages_keeps_its_latencies_and_hides_no_other_report(tmp_path: Path) -> None:
    bad, good, store = Pi("pi-1"), Pi("pi-2"), str(tmp_path / "fleet.db")
    hist, metrics = bad.window(NOW_MS - 1, [1.0] * 3, engine=[0.5] * 3)
    sent = [(hist[0], json.dumps({**json.loads(hist[1]), "stages": "eJw="}).encode()), metrics]
    sent += good.window(NOW_MS - 1, [1.0] * 5, engine=[0.5] * 5)
    recorder = record(store, sent)
    assert (recorder.refused, recorder.recorded) == (1, 4)
    assert "pi-1/m/digits/hist: stages are 'eJw='" in recorder.last_refusal
    (answer,) = ask(store, 1, stages=True)
    assert answer.stages is not None
    assert (answer.latency.count, answer.stages.sketches()["engine"].count) == (8, 5)
    exporter = Exporter("b1", wall_clock=lambda: 0.0)
    feed(exporter, sent)
    (group,) = exporter.groups.values()
    assert (exporter.refused, group.latency.count, group.stages["engine"].count) == (1, 8, 5)


@pytest.fixture
def url(tmp_path: Path) -> Iterator[tuple[str, Broker]]:
    """The address of a page. Its store has an alarm of an older recorder, and its broker has bad reports."""
    now_ms, pi, store = time.time_ns() // 1_000_000, Pi("saw"), str(tmp_path / "fleet.db")
    alarm = {**BAD_ALARM, "value": 91.25, "limit": 85.0}
    record(
        store,
        pi.info() + event(pi, 1, now_ms, **alarm) + event(pi, 2, now_ms, event="recycled", reason="all is well"),
        now_ms,
    )
    with closing(sqlite3.connect(store)) as database, database:
        changed = database.execute("update edgert_event set fields = replace(fields, '91.25', '\"hot\"')")
        assert changed.rowcount == 2
    with (
        Broker.in_folder(tmp_path / "broker") as broker,
        page_of(broker, tmp_path, ["--store", store, "--listen", "127.0.0.1:0"]) as url,
    ):
        publish(broker, pi.info() + pi.window(now_ms, [1.0]))
        for seq, fields in enumerate(BAD, start=3):
            publish(broker, odd(pi, seq, now_ms, fields))
        yield url, broker


def test_the_page_shows_all_valid_reports(browser: Browser, url: tuple[str, Broker]) -> None:
    page = browser.open(url[0])
    for words in ("temp_c hot, limit 85.0", "all is well", "plant-a", f"{len(BAD)} messages were not understood"):
        seen(page, words)
    assert page.problems == []
    page.tab.context.close()


def test_the_page_marks_the_place_of_an_item_that_it_cannot_show(browser: Browser, url: tuple[str, Broker]) -> None:
    page = browser.open(url[0] + "rollouts")

    def spoil(what: str, name: str) -> None:
        def answer(route: Any) -> None:
            said = route.fetch().json()
            route.fulfill(json={**said, name: [None, {"at_ms": 1e300}, *said[name]]})

        page.tab.route(f"**/api/v1/{what}*", answer)

    spoil("events", "events")
    spoil("devices", "devices")
    spoil("rollouts", "rollouts")
    for path, words in (("events", "all is well"), ("devices", "saw"), ("", "all is well")):
        page.tab.goto(url[0] + path)
        seen(page, "This cannot be shown: ")
        seen(page, words)
    page.tab.unroute_all(behavior="ignoreErrors")
    page.tab.context.close()
