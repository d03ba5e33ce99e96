"""A store of an older version becomes a store of this version, with its reports and its gaps."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest
import sqlalchemy as sa

from edgert.errors import ConfigInvalid
from edgert_deploy.fleet.store import database, schema
from edgert_deploy.fleet.store.batch import MINUTE_MS
from edgert_deploy.fleet.store.database import StoreFailed
from edgert_deploy.fleet.store.migrations import MIGRATIONS, SCHEMA_VERSION
from edgert_deploy.fleet.store.query import FleetQuery
from edgert_deploy.fleet.store.store import Store
from tests.support.fleet import NOW_MS, Pi, ask, record
from tests.support.paths import ROOT

_SLOW = sa.text("SELECT pg_sleep(1.5)")
DUMPS = ROOT / "tests" / "support" / "stores"


@pytest.fixture
def old_url(store_url: str) -> str:
    """Return a store of the first version: six windows of pi-1, and four of pi-2, where two more are missing."""
    if "postgresql" in store_url:
        engine = sa.create_engine(store_url.replace("postgresql:", "postgresql+psycopg:"))
        with engine.begin() as connection:
            connection.exec_driver_sql((DUMPS / "version-1-postgresql.sql").read_text())
            # The form of the first stores.
            bound = "ALTER TABLE public.edgert_group_hour ADD FOREIGN KEY (owner) REFERENCES public.edgert_group"
            connection.exec_driver_sql(bound)
        engine.dispose()
    else:
        with sqlite3.connect(store_url.removeprefix("sqlite:///")) as database:
            database.executescript((DUMPS / "version-1-sqlite.sql").read_text())
        database.close()
    return store_url


def columns(url: str) -> dict[str, set[str]]:
    engine = database.open_engine(url, writes=False)
    inspector = sa.inspect(engine)
    found = {
        table: {column["name"] for column in inspector.get_columns(table)} for table in inspector.get_table_names()
    }
    found |= {
        f"{table} indexes": {str(index["name"]) for index in inspector.get_indexes(table)} for table in list(found)
    }
    found |= {
        f"{table} bound": {str(key["name"]) for key in inspector.get_foreign_keys(table)}
        for table in ("edgert_group_hour",)
    }
    engine.dispose()
    return found


def test_a_store_of_the_first_version_is_migrated_with_its_gaps(old_url: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match=r"schema 1.*edgert fleet record"):
        FleetQuery(old_url)
    said: list[str] = []
    Store(old_url, said.append).close()
    assert ["from schema 1 to 4. It has 10 windows; " in line for line in said] == [True]
    answers = {answer.group["device"]: answer for answer in ask(old_url, 1, ("device",))}
    engine = database.open_engine(old_url, writes=False)
    with engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT count(*) FROM edgert_hour_percentile")) > 0
    engine.dispose()
    assert {device: (answer.windows, answer.missing) for device, answer in answers.items()} == {
        "pi-1": (6, {}),
        "pi-2": (4, {"plant-a/pi-2": 2}),
    }
    pi = Pi("pi-2")
    pi.seq = 7  # the seventh report never arrives
    assert record(old_url, pi.window(NOW_MS - 1, [1.0])).duplicates == 0
    assert ask(old_url, 1, device="pi-2")[0].missing == {"plant-a/pi-2": 3}
    pi.seq = 2
    record(old_url, pi.window(NOW_MS - 4 * MINUTE_MS, [1.0]))
    assert ask(old_url, 1, device="pi-2")[0].missing == {"plant-a/pi-2": 2}
    Store(old_url, said.append).close()
    assert len(said) == 1  # the migration is reported once
    new = f"{tmp_path}/new.db"
    Store(new, said.append).close()
    assert len(said) == 1
    found = columns(old_url)
    assert found["edgert_group_hour bound"] == set()
    if "postgresql" not in old_url:
        assert found == columns(new)
    assert SCHEMA_VERSION == 4


def test_a_migration_may_take_longer_than_a_query(store_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "postgresql" not in store_url:
        pytest.skip("SQLite has no limit")
    Store(store_url).close()
    monkeypatch.setattr(database, "STATEMENT_TIMEOUT_S", 1)
    engine = database.new_engine(store_url, writes=True)
    with pytest.raises(StoreFailed, match="longer than 1 s"), database.transaction(engine) as connection:
        connection.execute(_SLOW)
    with database.transaction(engine) as connection:
        connection.execute(schema.meta.update().values(version=SCHEMA_VERSION - 1))
    engine.dispose()
    monkeypatch.setattr(database, "MIGRATIONS", (*MIGRATIONS[:-1], lambda connection: connection.execute(_SLOW)))
    Store(store_url).close()
    FleetQuery(store_url).close()


def test_a_store_of_version_3_keeps_its_merged_rows_and_views(store_url: str) -> None:
    pi = Pi("pi-1")
    record(store_url, pi.window(NOW_MS - 1, [1.0, 2.0]))
    engine = database.open_engine(store_url, writes=True)
    with engine.begin() as connection:
        for merged in ("group_minute", "group_hour", "stream_hour"):
            for table in (f"edgert_{merged}", f"edgert_{merged}_stages"):
                connection.exec_driver_sql(f"ALTER TABLE {table} RENAME COLUMN time_bin TO slot")
        connection.exec_driver_sql("UPDATE edgert_meta SET version = 3")
    engine.dispose()
    record(store_url, pi.window(NOW_MS - 1, [3.0]))
    assert [answer.latency.count for by in ((), ("device",)) for answer in ask(store_url, 1, by)] == [3, 3]
    engine = database.open_engine(store_url, writes=False)
    with engine.connect() as connection:
        assert connection.scalar(sa.text("SELECT sum(count) FROM edgert_hour_bucket")) == 3
    engine.dispose()
