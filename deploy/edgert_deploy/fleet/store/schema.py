"""The store's tables, in SQLite or PostgreSQL.

Theory of operation: a report is one row in `hist_window` or `metrics_window`, whose key (stream, seq) makes repetition
harmless. In the same transaction it is added to merged rows: one for each minute and one for each hour of its group
(site, model, version, profile), and one for each hour of its stream, which keeps the device. The coarsest rows that fit
answer a question, so its cost follows the hours of the period, not the number of windows. Merging adds integers, so
every grain gives the same answer.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import ArgumentError, NoSuchModuleError, SQLAlchemyError

from edgert.errors import ConfigInvalid, EdgeRTError
from edgert.printable import counted
from edgert_deploy.fleet.reports import COUNTER_FIELDS, PROFILE_UNKNOWN
from edgert_deploy.fleet.store import views
from edgert_deploy.fleet.store.migrations import MIGRATIONS, SCHEMA_VERSION

BUSY_TIMEOUT_S = 15.0
STATEMENT_TIMEOUT_S = 120
# Options of libpq: a lost link is reported within about a minute, also on an idle connection.
LINK_LIMITS = {
    "connect_timeout": 10,
    "tcp_user_timeout": 30_000,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
}

_metadata = sa.MetaData()
# SQLite numbers rows by itself only in a plain INTEGER key.
_Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
COUNTERS = tuple(COUNTER_FIELDS)


def _names(*columns: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.String(64), nullable=False) for name in columns]


def _counters() -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.BigInteger, nullable=False, default=0) for name in COUNTERS]


meta = sa.Table("edgert_meta", _metadata, sa.Column("version", sa.Integer, nullable=False))

device = sa.Table(
    "edgert_device",
    _metadata,
    sa.Column("id", _Id, primary_key=True),
    *_names("site", "device"),
    sa.Column("profile", sa.String(64), nullable=False, default=""),
    sa.Column("status", sa.String(16), nullable=False, default="unknown"),
    sa.Column("heard_ms", sa.BigInteger, nullable=False, default=0),
    sa.Column("info", sa.Text),
    sa.Column("sys", sa.Text),
    sa.Column("deploy", sa.Text),
    sa.UniqueConstraint("site", "device"),
)
known_profile = sa.case((device.c.profile == "", PROFILE_UNKNOWN), else_=device.c.profile)

# One worker process on one device. `last_seq` and the counters are those of the newest `metrics`, so that an increase
# counts once; `hist_seq` and `hist_minute` are those of the newest `hist`, so that gaps are detected.
stream = sa.Table(
    "edgert_stream",
    _metadata,
    sa.Column("id", _Id, primary_key=True),
    sa.Column("device_id", sa.ForeignKey("edgert_device.id"), nullable=False),
    *_names("boot", "model", "version"),
    sa.Column("last_seq", sa.BigInteger, nullable=False, default=-1),
    sa.Column("hist_seq", sa.BigInteger, nullable=False, default=-1),
    sa.Column("hist_minute", sa.Integer, nullable=False, default=0),
    *_counters(),
    sa.UniqueConstraint("device_id", "boot", "model", "version"),
)

group = sa.Table(
    "edgert_group",
    _metadata,
    sa.Column("id", _Id, primary_key=True),
    *_names("site", "model", "version", "profile"),
    sa.UniqueConstraint("site", "model", "version", "profile"),
)

HISTOGRAM = ("windows", "zero", "count", "sum", "least", "most", "buckets")


def _histogram() -> list[sa.Column[Any]]:
    return [
        *(sa.Column(name, sa.BigInteger, nullable=False, default=0) for name in HISTOGRAM[:3]),
        *(sa.Column(name, sa.Double, nullable=False, default=0.0) for name in HISTOGRAM[3:6]),
        sa.Column("buckets", sa.LargeBinary, nullable=False, default=b""),
    ]


def _merged(name: str) -> sa.Table:
    """`slot` is minutes, or hours, since 1970; `owner` is a group or a stream.

    Not a foreign key: PostgreSQL would search all slots for each owner that is deleted.
    """
    return sa.Table(
        name,
        _metadata,
        sa.Column("slot", sa.Integer, primary_key=True),
        sa.Column("owner", _Id, primary_key=True, autoincrement=False),
        *_histogram(),
        *_counters(),
        sqlite_with_rowid=False,
    )


def _stages(name: str) -> sa.Table:
    """Return the table of stage times. Beside the counters, they would cost SQLite one page more a row."""
    return sa.Table(
        name,
        _metadata,
        sa.Column("slot", sa.Integer, primary_key=True),
        sa.Column("owner", _Id, primary_key=True, autoincrement=False),
        sa.Column("stages", sa.LargeBinary, nullable=False),
    )


group_minute = _merged("edgert_group_minute")
group_hour = _merged("edgert_group_hour")
stream_hour = _merged("edgert_stream_hour")
STAGES = {table.name: _stages(f"{table.name}_stages") for table in (group_minute, group_hour, stream_hour)}


def _last_heard(name: str, owner: str) -> sa.Table:
    """`hour`, since 1970, is at least the hour of the owner's newest row."""
    return sa.Table(
        name,
        _metadata,
        sa.Column("owner", sa.ForeignKey(f"{owner}.id"), primary_key=True, autoincrement=False),
        sa.Column("hour", sa.Integer, nullable=False, index=True),
    )


