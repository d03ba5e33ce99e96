"""A store that cannot be used is named, without its password."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edgert.errors import ConfigInvalid, EdgeRTError
from edgert_deploy.cli.fleet.query import query
from edgert_deploy.fleet.store import schema
from edgert_deploy.fleet.store.database import StoreFailed
from edgert_deploy.fleet.store.query import FleetQuery
from edgert_deploy.fleet.store.store import Store
from tests.support.fleet import NOW_MS, Pi, ask, record


@pytest.fixture
def url(store_url: str) -> str:
    return store_url


def cli(url: str, *words: str) -> Result:
    return CliRunner().invoke(query, ["--store", url, *words])


def test_the_error_about_a_damaged_store_says_that_the_file_is_damaged(tmp_path: Path) -> None:
    url = str(tmp_path / "fleet.db")
    Store(url).close()
    whole = Path(url).read_bytes()
    Path(url).write_bytes(whole[: len(whole) // 2])
    for use in (Store, FleetQuery):
        with pytest.raises(StoreFailed, match="the file is damaged: move it away"):
            use(url)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE edgert_group_minute SET buckets = x'ff7f0100000000000000'",
        "UPDATE edgert_group_minute SET buckets = x'ff7f'",
        "UPDATE edgert_group_minute_stages SET stages = x'789c00'",
    ],
)
def test_damage_that_sqlite_does_not_notice_is_reported_like_other_damage(tmp_path: Path, damage: str) -> None:
    url, pi = str(tmp_path / "fleet.db"), Pi("pi-1")
    record(url, pi.window(NOW_MS - 1, [1.0, 2.0], engine=[1.0]))
    with closing(sqlite3.connect(url)) as store, store:
        assert store.execute(damage).rowcount
    with pytest.raises(StoreFailed, match="the file is damaged: move it away"):
        ask(url, 1, ("model",), step_min=1, stages=True)
    with pytest.raises(StoreFailed, match="the file is damaged: move it away"):
        record(url, pi.window(NOW_MS - 1, [1.0], engine=[1.0]))


def test_damage_to_an_event_is_reported_like_other_damage(tmp_path: Path) -> None:
    url = str(tmp_path / "fleet.db")
    record(url, Pi("pi-1").rolled_back(2, "off"))
    with closing(sqlite3.connect(url)) as store, store:
        assert store.execute("UPDATE edgert_event SET fields = '{'").rowcount
    with closing(FleetQuery(url)) as query, pytest.raises(StoreFailed, match="the file is damaged: move it away"):
        query.failures(0, 2 * NOW_MS)


def test_damage_to_a_name_is_reported_like_other_damage(tmp_path: Path) -> None:
    url = str(tmp_path / "fleet.db")
    Store(url).close()
    name = schema.hist_window.name.encode()
    Path(url).write_bytes(Path(url).read_bytes().replace(name, b"\xa5" * len(name), 1))
    for use in (Store, FleetQuery):
        with pytest.raises(StoreFailed, match="the file is damaged: move it away"):
            use(url)


@pytest.mark.parametrize(
    ("store", "said"),
    [
        ("/nowhere/fleet.db", "there is no store /nowhere/fleet.db"),
        ("mysql://db/fleet", "postgresql"),
        (__file__, "give the file of a store"),
        ("/tmp", "give the file of a store"),
        ("postgresql://ops:secret@127.0.0.1:1/fleet", "cannot be used"),
    ],
)
def test_a_store_that_cannot_be_used_is_named_without_its_password(store: str, said: str) -> None:
    error = cli(store).exception
    assert isinstance(error, EdgeRTError)
    assert said in error.message
    assert "secret" not in error.message


def test_a_folder_with_the_name_of_a_database_does_not_change_the_advice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fleet").mkdir()
    monkeypatch.chdir(tmp_path)
    error = cli("postgresql://ops@127.0.0.1:1/fleet").exception
    assert isinstance(error, EdgeRTError)
    assert "check that the server runs, and check host, port, user and database" in error.message


def test_an_empty_store_and_a_store_of_a_newer_version_are_errors(url: str, tmp_path: Path) -> None:
    (tmp_path / "empty.db").touch()
    with pytest.raises(StoreFailed, match="no reports yet"):
        FleetQuery(f"{tmp_path}/empty.db")
    store = Store(url)
    with store._database.engine.begin() as connection:
        connection.execute(schema.meta.update().values(version=99))
    store.close()
    with pytest.raises(ConfigInvalid, match="schema 99"):
        FleetQuery(url)
