"""Ids are read once, missing rows are inserted, and the cache has a limit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from edgert_deploy.fleet.store import database, row_ids, schema
from edgert_deploy.fleet.store.row_ids import RowIds


@pytest.fixture
def connection(store_url: str) -> Iterator[sa.Connection]:
    engine = database.open_engine(store_url, writes=True)
    with engine.begin() as connection:
        yield connection
    engine.dispose()


def test_two_caches_give_the_same_id_to_a_row(connection: sa.Connection) -> None:
    first, second = (RowIds(schema.device, "site", "device") for _ in range(2))
    first.load(connection, [("plant-a", "pi-1"), ("plant-a", "pi-2"), ("plant-b", "pi-1")])
    assert second.get(connection, ("plant-a", "pi-2")) == first["plant-a", "pi-2"]
    assert len({first["plant-a", "pi-1"], first["plant-a", "pi-2"], first["plant-b", "pi-1"]}) == 3
    assert connection.scalar(sa.select(sa.func.count()).select_from(schema.device)) == 3


def test_a_full_cache_is_emptied_and_keeps_the_rows_of_the_call(
    connection: sa.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_ids, "CACHED_MAX", 1)
    ids = RowIds(schema.device, "site", "device")
    ids.load(connection, [("plant-a", "pi-1"), ("plant-a", "pi-2")])
    known = ids["plant-a", "pi-2"]
    ids.load(connection, [("plant-a", "pi-2"), ("plant-a", "pi-3")])
    assert ids["plant-a", "pi-2"] == known
    with pytest.raises(KeyError):
        ids["plant-a", "pi-1"]
