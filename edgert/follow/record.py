"""The files that the follower keeps between its rounds.

    STATE/follow/statement.dsse.json    the newest accepted statement
    STATE/follow/record.json            the counters of accepted statements, and the releases that were tried
    STATE/follow/runtime.dsse.json      the release of the runtime that the statement names
    STATE/follow/note.json              the result of the last round (edgert.checks.channel_status)
    STATE/follow/lock                   locked during a round

The statement is written before the record that names it. After a power cut between the two writes, the follower
requests the statement again.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from pathlib import Path

from edgert.bundle.channel import Entry, Statement, read_statement
from edgert.bundle.signing import PublicKey
from edgert.durable import make_private, store_file, storing
from edgert.errors import EdgeRTError
from edgert.state_dir import StateDir
from edgert.typed_json import json_bytes, read_json
from edgert.versions.slots import REASON_LENGTH_MAX

CHANNELS_MAX = 64  # the maximum number of channels whose counters are kept


@dataclass(frozen=True)
class Attempt:
    """The last attempt with a model. `reason` is the reason of a refusal; "" if the slots have the result.

    `attempt` identifies the attempt (`attempt_id`).
    """

    attempt: str
    reason: str = ""


@dataclass(frozen=True)
class Record:
    """The follower's record of earlier rounds.

    Attributes:
        counters: The highest counter of each channel. The channel of the stored statement is the last entry.
        source: The registry and the channel of the stored statement.
        manifest: The digest of the OCI manifest of the stored statement.
        runtime: The highest release among all runtimes that were in use.
    """

    counters: dict[str, int] = field(default_factory=dict)
    source: str = ""
    manifest: str = ""
    tried: dict[str, Attempt] = field(default_factory=dict)
    runtime: int = 0

    def with_statement(self, statement: Statement, source: str, manifest: str) -> Record:
        """Return the record after `statement` was accepted."""
        counters = {other: count for other, count in self.counters.items() if other != statement.channel}
        counters[statement.channel] = statement.counter
        tried = {model: tried for model, tried in self.tried.items() if model in statement.models}
        last = dict(list(counters.items())[-CHANNELS_MAX:])
        return Record(last, source, manifest, tried, self.runtime)

    def with_attempt(self, entry: Entry, reason: str = "") -> Record:
        """Return the record after the release of `entry` was tried, or was refused for `reason`."""
        tried = Attempt(attempt_id(entry), reason[:REASON_LENGTH_MAX])
        return replace(self, tried={**self.tried, entry.model: tried})

    def attempt_of(self, entry: Entry) -> Attempt | None:
        """Return the attempt with exactly this entry; None if there was no such attempt."""
        tried = self.tried.get(entry.model)
        return tried if tried is not None and tried.attempt == attempt_id(entry) else None


class RecordStore:
    """The files with the record, the statement, and the `runtime_release` that the statement names."""

    def __init__(self, state: StateDir) -> None:
        self.folder = folder = state.follow
        self.lock = folder / "lock"
        self.runtime_release = folder / "runtime.dsse.json"
        self._record = folder / "record.json"
        self._statement = folder / "statement.dsse.json"

    def read(self) -> Record:
        """Return the record; an empty record if the file is missing or damaged."""
        return read_json(Record, self._record) or Record()

    def write(self, record: Record) -> None:
        """Replace the record durably. Raises StorageFailed."""
        self._store(self._record, json_bytes(record))

    def accept(self, envelope: bytes, record: Record) -> None:
        """Store a statement's envelope, and the record that names it. Raises StorageFailed."""
        self._store(self._statement, envelope)
        self.write(record)

    def statement(self, channel: str, trusted: tuple[PublicKey, ...]) -> Statement | None:
        """Return the stored statement of `channel`; None if no key in `trusted` signed it."""
        try:
            return read_statement(self._statement.read_bytes(), channel, trusted)
        except (OSError, EdgeRTError):
            return None

    def _store(self, path: Path, data: bytes) -> None:
        with storing(f"cannot use {self.folder}"):
            make_private(self.folder)
        store_file(path, data)


def attempt_id(entry: Entry) -> str:
    """Return the identity of an attempt: content, limits and the attempt's number, but not the share."""
    fields = (entry.digest, sorted(entry.limits.items()), entry.watch_s, entry.attempt)
    return hashlib.sha256(repr(fields).encode()).hexdigest()[:32]
