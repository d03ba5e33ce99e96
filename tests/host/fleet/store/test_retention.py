"""Old rows are removed, but a row that a query can reach stays."""

from __future__ import annotations

import itertools
from contextlib import closing
from pathlib import Path

import pytest
import sqlalchemy as sa
from click.testing import CliRunner

from edgert_deploy.cli.fleet.record import record as record_command
from edgert_deploy.fleet.store import database, retention, schema
from edgert_deploy.fleet.store.query import Answer
from edgert_deploy.fleet.store.recorder import PRUNE_EVERY_S, Recorder
from edgert_deploy.fleet.store.retention import Retention, forget, size_bytes
from edgert_deploy.fleet.store.store import Store
from tests.support.fleet import NOW_MS, Pi, a_fleet, ask, feed, record, replayed

DAY_MS = 86_400_000


@pytest.fixture
def url(store_url: str) -> str:
    return store_url


def rows_of(url: str) -> dict[str, int]:
    """Return the number of rows of devices, streams and groups."""
    with database.open_engine(url, writes=False).begin() as connection:
        tables = (schema.device, schema.stream, schema.group, schema.stream_heard, schema.group_heard)
        return {table.name: connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0 for table in tables}


def test_old_windows_are_removed_and_queries_by_the_hour_are_still_answered(url: str) -> None:
    pi = Pi("pi-1")
    day_ms = 86_400_000
    for days in (0, 1, 4, 40):
        record(url, pi.window(NOW_MS - days * day_ms - 1, [1.0] * 10), now_ms=NOW_MS - days * day_ms)
    store = Store(url)
    assert store.prune(Retention(), NOW_MS) == 2 * 2 + 1  # windows older than 3 days, and a minute older than 31 days
    store.prune(Retention(), NOW_MS)
    store.close()
    assert [ask(url, 24 * days)[0].latency.count for days in (3, 5, 50)] == [20, 30, 40]


def test_only_rows_of_devices_that_are_silent_beyond_the_retention_are_removed(url: str) -> None:
    still, late, gone = Pi("pi-1", "r1"), Pi("pi-2", "r1"), Pi("pi-3", "r0")
    days_ago = [NOW_MS - days * DAY_MS for days in (399, 401)]
    record(url, late.window(days_ago[0], [3.0] * 5), days_ago[0])
    record(url, still.info() + still.window(days_ago[1], [1.0] * 9), days_ago[1])
    still.version = "r2"
    record(url, still.window(NOW_MS - 1, [1.0] * 10))
    clock_ms = [days_ago[1]]
    recorder = Recorder(Store(url), lambda: clock_ms[0])
    feed(recorder, gone.window(days_ago[1], [2.0] * 4))
    recorder.flush()
    assert list(rows_of(url).values()) == [3, 4, 4, 4, 4]

    def asked() -> list[list[Answer]]:
        return [ask(url, 24 * 399 + 1, by) for by in ((), ("device", "version"), ("site", "version", "profile"))]

    before, pruner = asked(), Store(url)
    pruner.prune(Retention(), NOW_MS)
    assert list(rows_of(url).values()) == [2, 2, 2, 2, 2]
    assert asked() == before
    # Another device gets the removed ids, and a recorder that has cached these ids continues to write.
    newcomer = Recorder(pruner, lambda: NOW_MS)
    feed(newcomer, Pi("pi-4", "r4").window(NOW_MS - 1, [5.0] * 6))
    newcomer.flush()
    clock_ms[0] = NOW_MS
    feed(recorder, gone.window(NOW_MS - 1, [2.0] * 7))
    recorder.flush()
    counts = {answer.group["device"]: answer.latency.count for answer in ask(url, 1, ("device",))}
    assert counts == {"pi-1": 10, "pi-3": 7, "pi-4": 6}
    assert ask(url, 1, ("version",), version="r0")[0].latency.count == 7


def test_a_removal_that_takes_long_is_continued_by_the_next_call(url: str) -> None:
    """One statement for all rows would exceed the time limit of PostgreSQL, after each later call as well."""
    pi = Pi("pi-1")
    for days in (0, 4, 5, 6):
        record(url, pi.window(NOW_MS - days * DAY_MS - 1, [1.0] * 10), now_ms=NOW_MS - days * DAY_MS)
    clock = itertools.count(0.0, retention.PRUNE_S_MAX * 0.4)  # time is over at the third statement
    store = Store(url)
    with store._transaction() as connection:
        assert [retention.prune(connection, Retention(), NOW_MS, clock.__next__) for _ in range(4)] == [2, 2, 2, 0]
    store.close()
    assert [ask(url, 24 * days)[0].latency.count for days in (3, 7)] == [10, 40]


