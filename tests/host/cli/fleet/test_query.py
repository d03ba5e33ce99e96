"""`edgert fleet query`: a table, JSON, and the errors for wrong options."""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edgert.errors import ConfigInvalid
from edgert.telemetry.sketch import Sketch, merged
from edgert_deploy.cli.fleet.query import query
from edgert_deploy.fleet.store.results import time_text
from tests.support.fleet import NOW_MS, Pi, Sent, record, without
from tests.support.sketches import index_of


@pytest.fixture
def url(store_url: str) -> str:
    return store_url


def cli(url: str, *words: str) -> Result:
    return CliRunner().invoke(query, ["--store", url, *words])


def test_the_command_prints_groups_as_a_table_and_as_json(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fast, slow = Pi("pi-1", "r1", "nuc"), Pi("pi-2", "r2", "pi")
    sent = fast.info() + slow.info() + fast.window(NOW_MS - 1, [1.0] * 99 + [9.0]) + slow.window(NOW_MS - 1, [7.0])
    record(url, sent)
    monkeypatch.setattr("time.time_ns", lambda: NOW_MS * 1_000_000)
    words = ("--model", "digits", "--period", "1h", "--by", "version,profile", "--percentiles", "50,95,99.9")
    table = cli(url, *words)
    assert table.exit_code == 0, table.output
    heading, first, second = (line.split() for line in table.stdout.splitlines())
    assert heading[:7] == ["version", "profile", "windows", "missing", "answered", "rate_per_s", "p50_ms"]
    assert (first[:4], second[:4]) == (["r1", "nuc", "1", "0"], ["r2", "pi", "1", "0"])
    groups = json.loads(cli(url, *words, "--json").stdout)["groups"]
    assert groups[0]["p50_ms"] == pytest.approx(1.0, rel=0.011)
    assert (groups[0]["p99.9_ms"], groups[1]["p50_ms"], groups[0]["rate_per_s"]) == (9.0, 7.0, 0.028)
    assert cli(url, "--model", "faces").stderr == (
        f"no matching reports from {time_text(NOW_MS - 3_600_000)} to {time_text(NOW_MS)} --model faces\n"
    )


def test_an_answer_states_the_whole_minutes_that_it_covers(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record(url, [])
    assert re.match(r"the store \S+ has no reports yet", cli(url).stderr)
    record(url, Pi("pi-1").window(NOW_MS - 1, [1.0] * 120))
    monkeypatch.setattr("time.time_ns", lambda: (NOW_MS + 30_000) * 1_000_000)
    answer = json.loads(cli(url, "--period", "1m", "--json").stdout)
    assert (answer["since_ms"], answer["until_ms"]) == (NOW_MS - 60_000, NOW_MS + 60_000)
    assert answer["groups"][0]["rate_per_s"] == 1.0  # 120 requests in these two minutes
    assert "at least 1m" in cli(url, "--period", "30s").output


def test_missing_reports_and_old_reports_and_unsynchronized_clocks_are_reported_with_the_answer(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    holed, unsure = Pi("pi-1"), Pi("pi-2")
    sent = [message for n in range(6) for message in holed.window(NOW_MS - (6 - n) * 60_000, [1.0])]
    record(url, without(sent, 3, 4) + unsure.window(NOW_MS - 9_000_000, [2.0], clock_synced=0))
    monkeypatch.setattr("time.time_ns", lambda: (NOW_MS + 600_000) * 1_000_000)
    said = cli(url)
    assert [line.split()[2:4] for line in said.stdout.splitlines()] == [["windows", "missing"], ["5", "2"]]
    for words in (
        "2 of 7 reports (28.6%) missing, from plant-a/pi-1 (2)",
        "times are times of receipt for devices whose clock is not synchronized: plant-a/pi-2",
        "the newest report in the store is 10 min old",
    ):
        assert words in said.stderr
    answer = json.loads(cli(url, "--json").stdout)
    assert (answer["newest_ms"], answer["missing_devices"]) == (NOW_MS, {"plant-a/pi-1": 2})
    assert (answer["clocks_not_synchronized"], answer["groups"][0]["missing"]) == (["plant-a/pi-2"], 2)


def test_csv_with_buckets_can_be_merged_elsewhere_to_the_same_answer(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pis = [Pi("pi-1", "r1"), Pi("pi-2", "r2")]
    record(
        url, [m for n, pi in enumerate(pis) for m in pi.info() + pi.window(NOW_MS - 1, [1.0 + n, 0.0, 30.0 * (n + 1)])]
    )
    monkeypatch.setattr("time.time_ns", lambda: NOW_MS * 1_000_000)
    rows = list(csv.DictReader(io.StringIO(cli(url, "--buckets", "--csv").stdout)))
    assert [(row["model"], row["version"], row["answered"]) for row in rows] == [
        ("digits", "r1", "3"),
        ("digits", "r2", "3"),
    ]
    parts = [
        Sketch.decode(
            row["buckets"],
            zero=int(row["zero"]),
            sum_ms=float(row["sum_ms"]),
            min_ms=float(row["min_ms"]),
            max_ms=float(row["max_ms"]),
        )
        for row in rows
    ]
    (whole,) = json.loads(cli(url, "--buckets", "--by", "", "--json").stdout)["groups"]
    assert merged(parts).encode() == whole["buckets"]
    assert merged(parts).sum == whole["sum_ms"] == 93.0
    assert "buckets" not in cli(url, "--csv").stdout


def test_the_stages_of_each_group_show_where_the_time_goes(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Sent()
    for name, profile, slow_ms in (("pi-1", "nuc", 2.0), ("pi-2", "pi", 8.0), ("pi-3", "pi", 32.0)):
        pi = Pi(name, "r1", profile)
        stages = pi.window(NOW_MS - 1, [9.0] * 100, decode=[0.0] * 100, queue=[0.5] * 40, engine=[slow_ms] * 40)
        sent += pi.info() + stages
    record(url, sent)
    monkeypatch.setattr("time.time_ns", lambda: NOW_MS * 1_000_000)
    words = ("--stages", "--by", "profile", "--percentiles", "50,99")
    heading, *rows = (line.split() for line in cli(url, *words).stdout.splitlines())
    assert heading == ["profile", "stage", "answered", "share", "p50_ms", "p99_ms", "max_ms"]
    assert [row[:3] for row in rows] == [
        [profile, stage, str(count)]
        for profile, devices in (("nuc", 1), ("pi", 2))
        for stage, count in (("decode", 100 * devices), ("queue", 40 * devices), ("engine", 40 * devices))
    ]
    groups = json.loads(cli(url, *words, "--buckets", "--json").stdout)["groups"]
    decode, queue, engine = groups[3:]
    assert (decode["share"], decode["p99_ms"], decode["zero"], decode["buckets"]) == (0.0, 0.0, 200, "")
    assert (engine["p50_ms"], engine["p99_ms"]) == (pytest.approx(8, rel=0.011), pytest.approx(32, rel=0.011))
    assert (queue["share"], engine["share"]) == (pytest.approx(1 / 41, rel=0.03), pytest.approx(40 / 41, rel=0.03))
    assert engine["buckets"] == f"{index_of(8.0)}:40,{index_of(32.0)}:40"
    assert [row["stage"] for row in csv.DictReader(io.StringIO(cli(url, *words, "--csv").stdout))][:2] == [
        "decode",
        "queue",
    ]


def test_devices_that_report_no_stages_are_mentioned(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    record(url, Pi("old").window(NOW_MS - 1, [1.0]))
    monkeypatch.setattr("time.time_ns", lambda: NOW_MS * 1_000_000)
    assert "no stages in the matching reports" in cli(url, "--stages").stderr
    assert "(1): upgrade the devices' runtime" in cli(url, "--stages").stderr
    assert "no matching reports" in cli(url, "--stages", "--model", "faces").stderr


def test_a_percentile_is_taken_at_its_exact_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url, pi = f"{tmp_path}/fleet.db", Pi("pi-1")
    # 99.9 % of 1000 is the 999th, though 99.9 / 100 * 1000 is more than 999 as a float.
    record(url, pi.info() + pi.window(NOW_MS - 1, [1.0] * 999 + [500.0]))
    monkeypatch.setattr("time.time_ns", lambda: NOW_MS * 1_000_000)
    (group,) = json.loads(cli(url, "--percentiles", "99.9,99.90,99.91", "--json").stdout)["groups"]
    assert group["p99.9_ms"] == group["p99.90_ms"] == pytest.approx(1.0, rel=0.011)
    assert group["p99.91_ms"] == 500.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--by", "weather"), "known: site, device"),
        (("--percentiles", "101"), "between 0 and 100"),
        (("--percentiles", "1e-999999999"), "such as 50,95,99.9"),
        (("--percentiles", "many"), "such as 50,95,99.9"),
        (("--step", "90s"), "whole minutes"),
        (("--step", "1m", "--period", "60d"), "choose longer"),
    ],
)
def test_invalid_words_are_explained(tmp_path: Path, words: tuple[str, ...], said: str) -> None:
    error = cli(f"{tmp_path}/fleet.db", *words).exception
    assert isinstance(error, ConfigInvalid)
    assert said in error.message


def test_two_forms_of_output_are_a_usage_error(tmp_path: Path) -> None:
    assert cli(f"{tmp_path}/fleet.db", "--csv", "--json").exit_code == 2
