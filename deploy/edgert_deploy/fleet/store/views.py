"""Views that give histograms and percentiles in plain SQL, the same in SQLite and PostgreSQL.

Theory of operation: neither database can read the packed records of a histogram (fleet/packed_histograms.py) by itself.
The table `edgert_bucket` has a row for each possible bucket: its bounds, its value, and the two bytes with which its
record begins. A first join with this table enumerates the records of a row. A second join finds the bucket of each
record. The two databases differ only in how they read the eight bytes of a count. The values are the sketch's values,
so a view and `edgert fleet query` give the same answers.
"""

from __future__ import annotations

import math

import sqlalchemy as sa

from edgert.telemetry.sketch import INDEX_MAX, INDEX_MIN, PER_OCTAVE, middle_ms
from edgert_deploy.fleet.packed_histograms import MERGED_FORM

PERCENTILES = (50, 95, 99)
_RECORD, _INDEX = MERGED_FORM.itemsize, MERGED_FORM["index"].itemsize
_OF_GROUP = ("edgert_group", "site, model, version, profile")
_OF_STREAM = (
    "(SELECT s.id, site, device, model, version, CASE profile WHEN '' THEN 'unknown' ELSE profile END AS profile"
    " FROM edgert_stream s JOIN edgert_device d ON d.id = s.device_id)",
    "site, device, model, version, profile",
)
# View -> (the table of its rows, the unit of its time bins, its owners, the columns that name an owner).
_BUCKETS = {
    "edgert_minute_bucket": ("edgert_group_minute", "minute", *_OF_GROUP),
    "edgert_hour_bucket": ("edgert_group_hour", "hour", *_OF_GROUP),
    "edgert_device_hour_bucket": ("edgert_stream_hour", "hour", *_OF_STREAM),
}


def create(connection: sa.Connection, bucket: sa.Table) -> None:
    """Fill the new table `bucket` and create the views."""
    connection.execute(bucket.insert(), [_bucket(index) for index in range(INDEX_MIN, INDEX_MAX + 1)])
    for name, words in _BUCKETS.items():
        connection.exec_driver_sql(f"CREATE VIEW {name} AS {_buckets(connection.dialect.name, *words)}")
    connection.exec_driver_sql(f"CREATE VIEW edgert_hour_percentile AS {_PERCENTILE}")


def _bucket(index: int) -> dict[str, object]:
    return {
        "place": index - INDEX_MIN,
        "packed": index.to_bytes(_INDEX, "little", signed=True),
        "lower_ms": math.pow(2, index / PER_OCTAVE),
        "upper_ms": math.pow(2, (index + 1) / PER_OCTAVE),
        "value_ms": middle_ms(index),
    }


def _buckets(dialect: str, table: str, unit: str, owners: str, names: str) -> str:
    """Return a SELECT with a row for each filled bucket, and a row for the requests of 0 ms."""
    places = range(_INDEX, _RECORD)
    if dialect == "postgresql":
        byte = "get_byte(r.buckets, n.place * {record} + {place})::bigint"
    else:  # the position of a byte in a text of all 256 bytes is its value
        every = bytes(range(256)).hex()
        byte = f"(instr(x'{every}', substr(r.buckets, n.place * {{record}} + {{place}} + 1, 1)) - 1)"
    count = " + ".join(f"({byte.format(record=_RECORD, place=place)} << {8 * (place - _INDEX)})" for place in places)
    owned = f"r.time_bin AS {unit}, {names}"
    return (
        f"SELECT {owned}, b.lower_ms, b.upper_ms, b.value_ms, {count} AS count,"
        f" r.count AS answered, r.least AS min_ms, r.most AS max_ms"
        f" FROM {table} r JOIN {owners} o ON o.id = r.owner"
        f" JOIN edgert_bucket n ON n.place < length(r.buckets) / {_RECORD}"
        f" JOIN edgert_bucket b ON b.packed = substr(r.buckets, n.place * {_RECORD} + 1, {_INDEX})"
        f" UNION ALL SELECT {owned}, 0, 0, 0, r.zero, r.count, r.least, r.most"
        f" FROM {table} r JOIN {owners} o ON o.id = r.owner WHERE r.zero > 0"
    )


# The bucket of a percentile is the first bucket whose cumulative count reaches the percentile's rank. By the
# nearest-rank rule, the last rank is the largest value.
_GROUP = "hour, site, model, version, profile"
_PERCENTILE = f"""
SELECT {_GROUP}, answered, percentile,
    CASE WHEN percentile * answered > 100 * (answered - 1) OR value_ms > max_ms THEN max_ms
         WHEN value_ms > 0 AND value_ms < min_ms THEN min_ms ELSE value_ms END AS value_ms
FROM (SELECT {_GROUP}, value_ms, count, answered, min_ms, max_ms,
        sum(count) OVER (PARTITION BY {_GROUP} ORDER BY value_ms) AS seen FROM edgert_hour_bucket) AS counted
    JOIN ({" UNION ALL ".join(f"SELECT {number} AS percentile" for number in PERCENTILES)}) AS asked
    ON seen * 100 >= answered * percentile AND (seen - count) * 100 < answered * percentile
"""