def test_each_turn_removes_a_limited_number_of_rows_and_the_next_turn_continues(url: str) -> None:
    long_ago = NOW_MS - 500 * DAY_MS
    record(url, [message for n in range(5) for message in Pi(f"pi-{n}", f"r{n}").window(long_ago, [1.0])], long_ago)
    store, hour = Store(url), NOW_MS // 3_600_000
    store.prune(Retention(hours_h=600 * 24), NOW_MS)  # removes only the windows
    with store._transaction() as connection:
        for table in (schema.stream_hour, schema.group_hour, schema.group_minute):
            connection.execute(table.delete())
        assert [forget(connection, hour, 400 * 24, at_once=2) for _ in range(4)] == [6, 6, 3, 0]
    store.close()
    assert set(rows_of(url).values()) == {0}


def test_in_a_store_of_an_older_version_silence_counts_from_its_first_cleaning(url: str) -> None:
    record(url, Pi("pi-1").window(NOW_MS - 1, [1.0] * 3))
    with Store(url)._transaction() as connection:
        for table in (schema.stream_heard, schema.group_heard):
            connection.execute(table.delete())
    store = Store(url)
    store.prune(Retention(), NOW_MS + 399 * DAY_MS)  # the first removal by this version
    store.prune(Retention(), NOW_MS + 798 * DAY_MS)
    assert rows_of(url)["edgert_stream"] == rows_of(url)["edgert_group"] == 1
    store.prune(Retention(), NOW_MS + 801 * DAY_MS)
    store.close()
    assert set(rows_of(url).values()) == {0}


def test_a_host_whose_clock_is_years_ahead_removes_nothing_that_it_would_keep(tmp_path: Path) -> None:
    url, pi = f"{tmp_path}/fleet.db", Pi("pi-1")
    for days in (4, 1):
        record(url, pi.window(NOW_MS - days * DAY_MS - 1, [1.0] * 10), NOW_MS - days * DAY_MS)
    clock_s, said = 0.0, list[str]()
    with closing(Store(url)) as store:
        recorder = Recorder(store, lambda: NOW_MS + 3_650 * DAY_MS, clock=lambda: clock_s)

        def prune() -> None:
            nonlocal clock_s
            clock_s += PRUNE_EVERY_S + 1
            recorder.prune_when_due(said.append)

        prune()  # no report has confirmed the clock
        assert [ask(url, 24 * days)[0].latency.count for days in (3, 5)] == [10, 20]
        feed(recorder, Pi("pi-2").window(NOW_MS - 400 * DAY_MS, [1.0], clock_synced=0) + pi.window(NOW_MS, [1.0]))
        prune()
        assert [ask(url, 24 * days)[0].latency.count for days in (3, 5)] == [10, 20]
        with store._transaction() as connection:  # the window of four days ago is old by any clock
            assert connection.scalar(sa.select(sa.func.count()).select_from(schema.hist_window)) == 1
    assert said == []


def test_a_fleet_without_synchronized_clocks_is_pruned_by_the_clock_of_the_host(tmp_path: Path) -> None:
    url, pi = f"{tmp_path}/fleet.db", Pi("pi-1")
    record(url, pi.window(0, [1.0], clock_synced=0), NOW_MS - DAY_MS // 2)
    clock_s = 0.0
    with closing(Store(url)) as store:
        recorder = Recorder(store, lambda: NOW_MS + 500 * DAY_MS, clock=lambda: clock_s)
        feed(recorder, pi.window(NOW_MS, [1.0], clock_synced=0))
        recorder.prune_when_due(lambda line: None)
        assert ask(url, 24)  # for ten minutes, a synchronized clock may still report
        clock_s = PRUNE_EVERY_S + 1
        recorder.prune_when_due(lambda line: None)
    assert ask(url, 24) == []


def test_a_file_that_grows_too_large_loses_its_oldest_windows(tmp_path: Path) -> None:
    url = f"{tmp_path}/fleet.db"
    record(url, replayed(a_fleet(4, 150)))
    store = Store(url)

    def stored_bytes() -> int:
        with store._transaction() as connection:
            return size_bytes(connection)

    size = stored_bytes()
    before = ask(url, 3)[0].latency
    assert store.prune(Retention(size_bytes_max=int(size * 0.8)), NOW_MS) > 0
    assert stored_bytes() <= size * 0.8
    assert store.prune(Retention(size_bytes_max=int(size * 0.8)), NOW_MS) == 0
    store.close()
    assert ask(url, 3)[0].latency == before


def test_a_time_that_no_database_can_hold_is_refused() -> None:
    result = CliRunner().invoke(record_command, ["--broker", "127.0.0.1:1", "--keep-hours", "999999999999d"])
    assert result.exit_code == 2
    assert "at most 36500d" in result.output
