"""The spool: reports on this device's disk that the broker has not acknowledged yet.

Theory of operation: the spool is one SQLite file in WAL mode. Every worker process appends messages. The forwarder
reads the oldest messages first, and deletes acknowledged messages. Each append is one transaction, which uses the
stream's next `seq` and writes the message. If the spool exceeds its limits, the transaction also deletes the oldest
messages of the least important kind. With `synchronous = NORMAL` a commit survives the death of any process. A power
cut may lose the last commits, and their `seq` numbers are then used again. So subscribers identify a message by its
boot and its `seq`.

A process that finds the database unreadable renames it to `NAME.corrupt`, and creates a new database. The other
processes notice the new inode and use the new file. In every new file, `seq` starts at a random number above 2**32. So
no `seq` of this boot occurs twice, even if somebody removes the file and another process creates the next file.

The threads of one process may share a `Spool`; a forked process must open its own.
"""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from edgert.durable import locked
from edgert.errors import StorageFailed
from edgert.telemetry import messages

SCHEMA_VERSION = 1
BYTES_MAX = 16 * 1024 * 1024  # the size of topics and payloads; the file is slightly larger
ROWS_MAX = 50_000
BUSY_TIMEOUT_S = 5.0
LOST_WITH_FILE = "unknown"  # the kind in `lost` for a lost file, because the number of its messages is unknown
FIRST_SEQ_MIN = 2**32
FIRST_SEQ_MAX = 2**52  # every JSON reader represents integers below 2**53 exactly

# A full spool first deletes messages of the kind with the lowest number; among these, it deletes the oldest first.
IMPORTANCE = {"metrics": 0, "hist": 1, "event": 2}
_ROW_OVERHEAD_BYTES = 64
_NO_INODE = -1
_MESSAGE_TYPES = (int, str, bytes, int, str)  # of the fields of Spooled
# sqlite3 raises UnicodeDecodeError instead of its own error if the error's text quotes a damaged name.
_DATABASE_ERRORS = (sqlite3.DatabaseError, UnicodeDecodeError)
# An OperationalError is mostly an error of the disk. With these texts, it is an error of the file's content.
_DAMAGE = ("Could not decode", "no such ", "malformed")

Fields = Callable[[int], Mapping[str, object]]
_T = TypeVar("_T")


@dataclass(frozen=True)
class Spooled:
    """A waiting message. `id` grows in the order of appending."""

    id: int
    topic: str
    payload: bytes
    qos: int
    kind: str


@dataclass(frozen=True)
class Retained:
    """The current value of a retained topic. `version` grows with every change of any retained topic."""

    payload: bytes
    version: int


@dataclass(frozen=True)
class SpoolStats:
    """The number of waiting messages, and by kind the number of messages lost since the file was created.

    A full spool drops messages of the kinds metrics, hist and event. An earlier file that was lost is counted as
    one message of the kind LOST_WITH_FILE.
    """

    rows: int
    size_bytes: int
    lost: dict[str, int]

    @property
    def lost_total(self) -> int:
        return sum(self.lost.values())


