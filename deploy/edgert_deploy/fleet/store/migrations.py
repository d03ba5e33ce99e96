"""Migrations: the steps from a store of an older version to this version."""

from __future__ import annotations

from collections.abc import Callable

import sqlalchemy as sa

_GAPS_OF_VERSION_1 = """
INSERT INTO edgert_gap (stream, first_seq, end_seq, from_minute, until_minute)
SELECT stream, before + 1, seq, minute_before, minute FROM (
    SELECT stream, seq, minute, lag(seq) OVER numbered AS before, lag(minute) OVER numbered AS minute_before
    FROM edgert_hist_window WINDOW numbered AS (PARTITION BY stream ORDER BY seq)) AS pairs
WHERE seq > before + 1 AND seq - before <= 2147483648
"""
_LAST_OF_VERSION_1 = """
UPDATE edgert_stream SET
    hist_seq = coalesce((SELECT max(seq) FROM edgert_hist_window WHERE stream = edgert_stream.id), -1),
    hist_minute = coalesce((SELECT max(minute) FROM edgert_hist_window WHERE stream = edgert_stream.id), 0)
"""


def _from_1(connection: sa.Connection) -> None:
    """Add gaps and the column `clock_synced`. Remove the foreign keys of merged rows."""
    for statement in (
        "ALTER TABLE edgert_stream ADD COLUMN hist_seq BIGINT NOT NULL DEFAULT -1",
        "ALTER TABLE edgert_stream ADD COLUMN hist_minute INTEGER NOT NULL DEFAULT 0",
        "ALTER TABLE edgert_hist_window ADD COLUMN clock_synced SMALLINT NOT NULL DEFAULT 1",
        "CREATE INDEX edgert_hist_window_unsynced ON edgert_hist_window (minute) WHERE clock_synced = 0",
        _LAST_OF_VERSION_1,
        _GAPS_OF_VERSION_1,
    ):
        connection.execute(sa.text(statement))
    if connection.dialect.name == "postgresql":  # SQLite does not check foreign keys
        inspector = sa.inspect(connection)
        for table in ("edgert_group_minute", "edgert_group_hour", "edgert_stream_hour"):
            for bound in inspector.get_foreign_keys(table):
                connection.execute(sa.text(f'ALTER TABLE {table} DROP CONSTRAINT "{bound["name"]}"'))


def _from_2(connection: sa.Connection) -> None:
    """Add histograms of stage times. Remove the payloads, because percentiles of stages cannot be merged."""
    binary = "BYTEA NOT NULL DEFAULT ''" if connection.dialect.name == "postgresql" else "BLOB NOT NULL DEFAULT x''"
    connection.execute(sa.text(f"ALTER TABLE edgert_hist_window ADD COLUMN stages {binary}"))
    connection.execute(sa.text("ALTER TABLE edgert_metrics_window DROP COLUMN fields"))


def _from_3(connection: sa.Connection) -> None:
    """Rename the column `slot` of merged rows to `time_bin`. Tables that are new have this name already."""
    inspector = sa.inspect(connection)
    for merged in ("edgert_group_minute", "edgert_group_hour", "edgert_stream_hour"):
        for table in (merged, f"{merged}_stages"):
            if "slot" in {column["name"] for column in inspector.get_columns(table)}:
                connection.execute(sa.text(f"ALTER TABLE {table} RENAME COLUMN slot TO time_bin"))


# The first function migrates version 1 to version 2. The caller has created the new tables.
MIGRATIONS: tuple[Callable[[sa.Connection], None], ...] = (_from_1, _from_2, _from_3)
SCHEMA_VERSION = 1 + len(MIGRATIONS)
