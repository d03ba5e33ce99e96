"""Gaps: the reports of latencies that were sent and never arrived, by their `seq`.

Theory of operation: `seq` grows by one with each report of a model on a device. It continues over restarts, reboots and
versions. If a number is more than one above the number before it, the numbers between the two are a gap. A gap is one
row, in the stream of the report after the gap. All versions share the numbers: after a rollback, the older stream
continues after the last number of the newer stream.

A late report closes its part of a gap of any version and boot, because a broker may delay the report beyond the next
deployment or reboot. After a power cut, a device uses its last numbers again. So a number that is not above the last
number of another boot leaves no gap. A lost spool had an unknown number of reports; it adds one missing report.

The time of a missing report is unknown. The store spreads the missing reports evenly over the gap's time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa

from edgert_deploy.fleet.sequence import in_order, is_new_spool
from edgert_deploy.fleet.store import database, schema
from edgert_deploy.fleet.store.merged_rows import chunks


class Gap(NamedTuple):
    """The missing numbers from `first_seq` to before `end_seq`, and the minutes of the reports around it."""

    stream: int
    first_seq: int
    end_seq: int
    from_minute: int
    until_minute: int

    def within(self, first: int, end: int) -> int:
        """Return how many of the gap's reports belong to the minutes from `first` to before `end`."""
        return self._missing_before(end) - self._missing_before(first)

    def _missing_before(self, minute: int) -> int:
        count, length = self.end_seq - self.first_seq, self.until_minute - self.from_minute
        if length <= 0:
            return count if minute > self.until_minute else 0
        position = -(-(minute - self.from_minute) * (count + 1) // length) - 1
        return min(max(position, 0), count)


def record_gaps(connection: sa.Connection, reports: Sequence[tuple[int, int, int]]) -> None:
    """Store the gaps before new reports (stream, seq, minute), and close the gaps that late reports fill.

    `reports` are in the order of their receipt.
    """
    minutes = {(stream, seq): minute for stream, seq, minute in reports}
    arrived: dict[int, list[int]] = {}
    for stream, seq, _ in reports:
        arrived.setdefault(stream, []).append(seq)
    known = _streams(connection, list(arrived))
    newest = _newest_of_others(connection, [row for row in known.values() if row["hist_seq"] < 0])
    behind = [row for row in known.values() if 0 <= row["hist_seq"] < max(arrived[row["id"]]) - 1]
    of_boot = _newest_of_boots(connection, behind)
    late = {row["device_id"] for row in known.values() if min(arrived[row["id"]]) <= row["model_seq"]}
    open_gaps = _gaps_of(connection, late)
    before = _all_gaps(open_gaps)
    for stream, seqs in arrived.items():
        row = known[stream]
        model = (row["device_id"], row["model"])
        gaps = open_gaps.setdefault(model, [])
        hist_seq, at = row["hist_seq"], row["hist_minute"]
        boot = (*model, row["boot"])
        last, last_at = max((hist_seq, at), of_boot.get(boot, (-1, 0))) if hist_seq >= 0 else newest.get(model, (-1, 0))
        for seq in in_order(seqs):
            minute = minutes[stream, seq]
            if _close(gaps, seq):
                pass  # a late report: the missing numbers before it are already in a gap
            elif last >= 0 and is_new_spool(seq, last):
                gaps.append(Gap(stream, seq - 1, seq, last_at, minute))
            elif 0 <= last < seq - 1:
                gaps.append(Gap(stream, last + 1, seq, last_at, minute))
            if hist_seq < 0 or seq > hist_seq or is_new_spool(seq, hist_seq):
                hist_seq, at = seq, minute
            if hist_seq > last or is_new_spool(hist_seq, last):
                last, last_at = hist_seq, at
        row["hist_seq"], row["hist_minute"] = hist_seq, at
        of_boot[boot] = max((hist_seq, at), of_boot.get(boot, (-1, 0)))
        if at >= newest.get(model, (-1, 0))[1]:
            newest[model] = hist_seq, at
    streams = [{name: row[name] for name in ("id", "hist_seq", "hist_minute")} for row in known.values()]
    database.update_rows(connection, schema.stream, ["id"], streams)
    _store_changes(connection, before, _all_gaps(open_gaps))


def overlapping(connection: sa.Connection, first: int, end: int) -> Iterator[Gap]:
    """Yield the gaps that overlap the minutes from `first` to before `end`."""
    table = schema.gap
    query = sa.select(table).where(table.c.until_minute >= first, table.c.from_minute < end)
    return (Gap(*row) for row in connection.execute(query))


def _streams(connection: sa.Connection, ids: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Return the streams by id. Their `model_seq` is the model's last number in all streams of the device."""
    table, other = schema.stream, schema.stream.alias()
    names = ("id", "device_id", "boot", "model", "hist_seq", "hist_minute")
    same = (other.c.device_id == table.c.device_id, other.c.model == table.c.model)
    model_seq = sa.select(sa.func.max(other.c.hist_seq)).where(*same).scalar_subquery()
    query = sa.select(*(table.c[name] for name in names), model_seq)
    rows = (row for few in chunks(ids) for row in connection.execute(query.where(table.c.id.in_(few))))
    return {row[0]: dict(zip((*names, "model_seq"), row, strict=True)) for row in rows}


def _newest_of_others(
    connection: sa.Connection, begun: Iterable[Mapping[str, Any]]
) -> dict[tuple[int, str], tuple[int, int]]:
    """Return the last number and minute in older streams, for each model whose stream just began."""
    table = schema.stream
    newest_first = (table.c.hist_minute.desc(), table.c.hist_seq.desc())
    order = sa.func.row_number().over(partition_by=(table.c.device_id, table.c.model), order_by=newest_first)
    newest: dict[tuple[int, str], tuple[int, int]] = {}
    for few in chunks(sorted({row["device_id"] for row in begun})):
        numbered = (
            sa.select(table.c.device_id, table.c.model, table.c.hist_seq, table.c.hist_minute, order.label("place"))
            .where(table.c.device_id.in_(few), table.c.hist_seq >= 0)
            .subquery()
        )
        for row in connection.execute(sa.select(numbered).where(numbered.c.place == 1)):
            newest[row.device_id, row.model] = row.hist_seq, row.hist_minute
    return newest


def _newest_of_boots(
    connection: sa.Connection, behind: Sequence[Mapping[str, Any]]
) -> dict[tuple[int, str, str], tuple[int, int]]:
    """Return the last number and minute of each (device, model, boot), over all versions."""
    columns = schema.stream.c
    newest: dict[tuple[int, str, str], tuple[int, int]] = {}
    for few in chunks(sorted({row["device_id"] for row in behind})):
        query = sa.select(columns.device_id, columns.model, columns.boot, columns.hist_seq, columns.hist_minute)
        boots = {row["boot"] for row in behind if row["device_id"] in few}
        for *owner, seq, minute in connection.execute(
            query.where(columns.device_id.in_(few), columns.boot.in_(boots), columns.hist_seq >= 0)
        ):
            device, model, boot = owner
            newest[device, model, boot] = max((seq, minute), newest.get((device, model, boot), (-1, 0)))
    return newest


def _gaps_of(connection: sa.Connection, devices: set[int]) -> dict[tuple[int, str], list[Gap]]:
    """Return the gaps of these devices by device and model."""
    table, owner = schema.gap, schema.stream
    open_gaps: dict[tuple[int, str], list[Gap]] = {}
    for few in chunks(sorted(devices)):
        query = sa.select(owner.c.device_id, owner.c.model, table).join(owner, owner.c.id == table.c.stream)
        for device, model, *numbers in connection.execute(query.where(owner.c.device_id.in_(few))):
            open_gaps.setdefault((device, model), []).append(Gap(*numbers))
    return open_gaps


def _all_gaps(open_gaps: Mapping[tuple[int, str], Sequence[Gap]]) -> set[Gap]:
    return {gap for gaps in open_gaps.values() for gap in gaps}


def _close(gaps: list[Gap], seq: int) -> bool:
    """Remove `seq` from the gap that contains it; return whether there is such a gap."""
    for gap in gaps:
        if gap.first_seq <= seq < gap.end_seq:
            gaps.remove(gap)
            parts = (gap._replace(end_seq=seq), gap._replace(first_seq=seq + 1))
            gaps += [part for part in parts if part.first_seq < part.end_seq]
            return True
    return False


def _store_changes(connection: sa.Connection, before: set[Gap], after: set[Gap]) -> None:
    table = schema.gap
    same = (table.c.stream == sa.bindparam("_stream"), table.c.first_seq == sa.bindparam("_first"))
    if gone := [{"_stream": gap.stream, "_first": gap.first_seq} for gap in before - after]:
        connection.execute(table.delete().where(*same), gone)
    if new := [gap._asdict() for gap in after - before]:
        connection.execute(table.insert(), new)
