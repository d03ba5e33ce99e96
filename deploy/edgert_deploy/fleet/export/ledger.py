"""The ledger: how exporters that share the load agree on who counts a report, with nothing but the broker.

Theory of operation: a broker hands each message of `$share/...` to one exporter, but a report that a device sends
again may go to another than before. So every exporter writes what it took, in batches, to one topic that all of them
read, itself included. A broker keeps the order of one topic, so all exporters read the same ledger: whoever's entry
for a report stands first counts it, and everyone knows. The ledger also carries the counters, as what they grew by
can only be told by one who knows the value before, whoever took that. An exporter that has just started does not, and
says so (`blind`): one of the others, who do, counts it in its place. What it told in a life before counts for nobody
else and died with it: the broker hands out again what it had not acknowledged (`--session`).

A broker that hands the messages of one topic to different subscribers in different orders (some clusters do, for
publishers on different nodes) makes this a best effort: there let it dispatch by client (EMQX: `hash_clientid`).

Pure: `take` and `due` say what to send, `read` what was agreed.
"""

from __future__ import annotations

import json
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from sys import intern
from typing import Any, NamedTuple

from edgert.errors import ProtocolError
from edgert.names import checked_id
from edgert_deploy.fleet.reports import COUNTER_FIELDS, NUMBER_END
from edgert_deploy.fleet.sequence import SeqTracker, begun_anew

ROOT = "edgert-exporter/v1"
FLUSH_EVERY_S = 0.25
HEARTBEAT_S = 5.0
MEMBER_GONE_AFTER_S = 16.0
ENTRIES_MAX = 500  # of one message; about 40 KB
STREAMS_MAX = 500_000
LATE_MAX = 32


@dataclass(frozen=True)
class Entry:
    """One report that an exporter took. `counters` are those of a `metrics`, else empty; `fresh`: they began with it.

    `blind`: the exporter does not know the counters before.
    """

    kind: str
    site: str
    device: str
    model: str
    boot: str
    seq: int
    counters: tuple[int, ...] = ()
    fresh: bool = False
    blind: bool = False
    version: str = ""

    @property
    def stream(self) -> tuple[str, ...]:
        # Events of a device are numbered together, whatever model they concern.
        return (self.kind, self.site, self.device, "" if self.kind == "event" else self.model, self.boot)

    def as_json(self) -> list[Any]:
        names = (self.kind, self.site, self.device, self.model, self.boot)
        return [*names, self.seq, self.counters, self.fresh, self.blind, self.version]


class Agreed(NamedTuple):
    """An entry in the ledger's order.

    `grown`: what this exporter is to count of its counters; None where the report does not count, as it stood before.
    `mine`: it is this exporter's own, which counts the rest of the report, too.
    """

    entry: Entry
    grown: tuple[int, ...] | None
    mine: bool


