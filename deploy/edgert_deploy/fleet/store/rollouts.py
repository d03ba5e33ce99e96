"""The rollouts of a team in the fleet's store, and a lock for each rollout (rollout/rollout_store.py).

A lock ends with the process that holds it. In PostgreSQL, the lock belongs to a connection. For SQLite, the lock is on
a file beside the database.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import sqlalchemy as sa

from edgert.durable import is_locked, locked
from edgert_deploy.fleet.store import database, schema
from edgert_deploy.rollout.rollout_store import LOCK_S_MAX, Checksum, digest_of

_LOCKS = 730542  # the first of the two numbers of an advisory lock; the second number identifies the rollout


class StoredRollouts:
    """A TeamStore in SQLite or PostgreSQL. Raises ConfigInvalid or StoreFailed."""

    def __init__(self, url: str) -> None:
        """Connect, and create the table of rollouts if it is missing. The other tables may have any version."""
        self._engine = database.new_engine(url, writes=True)
        with database.transaction(self._engine) as connection:
            if not sa.inspect(connection).has_table(schema.rollout_line.name):
                database.lock(connection)  # otherwise two processes could create the table at the same time and fail
                schema.rollout_line.create(connection, checkfirst=True)

    def checksums(self) -> dict[str, Checksum]:
        table = schema.rollout_line
        sums = (sa.func.count(), sa.func.sum(table.c.digest % 2**31))
        with database.transaction(self._engine) as connection:
            rows = connection.execute(sa.select(table.c.rollout, *sums).group_by(table.c.rollout))
            return {id: (int(count), int(total)) for id, count, total in rows}

    def lines(self, id: str) -> list[str]:
        table = schema.rollout_line
        with database.transaction(self._engine) as connection:
            return list(connection.scalars(sa.select(table.c.line).where(table.c.rollout == id)))

    def add(self, id: str, lines: Sequence[str]) -> None:
        rows = [{"rollout": id, "digest": digest_of(line), "line": line} for line in lines]
        with database.transaction(self._engine) as connection:
            connection.execute(database.insert(connection, schema.rollout_line).on_conflict_do_nothing(), rows)

    @contextmanager
    def locked(self, id: str) -> Iterator[bool]:
        if (file := self._file(id)) is None:
            with self._connected() as connection:
                with database.translated(self._engine):
                    taken = connection.scalar(sa.select(sa.func.pg_try_advisory_lock(_LOCKS, _number(id))))
                yield bool(taken)
            return
        try:
            file.parent.mkdir(exist_ok=True)
            lock = locked(file, LOCK_S_MAX)  # it waits, because `is_locked` also holds this lock for an instant
        except BlockingIOError:
            yield False
            return
        except OSError as error:
            raise self._unusable(error) from error
        with lock:
            yield True

    def is_locked(self, id: str) -> bool:
        file = self._file(id)
        try:
            if file is not None:
                return is_locked(file)
        except OSError as error:
            raise self._unusable(error) from error
        query = sa.text(
            "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND granted AND classid = CAST(:all AS oid) "
            "AND objid = CAST(CAST(:one AS bigint) AS oid) "
            "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
        )
        with database.transaction(self._engine) as connection:
            return bool(connection.scalar(query, {"all": _LOCKS, "one": _number(id)}))

    def close(self) -> None:
        self._engine.dispose()

    def _file(self, id: str) -> Path | None:
        """Return a rollout's lock file, beside SQLite's file; None for PostgreSQL, which has its own locks."""
        if self._engine.dialect.name != "sqlite":
            return None
        return Path(f"{self._engine.url.database}-rollouts") / f"{id}.lock"

    @contextmanager
    def _connected(self) -> Iterator[sa.Connection]:
        """Give a connection without a transaction. The connection is closed after use, which ends its locks."""
        with database.translated(self._engine):
            connection = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
        try:
            yield connection
        finally:
            connection.invalidate()
            connection.close()

    def _unusable(self, error: OSError) -> database.StoreFailed:
        return database.StoreFailed(
            f"cannot lock a rollout beside {self._engine.url.database}: {error.strerror}. Check that the folder is writable, then retry"
        )


def _number(id: str) -> int:
    return int.from_bytes(hashlib.sha256(id.encode()).digest()[:4], "big") >> 1