class Spool:
    """The spool file in one process.

    Every method raises StorageFailed on a disk error. If the file cannot be opened, the next call of a method tries
    again.
    """

    def __init__(
        self,
        path: Path,
        *,
        rows_max: int = ROWS_MAX,
        bytes_max: int = BYTES_MAX,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.path = path
        self._rows_max, self._bytes_max = rows_max, bytes_max
        self._log = log
        self._lock = threading.Lock()
        self._database: sqlite3.Connection | None = None
        self._inode = _NO_INODE
        with self._lock, contextlib.suppress(sqlite3.Error, OSError):
            self._reopen(suspect=False)

    def append(self, stream: str, topic: str, fields: Fields, qos: int, kind: str) -> int:
        """Store one message and return its `seq`, which grows by one in each `stream`.

        `fields` returns the fields to send with a given `seq`. The spool drops a message and counts it as lost if the
        message alone exceeds the limits, or if the spool is full and all waiting messages are more important.
        """
        assert kind in IMPORTANCE, kind

        def add(database: sqlite3.Connection) -> int:
            seq = _next_seq(database, stream)
            body = messages.dump(fields(seq))
            size = len(body) + len(topic) + _ROW_OVERHEAD_BYTES
            if size > self._bytes_max:  # this message would displace all others
                _count_lost(database, kind)
                return seq
            database.execute(
                "INSERT INTO message (importance, kind, topic, payload, qos, size) VALUES (?, ?, ?, ?, ?, ?)",
                (IMPORTANCE[kind], kind, topic, body, qos, size),
            )
            _adjust_usage(database, 1, size)
            self._trim(database)
            return seq

        return self._transact(add)

    def take(self, limit: int, after_id: int = 0) -> list[Spooled]:
        """Return up to `limit` of the oldest messages with an id above `after_id`, without deleting them."""

        def read(database: sqlite3.Connection) -> list[Spooled]:
            rows = database.execute(
                "SELECT id, topic, payload, qos, kind FROM message WHERE id > ? ORDER BY id LIMIT ?", (after_id, limit)
            )
            return [_message(row) for row in rows]

        return self._transact(read, writes=False)

    def delete_acknowledged(self, ids: Iterable[int]) -> None:
        """Delete acknowledged messages. Ids that no longer exist are ignored."""

        def delete(database: sqlite3.Connection) -> None:
            for message_id in ids:
                _delete(database, message_id)

        self._transact(delete)

    def retain(self, topic: str, fields: Mapping[str, object]) -> None:
        """Set the value of a retained topic. The forwarder publishes the value again after each connect."""

        def put(database: sqlite3.Connection) -> None:
            (version,) = database.execute("SELECT coalesce(max(version), 0) + 1 FROM retained").fetchone()
            database.execute("REPLACE INTO retained VALUES (?, ?, ?)", (topic, messages.dump(fields), version))

        self._transact(put)

    def retained(self, topic: str, after_version: int = 0) -> Retained | None:
        """Return the value of a retained topic; None if it did not change after `after_version`."""

        def read(database: sqlite3.Connection) -> Retained | None:
            query = "SELECT payload, version FROM retained WHERE topic = ? AND version > ?"
            row = database.execute(query, (topic, after_version)).fetchone()
            return None if row is None else Retained(*_checked(row, (bytes, int)))

        return self._transact(read, writes=False)

    def stats(self) -> SpoolStats:
        def read(database: sqlite3.Connection) -> SpoolStats:
            lost = dict(_checked(row, (str, int)) for row in database.execute("SELECT kind, count FROM lost"))
            rows, size_bytes = _usage(database)
            return SpoolStats(rows, size_bytes, lost)

        return self._transact(read, writes=False)

    @property
    def file_id(self) -> int:
        """The identity of the file. A new file has other ids and versions."""
        return self._inode

    def close(self) -> None:
        with self._lock, contextlib.suppress(sqlite3.Error):
            self._disconnect()

    def _transact(self, work: Callable[[sqlite3.Connection], _T], writes: bool = True) -> _T:
        """Run `work` in one transaction; if the file is corrupt, run it once more in a new file."""
        with self._lock, self._translated():
            if self._database is None or self._inode != _inode_of(self.path):
                self._reopen(suspect=False)
            try:
                return self._attempt(work, writes)
            except _DATABASE_ERRORS as error:
                if not _is_corruption(error):
                    raise
                self._reopen(suspect=True)
                return self._attempt(work, writes)

    def _attempt(self, work: Callable[[sqlite3.Connection], _T], writes: bool) -> _T:
        assert self._database is not None
        self._database.execute("BEGIN IMMEDIATE" if writes else "BEGIN")
        try:
            result = work(self._database)
            self._database.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                self._database.execute("ROLLBACK")
            raise
        return result

    def _trim(self, database: sqlite3.Connection) -> None:
        """Delete the oldest messages of the least important kind until the spool is within its limits."""
        while True:
            rows, size_bytes = _usage(database)
            if rows <= self._rows_max and size_bytes <= self._bytes_max:
                return
            oldest = database.execute("SELECT id, kind FROM message ORDER BY importance, id LIMIT 1").fetchone()
            victim, kind = _checked(oldest, (int, str))
            _delete(database, victim)
            _count_lost(database, kind)

    def _reopen(self, suspect: bool) -> None:
        """Open the file, or a new file if it is corrupt. Other processes wait."""
        mine = self._inode
        self._disconnect()
        with locked(self.path.with_name(self.path.name + ".lock")):
            # If several processes find the same corrupt file, the first process replaces it.
            replaced_already = suspect and _inode_of(self.path) != mine
            try:
                if suspect and not replaced_already:
                    raise sqlite3.DatabaseError("found corrupt while in use")
                self._database = _connect(self.path, after_loss=mine != _NO_INODE)
            except _DATABASE_ERRORS as error:
                if not suspect and not _is_corruption(error):
                    raise
                aside = f"{self.path}.corrupt"
                _set_aside(self.path, aside)
                self._log(f"telemetry: the spool {self.path} was unreadable ({error}), and is now {aside}")
                self._database = _connect(self.path, after_loss=True)
            self._inode = _inode_of(self.path)

    def _disconnect(self) -> None:
        if self._database is not None:
            database, self._database = self._database, None
            with contextlib.suppress(sqlite3.Error):
                database.close()

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StorageFailed(
                f"the telemetry spool {self.path} cannot be used: {error}; "
                "check that its folder exists, is writable and has space"
            ) from error


# --- the file -------------------------------------------------------------------------------

_SCHEMA = """
CREATE TABLE IF NOT EXISTS message (
    id INTEGER PRIMARY KEY AUTOINCREMENT, importance INTEGER NOT NULL, kind TEXT NOT NULL,
    topic TEXT NOT NULL, payload BLOB NOT NULL, qos INTEGER NOT NULL, size INTEGER NOT NULL);
CREATE INDEX IF NOT EXISTS message_by_importance ON message (importance, id);
CREATE TABLE IF NOT EXISTS stream (name TEXT PRIMARY KEY, seq INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS retained (topic TEXT PRIMARY KEY, payload BLOB NOT NULL, version INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS lost (kind TEXT PRIMARY KEY, count INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS usage (rows INTEGER NOT NULL, size INTEGER NOT NULL, first_seq INTEGER NOT NULL);
"""


def _connect(path: Path, *, after_loss: bool) -> sqlite3.Connection:
    """Open and check the file; create what is missing. Raises sqlite3.DatabaseError.

    If the file is new, `after_loss` tells that it replaces a lost file.
    """
    # Autocommit mode, with explicit transactions. The spool's lock serializes the calls.
    database = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        database.execute("PRAGMA synchronous = NORMAL")
        database.execute("PRAGMA wal_autocheckpoint = 250")  # in pages: 1 MB; flash is small, and a WAL never shrinks
        database.execute("PRAGMA journal_size_limit = 1048576")
        _prepare(database, after_loss)
    except BaseException:
        database.close()
        raise
    return database


def _prepare(database: sqlite3.Connection, after_loss: bool) -> None:
    (result,) = database.execute("PRAGMA quick_check(1)").fetchone()
    if result != "ok":
        raise sqlite3.DatabaseError(f"quick_check: {result}")
    (version,) = database.execute("PRAGMA user_version").fetchone()
    if version not in (0, SCHEMA_VERSION):
        raise sqlite3.DatabaseError(f"schema version {version}; this program knows {SCHEMA_VERSION}")
    if version == 0:
        _create_tables(database, after_loss)


def _create_tables(database: sqlite3.Connection, after_loss: bool) -> None:
    first_seq = random.randrange(FIRST_SEQ_MIN, FIRST_SEQ_MAX)
    # One transaction, so a process that ends here leaves no part of it.
    database.executescript(f"BEGIN IMMEDIATE; {_SCHEMA}")
    database.execute("INSERT INTO usage VALUES (0, 0, ?)", (first_seq,))
    # Ids start like `seq`: an acknowledgement of an older file's message must not match a message of this file.
    database.execute("INSERT INTO sqlite_sequence VALUES ('message', ?)", (first_seq - 1,))
    if after_loss:
        _count_lost(database, LOST_WITH_FILE)
    database.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
    database.execute("COMMIT")


def _next_seq(database: sqlite3.Connection, stream: str) -> int:
    database.execute(
        "INSERT INTO stream SELECT ?, first_seq FROM usage WHERE true "
        "ON CONFLICT (name) DO UPDATE SET seq = stream.seq + 1",
        (stream,),
    )
    (seq,) = database.execute("SELECT seq FROM stream WHERE name = ?", (stream,)).fetchone()
    return int(seq)


def _delete(database: sqlite3.Connection, message_id: int) -> None:
    row = database.execute("SELECT size FROM message WHERE id = ?", (message_id,)).fetchone()
    if row is not None:
        database.execute("DELETE FROM message WHERE id = ?", (message_id,))
        _adjust_usage(database, -1, -_checked(row, (int,))[0])


def _adjust_usage(database: sqlite3.Connection, rows: int, size_bytes: int) -> None:
    database.execute("UPDATE usage SET rows = rows + ?, size = size + ?", (rows, size_bytes))


def _count_lost(database: sqlite3.Connection, kind: str) -> None:
    database.execute("INSERT INTO lost VALUES (?, 1) ON CONFLICT (kind) DO UPDATE SET count = count + 1", (kind,))


def _checked(row: tuple[Any, ...] | None, types: tuple[type, ...]) -> tuple[Any, ...]:
    """Return a row with values of these types.

    A damaged file may have other values, which SQLite does not notice.
    """
    if row is None or tuple(map(type, row)) != types:
        raise sqlite3.DatabaseError(f"a row is damaged: {row!r:.100}")
    return row


def _message(row: tuple[Any, ...]) -> Spooled:
    message = Spooled(*_checked(row, _MESSAGE_TYPES))
    if message.qos not in (0, 1) or not set(message.topic).isdisjoint("+#\0"):
        raise sqlite3.DatabaseError(f"message {message.id} is damaged: qos {message.qos}, topic {message.topic!r:.100}")
    return message


def _usage(database: sqlite3.Connection) -> tuple[int, int]:
    """Return the number of the waiting messages and their size in bytes."""
    rows, size_bytes = _checked(database.execute("SELECT rows, size FROM usage").fetchone(), (int, int))
    return rows, size_bytes


def _is_corruption(error: Exception) -> bool:
    """Return whether the file's content is damaged.

    The errors of a full, locked or read-only disk are OperationalErrors.
    """
    return not isinstance(error, sqlite3.OperationalError) or str(error).startswith(_DAMAGE)


def _inode_of(path: Path) -> int:
    try:
        return os.stat(path).st_ino
    except FileNotFoundError:
        return _NO_INODE


def _set_aside(path: Path, aside: str) -> None:
    """Rename the database and its log. They replace earlier files that were set aside."""
    for stale in (f"{aside}-wal", f"{path}-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(stale)
    for suffix in ("", "-wal"):
        with contextlib.suppress(FileNotFoundError):
            os.rename(f"{path}{suffix}", f"{aside}{suffix}")
