"""The store: the fleet's reports, each written once, kept for a stated time.

Theory of operation of `write`: each batch is one transaction. The key (stream, seq) distinguishes new windows from
repeated windows. The database compares the keys (ON CONFLICT DO NOTHING, RETURNING), so any number of recorders may
write to one store. Only new windows are added to the merged rows (merged_rows.py).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import sqlalchemy as sa

from edgert.telemetry.messages import HistMessage, MetricsMessage
from edgert_deploy.fleet.packed_histograms import WINDOW_FORM, pack
from edgert_deploy.fleet.reports import EventMessage, counters_of, increase
from edgert_deploy.fleet.sequence import in_order, is_new_spool
from edgert_deploy.fleet.store import database, gaps, schema
from edgert_deploy.fleet.store.batch import HOUR_MIN, Batch, Origin, minute_of, report_time_ms
from edgert_deploy.fleet.store.merged_rows import MergedRows, chunks
from edgert_deploy.fleet.store.retention import LastHours, Retention, forget_device, prune
from edgert_deploy.fleet.store.row_ids import RowIds
from edgert_deploy.fleet.store.schema import COUNTERS

# A beginning or an end of a period that is older than this moves to a whole hour; see query.py.
FINE_HOURS = 48

Key = tuple[int, int]  # the key of a window: its stream and its number
T = TypeVar("T", HistMessage, MetricsMessage)


class Store:
    """One process's connection to the store, for writing. Raises ConfigInvalid or StoreFailed."""

    def __init__(self, url: str, log: Callable[[str], None] = lambda line: None) -> None:
        self._database = database.OpenStore(url, writes=True, log=log)
        self._devices = RowIds(schema.device, "site", "device")
        self._streams = RowIds(schema.stream, "device_id", "boot", "model", "version")
        self._groups = RowIds(schema.group, "site", "model", "version", "profile")
        self._profiles: dict[int, str] = {}  # the profile of each device, by the device's id
        self._last_hours = LastHours()
        # The caches are valid while this pair stays the same: `openings` of the store, and `turns` of the table
        # `forgotten`.
        self._generation: tuple[int, int | None] = (0, None)

    @property
    def name(self) -> str:
        """The store's URL without its password."""
        return self._database.name

    def close(self) -> None:
        self._database.close()

    def write(self, batch: Batch) -> int:
        """Write `batch` whole or, if this raises, not at all. Return how many of its reports were new."""
        try:
            with self._transaction() as connection:
                return sum(self._write(connection, piece) for piece in batch.pieces())
        except BaseException:
            # The ids that this transaction created may have been rolled back.
            self._clear_cached_ids()
            raise

    def prune(self, retention: Retention, now_ms: int) -> int:
        """Remove rows that are older than `retention`; return the number of removed rows."""
        with self._transaction() as connection:
            return prune(connection, retention, now_ms)

    def forget(self, site: str, device: str) -> int:
        """Remove every row of a device; return the number of rows. Sums over groups of devices stay."""
        with self._transaction() as connection:
            return forget_device(connection, site, device)

    @contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        with self._database.transaction() as connection:
            database.lock(connection)
            generation = (self._database.openings, connection.scalar(sa.select(schema.forgotten.c.turns)))
            if generation != self._generation:  # the file is new, or another recorder removed rows
                self._clear_cached_ids()
                self._generation = generation
            yield connection

    def _clear_cached_ids(self) -> None:
        for cached in (self._devices, self._streams, self._groups, self._profiles, self._last_hours):
            cached.clear()

    def _write(self, connection: sa.Connection, batch: Batch) -> int:
        self._write_devices(connection, batch)
        streams = self._stream_ids(connection, [*batch.hists, *batch.metrics])
        merged = MergedRows(lambda origin, version: self._group_id(connection, origin, version), connection)
        hists, metrics = streams[: len(batch.hists)], streams[len(batch.hists) :]
        new = self._write_hists(connection, _by_key(hists, batch.hists), merged)
        new += self._write_metrics(connection, _by_key(metrics, batch.metrics), merged)
        new += self._write_events(connection, batch.events)
        merged.write()
        self._last_hours.store(connection, schema.stream_heard, _stream_hours(batch, streams))
        self._last_hours.store(connection, schema.group_heard, merged.group_hours())
        return new

    # --- ids of devices, streams and groups ---------------------------------------------------

    def _write_devices(self, connection: sa.Connection, batch: Batch) -> None:
        names = {
            *batch.devices,
            *batch.heard_ms,
            *((origin.site, origin.device) for origin, _ in (*batch.hists, *batch.metrics, *batch.events)),
        }
        self._devices.load(connection, names)
        self._load_profiles(connection, {self._devices[name] for name in names})
        table = schema.device
        for name, fields in batch.devices.items():
            id = self._devices[name]
            if "profile" in fields:
                self._profiles[id] = fields["profile"]
            connection.execute(table.update().where(table.c.id == id).values(**fields))
        if batch.heard_ms:
            heard = [{"_id": self._devices[name], "_at": at_ms} for name, at_ms in batch.heard_ms.items()]
            later = table.update().where(table.c.id == sa.bindparam("_id"), table.c.heard_ms < sa.bindparam("_at"))
            connection.execute(later.values(heard_ms=sa.bindparam("_at")), heard)

    def _load_profiles(self, connection: sa.Connection, devices: set[int]) -> None:
        """Read the profiles of these devices, by id, that are not cached."""
        query = sa.select(schema.device.c.id, schema.known_profile)
        for few in chunks(sorted(devices - self._profiles.keys())):
            self._profiles.update(
                (row[0], row[1]) for row in connection.execute(query.where(schema.device.c.id.in_(few)))
            )

    def _stream_ids(
        self, connection: sa.Connection, reports: Sequence[tuple[Origin, HistMessage | MetricsMessage]]
    ) -> list[int]:
        names = [
            (self._devices[origin.site, origin.device], report.boot, origin.model, report.model_version)
            for origin, report in reports
        ]
        self._streams.load(connection, names)
        return [self._streams[name] for name in names]

    def _group_id(self, connection: sa.Connection, origin: Origin, version: str) -> int:
        profile = self._profiles[self._devices[origin.site, origin.device]]
        return self._groups.get(connection, (origin.site, origin.model, version, profile))

    # --- windows ----------------------------------------------------------------------------

    def _write_hists(
        self, connection: sa.Connection, hists: Mapping[Key, tuple[Origin, HistMessage]], merged: MergedRows
    ) -> int:
        rows = {
            key: {**_window(key, origin, hist), "clock_synced": int(hist.clock_synced), **_histogram_row(hist)}
            for key, (origin, hist) in hists.items()
        }
        new = self._insert_new(connection, schema.hist_window, rows)
        gaps.record_gaps(connection, [(*key, minute_of(*hists[key])) for key in new])
        for key in new:
            merged.add_hist(key[0], *hists[key], rows[key]["buckets"])
        return len(new)

    def _write_metrics(
        self, connection: sa.Connection, metrics: Mapping[Key, tuple[Origin, MetricsMessage]], merged: MergedRows
    ) -> int:
        rows = {key: _window(key, origin, report) for key, (origin, report) in metrics.items()}
        new = self._insert_new(connection, schema.metrics_window, rows)
        self._count_increases(connection, {key: metrics[key] for key in new}, merged)
        return len(new)

    def _count_increases(
        self, connection: sa.Connection, new: Mapping[Key, tuple[Origin, MetricsMessage]], merged: MergedRows
    ) -> None:
        """Store each counter's growth since the last report. The growth of a late report is already stored."""
        arrived: dict[int, list[int]] = {}
        for stream, seq in new:
            arrived.setdefault(stream, []).append(seq)
        last_rows = _last_rows(connection, arrived)
        increases = []
        ordered = [(stream, seq) for stream, seqs in sorted(arrived.items()) for seq in in_order(seqs)]
        for stream, seq in ordered:
            origin, report = new[stream, seq]
            grown = _advance(last_rows[stream], report)
            if any(grown.values()):
                merged.add_counters(stream, origin, report, grown)
                increases.append({"stream": stream, "seq": seq, **grown})
        streams = [{name: row[name] for name in ("id", "last_seq", *COUNTERS)} for row in last_rows.values()]
        database.update_rows(connection, schema.stream, ["id"], streams)
        database.update_rows(connection, schema.metrics_window, ["stream", "seq"], increases)

    def _write_events(self, connection: sa.Connection, events: Sequence[tuple[Origin, EventMessage]]) -> int:
        rows = [
            {
                "device_id": self._devices[origin.site, origin.device],
                "boot": event.boot,
                "seq": event.seq,
                "at_ms": report_time_ms(origin, event),
                "event": event.event,
                "model": event.model or None,
                "fields": json.dumps(event.fields),
            }
            for origin, event in events
        ]
        if not rows:
            return 0
        table = schema.event
        statement = database.insert(connection, table).on_conflict_do_nothing().returning(table.c.seq)
        return len(connection.execute(statement, rows).all())

    def _insert_new(
        self, connection: sa.Connection, table: sa.Table, rows: Mapping[Key, Mapping[str, Any]]
    ) -> list[Key]:
        """Insert the rows whose key is new; return the keys of these rows, in the order of `rows`."""
        if not rows:
            return []
        statement = database.insert(connection, table).on_conflict_do_nothing().returning(table.c.stream, table.c.seq)
        inserted = {(row.stream, row.seq) for row in connection.execute(statement, list(rows.values()))}
        return [key for key in rows if key in inserted]