class Ledger:
    """One exporter's part in a share, or a ledger of its own where `share` is None: then nothing is sent.

    `exporter` is its name, which may outlive it; `life` differs each time that it starts.
    """

    def __init__(self, exporter: str, share: str | None, life: str = "") -> None:
        self.exporter, self.life = checked_id("exporter", exporter), life
        self.topic = None if share is None else f"{ROOT}/{checked_id('share', share)}/taken"
        self.duplicates = 0
        self._untold: list[Entry] = []
        self._told_at = float("-inf")
        self._trackers: OrderedDict[tuple[str, ...], SeqTracker] = OrderedDict()
        self._counters: OrderedDict[tuple[str, ...], _Counted] = OrderedDict()
        self._beginning: set[tuple[str, ...]] = set()  # taken and not agreed on yet
        self._members: dict[str, float] = {}

    @property
    def missing(self) -> int:
        """Histograms and events that never came to any exporter, at least."""
        return sum(tracker.lost_min for stream, tracker in self._trackers.items() if stream[0] != "metrics")

    @property
    def streams(self) -> int:
        return len(self._trackers)

    def take(self, entry: Entry) -> None:
        """This exporter was handed the report: it is told to all with the next message."""
        if entry.blind or entry.fresh:
            self._beginning.add((entry.site, entry.device, entry.model, entry.boot))
        self._untold.append(entry)

    def tell_again(self, entries: list[Entry]) -> None:
        """What was told and never read back: twice in the ledger does no harm."""
        self._untold = entries
        self._told_at = float("-inf")

    def due(self, now: float, messages_max: int) -> Iterator[bytes]:
        """What to publish now, if anything: entries, or a sign of life. What `messages_max` leave comes next time."""
        assert self.topic is not None
        quiet_s = now - self._told_at
        if quiet_s < FLUSH_EVERY_S or (not self._untold and quiet_s < HEARTBEAT_S):
            return
        if messages_max < 1:
            return
        self._told_at = now
        told_max = messages_max * ENTRIES_MAX
        entries, self._untold = self._untold[:told_max], self._untold[told_max:]
        for start in range(0, max(len(entries), 1), ENTRIES_MAX):
            said = [entry.as_json() for entry in entries[start : start + ENTRIES_MAX]]
            yield json.dumps(
                {"v": 1, "exporter": self.exporter, "life": self.life, "taken": said}, separators=(",", ":")
            ).encode()

    def knows(self, site: str, device: str, model: str, boot: str) -> bool:
        """Whether counting of these counters has begun, or will have with a report that was taken."""
        seen = self._counters.get((site, device, model))
        return (seen is not None and seen.boot == boot) or (site, device, model, boot) in self._beginning

    def read(self, payload: bytes, now: float) -> Iterator[Agreed]:
        """Agree on a message of the ledger's topic. Raises ProtocolError."""
        exporter, life, entries = _parse(payload)
        self._members[exporter] = now
        mine = exporter == self.exporter
        if mine and life != self.life:
            return
        for agreed in self.agree(entries, mine=mine):
            if agreed.grown and agreed.entry.blind and (mine or not self._stands_in(exporter, agreed.entry, now)):
                agreed = agreed._replace(grown=(0,) * len(agreed.grown))
            yield agreed

    def agree(self, entries: Sequence[Entry], *, mine: bool) -> Iterator[Agreed]:
        """The same for entries of one exporter."""
        for entry in entries:
            new = self._tracker(entry).is_new(entry.seq)
            self.duplicates += mine and not new
            grown = self._increase(entry) if new else None
            if mine and self._beginning:
                self._beginning.discard((entry.site, entry.device, entry.model, entry.boot))
            counts = mine or entry.blind
            yield Agreed(entry, grown if counts or grown is None else (), mine)

    def owns(self, name: str, now: float) -> bool:
        """Whether this exporter is the one that speaks for `name`: all agree on one, whoever comes or goes."""
        return self._chosen({*self._present(now), self.exporter}, name)

    def _stands_in(self, blind: str, entry: Entry, now: float) -> bool:
        return self._chosen({*self._present(now), self.exporter} - {blind}, f"{entry.site}/{entry.device}")

    def _present(self, now: float) -> Iterable[str]:
        for exporter in [exporter for exporter, seen in self._members.items() if now - seen > MEMBER_GONE_AFTER_S]:
            del self._members[exporter]
        return self._members

    def _chosen(self, members: set[str], name: str) -> bool:
        return len(members) == 1 or max(members, key=lambda exporter: _weight(exporter, name)) == self.exporter

    def _tracker(self, entry: Entry) -> SeqTracker:
        tracker = self._trackers.get(entry.stream)
        if tracker is None:
            tracker = self._trackers[entry.stream] = SeqTracker(late=LATE_MAX if self.topic else 0)
            if len(self._trackers) > STREAMS_MAX:
                self._trackers.popitem(last=False)
        else:
            self._trackers.move_to_end(entry.stream)  # a device that makes up boots costs those that report nothing
        return tracker

    def _increase(self, entry: Entry) -> tuple[int, ...]:
        """What the counters grew by that no entry before has counted; those that fell began anew at 0.

        Where counting begins, all of it if they began with this report, else nothing: when is not known. An entry
        that comes late is part of what a later one counted, unless counting began with that one.
        """
        if not entry.counters:
            return ()
        key = (entry.site, entry.device, entry.model)
        seen = self._counters.get(key)
        nothing = (0,) * len(entry.counters)
        if seen is None or seen.boot != entry.boot:
            seen = self._counters[key] = _Counted(entry.boot, entry.seq, entry.counters, entry.seq, entry.counters)
            if len(self._counters) > STREAMS_MAX:
                self._counters.popitem(last=False)
            return entry.counters if entry.fresh else nothing
        self._counters.move_to_end(key)
        if begun_anew(entry.seq, seen.last_seq):
            grown = _grown_anew(entry.counters, seen.last, entry.fresh)
            self._counters[key] = _Counted(entry.boot, entry.seq, entry.counters, entry.seq, entry.counters)
            return grown
        if entry.seq > seen.last_seq:
            grown = _grown(entry.counters, seen.last)
            seen.last_seq, seen.last = entry.seq, entry.counters
            return grown
        if entry.seq < seen.first_seq:
            grown = _grown(seen.first, entry.counters)
            seen.first_seq, seen.first = entry.seq, entry.counters
            return tuple(map(sum, zip(grown, entry.counters if entry.fresh else nothing, strict=True)))
        return nothing


@dataclass
class _Counted:
    """The stretch of one worker's counters that has been counted: from `first` to `last`."""

    boot: str
    first_seq: int
    first: tuple[int, ...]
    last_seq: int
    last: tuple[int, ...]


def _grown_anew(now: tuple[int, ...], before: tuple[int, ...], fresh: bool) -> tuple[int, ...]:
    """What counters grew by since the last report of a spool that was lost.

    Where they fell, the worker began anew in what was lost, or a report of the older spool comes late: what of it is
    not counted yet cannot be told, unless the counters began with this very report.
    """
    fell = any(value < was for value, was in zip(now, before, strict=True))
    return _grown(now, before) if fresh or not fell else (0,) * len(now)


def _grown(now: tuple[int, ...], before: tuple[int, ...]) -> tuple[int, ...]:
    fell = any(value < was for value, was in zip(now, before, strict=True))
    return now if fell else tuple(value - was for value, was in zip(now, before, strict=True))


def _parse(payload: bytes) -> tuple[str, str, list[Entry]]:
    """The exporter's name, its life, and what it took."""
    try:
        said = json.loads(payload)
        entries = [
            Entry(
                intern(kind),
                intern(site),
                intern(device),
                intern(model),
                intern(boot),
                int(seq),
                tuple(map(int, counters)),
                bool(fresh),
                bool(blind),
                intern(version),
            )
            for kind, site, device, model, boot, seq, counters, fresh, blind, version in said["taken"]
        ]
        if any(
            not 0 <= entry.seq < NUMBER_END or len(entry.counters) not in (0, len(COUNTER_FIELDS)) for entry in entries
        ):
            raise ValueError("a seq lies outside 0 ... 2^53, or counters are missing")
        return str(said["exporter"])[:64], str(said["life"])[:64], entries
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise ProtocolError(f"not an exporter's ledger: {payload[:60]!r}: {error}") from error


def _weight(exporter: str, name: str) -> int:
    # Rendezvous hashing: when an exporter goes, only what was its own moves.
    return zlib.crc32(f"{exporter} {name}".encode())
