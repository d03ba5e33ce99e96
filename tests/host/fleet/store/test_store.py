"""The store keeps each report once and answers exactly: the same over SQLite and a real PostgreSQL."""

from __future__ import annotations

import json
import random
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result

from edgert.errors import ConfigInvalid, EdgeRTError
from edgert.telemetry import messages
from edgert.telemetry.sketch import Sketch, merged
from edgert_deploy.cli.fleet_query import query
from edgert_deploy.fleet.packed import Dense, Pool, pack, unpack
from edgert_deploy.fleet.store import schema
from edgert_deploy.fleet.store.batch import MINUTE_MS
from edgert_deploy.fleet.store.payload import pack_fields, unpack_fields
from edgert_deploy.fleet.store.query import Answer, FleetQuery, Question
from edgert_deploy.fleet.store.recorder import Recorder
from edgert_deploy.fleet.store.retention import Retention, forget
from edgert_deploy.fleet.store.schema import StoreFailed
from edgert_deploy.fleet.store.store import Store
from tests.support.fleet import NOW_MS, Pi, Sent, ask, record


@pytest.fixture
def url(store_url: str) -> str:
    return store_url


def a_fleet(devices: int = 6, minutes: int = 200) -> list[Pi]:
    dice = random.Random(3)
    fleet = [Pi(f"pi-{n}", version=f"r{n % 2 + 1}", profile=f"board-{n % 3}") for n in range(devices)]
    for pi in fleet:
        for minute in range(minutes):
            pi.window(NOW_MS - minute * MINUTE_MS - 1, [dice.lognormvariate(1, 1) for _ in range(dice.randrange(6))])
    return fleet


def replayed(fleet: list[Pi]) -> Sent:
    """All that the fleet sends, devices mixed and some of it twice."""
    sent: Sent = []
    for pi in fleet:
        sent += pi.info()
        twin = Pi(pi.topics.device, pi.version, pi.profile)
        for ts_ms, sketch in pi.sketches:
            window = twin.window(ts_ms, [])
            fields = json.loads(window[0][1]) | {
                "buckets": sketch.encode(), "zero": sketch.zero, "count": sketch.count,
                "sum": sketch.sum, "min": sketch.min, "max": sketch.max,
            }  # fmt: skip
            sent += [(window[0][0], messages.dump(fields)), window[1]]
    dice = random.Random(4)
    reports = [message for message in sent if "/m/" in message[0]]
    again = dice.sample(reports, 300)
    dice.shuffle(reports)
    return [message for message in sent if "/m/" not in message[0]] + reports + again


def test_any_grouping_over_any_stretch_is_the_sketch_of_all_its_requests(url: str) -> None:
    fleet = a_fleet()
    sent = replayed(fleet)
    recorder = record(url, sent[: len(sent) // 2])
    again = record(url, sent[len(sent) // 3 :])  # another recorder, which hears a part of it once more
    assert recorder.refused + again.refused == 0
    assert recorder.recorded + again.recorded == 6 * 200 * 2
    for hours in (0.05, 0.5, 1, 2.5, 3.25):  # within an hour, over its edge, over whole hours
        for by in ((), ("version",), ("version", "profile"), ("device",), ("device", "version")):
            groups = {tuple(answer.group.values()): answer for answer in ask(url, hours, by, model="digits")}
            expected: dict[tuple[str, ...], list[Sketch]] = {}
            for pi in fleet:
                names = {"version": pi.version, "profile": pi.profile, "device": pi.topics.device}
                for ts_ms, sketch in pi.sketches:
                    if ts_ms >= NOW_MS - hours * 3_600_000:
                        expected.setdefault(tuple(names[word] for word in by), []).append(sketch)
            assert groups.keys() == expected.keys()
            for key, answer in groups.items():
                assert answer.latency == merged(expected[key]), (hours, by, key)
                assert answer.windows == len(expected[key])
    steps = ask(url, 3, ("version",), step_min=60)
    assert len(steps) == 2 * 3
    assert merged(step.latency for step in steps) == ask(url, 3)[0].latency
    assert merged(step.latency for step in ask(url, 3, step_min=7)) == ask(url, 3)[0].latency
    (one,) = ask(url, 3, ("site",), device="pi-2")
    assert one.latency == merged(sketch for ts, sketch in fleet[2].sketches if ts >= NOW_MS - 3 * 3_600_000)


def test_counters_count_each_increase_once_whatever_comes_late_or_begins_anew(url: str) -> None:
    pi = Pi("pi-1")
    windows = [pi.window(NOW_MS - (5 - n) * MINUTE_MS, [1.0] * 10, errors=2, uptime_s=60 * (n + 1)) for n in range(5)]
    for order in (0, 1, 3, 2, 4, 1):
        record(url, windows[order])
    pi.requests = pi.errors = 0  # the worker began anew
    record(url, pi.window(NOW_MS - 1, [1.0] * 4, errors=1, uptime_s=30))
    for by in ((), ("device",)):
        (answer,) = ask(url, 1, by)
        assert (answer.counters["requests"], answer.counters["errors"]) == (5 * 12 + 5, 5 * 2 + 1)


def test_counters_that_ran_before_anyone_listened_are_not_charged_to_this_window(url: str) -> None:
    pi = Pi("pi-1")
    pi.requests = 1_000_000
    record(url, pi.window(NOW_MS - 60_000, [1.0]) + pi.window(NOW_MS - 1, [1.0] * 3))
    (answer,) = ask(url, 1)
    assert answer.counters["requests"] == 3


@pytest.mark.parametrize("together", [True, False], ids=["in one batch", "one by one"])
def test_counters_go_on_however_often_the_device_loses_its_spool(url: str, together: bool) -> None:
    pi = Pi("pi-1")
    sent: list[Sent] = []
    # A spool begun anew counts from a random number, lower than the one before as often as not.
    for n, first in enumerate((0, 2**50, 2**40, 2**45, 2**33)):
        pi.seq = first
        for minute in (3 * n, 3 * n + 1):
            sent.append(pi.window(NOW_MS - (20 - minute) * MINUTE_MS, [1.0] * 10, uptime_s=60 * (minute + 1)))
        pi.window(0, [1.0] * 10)  # lost with the spool, and part of what the counters say next
    pi.requests = 0  # the worker began anew together with the last spool
    pi.seq = 2**36
    sent.append(pi.window(NOW_MS - 1, [1.0] * 7, uptime_s=30))
    for batch in [[message for window in sent for message in window]] if together else sent:
        record(url, batch)
    for by in ((), ("device",)):
        (answer,) = ask(url, 1, by)
        assert (answer.counters["requests"], answer.latency.count) == (10 * (5 * 3 - 1) + 7, 10 * 10 + 7)


def test_a_report_of_a_lost_spool_that_comes_late_is_not_counted_as_a_worker_begun_anew(url: str) -> None:
    pi = Pi("pi-1")
    windows = [pi.window(NOW_MS - 300_000 + n, [1.0] * 100, uptime_s=60 * (n + 1)) for n in range(3)]
    pi.seq = 2**40
    windows += [pi.window(NOW_MS - 100_000, [1.0] * 100, uptime_s=240)]
    for order in (0, 1, 3, 2):
        record(url, windows[order])
    assert ask(url, 1)[0].counters["requests"] == 400


def test_events_and_what_devices_say_of_themselves_are_kept_once(url: str) -> None:
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


def test_a_clock_that_is_far_off_is_not_believed(url: str) -> None:
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
def test_what_a_column_cannot_hold_is_refused_and_holds_up_nothing(tmp_path: Path, spoilt: dict[str, object]) -> None:
    url, pi = f"sqlite:///{tmp_path}/fleet.db", Pi("pi-1")
    (topic, payload), metrics = pi.window(NOW_MS - 1, [1.2])
    bad = (topic, messages.dump(json.loads(payload) | spoilt))
    recorder = record(url, [bad, metrics, *pi.window(NOW_MS - 1, [1.0])])
    assert (recorder.refused, recorder.recorded) == (1, 3)


def test_windows_go_with_time_and_the_hours_still_answer(url: str) -> None:
    pi = Pi("pi-1")
    day_ms = 86_400_000
    for days in (0, 1, 4, 40):
        record(url, pi.window(NOW_MS - days * day_ms - 1, [1.0] * 10), now_ms=NOW_MS - days * day_ms)
    store = Store(url)
    assert store.prune(Retention(), NOW_MS) == 2 * 2 + 1  # windows past 3 days, a minute past 31
    store.prune(Retention(), NOW_MS)
    store.close()
    assert [ask(url, 24 * days)[0].latency.count for days in (3, 5, 50)] == [20, 30, 40]


DAY_MS = 86_400_000


def rows_of(url: str) -> dict[str, int]:
    """How many rows there are of who reports."""
    with schema.open_engine(url, writes=False).begin() as connection:
        tables = (schema.device, schema.stream, schema.group, schema.stream_heard, schema.group_heard)
        return {table.name: connection.scalar(sa.select(sa.func.count()).select_from(table)) or 0 for table in tables}


def test_who_was_silent_for_longer_than_anything_is_kept_goes_and_nothing_that_can_be_asked(url: str) -> None:
    still, late, gone = Pi("pi-1", "r1"), Pi("pi-2", "r1"), Pi("pi-3", "r0")
    days_ago = [NOW_MS - days * DAY_MS for days in (399, 401)]
    record(url, late.window(days_ago[0], [3.0] * 5), days_ago[0])
    record(url, still.info() + still.window(days_ago[1], [1.0] * 9), days_ago[1])
    still.version = "r2"
    record(url, still.window(NOW_MS - 1, [1.0] * 10))
    clock_ms = [days_ago[1]]
    recorder = Recorder(Store(url), lambda: clock_ms[0])
    for message in gone.window(days_ago[1], [2.0] * 4):
        recorder.apply(*message, False, 0.0)
    recorder.flush()
    assert list(rows_of(url).values()) == [3, 4, 4, 4, 4]

    def asked() -> list[list[Answer]]:
        return [ask(url, 24 * 399 + 1, by) for by in ((), ("device", "version"), ("site", "version", "profile"))]

    before, pruner = asked(), Store(url)
    pruner.prune(Retention(), NOW_MS)
    assert list(rows_of(url).values()) == [2, 2, 2, 2, 2]
    assert asked() == before
    # Another device is given the numbers that have gone, and a recorder that remembers them writes on.
    newcomer = Recorder(pruner, lambda: NOW_MS)
    for message in Pi("pi-4", "r4").window(NOW_MS - 1, [5.0] * 6):
        newcomer.apply(*message, False, 0.0)
    newcomer.flush()
    clock_ms[0] = NOW_MS
    for message in gone.window(NOW_MS - 1, [2.0] * 7):
        recorder.apply(*message, False, 0.0)
    recorder.flush()
    counts = {answer.group["device"]: answer.latency.count for answer in ask(url, 1, ("device",))}
    assert counts == {"pi-1": 10, "pi-3": 7, "pi-4": 6}
    assert ask(url, 1, ("version",), version="r0")[0].latency.count == 7


def test_so_many_are_forgotten_in_a_turn_and_the_others_in_the_next(url: str) -> None:
    long_ago = NOW_MS - 500 * DAY_MS
    record(url, [message for n in range(5) for message in Pi(f"pi-{n}", f"r{n}").window(long_ago, [1.0])], long_ago)
    store, hour = Store(url), NOW_MS // 3_600_000
    store.prune(Retention(hours_h=600 * 24), NOW_MS)  # the windows alone
    with store._transaction() as connection:
        for table in (schema.stream_hour, schema.group_hour, schema.group_minute):
            connection.execute(table.delete())
        assert [forget(connection, hour, 400 * 24, at_once=2) for _ in range(4)] == [6, 6, 3, 0]
    store.close()
    assert set(rows_of(url).values()) == {0}


def test_in_a_store_of_an_older_version_silence_counts_from_now_on(url: str) -> None:
    record(url, Pi("pi-1").window(NOW_MS - 1, [1.0] * 3))
    with Store(url)._transaction() as connection:
        for table in (schema.stream_heard, schema.group_heard):
            connection.execute(table.delete())
        if connection.dialect.name == "postgresql":
            connection.execute(
                sa.text("ALTER TABLE edgert_stream_hour ADD FOREIGN KEY (owner) REFERENCES edgert_stream")
            )
    store = Store(url)
    assert sa.inspect(store._engine).get_foreign_keys("edgert_stream_hour") == []
    store.prune(Retention(), NOW_MS + 399 * DAY_MS)  # the first turn that this version takes
    store.prune(Retention(), NOW_MS + 798 * DAY_MS)
    assert rows_of(url)["edgert_stream"] == rows_of(url)["edgert_group"] == 1
    store.prune(Retention(), NOW_MS + 801 * DAY_MS)
    store.close()
    assert set(rows_of(url).values()) == {0}


def test_a_file_that_grows_too_large_loses_its_oldest_windows(tmp_path: Path) -> None:
    url = f"{tmp_path}/fleet.db"
    record(url, replayed(a_fleet(4, 150)))
    store = Store(url)
    size = store.size_bytes()
    before = ask(url, 3)[0].latency
    assert store.prune(Retention(size_bytes_max=int(size * 0.8)), NOW_MS) > 0
    assert store.size_bytes() <= size * 0.8
    assert store.prune(Retention(size_bytes_max=int(size * 0.8)), NOW_MS) == 0
    store.close()
    assert ask(url, 3)[0].latency == before


def test_a_write_that_fails_writes_nothing_and_is_tried_again(tmp_path: Path) -> None:
    store = Store(f"{tmp_path}/fleet.db")
    recorder = Recorder(store, lambda: NOW_MS)
    for topic, payload in Pi("pi-1").window(NOW_MS - 1, [1.0]):
        recorder.apply(topic, payload, False, 0.0)
    blocker = sqlite3.connect(tmp_path / "fleet.db", isolation_level=None)
    with store._engine.connect() as connection:  # the wait is the engine's; here nobody wants to wait
        connection.exec_driver_sql("ROLLBACK")
        connection.exec_driver_sql("PRAGMA busy_timeout = 50")
        connection.exec_driver_sql("BEGIN")
    blocker.execute("BEGIN IMMEDIATE")
    with pytest.raises(StoreFailed, match="locked"):
        recorder.flush()
    assert (recorder.waiting, recorder.failures, recorder.tells) == (2, 1, True)
    blocker.execute("ROLLBACK")
    blocker.close()
    recorder.flush()
    assert (recorder.recorded, recorder.waiting, recorder.failures) == (2, 0, 0)
    store.close()


def cli(url: str, *words: str) -> Result:
    return CliRunner().invoke(query, ["--store", url, *words])


def test_the_command_prints_groups_as_a_table_and_as_json(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = Pi("pi-1", "r1", "nuc"), Pi("pi-2", "r2", "pi")
    sent = fast.info() + slow.info() + fast.window(NOW_MS - 1, [1.0] * 99 + [9.0]) + slow.window(NOW_MS - 1, [7.0])
    record(url, sent)
    monkeypatch.setattr("time.time_ns", lambda: NOW_MS * 1_000_000)
    words = ("--model", "digits", "--window", "1h", "--by", "version,profile", "--percentiles", "50,95,99.9")
    table = cli(url, *words)
    assert table.exit_code == 0, table.output
    heading, first, second = (line.split() for line in table.stdout.splitlines())
    assert heading[:7] == ["version", "profile", "windows", "answered", "rate_per_s", "p50_ms", "p95_ms"]
    assert (first[:4], second[:4]) == (["r1", "nuc", "1", "100"], ["r2", "pi", "1", "1"])
    groups = json.loads(cli(url, *words, "--json").stdout)["groups"]
    assert groups[0]["p50_ms"] == pytest.approx(1.0, rel=0.011)
    assert (groups[0]["p99.9_ms"], groups[1]["p50_ms"], groups[0]["rate_per_s"]) == (9.0, 7.0, 0.028)
    assert "no matching reports" in cli(url, "--model", "faces").stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--window", "0s"), "ends before it begins"),
        (("--by", "weather"), "known: site, device"),
        (("--percentiles", "101"), "between 0 and 100"),
        (("--percentiles", "many"), "such as 50,95,99.9"),
        (("--step", "90s"), "whole minutes"),
        (("--step", "1m", "--window", "60d"), "choose longer"),
    ],
)
def test_words_that_cannot_be_used_are_explained(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    error = cli(f"{tmp_path}/fleet.db", *words).exception
    assert isinstance(error, ConfigInvalid)
    assert said in error.message


@pytest.mark.parametrize(
    ("store", "said"),
    [
        ("/nowhere/fleet.db", "no store /nowhere/fleet.db"),
        ("mysql://db/fleet", "postgresql"),
        ("postgresql://ops:secret@127.0.0.1:1/fleet", "cannot be used"),
    ],
)
def test_a_store_that_cannot_be_used_is_named_without_its_password(store: str, said: str) -> None:
    error = cli(store).exception
    assert isinstance(error, EdgeRTError)
    assert said in error.message
    assert "secret" not in error.message


def test_a_store_that_is_empty_or_newer_says_so(url: str, tmp_path: Path) -> None:
    (tmp_path / "empty.db").touch()
    with pytest.raises(StoreFailed, match="no reports yet"):
        FleetQuery(f"{tmp_path}/empty.db")
    store = Store(url)
    with store._engine.begin() as connection:
        connection.execute(schema.meta.update().values(version=99))
    store.close()
    with pytest.raises(ConfigInvalid, match="schema 99"):
        FleetQuery(url)


def test_packed_histograms_are_what_they_were() -> None:
    buckets = {640: 1, -320: 2**40, 7: 3}
    dense = Dense()
    dense.add(pack(buckets))
    assert dense.packed() == pack(buckets)
    assert unpack(pack(buckets)) == buckets
    pool = Pool(2)
    pool.add([1, 1], [pack(buckets), pack({7: 1})])
    pool.add_scalars([1, 1], [[2, 0], [2**40 + 6, 0], [5.0, 0.0], [0.001, 0.0], [9.0, 0.0]])
    assert pool.sketch(1).buckets == {640: 1, -320: 2**40, 7: 4}
    assert pool.sketch(0) == Sketch()
    fields: dict[str, messages.Scalar] = {"v": 1, "boot": "b1", "temp_c": 51.5, "anything": "else"}
    assert unpack_fields(pack_fields(fields)) == fields


def test_a_question_is_checked() -> None:
    with pytest.raises(ConfigInvalid):
        replace(Question(0, 1), where={"colour": "red"})
