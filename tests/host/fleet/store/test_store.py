"""The store keeps each report once. Its answers are exact, and the same with SQLite and a real PostgreSQL."""

from __future__ import annotations

import contextlib
import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from edgert.errors import ConfigInvalid
from edgert.telemetry import messages
from edgert_deploy.fleet.store.batch import MINUTE_MS
from edgert_deploy.fleet.store.query import FleetQuery
from edgert_deploy.fleet.store.recorder import Recorder
from edgert_deploy.fleet.store.store import Store
from tests.support.fleet import NOW_MS, Pi, Sent, ask, feed, record


@pytest.fixture
def url(store_url: str) -> str:
    return store_url


def test_counters_count_each_increase_once_although_reports_come_late_and_workers_restart(url: str) -> None:
    pi = Pi("pi-1")
    windows = [pi.window(NOW_MS - (5 - n) * MINUTE_MS, [1.0] * 10, errors=2, uptime_s=60 * (n + 1)) for n in range(5)]
    for order in (0, 1, 3, 2, 4, 1):
        record(url, windows[order])
    pi.requests = pi.errors = 0  # the worker restarted
    record(url, pi.window(NOW_MS - 1, [1.0] * 4, errors=1, uptime_s=30))
    for by in ((), ("device",)):
        (answer,) = ask(url, 1, by)
        assert (answer.counters["requests"], answer.counters["errors"]) == (5 * 12 + 5, 5 * 2 + 1)


def test_counts_from_before_the_first_report_are_not_added_to_a_window(url: str) -> None:
    pi = Pi("pi-1")
    pi.requests = 1_000_000
    record(url, pi.window(NOW_MS - 60_000, [1.0]) + pi.window(NOW_MS - 1, [1.0] * 3))
    (answer,) = ask(url, 1)
    assert answer.counters["requests"] == 3


@pytest.mark.parametrize("together", [True, False], ids=["in one batch", "one by one"])
def test_counters_continue_although_a_device_loses_its_spool_repeatedly(url: str, together: bool) -> None:
    pi = Pi("pi-1")
    sent: list[Sent] = []
    # A new spool counts from a random number, which is often lower than the number before.
    for n, first in enumerate((0, 2**50, 2**40, 2**45, 2**33)):
        pi.seq = first
        for minute in (3 * n, 3 * n + 1):
            sent.append(pi.window(NOW_MS - (20 - minute) * MINUTE_MS, [1.0] * 10, uptime_s=60 * (minute + 1)))
        pi.window(0, [1.0] * 10)  # lost with the spool, but included in the next counters
    pi.requests = 0  # the worker restarted when the last spool began
    pi.seq = 2**36
    sent.append(pi.window(NOW_MS - 1, [1.0] * 7, uptime_s=30))
    for batch in [[message for window in sent for message in window]] if together else sent:
        record(url, batch)
    for by in ((), ("device",)):
        (answer,) = ask(url, 1, by)
        assert (answer.counters["requests"], answer.latency.count) == (10 * (5 * 3 - 1) + 7, 10 * 10 + 7)


def test_a_late_report_of_a_lost_spool_is_not_counted_as_a_restart_of_the_worker(url: str) -> None:
    pi = Pi("pi-1")
    windows = [pi.window(NOW_MS - 300_000 + n, [1.0] * 100, uptime_s=60 * (n + 1)) for n in range(3)]
    pi.seq = 2**40
    windows += [pi.window(NOW_MS - 100_000, [1.0] * 100, uptime_s=240)]
    for order in (0, 1, 3, 2):
        record(url, windows[order])
    assert ask(url, 1)[0].counters["requests"] == 400


def test_events_and_descriptions_of_devices_are_stored_once(url: str) -> None:
    pi = Pi("pi-1", profile="raspberry-pi-4")
    fields = messages.envelope(ts_ms=NOW_MS - 5, boot="b1", seq=1) | {"event": "degraded", "model": "digits"}
    event = (pi.topics.event, messages.dump(fields | {"reason": "a \x00 b"}))
    recorder = record(url, [*pi.info(), event, event])
    assert (recorder.recorded, recorder.duplicates) == (1, 1)
    fleet = FleetQuery(url)
    (device,) = fleet.devices()
    assert (device["profile"], device["status"], device["heard_ms"]) == ("raspberry-pi-4", "online", NOW_MS)
    (kept,) = fleet.events(NOW_MS - 1000, NOW_MS)
    assert (kept["event"], kept["device"], kept["reason"]) == ("degraded", "pi-1", "a \x00 b")
    fleet.close()


def test_the_time_of_a_clock_that_is_far_off_is_replaced_by_the_time_of_receipt(url: str) -> None:
    early, late = Pi("pi-1"), Pi("pi-2")
    record(url, early.window(0, [1.0] * 3) + late.window(NOW_MS + 86_400_000, [1.0] * 4), now_ms=NOW_MS - 1)
    assert ask(url, 1)[0].latency.count == 7


