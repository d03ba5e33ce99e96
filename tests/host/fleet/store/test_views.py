"""The views of the store, and the SQL of docs/sql.md, answer as `edgert fleet query` does, in SQLite and PostgreSQL."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

import pytest
import sqlalchemy as sa

from edgert_deploy.fleet.store import database
from edgert_deploy.fleet.store.batch import HOUR_MIN, MINUTE_MS
from edgert_deploy.fleet.store.query import Answer, FleetQuery, Question
from tests.support.fleet import NOW_MS, Pi, a_fleet, record, replayed
from tests.support.paths import ROOT
from tests.support.servers.databases import new_database

HOUR_MS = HOUR_MIN * MINUTE_MS
SINCE_HOUR = NOW_MS // HOUR_MS - 3
_BLOCKS = re.findall(r"^```sql\n(.*?)^```", (ROOT / "docs" / "sql.md").read_text(), re.M | re.S)


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a store that tests only read: requests of 0 ms, many versions, and one group with a single request."""
    if request.param == "sqlite":
        store_url = f"sqlite:///{tmp_path_factory.mktemp('views')}/fleet.db"
    else:
        store_url = new_database(request.getfixturevalue("postgres_server"))
    seldom = Pi("seldom", version="r9")
    idle = seldom.info() + seldom.window(NOW_MS - 1, [7.0])
    zeros = Pi("zeros", version="r1")
    sent = zeros.info() + zeros.window(NOW_MS - 1, [0.0] * 9 + [3.0])
    assert record(store_url, [*replayed(a_fleet()), *idle, *sent]).refused == 0
    return store_url


def rows(url: str, text: str) -> list[dict[str, Any]]:
    engine = database.open_engine(url, writes=False)
    asked = sa.text(text)
    given = {"since_hour": SINCE_HOUR} if ":since_hour" in text else {}
    with engine.connect() as connection:
        found = [dict(row) for row in connection.execute(asked, given).mappings()]
    engine.dispose()
    return found


def asked(url: str, by: tuple[str, ...], step_min: int = 0) -> list[Answer]:
    """Return the answer for the time from SINCE_HOUR to the end of this hour."""
    fleet = FleetQuery(url)
    question = Question(SINCE_HOUR * HOUR_MS, NOW_MS // HOUR_MS * HOUR_MS + HOUR_MS, by, {"model": "digits"}, step_min)
    answers = fleet.answer(question, NOW_MS)
    fleet.close()
    return answers


def test_percentiles_of_the_view_are_those_of_the_query(url: str) -> None:
    by = ("site", "model", "version", "profile")
    expected = {
        (answer.start_ms // HOUR_MS, *answer.group.values(), percentile): (answer.latency.count, answer.latency.quantile(Fraction(percentile, 100)))
        for answer in asked(url, by, HOUR_MIN)
        for percentile in (50, 95, 99)
        if answer.latency.count
    }  # fmt: skip
    found = rows(url, "SELECT * FROM edgert_hour_percentile WHERE hour >= :since_hour")
    assert len(found) == len(expected) > 40
    for row in found:
        key = (row["hour"], *(row[name] for name in by), row["percentile"])
        assert (row["answered"], row["value_ms"]) == expected[key], key


@pytest.mark.parametrize(
    ("view", "bin_ms", "by"),
    [
        ("edgert_minute_bucket", MINUTE_MS, ("version", "profile")),
        ("edgert_hour_bucket", HOUR_MS, ("version", "profile")),
        ("edgert_device_hour_bucket", HOUR_MS, ("device", "version", "profile")),
    ],
)
def test_buckets_of_a_view_are_those_of_the_query(url: str, view: str, bin_ms: int, by: tuple[str, ...]) -> None:
    unit, names = "minute" if bin_ms == MINUTE_MS else "hour", ", ".join(by)
    found: dict[tuple[str, ...], dict[float, int]] = {}
    for row in rows(
        url,
        f"SELECT {names}, upper_ms, sum(count) AS n FROM {view} WHERE {unit} >= :since_hour * {HOUR_MS // bin_ms}"
        f" GROUP BY {names}, upper_ms",
    ):
        found.setdefault(tuple(row[name] for name in by), {})[round(row["upper_ms"], 9)] = row["n"]
    expected = {}
    for answer in asked(url, by):
        buckets = {round(2 ** ((index + 1) / 32), 9): count for index, count in answer.latency.buckets.items()}
        expected[tuple(answer.group.values())] = buckets | ({0: answer.latency.zero} if answer.latency.zero else {})
    assert found == expected


def test_the_sql_of_the_documentation_answers_as_the_query_does(url: str) -> None:
    curve, pooled, share, errors, events = _BLOCKS
    answers = {answer.group["version"]: answer.latency for answer in asked(url, ("version",))}
    found = {row["version"]: row for row in rows(url, pooled)}
    assert found.keys() == answers.keys()
    for version in ("r1", "r2"):
        assert found[version]["answered"] == answers[version].count
        assert found[version]["p95_ms"] == answers[version].quantile(0.95)
    assert found["r9"]["p95_ms"] == pytest.approx(7.0, rel=0.0109)
    for row in rows(url, share):
        latency = answers[row["version"]]
        within = latency.zero + sum(count for index, count in latency.buckets.items() if index < 6 * 32)
        assert float(row["share"]) == pytest.approx(within / latency.count)
    assert {row["time"] // 3600 for row in rows(url, curve)} == set(range(SINCE_HOUR, SINCE_HOUR + 4))
    assert {row["site"] for row in rows(url, errors)} == {"plant-a"}
    assert rows(url, events) == []