def _by_key(streams: Sequence[int], reports: Sequence[tuple[Origin, T]]) -> dict[Key, tuple[Origin, T]]:
    return {(stream, report[1].seq): report for stream, report in zip(streams, reports, strict=True)}


def _stream_hours(batch: Batch, streams: Sequence[int]) -> dict[int, int]:
    """Return the last hour of each stream. `streams` has the ids of the hists, then of the metrics."""
    hours: dict[int, int] = {}
    reports: list[tuple[Origin, HistMessage | MetricsMessage]] = [*batch.hists, *batch.metrics]
    for stream, (origin, report) in zip(streams, reports, strict=True):
        hours[stream] = max(minute_of(origin, report) // HOUR_MIN, hours.get(stream, 0))
    return hours


def _last_rows(connection: sa.Connection, streams: Collection[int]) -> dict[int, dict[str, Any]]:
    """Return the row of each stream: the counters of its last report, and the number of this report."""
    table = schema.stream
    return {
        row.id: row._asdict()
        for few in chunks(sorted(streams))
        for row in connection.execute(sa.select(table).where(table.c.id.in_(few)))
    }


def _advance(last: dict[str, Any], report: MetricsMessage) -> dict[str, int]:
    """Make `report` its stream's last report; return each counter's growth. A late one changes nothing."""
    new_spool = last["last_seq"] >= 0 and is_new_spool(report.seq, last["last_seq"])
    if report.seq <= last["last_seq"] and not new_spool:
        return {}
    counters = counters_of(report)
    before = [last[name] for name in COUNTERS] if last["last_seq"] >= 0 else None
    last.update(zip(COUNTERS, counters, strict=True), last_seq=report.seq)
    return dict(zip(COUNTERS, increase(counters, before, report, new_spool), strict=True))


def _window(key: Key, origin: Origin, report: HistMessage | MetricsMessage) -> dict[str, Any]:
    return {"stream": key[0], "seq": key[1], "minute": minute_of(origin, report), "ts_ms": report.ts_ms}


def _histogram_row(hist: HistMessage) -> dict[str, Any]:
    sketch = hist.sketch
    return {
        "windows": 1,
        "zero": sketch.zero,
        "count": sketch.count,
        "sum": sketch.sum,
        "least": sketch.min,
        "most": sketch.max,
        "buckets": pack(sketch.buckets, WINDOW_FORM),
        "stages": hist.stages,
    }