stream_heard = _last_heard("edgert_stream_heard", "edgert_stream")
group_heard = _last_heard("edgert_group_heard", "edgert_group")

# Changes whenever streams, groups or devices are deleted: the numbers that a writer remembers are then invalid.
forgotten = sa.Table("edgert_forgotten", _metadata, sa.Column("turns", sa.BigInteger, nullable=False))

# Reports that were sent and never arrived; see gaps.py.
gap = sa.Table(
    "edgert_gap",
    _metadata,
    sa.Column("stream", _Id, primary_key=True, autoincrement=False),
    sa.Column("first_seq", sa.BigInteger, primary_key=True),
    sa.Column("end_seq", sa.BigInteger, nullable=False),
    sa.Column("from_minute", sa.Integer, nullable=False),
    sa.Column("until_minute", sa.Integer, nullable=False, index=True),
    sqlite_with_rowid=False,
)

# `minute` is that of receipt if `clock_synced` is 0.
hist_window = sa.Table(
    "edgert_hist_window",
    _metadata,
    sa.Column("stream", sa.ForeignKey("edgert_stream.id"), primary_key=True),
    sa.Column("seq", sa.BigInteger, primary_key=True),
    sa.Column("minute", sa.Integer, nullable=False, index=True),
    sa.Column("ts_ms", sa.BigInteger, nullable=False),
    sa.Column("clock_synced", sa.SmallInteger, nullable=False, default=1),
    *_histogram(),
    sa.Column("stages", sa.LargeBinary, nullable=False, default=b""),
)
_unsynced = hist_window.c.clock_synced == 0
sa.Index("edgert_hist_window_unsynced", hist_window.c.minute, sqlite_where=_unsynced, postgresql_where=_unsynced)

# Counters are this window's increase.
metrics_window = sa.Table(
    "edgert_metrics_window",
    _metadata,
    sa.Column("stream", sa.ForeignKey("edgert_stream.id"), primary_key=True),
    sa.Column("seq", sa.BigInteger, primary_key=True),
    sa.Column("minute", sa.Integer, nullable=False, index=True),
    sa.Column("ts_ms", sa.BigInteger, nullable=False),
    *_counters(),
)

event = sa.Table(
    "edgert_event",
    _metadata,
    sa.Column("device_id", sa.ForeignKey("edgert_device.id"), primary_key=True),
    sa.Column("boot", sa.String(64), primary_key=True),
    sa.Column("seq", sa.BigInteger, primary_key=True),
    sa.Column("at_ms", sa.BigInteger, nullable=False, index=True),
    sa.Column("event", sa.String(64), nullable=False),
    sa.Column("model", sa.String(64)),
    sa.Column("fields", sa.Text, nullable=False),
    sqlite_with_rowid=False,
)