@pytest.mark.parametrize(
    "spoilt",
    [
        {"boot": "b\x00"},
        {"model_version": "x" * 65},
        {"seq": 2**63},
        {"seq": -1},
        {"ts": 2**70},
        {"count": 2**40, "buckets": f"3:{2**40}"},
    ],
)
def test_a_value_that_a_column_cannot_hold_is_refused_and_delays_no_other_report(
    tmp_path: Path, spoilt: dict[str, object]
) -> None:
    url, pi = f"sqlite:///{tmp_path}/fleet.db", Pi("pi-1")
    (topic, payload), metrics = pi.window(NOW_MS - 1, [1.2])
    bad = (topic, messages.dump(json.loads(payload) | spoilt))
    recorder = record(url, [bad, metrics, *pi.window(NOW_MS - 1, [1.0])])
    assert (recorder.refused, recorder.recorded) == (1, 3)


def test_a_write_searches_and_never_reads_a_whole_table(tmp_path: Path) -> None:
    """A recorder writes each second, and its tables hold a year."""
    store, said = Store(f"{tmp_path}/fleet.db"), list[tuple[str, Any]]()
    sa.event.listen(store._database.engine, "before_cursor_execute", lambda *words: said.append(words[2:4]))
    recorder = Recorder(store, lambda: NOW_MS)
    first, second = Pi("pi-1"), Pi("pi-2", version="r2", site="plant-b")
    early = [first.window(NOW_MS - n * MINUTE_MS, [1.0]) for n in (9, 8, 7, 2, 1)]
    again = Pi("pi-1", boot="b2")
    again.seq = 9
    for sent in (early[0] + early[3], second.info() + early[2] + early[4] + second.window(NOW_MS, [1.0]) + again.rolled_back(3, "limit"), early[1] + again.window(NOW_MS, [2.0])):  # fmt: skip
        feed(recorder, sent)
        recorder.flush()
    store.close()
    with contextlib.closing(sqlite3.connect(tmp_path / "fleet.db")) as database:
        steps = {
            step[3]: statement
            for statement, parameters in said
            if statement.startswith(("SELECT", "UPDATE", "DELETE"))
            for step in database.execute(
                f"EXPLAIN QUERY PLAN {statement}", parameters[0] if isinstance(parameters, list) else parameters
            )
        }
    assert any(step.startswith("SEARCH edgert_group_minute") for step in steps)
    assert {step for step in steps if step.startswith("SCAN edgert")} == {"SCAN edgert_forgotten"}  # its only row


def test_a_failed_write_leaves_the_store_unchanged_and_is_tried_again(tmp_path: Path) -> None:
    store = Store(f"{tmp_path}/fleet.db")
    recorder = Recorder(store, lambda: NOW_MS)
    feed(recorder, Pi("pi-1").window(NOW_MS - 1, [1.0]))
    blocker = sqlite3.connect(tmp_path / "fleet.db", isolation_level=None)
    with store._database.engine.connect() as connection:  # the engine waits for a lock by default; this test does not
        connection.exec_driver_sql("ROLLBACK")
        connection.exec_driver_sql("PRAGMA busy_timeout = 50")
        connection.exec_driver_sql("BEGIN")
    blocker.execute("BEGIN IMMEDIATE")
    said: list[str] = []
    for _ in range(3):
        recorder.flush_or_wait(said.append)
    assert recorder.waiting == 2
    assert ["reports: 2 waiting, 0 dropped; retrying" in line and "locked" in line for line in said] == [True] * 2
    blocker.execute("ROLLBACK")
    blocker.close()
    recorder.flush_or_wait(said.append)
    assert "works again" in said[-1]
    assert (recorder.recorded, recorder.waiting, recorder.failures) == (2, 0, 0)
    store.close()


def test_a_file_that_is_removed_under_a_recorder_and_a_reader_is_begun_anew(tmp_path: Path) -> None:
    """Reports that were written to the removed file would be acknowledged, and lost."""
    url, said = str(tmp_path / "fleet.db"), list[str]()
    store = Store(url, said.append)
    recorder = Recorder(store, lambda: NOW_MS)
    fleet: FleetQuery | None = None
    for n in (1, 2, 3):
        feed(recorder, Pi(f"pi-{n}").window(NOW_MS - 1, [1.0]))
        recorder.flush()
        fleet = fleet or FleetQuery(url)
        assert [device["device"] for device in fleet.devices()] == [f"pi-{n}"]
        assert ask(url, 1)[0].latency.count == 1
        os.unlink(url)
        with pytest.raises(ConfigInvalid, match="there is no store"):
            fleet.devices()
    assert fleet is not None
    fleet.close()
    store.close()
    assert len(said) == 2
    assert "was removed or replaced" in said[0]
