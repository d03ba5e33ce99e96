"""The rollouts of a project.

Each rollout has a record (rollout_record.py), both in the project's folder and in the team's store.

Theory of operation. Each line is on this host's disk before the next action, so nothing is lost if the host dies or the
user stops. Commits of several hosts never conflict, for three reasons. Each rollout has a unique name, and no file
holds a counter, so two hosts do not create a file of the same name. No file is removed, because git may treat a removal
and an addition as a renaming. If two hosts continued the same rollout, git keeps the lines of both (.gitattributes).

The team's store holds the same lines. `sync` copies the lines that one side lacks. A growing number orders the
rollouts, because a host's clock may jump.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from edgert.durable import is_locked, locked, os_error_as, sync_file, sync_folder
from edgert.errors import ConfigInvalid, EdgeRTError
from edgert_deploy.devices.claims import user_and_host
from edgert_deploy.rollout.rollout_record import Record, Rollout, new_record

SUFFIX = ".jsonl"
READ_MAX = 200  # this store reads only this number of the newest rollouts; older rollouts stay on disk
RECORD_BYTES_MAX = 64 * 1024**2
LOCK_S_MAX = 0.2
_LOCK = ".lock"
_FILES = {".gitignore": f"*{_LOCK}\n", ".gitattributes": f"*{SUFFIX} merge=union\n"}
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,199}\Z")
_NUMBER = re.compile(r"-(\d{1,15})(?:-[0-9a-f]{6})?\Z")

Stamp = tuple[int, int, int]
Checksum = tuple[int, int]  # of a record: the number of lines, and the sum of their digests, each modulo 2^31


class TeamStore(Protocol):
    """The store that the hosts of a team share. Every method raises EdgeRTError if it cannot be used."""

    def checksums(self) -> dict[str, Checksum]:
        """Return the checksum of each rollout's record."""
        ...

    def lines(self, id: str) -> list[str]: ...

    def add(self, id: str, lines: Sequence[str]) -> None:
        """Add lines to a record, except lines that the record has already."""
        ...

    def locked(self, id: str) -> AbstractContextManager[bool]:
        """Lock a rollout against all other processes of the team. Yield False if another process has the lock."""
        ...

    def is_locked(self, id: str) -> bool: ...


