"""The rows of minutes and hours that a batch of reports changes (see schema.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sqlalchemy as sa

from edgert.telemetry.messages import HistMessage, MetricsMessage
from edgert_deploy.fleet.packed_histograms import MERGED_FORM, WINDOW_FORM, Cells, DenseHistogram, StageCounts, cells_of
from edgert_deploy.fleet.store import database, schema
from edgert_deploy.fleet.store.batch import HOUR_MIN, Origin, minute_of
from edgert_deploy.fleet.store.schema import COUNTERS, HISTOGRAM

COUNTED_MAX = 2**63 - 1  # the largest value of a column; a device may report any number
IN_MAX = 5_000  # the maximum number of parameters of one statement; SQLite's own limit is 32,766


class MergedRows:
    """Adds up a batch in memory, then reads, changes and writes each row once."""

    def __init__(self, group_id: Callable[[Origin, str], int], connection: sa.Connection) -> None:
        """`group_id(origin, version)` returns the id of a report's group."""
        self._group_id, self._connection = group_id, connection
        self._minutes: dict[tuple[int, int], _Row] = {}
        self._streams: dict[tuple[int, int], _Row] = {}

    def add_hist(self, stream: int, origin: Origin, hist: HistMessage, blob: bytes) -> None:
        sketch, cells = hist.sketch, [cells_of(hist.stages, WINDOW_FORM)] if hist.stages else []
        for row in self._rows(stream, origin, hist):
            row.buckets.add(blob, WINDOW_FORM)
            row.stages += cells
            row.add(1, sketch.zero, sketch.count, sketch.sum, sketch.min, sketch.max)

    def add_counters(self, stream: int, origin: Origin, report: MetricsMessage, grown: Mapping[str, int]) -> None:
        for row in self._rows(stream, origin, report):
            for name, value in grown.items():
                row.counters[name] += value

    def group_hours(self) -> dict[int, int]:
        """Return the last hour of each group that has rows in this batch."""
        hours: dict[int, int] = {}
        for minute, owner in self._minutes:
            hours[owner] = max(minute // HOUR_MIN, hours.get(owner, 0))
        return hours

    def write(self) -> None:
        hours: dict[tuple[int, int], _Row] = {}
        for (minute, owner), row in self._minutes.items():
            hours.setdefault((minute // HOUR_MIN, owner), _Row()).merge(row)
        for table, rows in (
            (schema.group_hour, hours),
            (schema.group_minute, self._minutes),
            (schema.stream_hour, self._streams),
        ):
            for few in chunks(sorted(rows), IN_MAX // 2):
                self._write(table, {key: rows[key] for key in few})

    def _rows(self, stream: int, origin: Origin, report: HistMessage | MetricsMessage) -> tuple[_Row, _Row]:
        minute = minute_of(origin, report)
        owner = self._group_id(origin, report.model_version)
        return _row_of(self._minutes, (minute, owner)), _row_of(self._streams, (minute // HOUR_MIN, stream))

    def _stored(self, table: sa.Table, keys: Iterable[tuple[int, int]], *names: str) -> Iterator[Sequence[Any]]:
        """Yield the stored rows among `keys`. One statement reads all time bins that have the same owners.

        For a list of pairs (time_bin, owner), SQLite reads a whole table. For two lists of numbers, SQLite uses the
        index.
        """
        owners_of: dict[int, list[int]] = {}
        for time_bin, owner in keys:
            owners_of.setdefault(time_bin, []).append(owner)
        bins_of: dict[tuple[int, ...], list[int]] = {}
        for time_bin, owners in owners_of.items():
            bins_of.setdefault(tuple(owners), []).append(time_bin)
        query = sa.select(*(table.c[name] for name in ("time_bin", "owner", *names)))
        for same_owners, bins in bins_of.items():
            yield from self._connection.execute(query.where(table.c.time_bin.in_(bins), table.c.owner.in_(same_owners)))

    def _write(self, table: sa.Table, rows: Mapping[tuple[int, int], _Row]) -> None:
        there: set[tuple[int, int]] = set()
        for stored in self._stored(table, rows, *HISTOGRAM, *COUNTERS):
            time_bin, owner, *numbers, buckets = stored[: -len(COUNTERS)]
            row = rows[time_bin, owner]
            row.buckets.add(buckets)
            row.add(*numbers)
            for name, value in zip(COUNTERS, stored[-len(COUNTERS) :], strict=True):
                row.counters[name] += value
            there.add((time_bin, owner))
        # The transaction's lock keeps other writers out, so these inserts have no conflicts.
        written = {key: {"time_bin": key[0], "owner": key[1], **row.values()} for key, row in rows.items()}
        if new := [row for key, row in written.items() if key not in there]:
            self._connection.execute(table.insert(), new)
        database.update_rows(self._connection, table, ["time_bin", "owner"], [written[key] for key in there])
        self._write_stages(schema.STAGES[table.name], {key: row.stages for key, row in rows.items() if row.stages})

    def _write_stages(self, table: sa.Table, stages: Mapping[tuple[int, int], list[Cells]]) -> None:
        if not stages:
            return
        for time_bin, owner, stored in self._stored(table, stages, "stages"):
            stages[time_bin, owner].append(cells_of(stored, MERGED_FORM))
        new = [
            {"time_bin": time_bin, "owner": owner, "stages": StageCounts(parts).packed()}
            for (time_bin, owner), parts in stages.items()
        ]
        statement = database.insert(self._connection, table)
        changed = {"stages": statement.excluded.stages}
        self._connection.execute(
            statement.on_conflict_do_update(index_elements=["time_bin", "owner"], set_=changed), new
        )


class _Row:
    """One merged row in memory.

    Stage times stay separate until the row is written: one counter for each cell would take 7 times the memory.
    """

    __slots__ = ("buckets", "count", "counters", "least", "most", "stages", "sum", "windows", "zero")

    def __init__(self) -> None:
        self.buckets = DenseHistogram()
        self.stages: list[Cells] = []
        self.windows = self.zero = self.count = 0
        self.sum = self.least = self.most = 0.0
        self.counters = dict.fromkeys(COUNTERS, 0)

    def add(self, windows: int, zero: int, count: int, total: float, least: float, most: float) -> None:
        if count:
            self.least = min(self.least, least) if self.count else least
            self.most = max(self.most, most)
        self.windows += windows
        self.zero += zero
        self.count += count
        self.sum += total

    def merge(self, other: _Row) -> None:
        self.buckets.merge(other.buckets)
        self.stages += other.stages
        self.add(other.windows, other.zero, other.count, other.sum, other.least, other.most)
        for name, value in other.counters.items():
            self.counters[name] += value

    def values(self) -> dict[str, Any]:
        histogram = {name: getattr(self, name) for name in HISTOGRAM[:-1]}
        counters = {name: min(value, COUNTED_MAX) for name, value in self.counters.items()}
        return {**histogram, "buckets": self.buckets.packed(), **counters}


def _row_of(rows: dict[tuple[int, int], _Row], key: tuple[int, int]) -> _Row:
    # `setdefault` would create a new `_Row` at each call.
    row = rows.get(key)
    if row is None:
        row = rows[key] = _Row()
    return row


def chunks(items: Sequence[Any], size: int = IN_MAX) -> Iterable[Sequence[Any]]:
    return (items[start : start + size] for start in range(0, len(items), size))