# The possible buckets of a histogram; see views.py. `place` counts them from 0; `packed` is the prefix of its record.
bucket = sa.Table(
    "edgert_bucket",
    _metadata,
    sa.Column("place", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("packed", sa.LargeBinary(2), nullable=False, unique=True),
    sa.Column("lower_ms", sa.Double, nullable=False),
    sa.Column("upper_ms", sa.Double, nullable=False),
    sa.Column("value_ms", sa.Double, nullable=False),
)

# A line of a rollout's record (edgert_deploy.rollout.rollout_record); `digest` is that of its text.
rollout_line = sa.Table(
    "edgert_rollout_line",
    _metadata,
    sa.Column("rollout", sa.String(200), primary_key=True),
    sa.Column("digest", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("line", sa.Text, nullable=False),
    sqlite_with_rowid=False,
)


class StoreFailed(EdgeRTError, code="fleet.store_failed", exit_code=6, retryable=True):
    """The database failed: unreachable, read-only, full, or not a store."""


def open_engine(url: str, *, writes: bool, log: Callable[[str], None] = lambda line: None) -> sa.Engine:
    """Connect to a store of reports; if `writes`, create or migrate it, and report slow steps to `log`.

    Raises ConfigInvalid or StoreFailed.
    """
    engine = new_engine(url, writes=writes)
    with begun(engine) as connection:
        if writes:
            lock(connection)  # two processes that create the same tables would fail
            _create_or_migrate(connection, log)
            if connection.scalar(sa.select(sa.func.count()).select_from(forgotten)) == 0:
                connection.execute(forgotten.insert().values(turns=0))
        version = connection.scalar(sa.select(meta.c.version))
    if version != SCHEMA_VERSION:
        older = version and version < SCHEMA_VERSION
        advice = "run `edgert fleet record` on it" if older else "update the program, or use another store"
        raise ConfigInvalid(f"the store {shown(engine.url)} has schema {version}, not {SCHEMA_VERSION}: {advice}")
    return engine


def file_of(engine: sa.Engine) -> tuple[int, int] | None:
    """Return device and inode of a SQLite file, which change if it is replaced; None without a file."""
    if engine.dialect.name != "sqlite":
        return None
    try:
        found = os.stat(engine.url.database or "")
    except OSError:
        return None
    return found.st_dev, found.st_ino


@contextmanager
def begun(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Give a connection in a transaction. Raises StoreFailed."""
    with translated(engine), engine.begin() as connection:
        yield connection


@contextmanager
def translated(engine: sa.Engine) -> Iterator[None]:
    """Raise the database's errors of the block as StoreFailed."""
    try:
        yield
    except SQLAlchemyError as error:
        raise _failed(engine.url, error) from error


def new_engine(url: str, *, writes: bool) -> sa.Engine:
    """Return the engine of a store that exists or, if `writes`, may be made. Raises ConfigInvalid.

    `url` is a file name, `sqlite:///FILE` or `postgresql://[USER[:PASSWORD]@]HOST[:PORT]/DATABASE`. A password is
    better left to PostgreSQL's own ~/.pgpass than written where `ps` shows it.
    """
    parsed = _parsed(url)
    if parsed.get_backend_name() == "sqlite":
        if not parsed.database or parsed.database == ":memory:":
            raise ConfigInvalid("a store in memory ends with the command: name a file, such as sqlite:///fleet.db")
        if not writes and not os.path.exists(parsed.database):
            raise ConfigInvalid(f"there is no store {parsed.database}: edgert fleet record --store FILE makes one")
        return _sqlite(parsed, writes)
    options = f"-c statement_timeout={STATEMENT_TIMEOUT_S * 1000}"
    return sa.create_engine(parsed, pool_pre_ping=True, connect_args={**LINK_LIMITS, "options": options})


def _create_or_migrate(connection: sa.Connection, log: Callable[[str], None]) -> None:
    """Create missing tables, and migrate an older store to this version; leave a newer one unchanged."""
    version = connection.scalar(sa.select(meta.c.version)) if sa.inspect(connection).has_table(meta.name) else None
    if version is not None and version > SCHEMA_VERSION:
        return
    has_views = sa.inspect(connection).has_table(bucket.name)
    _metadata.create_all(connection)
    if version is not None and version < SCHEMA_VERSION:
        windows = connection.scalar(sa.select(sa.func.count()).select_from(metrics_window)) or 0
        log(
            f"updating the store {shown(connection.engine.url)} from schema {version} to {SCHEMA_VERSION} once, for its "
            f"{counted(windows, 'window')}: a large one takes minutes. Let it finish; if it is stopped, nothing is lost"
        )
    for migrate in MIGRATIONS[(version or SCHEMA_VERSION) - 1 :]:
        migrate(connection)
    if not has_views:
        views.create(connection, bucket)
    changed = meta.insert() if version is None else meta.update()
    connection.execute(changed.values(version=SCHEMA_VERSION))


def insert(connection: sa.Connection, table: sa.Table) -> postgresql.Insert | sqlite.Insert:
    """Return an INSERT that has ON CONFLICT."""
    return postgresql.insert(table) if connection.dialect.name == "postgresql" else sqlite.insert(table)


def lock(connection: sa.Connection) -> None:
    """Lock the store for one writer until the transaction ends. SQLite does so by itself."""
    if connection.dialect.name == "postgresql":
        connection.execute(sa.text("SELECT pg_advisory_xact_lock(730541)"))


def _failed(url: sa.URL, error: SQLAlchemyError) -> StoreFailed:
    """Return the error for the user."""
    reason = next(iter(str(getattr(error, "orig", None) or error).strip().splitlines()), type(error).__name__)
    if "no such table" in reason or ("does not exist" in reason and "edgert_" in reason):
        name = shown(url)
        return StoreFailed(f"the store {name} has no reports yet; `edgert fleet record --store {name}` fills it")
    is_other = "not a database" in reason or os.path.isdir(url.database or "")
    advice = "it is not a store: give another file" if is_other else "check that it exists, is writable and has room"
    if "malformed" in reason:
        advice = "the file is damaged: move it away, and a new one begins; or restore a copy (docs/sql.md)"
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
            f"--store {url!r} is not a store: write a file, sqlite:///FILE or postgresql://USER@HOST/DATABASE"
        ) from error
    if parsed.get_backend_name() not in ("sqlite", "postgresql"):
        raise ConfigInvalid(f"--store {url!r}: {parsed.get_backend_name()} is not supported; use sqlite or postgresql")
    return parsed


def _sqlite(url: sa.URL, writes: bool) -> sa.Engine:
    engine = sa.create_engine(url, connect_args={"timeout": BUSY_TIMEOUT_S})

    # The driver would begin transactions late, and two writers would deadlock.
    @sa.event.listens_for(engine, "connect")
    def _connected(connection: sqlite3.Connection, _record: object) -> None:
        connection.isolation_level = None
        if writes:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA cache_size = -32768")  # KiB

    @sa.event.listens_for(engine, "begin")
    def _begin(connection: sa.Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine
