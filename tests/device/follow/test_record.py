"""The follower's record is either complete or missing."""

from __future__ import annotations

from pathlib import Path

from edgert.bundle.channel import Statement, sign_statement
from edgert.bundle.signing import SigningKey, new_key
from edgert.follow.record import CHANNELS_MAX, Attempt, Record, RecordStore
from edgert.state_dir import StateDir

TIMES = ("2026-01-01T00:00:00Z", "2099-01-01T00:00:00Z")


def statement(channel: str = "stable", counter: int = 1) -> Statement:
    return Statement(channel, counter, *TIMES, ())


def test_a_record_is_read_back_and_a_damaged_record_is_read_as_empty(tmp_path: Path) -> None:
    records = RecordStore(StateDir(tmp_path))
    record = Record({"stable": 7}, "oci://r/x stable", "sha256:ab", {"digits": Attempt("a", "why")})
    records.write(record)
    assert records.read() == record
    (tmp_path / "follow" / "record.json").write_bytes(b'{"counters": 5}')
    assert records.read() == Record()


def test_the_kept_statement_is_verified_each_time_it_is_read(tmp_path: Path, signing_key: SigningKey) -> None:
    records = RecordStore(StateDir(tmp_path))
    assert records.statement("stable", (signing_key.public,)) is None
    records.accept(sign_statement(statement(), signing_key), Record())
    assert records.statement("stable", (signing_key.public,)) == statement()
    assert records.statement("stable", (new_key().public,)) is None
    assert records.statement("canary", (signing_key.public,)) is None


def test_each_channel_has_its_own_counter_and_the_number_of_counters_is_limited() -> None:
    record = Record().with_statement(statement("stable", 7), "s", "m").with_statement(statement("canary", 2), "c", "n")
    assert record.counters == {"stable": 7, "canary": 2}
    for number in range(CHANNELS_MAX):
        record = record.with_statement(statement(f"c{number}"), "s", "m")
    assert len(record.counters) == CHANNELS_MAX


def test_a_model_that_has_left_the_channel_is_forgotten() -> None:
    assert Record(tried={"digits": Attempt("a")}).with_statement(statement(), "s", "m").tried == {}
