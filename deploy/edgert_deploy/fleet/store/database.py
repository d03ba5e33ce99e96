"""The database of a store: its URL, connections, creation and migration. Translates its errors."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from edgert.errors import ConfigInvalid, EdgeRTError
from edgert.printable import counted
from edgert_deploy.fleet.packed_histograms import DamagedData
from edgert_deploy.fleet.store import schema, views
from edgert_deploy.fleet.store.migrations import MIGRATIONS, SCHEMA_VERSION

BUSY_TIMEOUT_S = 15.0
STATEMENT_TIMEOUT_S = 120
# Options of libpq. With these limits, libpq reports a lost link within about a minute, even on an idle connection.
LINK_LIMITS = {
    "connect_timeout": 10,
    "tcp_user_timeout": 30_000,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
}

_MOVE_AWAY = "the file is damaged: move it away to begin a new store, or restore a copy (docs/sql.md)"

Row = Mapping[str, Any]  # the values of a row by column


class StoreFailed(EdgeRTError, code="fleet.store_failed", exit_code=6, retryable=True):
    """The database failed: it is unreachable, read-only, full, or not a store."""


class NoReports(StoreFailed):
    """The database has no tables of reports: it is empty, or it has only a team's rollouts."""


class OpenStore:
    """The engine of a store of reports. It opens the store again after its file was removed or replaced.

    Every method raises ConfigInvalid or StoreFailed.
    """

    def __init__(self, url: str, *, writes: bool, log: Callable[[str], None] = lambda line: None) -> None:
        """Open the store as `open_engine` does. Later, `log` receives a line about each replaced file."""
        self._url = url
        self._writes = writes
        self._log = log
        self.engine = open_engine(url, writes=writes, log=log)
        self.openings = 1
        self._file = _file_of(self.engine)

    @property
    def name(self) -> str:
        """The store's URL without its password."""
        return shown(self.engine.url)

    def transaction(self) -> AbstractContextManager[sa.Connection]:
        """Give a connection in a transaction."""
        file = _file_of(self.engine)
        if file != self._file:
            self._reopen(file)
        return transaction(self.engine)

    def close(self) -> None:
        self.engine.dispose()

    def _reopen(self, file: tuple[int, int] | None) -> None:
        """Open the present file, or create one. Reports that are written to a removed file are lost."""
        self.engine.dispose()
        self.engine = open_engine(self._url, writes=self._writes, log=self._log)
        self.openings += 1
        self._file = file or _file_of(self.engine)
        self._log(f"the store {self.name} was removed or replaced: reports go to the new file")


def open_engine(url: str, *, writes: bool, log: Callable[[str], None] = lambda line: None) -> sa.Engine:
    """Connect to a store of reports. Raises ConfigInvalid or StoreFailed.

    Args:
        url: The store, in a form that `new_engine` describes.
        writes: Whether to create a missing store, and to migrate an older store.
        log: Receives a line about a migration, which may be slow.
    """
    engine = new_engine(url, writes=writes)
    with transaction(engine) as connection:
        if writes:
            lock(connection)  # otherwise two processes could create the tables at the same time and fail
            _create_or_migrate(connection, log)
            if connection.scalar(sa.select(sa.func.count()).select_from(schema.forgotten)) == 0:
                connection.execute(schema.forgotten.insert().values(turns=0))
        version = connection.scalar(sa.select(schema.meta.c.version))
    if version != SCHEMA_VERSION:
        older = version and version < SCHEMA_VERSION
        advice = "run `edgert fleet record` on this store" if older else "update edgert, or use another store"
        raise ConfigInvalid(f"the store {shown(engine.url)} has schema {version}, not {SCHEMA_VERSION}: {advice}")
    return engine


