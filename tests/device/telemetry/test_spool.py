"""Appended messages survive any crash, the limits hold, and a corrupt file stops no reader."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from edgert.errors import StorageFailed
from edgert.telemetry import spool as spool_module
from edgert.telemetry.spool import Spool, Spooled
from tests.support.devices import WAIT_S_MAX

# Appends until it is killed. Prints each seq after the append has returned.
APPENDER = """
import sys
from pathlib import Path
from edgert.telemetry.spool import Spool
spool = Spool(Path(sys.argv[1]))
while True:
    print(spool.append("hist/digits", "t", lambda seq: {"seq": seq}, 1, "hist"), flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "telemetry.db"


def add(spool: Spool, kind: str = "hist", stream: str = "hist/digits", size: int = 0) -> int:
    return spool.append(stream, "topic", lambda seq: {"seq": seq, "pad": "x" * size}, 1, kind)


def seqs(messages: list[Spooled]) -> list[int]:
    return [json.loads(message.payload)["seq"] for message in messages]


def test_messages_come_out_oldest_first_and_stay_until_they_are_done(path: Path) -> None:
    spool = Spool(path)
    appended = [add(spool) for _ in range(3)]
    assert appended == [appended[0], appended[0] + 1, appended[0] + 2]
    first, second, third = spool.take(10)
    assert seqs([first, second, third]) == appended
    assert (first.topic, first.qos, first.kind) == ("topic", 1, "hist")
    assert spool.take(10, after_id=first.id) == [second, third]
    spool.delete_acknowledged([first.id, second.id, second.id])
    assert spool.take(10) == [third]
    assert spool.stats().rows == 1


def test_each_stream_has_its_own_sequence_numbers(path: Path) -> None:
    spool = Spool(path)
    first, *others = [add(spool, stream=name) for name in ("a", "b", "a", "a", "b")]
    assert [seq - first for seq in others] == [0, 1, 2, 1]


def test_the_sequence_numbers_continue_after_the_last_process(path: Path) -> None:
    spool = Spool(path)
    first = add(spool)
    spool.close()
    assert add(Spool(path)) == first + 1


def test_a_full_spool_drops_metrics_first_and_events_last_and_counts_each_loss(path: Path) -> None:
    spool = Spool(path, rows_max=4)
    kinds = ("event", "hist", "metrics", "metrics", "metrics", "hist", "hist", "event", "event")
    before = min(add(spool, kind, stream=kind) for kind in kinds) - 1
    left = [(message.kind, json.loads(message.payload)["seq"] - before) for message in spool.take(10)]
    assert left == [("event", 1), ("hist", 3), ("event", 2), ("event", 3)]
    assert spool.stats().lost == {"metrics": 3, "hist": 2}
    assert spool.stats().lost_total == 5


def test_the_spool_keeps_to_its_limit_in_bytes(path: Path) -> None:
    spool = Spool(path, bytes_max=10_000)
    appended = [add(spool, size=900) for _ in range(50)]
    stats = spool.stats()
    assert stats.size_bytes <= 10_000
    assert stats.rows + stats.lost["hist"] == 50
    assert seqs(spool.take(50))[-1] == appended[-1]


def test_a_message_larger_than_the_spool_displaces_no_other_message(path: Path) -> None:
    spool = Spool(path, bytes_max=1_000)
    first = add(spool)
    assert add(spool, "event", stream="event", size=5_000) == first
    assert (spool.stats().rows, spool.stats().lost) == (1, {"event": 1})


def test_the_usage_is_zero_after_all_messages_are_deleted(path: Path) -> None:
    spool = Spool(path)
    for _ in range(5):
        add(spool)
    spool.delete_acknowledged([message.id for message in spool.take(5)])
    assert (spool.stats().rows, spool.stats().size_bytes) == (0, 0)


def test_threads_and_processes_append_at_once_without_losing_or_repeating_a_seq(path: Path) -> None:
    ours = Spool(path)
    script = APPENDER.replace("while True:", "for _ in range(60):")
    others = [subprocess.Popen([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE) for _ in range(2)]
    threads = [threading.Thread(target=lambda: [add(ours) for _ in range(60)]) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for other in others:
        other.communicate(timeout=WAIT_S_MAX)
        assert other.returncode == 0
    found = sorted(seqs(ours.take(1000)))
    assert found == list(range(found[0], found[0] + 240))


def test_appended_messages_survive_the_kill_of_their_process(path: Path) -> None:
    appender = subprocess.Popen([sys.executable, "-c", APPENDER, str(path)], stdout=subprocess.PIPE)
    assert appender.stdout is not None
    reported = [int(appender.stdout.readline()) for _ in range(40)]
    os.kill(appender.pid, signal.SIGKILL)
    reported += [int(line) for line in appender.communicate()[0].split()]
    found = seqs(Spool(path).take(10_000))
    assert found[: len(reported)] == reported
    assert found == list(range(found[0], found[0] + len(found)))


@pytest.mark.parametrize(
    "content", [b"this is no database", b"SQLite format 3\x00" + b"\xff" * 9000], ids=["foreign", "torn"]
)
def test_a_corrupt_file_is_set_aside_and_a_new_file_is_begun(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    said: list[str] = []
    spool = Spool(path, log=said.append)
    # This boot cannot have used this number before. Subscribers drop a number that they received before.
    assert add(spool) >= spool_module.FIRST_SEQ_MIN
    assert path.with_name("telemetry.db.corrupt").read_bytes() == content
    assert "telemetry.db.corrupt" in said[0]


def test_a_file_of_another_schema_is_set_aside(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA user_version = 99")
    add(Spool(path))
    assert path.with_name("telemetry.db.corrupt").exists()


def test_a_file_that_becomes_corrupt_in_use_is_replaced_once_for_all_processes(path: Path) -> None:
    first, second = Spool(path), Spool(path)
    for _ in range(40):
        add(first, size=500)
    with sqlite3.connect(path) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    with open(path, "r+b") as file:
        file.seek(4096)
        file.write(b"\xa5" * (path.stat().st_size - 4096))
    new = add(first, stream="new")
    assert new >= spool_module.FIRST_SEQ_MIN
    assert add(second, stream="new") == new + 1
    assert seqs(second.take(10)) == seqs(first.take(10)) == [new, new + 1]
    assert second.stats().lost == {"unknown": 1}
    assert path.with_name("telemetry.db.corrupt").exists()


@pytest.mark.parametrize(
    ("intact", "damaged"),
    [
        (b"plant-a/pi-07", b"plant-\xa5/pi-07"),  # not UTF-8
        (b"plant-a/pi-07", b"plant-#/pi-07"),  # no topic of a message
        (b"message_by_importance", b"message_by\x91importance"),  # not UTF-8, in the text of SQLite's own error
        (b"CREATE TABLE stream (name", b"CREATE TABLE stream (nbme"),
    ],
    ids=["text", "topic", "name", "column"],
)
def test_a_file_whose_damage_sqlite_does_not_notice_is_replaced(path: Path, intact: bytes, damaged: bytes) -> None:
    spool = Spool(path)
    spool.append("event", "plant-a/pi-07", lambda seq: {"seq": seq}, 1, "event")
    spool.close()
    content = path.read_bytes()
    assert intact in content
    path.write_bytes(content.replace(intact, damaged, 1))
    spool = Spool(path)
    spool.take(10)
    new = add(spool)
    assert seqs(spool.take(10)) == [new]
    assert path.with_name("telemetry.db.corrupt").exists()


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE message SET payload = 'text'",
        "UPDATE message SET qos = 7",
        "UPDATE message SET size = x'00'",
        "UPDATE usage SET rows = 1000000",
        "UPDATE retained SET payload = 1",
        "INSERT INTO lost VALUES ('hist', 'text')",
        "DELETE FROM usage",
    ],
)
def test_a_file_with_values_that_nobody_wrote_is_replaced(path: Path, damage: str) -> None:
    spool = Spool(path)
    add(spool)
    spool.retain("deploy", {"v": 1})
    with sqlite3.connect(path) as database:
        database.execute(damage)
    spool.retained("deploy")
    add(spool)
    spool.delete_acknowledged([message.id for message in spool.take(10)])
    assert spool.stats().lost == {"unknown": 1}
    assert path.with_name("telemetry.db.corrupt").exists()


def test_only_the_newest_corrupt_file_is_kept(path: Path) -> None:
    for number in range(2):
        path.write_bytes(b"bad %d" % number)
        Spool(path).close()
        path.unlink()
    assert path.with_name("telemetry.db.corrupt").read_bytes() == b"bad 1"


def test_a_file_that_was_removed_in_use_is_begun_anew_with_numbers_not_used_before(path: Path) -> None:
    spool = Spool(path)
    add(spool)
    for file in path.parent.glob("telemetry.db*"):
        file.unlink()
    assert add(spool) >= spool_module.FIRST_SEQ_MIN


def test_a_file_that_was_removed_and_created_again_by_another_process_repeats_no_number(path: Path) -> None:
    ours = Spool(path)
    before = [add(ours) for _ in range(3)]
    for file in path.parent.glob("telemetry.db*"):
        file.unlink()
    script = APPENDER.replace("while True:", "for _ in range(2):")
    other = subprocess.run([sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, check=True)
    numbers = [*before, *map(int, other.stdout.split()), add(ours)]
    assert len(set(numbers)) == 6


@pytest.mark.parametrize("lost", [False, True])
def test_a_spool_whose_creation_is_cut_off_at_any_statement_is_empty_or_complete(
    path: Path, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    """Before each statement, copy the files as a killed process would leave them."""
    copies: list[Path] = []

    def copy(statement: str) -> None:
        folder = path.parent / f"copy-{len(copies)}"
        folder.mkdir()
        for file in path.parent.glob("telemetry.db*"):
            if not file.name.endswith("-shm"):  # SQLite rebuilds this file from the log
                shutil.copy(file, folder)
        copies.append(folder / path.name)

    def traced(*args: Any, **options: Any) -> sqlite3.Connection:
        database: sqlite3.Connection = connect(*args, **options)
        database.set_trace_callback(copy)
        return database

    connect = sqlite3.connect
    if lost:
        path.write_bytes(b"this is no database")
    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", traced)
        Spool(path).close()
    assert len(copies) > 10
    for each in copies:
        with contextlib.closing(sqlite3.connect(each)) as database, contextlib.suppress(sqlite3.DatabaseError):
            if database.execute("PRAGMA user_version").fetchone() == (1,):
                assert database.execute("SELECT count(*) FROM usage").fetchone() == (1,)
                assert database.execute("SELECT count(*) FROM lost").fetchone() == (int(lost),)
        assert add(Spool(each)) >= spool_module.FIRST_SEQ_MIN


def test_a_spool_that_cannot_be_opened_says_so_at_each_use_until_it_works(tmp_path: Path) -> None:
    path = tmp_path / "nowhere" / "telemetry.db"
    spool = Spool(path)
    with pytest.raises(StorageFailed, match="folder"):
        add(spool)
    path.parent.mkdir()
    add(spool)
    assert spool.stats().rows == 1
    assert not spool.stats().lost


def test_a_payload_that_cannot_be_built_leaves_no_message(path: Path) -> None:
    spool = Spool(path)
    with pytest.raises(ZeroDivisionError):
        spool.append("s", "t", lambda seq: {"x": 1 / 0}, 1, "hist")
    assert spool.stats().rows == 0
    first = add(spool)
    assert spool.append("s", "t", lambda seq: {}, 1, "hist") == first


def test_the_last_message_of_a_retained_topic_is_kept_and_only_later_changes_are_returned(path: Path) -> None:
    spool = Spool(path)
    spool.retain("deploy", {"digits_active": "r1"})
    spool.retain("deploy", {"digits_active": "r2"})
    spool.retain("other", {})
    last = spool.retained("deploy")
    assert last is not None
    assert last.payload == b'{"digits_active":"r2"}'
    assert spool.retained("deploy", last.version) is None