class RolloutStore:
    """The folder of a project's rollouts. `note` gets warnings for the user."""

    def __init__(
        self, folder: Path, team: TeamStore | None = None, note: Callable[[str], None] = lambda line: None
    ) -> None:
        self.folder = folder
        self._team = team
        self._note = note
        self._records: dict[str, Record] = {}  # the records that this process wrote
        self._checksums: dict[str, tuple[Stamp, Checksum]] = {}  # the files' checksums that `sync` read last
        self._late = False  # the team's store lacks lines of this process

    def ids(self) -> list[str]:
        """Return the ids of the newest rollouts, the newest first."""
        return _newest(path.name.removesuffix(SUFFIX) for path in self.folder.glob(f"*{SUFFIX}"))

    def all(self) -> list[Rollout]:
        """Return the rollouts, the newest first. A rollout that cannot be read is left out, with a note."""
        rollouts = []
        for id in self.ids():
            try:
                rollouts.append(self.read(id))
            except ConfigInvalid as error:
                self._note(f"left out: {error.message}")
        return sorted(rollouts, key=lambda rollout: rollout.order, reverse=True)

    def read(self, id: str) -> Rollout:
        """Return one rollout. Raises ConfigInvalid."""
        return self._record(id).rollout

    def find(self, beginning: str) -> Rollout:
        """Return the rollout whose id is `beginning`, or the only rollout whose id starts with `beginning`.

        Raises ConfigInvalid.
        """
        matching = [id for id in self.ids() if id.startswith(beginning)]
        if beginning not in matching and len(matching) > 1:
            raise ConfigInvalid(f"several ids begin with {beginning!r}: {', '.join(matching[:5])}; give more of the id")
        return self.read(matching[0] if len(matching) == 1 else beginning)

    def last(self) -> Rollout:
        """Return the newest rollout. Raises ConfigInvalid if the project has no rollout."""
        rollouts = self.all()
        if not rollouts:
            raise ConfigInvalid(f"there is no rollout in {self.folder}; start one with: edgert deploy")
        return rollouts[0]

    def begin(self, rollout: Rollout) -> Rollout:
        """Write a new rollout; return it with its number and its id. Raises ConfigInvalid."""
        with self._changing():
            number = max((_number(id) for id in self.ids()), default=0) + 1
            # Another host may use the same number at the same time, but not the same id.
            id = f"{rollout.model}-r{rollout.release}-{number}-{secrets.token_hex(3)}"
            rollout = replace(rollout, id=id, number=number)
            lines = self._write(rollout)
        self._tell_team(id, lines)
        return rollout

    def write(self, rollout: Rollout) -> None:
        """Write the changes of a rollout. Raises ConfigInvalid."""
        with self._changing():
            lines = self._write(rollout)
        self._tell_team(rollout.id, lines)

    def sync(self) -> None:
        """Copy lines between this folder and the team's store, until both have all lines.

        Raises ConfigInvalid, and the errors of TeamStore.
        """
        if self._team is None:
            return
        theirs = {id: checksum for id, checksum in self._team.checksums().items() if _ID.match(id)}
        for id in _newest({*theirs, *self.ids()}):
            if self._checksum(id) == theirs.get(id):
                continue
            ours = self._lines(id)
            lines_of_team = self._team.lines(id) if id in theirs else []
            if missing := [line for line in lines_of_team if line not in set(ours) and "\n" not in line]:
                with self._changing():
                    self._append(id, missing)
                self._records.pop(id, None)
            if missing := [line for line in ours if line not in set(lines_of_team)]:
                self._team.add(id, missing)
        self._late = False

    @contextmanager
    def at_work(self, id: str) -> Iterator[None]:
        """Hold the lock of a rollout; it ends with this process. Raises ConfigInvalid if another holds it."""
        busy = ConfigInvalid(f"rollout {id} is running in another process; follow it with: edgert rollout status {id}")
        with ExitStack() as locks:
            with self._changes("lock a rollout in", busy):
                self._make_folder()
                # This call waits, because `is_at_work` also holds the lock, for an instant.
                locks.enter_context(locked(self.path(id, _LOCK), LOCK_S_MAX))
            if self._team is not None and not locks.enter_context(self._team.locked(id)):
                raise busy
            self.sync()  # the last holder of the lock may have written lines that this process lacks
            yield
            if self._late:
                with contextlib.suppress(EdgeRTError):
                    self.sync()

    def is_at_work(self, id: str) -> bool | None:
        """Return whether a process works on the rollout; None if this is unknown. Change no file.

        Without a team's store, only the host that last worked on the rollout knows this. Raises ConfigInvalid.
        """
        lock = self.path(id, _LOCK)
        with self._changes("lock a rollout in"):
            if is_locked(lock):
                return True
            is_local = lock.exists() and self.read(id).by in ("", user_and_host())
        if self._team is not None:
            with contextlib.suppress(EdgeRTError):
                return self._team.is_locked(id)
        return False if is_local else None

    def path(self, id: str, suffix: str = SUFFIX) -> Path:
        """Return the path of a rollout's record. Raises ConfigInvalid for an invalid id."""
        if not _ID.match(id):
            raise ConfigInvalid(f"{id!r} is not an id of a rollout; list them with: edgert rollout list")
        return self.folder / f"{id}{suffix}"

    def stamp(self, id: str) -> Stamp:
        """Return the inode, the time and the size of a record.

        If this host or git changes the record, one of the three values changes. Raises OSError.
        """
        stat = self.path(id).stat()
        return stat.st_ino, stat.st_mtime_ns, stat.st_size

    @property
    def has_team(self) -> bool:
        return self._team is not None

    def without_team(self) -> RolloutStore:
        """Return a store of the same folder without the team's store."""
        return RolloutStore(self.folder, None, self._note)

    # --- files ----------------------------------------------------------------------------------------------------

    def _record(self, id: str) -> Record:
        path = self.path(id)
        if not path.exists():
            raise ConfigInvalid(f"there is no rollout {id!r}; list them with: edgert rollout list")
        lines = self._lines(id)
        if any(line.startswith(("<<<<<<<", ">>>>>>>")) for line in lines):
            raise ConfigInvalid(
                f"{path} has conflict markers of git: remove the lines with markers, and keep all other lines"
            )
        try:
            record = Record.read(lines)
            if record.rollout.id != id:
                raise ValueError(f"it names another rollout, {record.rollout.id}")
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError, ConfigInvalid) as error:
            raise ConfigInvalid(f"rollout {path} cannot be read: {error}") from error
        return record

    def _lines(self, id: str) -> list[str]:
        """Return the lines of a record, without an incomplete last line."""
        path = self.path(id)
        try:
            with path.open("rb") as file:
                data = file.read(RECORD_BYTES_MAX + 1)
            if len(data) > RECORD_BYTES_MAX:
                raise ConfigInvalid(f"rollout {path} cannot be read: it has more than {RECORD_BYTES_MAX} bytes")
            return [line.rstrip("\r") for line in data.decode().split("\n")[:-1] if line]  # git may write "\r\n"
        except FileNotFoundError:
            return []
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise ConfigInvalid(f"rollout {path} cannot be read: {reason}") from error

    def _checksum(self, id: str) -> Checksum:
        """Return the checksum of this host's copy of a record."""
        if not self.path(id).exists():
            return 0, 0
        stamp, cached = self.stamp(id), self._checksums.get(id)
        if cached is None or cached[0] != stamp:
            digests = [digest_of(line) for line in set(self._lines(id))]
            cached = self._checksums[id] = stamp, (len(digests), sum(digest % 2**31 for digest in digests))
        return cached[1]

    def _write(self, rollout: Rollout) -> list[str]:
        """Write the changes of a rollout as lines; return the lines."""
        known = self._records.get(rollout.id)
        if known is None and self.path(rollout.id).exists():
            known = self._record(rollout.id)
        record, lines = new_record(rollout) if known is None else known.changed_to(rollout)
        if lines:
            self._append(rollout.id, lines)
        self._records[rollout.id] = record
        return lines

    def _append(self, id: str, lines: Sequence[str]) -> None:
        path = self.path(id)
        with self._changes("write a rollout's progress to"):
            new = not path.exists()
            try:
                with path.open("ab+") as file:
                    _cut_unfinished(file.fileno())
                    file.write("".join(f"{line}\n" for line in lines).encode())
                    sync_file(file)
                if new:
                    sync_folder(self.folder)
            except OSError:
                if new:  # the rollout did not start, for example because the disk is full
                    path.unlink(missing_ok=True)
                raise

    def _tell_team(self, id: str, lines: Sequence[str]) -> None:
        """Add lines to the team's store. If this fails, the rollout continues, and `sync` adds them later."""
        if self._team is None or self._late or not lines:
            return
        try:
            self._team.add(id, lines)
        except EdgeRTError as error:
            self._late = True
            self._note(f"{error.message}. The rollout continues; a later command copies its record to the store")

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Lock the folder against other processes of this host during a change. Raises ConfigInvalid."""
        with self._changes("write to"):
            self._make_folder()
            lock = locked(self.folder / _LOCK)
        with lock:
            yield

    def _make_folder(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for name, text in _FILES.items():
            with contextlib.suppress(FileExistsError), (self.folder / name).open("x") as file:
                file.write(text)

    def _changes(self, what: str, busy: EdgeRTError | None = None) -> AbstractContextManager[None]:
        """Turn an OSError of the block, which does `what` in the folder, into a ConfigInvalid, or into `busy`."""
        advice = "free some space, or work in your own clone of the project"
        return os_error_as(ConfigInvalid, f"cannot {what} {self.folder}", advice, busy)


def digest_of(line: str) -> int:
    """Return a 63-bit hash of the line."""
    return int.from_bytes(hashlib.sha256(line.encode()).digest()[:8], "big") >> 1


def _newest(ids: Iterable[str]) -> list[str]:
    return sorted(filter(_ID.match, ids), key=lambda id: (_number(id), id), reverse=True)[:READ_MAX]


def _number(id: str) -> int:
    """Return the number in an id; 0 for an id that `begin` did not make."""
    match = _NUMBER.search(id)
    return int(match[1]) if match else 0


def _cut_unfinished(file: int) -> None:
    """Remove the last line if it is incomplete, as after a power cut."""
    size = os.fstat(file).st_size
    end = size
    while end and (tail := os.pread(file, min(end, 4096), max(0, end - 4096))).rfind(b"\n") != len(tail) - 1:
        end = max(0, end - 4096) + tail.rfind(b"\n") + 1
    if end != size:
        os.ftruncate(file, end)
