"""The store's tables, in SQLite or PostgreSQL.

Theory of operation: a report is one row in `hist_window` or `metrics_window`. The key (stream, seq) makes a repeated
report harmless. The same transaction adds the report to three merged rows: the minute and the hour of its group (site,
model, version, profile), and the hour of its stream, which identifies the device. A query reads the coarsest rows that
its period allows. So the cost of a query grows with the hours of its period, not with the number of windows. Merging
adds integers, so rows of minutes and rows of hours give the same answer.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from edgert_deploy.fleet.reports import COUNTER_FIELDS, PROFILE_UNKNOWN

metadata = sa.MetaData()
# SQLite assigns ids only to a key of the type INTEGER.
_Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
COUNTERS = tuple(COUNTER_FIELDS)


def _names(*columns: str) -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.String(64), nullable=False) for name in columns]


def _counters() -> list[sa.Column[Any]]:
    return [sa.Column(name, sa.BigInteger, nullable=False, default=0) for name in COUNTERS]


meta = sa.Table("edgert_meta", metadata, sa.Column("version", sa.Integer, nullable=False))

device = sa.Table(
    "edgert_device",
    metadata,
    sa.Column("id", _Id, primary_key=True),
    *_names("site", "device"),
    sa.Column("profile", sa.String(64), nullable=False, default=""),
    sa.Column("status", sa.String(16), nullable=False, default="unknown"),
    sa.Column("heard_ms", sa.BigInteger, nullable=False, default=0),
    sa.Column("info", sa.Text),
    sa.Column("sys", sa.Text),
    sa.Column("deploy", sa.Text),
    sa.UniqueConstraint("site", "device"),
)
known_profile = sa.case((device.c.profile == "", PROFILE_UNKNOWN), else_=device.c.profile)

# One worker process on one device. `last_seq` and the counters are from the newest `metrics`: each increase is added
# once. `hist_seq` and `hist_minute` are from the newest `hist`: the recorder finds gaps with them.
stream = sa.Table(
    "edgert_stream",
    metadata,
    sa.Column("id", _Id, primary_key=True),
    sa.Column("device_id", sa.ForeignKey("edgert_device.id"), nullable=False),
    *_names("boot", "model", "version"),
    sa.Column("last_seq", sa.BigInteger, nullable=False, default=-1),
    sa.Column("hist_seq", sa.BigInteger, nullable=False, default=-1),
    sa.Column("hist_minute", sa.Integer, nullable=False, default=0),
    *_counters(),
    sa.UniqueConstraint("device_id", "boot", "model", "version"),
)

group = sa.Table(
    "edgert_group",
    metadata,
    sa.Column("id", _Id, primary_key=True),
    *_names("site", "model", "version", "profile"),
    sa.UniqueConstraint("site", "model", "version", "profile"),
)

HISTOGRAM = ("windows", "zero", "count", "sum", "least", "most", "buckets")


def _histogram() -> list[sa.Column[Any]]:
    return [
        *(sa.Column(name, sa.BigInteger, nullable=False, default=0) for name in HISTOGRAM[:3]),
        *(sa.Column(name, sa.Double, nullable=False, default=0.0) for name in HISTOGRAM[3:6]),
        sa.Column("buckets", sa.LargeBinary, nullable=False, default=b""),
    ]


def _merged(name: str) -> sa.Table:
    """Return a table of merged rows: a time bin is a minute or an hour, counted since 1970.

    `owner` is a group or a stream. It has no foreign key, because PostgreSQL would search the whole table for each
    deleted owner.
    """
    return sa.Table(
        name,
        metadata,
        sa.Column("time_bin", sa.Integer, primary_key=True),
        sa.Column("owner", _Id, primary_key=True, autoincrement=False),
        *_histogram(),
        *_counters(),
        sqlite_with_rowid=False,
    )


def _stages(name: str) -> sa.Table:
    """Return the table of stage times. In the table of counters, stages would add a page to each row."""
    return sa.Table(
        name,
        metadata,
        sa.Column("time_bin", sa.Integer, primary_key=True),
        sa.Column("owner", _Id, primary_key=True, autoincrement=False),
        sa.Column("stages", sa.LargeBinary, nullable=False),
    )


group_minute = _merged("edgert_group_minute")
group_hour = _merged("edgert_group_hour")
stream_hour = _merged("edgert_stream_hour")
STAGES = {table.name: _stages(f"{table.name}_stages") for table in (group_minute, group_hour, stream_hour)}


def _last_heard(name: str, owner: str) -> sa.Table:
    """Return a table of last hours.

    `hour` is in hours since 1970. It is the hour of the owner's newest row, or a later hour.
    """
    return sa.Table(
        name,
        metadata,
        sa.Column("owner", sa.ForeignKey(f"{owner}.id"), primary_key=True, autoincrement=False),
        sa.Column("hour", sa.Integer, nullable=False, index=True),
    )


stream_heard = _last_heard("edgert_stream_heard", "edgert_stream")
group_heard = _last_heard("edgert_group_heard", "edgert_group")

# `turns` changes whenever streams, groups or devices are deleted. The ids that a writer has cached are then invalid.
forgotten = sa.Table("edgert_forgotten", metadata, sa.Column("turns", sa.BigInteger, nullable=False))

# Reports that were sent and never arrived; see gaps.py.
gap = sa.Table(
    "edgert_gap",
    metadata,
    sa.Column("stream", _Id, primary_key=True, autoincrement=False),
    sa.Column("first_seq", sa.BigInteger, primary_key=True),
    sa.Column("end_seq", sa.BigInteger, nullable=False),
    sa.Column("from_minute", sa.Integer, nullable=False),
    sa.Column("until_minute", sa.Integer, nullable=False, index=True),
    sqlite_with_rowid=False,
)

# If `clock_synced` is 0, `minute` is the minute of receipt.
hist_window = sa.Table(
    "edgert_hist_window",
    metadata,
    sa.Column("stream", sa.ForeignKey("edgert_stream.id"), primary_key=True),
    sa.Column("seq", sa.BigInteger, primary_key=True),
    sa.Column("minute", sa.Integer, nullable=False, index=True),
    sa.Column("ts_ms", sa.BigInteger, nullable=False),
    sa.Column("clock_synced", sa.SmallInteger, nullable=False, default=1),
    *_histogram(),
    sa.Column("stages", sa.LargeBinary, nullable=False, default=b""),
)
_unsynced = hist_window.c.clock_synced == 0
sa.Index("edgert_hist_window_unsynced", hist_window.c.minute, sqlite_where=_unsynced, postgresql_where=_unsynced)

# The column of a counter has the counter's increase in this window.
metrics_window = sa.Table(
    "edgert_metrics_window",
    metadata,
    sa.Column("stream", sa.ForeignKey("edgert_stream.id"), primary_key=True),
    sa.Column("seq", sa.BigInteger, primary_key=True),
    sa.Column("minute", sa.Integer, nullable=False, index=True),
    sa.Column("ts_ms", sa.BigInteger, nullable=False),
    *_counters(),
)

event = sa.Table(
    "edgert_event",
    metadata,
    sa.Column("device_id", sa.ForeignKey("edgert_device.id"), primary_key=True),
    sa.Column("boot", sa.String(64), primary_key=True),
    sa.Column("seq", sa.BigInteger, primary_key=True),
    sa.Column("at_ms", sa.BigInteger, nullable=False, index=True),
    sa.Column("event", sa.String(64), nullable=False),
    sa.Column("model", sa.String(64)),
    sa.Column("fields", sa.Text, nullable=False),
    sqlite_with_rowid=False,
)

# The possible buckets of a histogram; see views.py. `place` starts at 0. `packed` is the prefix of a bucket's record.
bucket = sa.Table(
    "edgert_bucket",
    metadata,
    sa.Column("place", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("packed", sa.LargeBinary(2), nullable=False, unique=True),
    sa.Column("lower_ms", sa.Double, nullable=False),
    sa.Column("upper_ms", sa.Double, nullable=False),
    sa.Column("value_ms", sa.Double, nullable=False),
)

# A line of a rollout's record (edgert_deploy.rollout.rollout_record). `digest` is the digest of the line's text.
rollout_line = sa.Table(
    "edgert_rollout_line",
    metadata,
    sa.Column("rollout", sa.String(200), primary_key=True),
    sa.Column("digest", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("line", sa.Text, nullable=False),
    sqlite_with_rowid=False,
)
