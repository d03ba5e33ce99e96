"""Silence: in which hour each stream and group was last heard, and who is forgotten for having been silent too long.

Theory of operation: the rows of windows and hours are keyed by time first, so that asking them for a stream's last
would read them all. So its last hour stands in a table of its own, told once an hour, and indexed by hour. Nobody goes
before all rows that name it have gone. A number that has gone may be given to another, in SQLite: `forgotten` changes
with each turn in which any went, and whoever remembers numbers reads it before using them.
"""

from __future__ import annotations

from collections.abc import Mapping

import sqlalchemy as sa

from edgert_deploy.fleet.store import schema
from edgert_deploy.fleet.store.batch import HOUR_MIN, MINUTE_MS
from edgert_deploy.fleet.store.merging import chunks

FORGOTTEN_AT_ONCE = 5_000  # of each table, in one turn
REMEMBERED_MAX = 200_000
_OWNERS = ((schema.stream_heard, schema.stream), (schema.group_heard, schema.group))


class Silence:
    """What one writer told last, so that it need not be told again within the hour."""

    def __init__(self) -> None:
        self._told: dict[tuple[str, int], int] = {}

    def clear(self) -> None:
        """Nothing that was told is certain to stand there any more."""
        self._told.clear()

    def heard(self, connection: sa.Connection, table: sa.Table, hours: Mapping[int, int]) -> None:
        """Each owner of `hours` was heard in its hour since 1970; `table` is stream_heard or group_heard."""
        later = {owner: hour for owner, hour in hours.items() if hour > self._told.get((table.name, owner), -1)}
        if not later:
            return
        statement = schema.insert(connection, table)
        newer = statement.excluded.hour > table.c.hour
        upsert = statement.on_conflict_do_update(
            index_elements=["owner"], set_={"hour": statement.excluded.hour}, where=newer
        )
        connection.execute(upsert, [{"owner": owner, "hour": later[owner]} for owner in sorted(later)])
        if len(self._told) > REMEMBERED_MAX:
            self._told.clear()
        self._told.update({(table.name, owner): hour for owner, hour in later.items()})


def forget(connection: sa.Connection, now_hour: int, kept_h: int, at_once: int = FORGOTTEN_AT_ONCE) -> int:
    """Forget who was silent for more than `kept_h` hours, at most `at_once` of each kind; how many. No row may be older than that.

    Of a store that an older version wrote, silence counts from the first turn on.
    """
    before = now_hour - kept_h
    for heard, owner in _OWNERS:
        known = sa.exists().where(heard.c.owner == owner.c.id)
        # An hour ahead, as far as a device's clock is believed.
        unknown = sa.select(owner.c.id, sa.literal(now_hour + 1)).where(~known).limit(at_once)
        connection.execute(heard.insert().from_select(["owner", "hour"], unknown))
    gone = sum(_forget_owners(connection, heard, owner, before, at_once) for heard, owner in _OWNERS)
    gone += _forget_devices(connection, before * HOUR_MIN * MINUTE_MS, at_once)
    if gone:
        connection.execute(schema.forgotten.update().values(turns=schema.forgotten.c.turns + 1))
    return gone


def _forget_owners(connection: sa.Connection, heard: sa.Table, owner: sa.Table, before: int, at_once: int) -> int:
    silent = sa.select(heard.c.owner).where(heard.c.hour < before).order_by(heard.c.hour).limit(at_once)
    ids = list(connection.scalars(silent))
    for few in chunks(ids):
        connection.execute(heard.delete().where(heard.c.owner.in_(few)))
        connection.execute(owner.delete().where(owner.c.id.in_(few)))
    return len(ids)


def _forget_devices(connection: sa.Connection, before_ms: int, at_once: int) -> int:
    """Devices that were heard once and have no row left. What is known from the broker's retained words alone stays."""
    device = schema.device
    reported = sa.exists().where(schema.stream.c.device_id == device.c.id)
    happened = sa.exists().where(schema.event.c.device_id == device.c.id)
    silent = sa.select(device.c.id).where(device.c.heard_ms > 0, device.c.heard_ms < before_ms, ~reported, ~happened)
    return connection.execute(device.delete().where(device.c.id.in_(silent.limit(at_once)))).rowcount
