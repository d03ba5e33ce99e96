"""The removal of old rows, and of streams, groups and devices without reports.

Theory of operation: the keys of windows and hours begin with the time, so a query for a stream's last report would read
all rows. A separate table holds the last hour of each stream and group. It is indexed by hour and updated once an hour.
An owner (a stream or a group) is removed after all rows that contain its id. SQLite may use the id of a removed row
again. So each removal changes the table `forgotten`, and a writer reads that table before it uses its cached ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import sqlalchemy as sa

from edgert_deploy.fleet.store import database, schema
from edgert_deploy.fleet.store.batch import HOUR_MIN, KEEP_WINDOWS_H, MINUTE_MS
from edgert_deploy.fleet.store.merged_rows import chunks

KEEP_MINUTES_H = 31 * 24
KEEP_HOURS_H = 400 * 24
SIZE_BYTES_MAX = 20 * 10**9
FORGOTTEN_AT_ONCE = 5_000  # the maximum number of owners of each kind that one call removes
REMEMBERED_MAX = 200_000
PRUNE_S_MAX = 20.0  # the recorder writes no reports in this time
_TRIMMED_AT_ONCE = 0.1
_OWNERS = ((schema.stream_heard, schema.stream), (schema.group_heard, schema.group))


@dataclass(frozen=True)
class Retention:
    """The time to keep each kind of rows, in hours, and the largest size of a SQLite file.

    Events are kept as long as the rows of hours.
    """

    windows_h: int = KEEP_WINDOWS_H
    minutes_h: int = KEEP_MINUTES_H
    hours_h: int = KEEP_HOURS_H
    size_bytes_max: int = SIZE_BYTES_MAX


class LastHours:
    """The last hour of each stream and group. The cache lets a writer store only hours that are later."""

    def __init__(self) -> None:
        self._stored: dict[tuple[str, int], int] = {}

    def clear(self) -> None:
        """Empty the cache: another writer may have removed the rows."""
        self._stored.clear()

    def store(self, connection: sa.Connection, table: sa.Table, hours: Mapping[int, int]) -> None:
        """Store the hour (since 1970) of each owner in `table`, which is stream_heard or group_heard."""
        later = {owner: hour for owner, hour in hours.items() if hour > self._stored.get((table.name, owner), -1)}
        if not later:
            return
        statement = database.insert(connection, table)
        newer = statement.excluded.hour > table.c.hour
        upsert = statement.on_conflict_do_update(
            index_elements=["owner"], set_={"hour": statement.excluded.hour}, where=newer
        )
        connection.execute(upsert, [{"owner": owner, "hour": later[owner]} for owner in sorted(later)])
        if len(self._stored) > REMEMBERED_MAX:
            self._stored.clear()
        self._stored.update({(table.name, owner): hour for owner, hour in later.items()})


def prune(
    connection: sa.Connection, retention: Retention, now_ms: int, clock: Callable[[], float] = time.monotonic
) -> int:
    """Remove old rows, owners without recent reports, and the oldest windows of a file that is too large.

    One statement removes an hour at most, so it does not exceed the time limit of PostgreSQL. After PRUNE_S_MAX, the
    function leaves the rest to the next call. Returns the number of removed rows.
    """
    hour, ends_at, removed = now_ms // MINUTE_MS // HOUR_MIN, clock() + PRUNE_S_MAX, 0
    windows, minutes, hours = (hour - kept for kept in (retention.windows_h, retention.minutes_h, retention.hours_h))
    for column, per_hour, before in (
        (schema.hist_window.c.minute, HOUR_MIN, windows),
        (schema.metrics_window.c.minute, HOUR_MIN, windows),
        *((table.c.time_bin, HOUR_MIN, minutes) for table in _with_stages(schema.group_minute)),
        *((table.c.time_bin, 1, hours) for table in _with_stages(schema.group_hour)),
        *((table.c.time_bin, 1, hours) for table in _with_stages(schema.stream_hour)),
        (schema.gap.c.until_minute, HOUR_MIN, hours),
        (schema.event.c.at_ms, HOUR_MIN * MINUTE_MS, hours),
    ):
        old = column < before * per_hour
        # The search begins behind the removed rows, because PostgreSQL would read these rows again.
        while (first := connection.scalar(sa.select(sa.func.min(column)).where(old))) is not None:
            if clock() > ends_at:
                return removed
            piece = sa.and_(old, column >= first, column < first + per_hour)
            removed += connection.execute(column.table.delete().where(piece)).rowcount
            old = sa.and_(column < before * per_hour, column >= first + per_hour)
    removed += forget(connection, hour, max(retention.windows_h, retention.minutes_h, retention.hours_h))
    return removed + _shrink(connection, retention.size_bytes_max)


def _with_stages(table: sa.Table) -> tuple[sa.Table, sa.Table]:
    return table, schema.STAGES[table.name]


def forget(connection: sa.Connection, now_hour: int, kept_h: int, at_once: int = FORGOTTEN_AT_ONCE) -> int:
    """Remove owners without reports for `kept_h` hours; return the number of removed owners.

    One call removes at most `at_once` owners of each kind.

    The caller has removed all older rows. A store of an older version has no last hours: there, `kept_h` begins with
    the first call.
    """
    before = now_hour - kept_h
    for last_hour, owner in _OWNERS:
        known = sa.exists().where(last_hour.c.owner == owner.c.id)
        # One hour ahead, because a device's clock may be ahead.
        unknown = sa.select(owner.c.id, sa.literal(now_hour + 1)).where(~known).limit(at_once)
        connection.execute(last_hour.insert().from_select(["owner", "hour"], unknown))
    removed = sum(_forget_owners(connection, last_hour, owner, before, at_once) for last_hour, owner in _OWNERS)
    removed += _forget_devices(connection, before * HOUR_MIN * MINUTE_MS, at_once)
    if removed:
        connection.execute(schema.forgotten.update().values(turns=schema.forgotten.c.turns + 1))
    return removed


def forget_device(connection: sa.Connection, site: str, name: str) -> int:
    """Remove every row of one device; return the number of rows."""
    device = schema.device
    device_id = connection.scalar(sa.select(device.c.id).where(device.c.site == site, device.c.device == name))
    if device_id is None:
        return 0
    streams = sa.select(schema.stream.c.id).where(schema.stream.c.device_id == device_id)
    owned = (
        schema.hist_window.c.stream,
        schema.metrics_window.c.stream,
        schema.gap.c.stream,
        schema.stream_hour.c.owner,
        schema.STAGES[schema.stream_hour.name].c.owner,
        schema.stream_heard.c.owner,
    )
    doomed = [column.table.delete().where(column.in_(streams)) for column in owned]
    doomed += [table.delete().where(table.c.device_id == device_id) for table in (schema.stream, schema.event)]
    removed = sum(
        connection.execute(removal).rowcount for removal in (*doomed, device.delete().where(device.c.id == device_id))
    )
    connection.execute(schema.forgotten.update().values(turns=schema.forgotten.c.turns + 1))
    return removed


def size_bytes(connection: sa.Connection) -> int:
    """Return the size of the store without free pages."""
    if connection.dialect.name == "sqlite":
        pages, free, size = (
            int(connection.exec_driver_sql(f"PRAGMA {name}").scalar_one())
            for name in ("page_count", "freelist_count", "page_size")
        )
        return (pages - free) * size
    tables = [schema.hist_window, schema.metrics_window, schema.group_minute, schema.group_hour, schema.stream_hour, *schema.STAGES.values(), schema.event]  # fmt: skip
    sizes = (connection.scalar(sa.select(sa.func.pg_total_relation_size(table.name))) for table in tables)
    return sum(int(size or 0) for size in sizes)


def _shrink(connection: sa.Connection, size_bytes_max: int) -> int:
    """Remove the oldest tenth of the windows while a SQLite file is too large. Does nothing in PostgreSQL."""
    removed = 0
    while connection.dialect.name == "sqlite" and size_bytes(connection) > size_bytes_max:
        column = schema.hist_window.c.minute
        first, last = connection.execute(sa.select(sa.func.min(column), sa.func.max(column))).one()
        if first is None:
            break
        until = first + max(1, int((last - first) * _TRIMMED_AT_ONCE))
        for table in (schema.hist_window, schema.metrics_window):
            removed += connection.execute(table.delete().where(table.c.minute < until)).rowcount
    return removed


def _forget_owners(connection: sa.Connection, last_hour: sa.Table, owner: sa.Table, before: int, at_once: int) -> int:
    old = sa.select(last_hour.c.owner).where(last_hour.c.hour < before).order_by(last_hour.c.hour).limit(at_once)
    ids = list(connection.scalars(old))
    for few in chunks(ids):
        connection.execute(last_hour.delete().where(last_hour.c.owner.in_(few)))
        connection.execute(owner.delete().where(owner.c.id.in_(few)))
    return len(ids)


def _forget_devices(connection: sa.Connection, before_ms: int, at_once: int) -> int:
    """Remove devices that reported once and have no rows now. Devices with only retained messages stay."""
    device = schema.device
    reported = sa.exists().where(schema.stream.c.device_id == device.c.id)
    happened = sa.exists().where(schema.event.c.device_id == device.c.id)
    old = sa.select(device.c.id).where(device.c.heard_ms > 0, device.c.heard_ms < before_ms, ~reported, ~happened)
    return connection.execute(device.delete().where(device.c.id.in_(old.limit(at_once)))).rowcount
