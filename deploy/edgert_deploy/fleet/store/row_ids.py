"""The ids of rows. Reports contain names; the store's rows refer to devices, streams and groups by id."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa

from edgert_deploy.fleet.store import database
from edgert_deploy.fleet.store.merged_rows import chunks

CACHED_MAX = 200_000

Names = tuple[Any, ...]  # the values of the columns that identify a row


class RowIds:
    """The ids of one table's rows, cached. A row that is missing is inserted."""

    def __init__(self, table: sa.Table, *columns: str) -> None:
        """`columns` identify a row of `table`."""
        self._table = table
        self._columns = [table.c[name] for name in columns]
        self._ids: dict[Names, int] = {}

    def clear(self) -> None:
        """Empty the cache: another writer may have removed the rows."""
        self._ids.clear()

    def __getitem__(self, names: Names) -> int:
        """Return the id of a row that `load` has read."""
        return self._ids[names]

    def get(self, connection: sa.Connection, names: Names) -> int:
        if names not in self._ids:
            self.load(connection, [names])
        return self._ids[names]

    def load(self, connection: sa.Connection, rows: Iterable[Names]) -> None:
        """Read the ids that are not cached; insert the missing rows."""
        wanted = set(rows)
        unknown = sorted(wanted - self._ids.keys())
        if not unknown:
            return
        if len(self._ids) > CACHED_MAX:
            self._ids.clear()
            unknown = sorted(wanted)
        values = [{column.name: value for column, value in zip(self._columns, names, strict=True)} for names in unknown]
        connection.execute(database.insert(connection, self._table).on_conflict_do_nothing(), values)
        query = sa.select(self._table.c.id, *self._columns)
        for few in chunks(unknown):
            # With the first condition, SQLite uses the index. With the second condition alone, SQLite would read a
            # whole table.
            same = (self._columns[0].in_({names[0] for names in few}), sa.tuple_(*self._columns).in_(few))
            for row in connection.execute(query.where(*same)):
                self._ids[tuple(row[1:])] = row[0]