@contextmanager
def transaction(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Give a connection in a transaction. Raises StoreFailed."""
    with translated(engine), engine.begin() as connection:
        yield connection


@contextmanager
def translated(engine: sa.Engine) -> Iterator[None]:
    """Raise StoreFailed for each error of the database in the block."""
    try:
        yield
    except SQLAlchemyError as error:
        raise _failed(engine.url, error) from error
    except (
        DamagedData,
        UnicodeDecodeError,
    ) as error:  # sqlite3 raises the latter if its own error quotes a damaged name
        raise StoreFailed(f"the store {shown(engine.url)} cannot be used: {error}; {_MOVE_AWAY}") from error


def new_engine(url: str, *, writes: bool) -> sa.Engine:
    """Return the engine of a store. Raises ConfigInvalid.

    Unless it `writes`, the file of a SQLite store must exist.

    `url` is a file name, `sqlite:///FILE` or `postgresql://[USER[:PASSWORD]@]HOST[:PORT]/DATABASE`. `ps` shows a
    password in the URL to every user, so users should write their password into ~/.pgpass.
    """
    parsed = _parsed(url)
    if parsed.get_backend_name() == "sqlite":
        if not parsed.database or parsed.database == ":memory:":
            raise ConfigInvalid("a store in memory ends with the command: give a file, such as sqlite:///fleet.db")
        if not writes and not os.path.exists(parsed.database):
            raise ConfigInvalid(f"there is no store {parsed.database}: edgert fleet record --store FILE creates one")
        return _sqlite(parsed, writes)
    options = f"-c statement_timeout={STATEMENT_TIMEOUT_S * 1000}"
    return sa.create_engine(parsed, pool_pre_ping=True, connect_args={**LINK_LIMITS, "options": options})


def update_rows(connection: sa.Connection, table: sa.Table, key: Collection[str], rows: Sequence[Row]) -> None:
    """Write each row's values into the stored row with the same `key`. All rows have the same columns."""
    if rows:
        same = (table.c[name] == sa.bindparam(f"_{name}") for name in key)
        values: dict[str, Any] = {name: sa.bindparam(name) for name in rows[0] if name not in key}
        renamed = [{f"_{name}" if name in key else name: value for name, value in row.items()} for row in rows]
        connection.execute(table.update().where(*same).values(values), renamed)


def _create_or_migrate(connection: sa.Connection, log: Callable[[str], None]) -> None:
    """Create missing tables and migrate an older store to this version. A newer store stays unchanged."""
    version = (
        connection.scalar(sa.select(schema.meta.c.version))
        if sa.inspect(connection).has_table(schema.meta.name)
        else None
    )
    if version is not None and version > SCHEMA_VERSION:
        return
    has_views = sa.inspect(connection).has_table(schema.bucket.name)
    schema.metadata.create_all(connection)
    if version is not None and version < SCHEMA_VERSION:
        if connection.dialect.name == "postgresql":  # a migration of a large store may take longer than a query may
            connection.execute(sa.text("SET LOCAL statement_timeout = 0"))
        windows = connection.scalar(sa.select(sa.func.count()).select_from(schema.metrics_window)) or 0
        log(
            f"updating the store {shown(connection.engine.url)} once, from schema {version} to {SCHEMA_VERSION}. It has "
            f"{counted(windows, 'window')}; a large store takes minutes. Let the update finish; if you stop it, nothing is lost"
        )
    for migrate in MIGRATIONS[(version or SCHEMA_VERSION) - 1 :]:
        migrate(connection)
    if not has_views:
        views.create(connection, schema.bucket)
    changed = schema.meta.insert() if version is None else schema.meta.update()
    connection.execute(changed.values(version=SCHEMA_VERSION))


def insert(connection: sa.Connection, table: sa.Table) -> postgresql.Insert | sqlite.Insert:
    """Return an INSERT statement that supports ON CONFLICT."""
    return postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)


def lock(connection: sa.Connection) -> None:
    """Lock the store for one writer until the transaction ends. SQLite needs no such lock."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.text("SELECT pg_advisory_xact_lock(730541)"))


def _file_of(engine: sa.Engine) -> tuple[int, int] | None:
    """Return device and inode of a SQLite file; None if it is missing. A replaced file has other numbers."""
    if engine.dialect.name != "sqlite":
        return None
    try:
        found = os.stat(engine.url.database or "")
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _failed(url: sa.URL, error: SQLAlchemyError) -> StoreFailed:
    """Translate an error of the database, with advice for the user."""
    reason = next(iter(str(getattr(error, "orig", None) or error).strip().splitlines()), type(error).__name__)
    if "no such table" in reason or ("does not exist" in reason and "edgert_" in reason):
        name = shown(url)
        return NoReports(f"the store {name} has no reports yet; `edgert fleet record --store {name}` fills it")
    is_folder = url.get_backend_name() == "sqlite" and os.path.isdir(url.database or "")
    advice = "check that its folder exists, is writable and has free space"
    if url.get_backend_name() == "postgresql":
        advice = "check that the server runs, and check host, port, user and database"
    if "not a database" in reason or is_folder:
        advice = "give the file of a store"
    if "statement timeout" in reason:
        advice = f"a statement took longer than {STATEMENT_TIMEOUT_S} s: try again later, or ask for a shorter period"
    # Without a text, the reason is the error's class: Python 3.10 drops a text that quotes a damaged name.
    if "malformed" in reason or reason == "DatabaseError":
        advice = _MOVE_AWAY
    return StoreFailed(f"the store {shown(url)} cannot be used: {reason}; {advice}")


def shown(url: sa.URL) -> str:
    """Return the URL without its password."""
    return url.render_as_string(hide_password=True).replace("postgresql+psycopg", "postgresql")


def _parsed(url: str) -> sa.URL:
    text = url if "://" in url else f"sqlite:///{url}"
    try:
        parsed = sa.make_url(text)
        if parsed.drivername in ("postgresql", "postgres"):
            parsed = parsed.set(drivername="postgresql+psycopg")
        parsed.get_dialect()
    except (ArgumentError, NoSuchModuleError, ValueError) as error:
        raise ConfigInvalid(
            f"--store {url!r} is not a store: give a file, sqlite:///FILE or postgresql://USER@HOST/DATABASE"
        ) from error
    if parsed.get_backend_name() not in ("sqlite", "postgresql"):
        raise ConfigInvalid(f"--store {url!r}: {parsed.get_backend_name()} is not supported; use sqlite or postgresql")
    return parsed


def _sqlite(url: sa.URL, writes: bool) -> sa.Engine:
    engine = sa.create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S})

    # Without these listeners, the driver would begin transactions late, and two writers would deadlock.
    @sa.event.listens_for(engine, "connect")
    def _connected(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None
        if writes:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA cache_size = -32768")  # a negative number is a size in KiB

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine
