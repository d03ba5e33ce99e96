"""The speed of the store: writing and answers for a day of 1,000 devices, 1.44 million windows.

Each device has its own log-normal distribution of latency, and each of its windows has a few hundred requests. The
answers are checked against each other: every grouping adds up to the same sketch. Each answer is timed as a new process
would see it, including the connection. The ratio compares this time with the time to read every window of the period,
which a store without merged rows needs. The cost of a million reports is the cost of histograms that are written minute
by minute. It does not include the cost of `metrics` (bench.fleet --recorder).

    python -m bench.fleet_query                                        # SQLite in a temporary folder
    python -m bench.fleet_query --postgres                             # a PostgreSQL server of its own, without fsync
    python -m bench.fleet_query --store postgresql://ops@db/fleet      # an empty database
    python -m bench.fleet_query --devices 100 --hours 3 --json
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import sqlalchemy as sa

from bench.support.fleet_load import stage_times
from bench.support.tables import emit_figures
from edgert.telemetry import stages
from edgert.telemetry.messages import HistMessage
from edgert.telemetry.sketch import Sketch, merged
from edgert_deploy.fleet.packed_histograms import WINDOW_FORM, HistogramPool
from edgert_deploy.fleet.store import database, schema
from edgert_deploy.fleet.store.batch import MINUTE_MS, Batch, Origin
from edgert_deploy.fleet.store.query import Answer, FleetQuery, Question
from edgert_deploy.fleet.store.retention import Retention
from edgert_deploy.fleet.store.store import Store
from tests.support.servers.databases import postgres
from tests.support.sketches import sketch_of

NOW_MS = 1_790_000_000_000 // 3_600_000 * 3_600_000 + 20 * MINUTE_MS
ASKED = {
    "24 h by version, profile": (24, ("version", "profile")),
    "24 h by device": (24, ("device",)),
    "1 h by version, profile": (1, ("version", "profile")),
    "1 h by device": (1, ("device",)),
    "24 h of stages by version, profile": (24, ("version", "profile")),
    "24 h of stages by device": (24, ("device",)),
}
PROFILES = ("raspberry-pi-4", "raspberry-pi-5", "intel-nuc", "jetson-orin-nano")
REPEATS = 5
SHAPES = 200
GROUPS = 60  # the number of combinations of site, version and profile
AT_ONCE = 66  # an hour of this number of devices is about one write batch of the store


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--store", help="an empty store (default: a file in a temporary folder)")
    parser.add_argument("--postgres", action="store_true", help="start a PostgreSQL server for the store")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="edgert-bench-"))
        url = stack.enter_context(postgres()) if options.postgres else options.store or str(Path(folder) / "fleet.db")
        per_s, processor_s, windows = fill(url, options.devices, options.hours)
        sizes = sizes_of(url)
        said = {
            "store": "postgresql" if "postgresql" in url else "sqlite",
            "devices": options.devices,
            "windows": windows,
            "windows_written_per_s": round(per_s),
            "bytes_per_window": round(sum(sizes.values()) / windows),
            "a million reports: written, s": round(1e6 / per_s),
            "a million reports: written, processor s": round(1e6 * processor_s),
            **{f"a million reports: {name}, MB": round(size / windows) for name, size in sizes.items()},
            **ask_all(url),
            "a million reports: removed, s": round(removal_s(url, options.hours), 1),
        }
    emit_figures(said, options.json)


def fill(url: str, devices: int, hours: int) -> tuple[float, float, int]:
    """Write the windows. Return how many are written per second, the processor time for each, and their number.

    Only the last hour is written minute by minute, and only this hour is timed. The earlier hours are written in blocks
    of one hour of a few devices, which gives the same rows in a fraction of the time.
    """
    store, dice = Store(url), np.random.default_rng(7)
    sketches = [a_sketch(dice) for _ in range(SHAPES)]
    packed = [stages.packed_of(stages.text_of(stage_times(dice, 2.7)) or "") for _ in range(SHAPES)]
    numbers = sorted(range(devices), key=lambda n: n % GROUPS)
    store.write(Batch(devices={name_of(n): {"profile": PROFILES[n % 4]} for n in numbers}))

    def write(some: Sequence[int], minutes: range) -> None:
        batch = Batch()
        for n in some:
            heard = Origin(*name_of(n), NOW_MS, "digits")
            for minute in minutes:
                ts_ms, shape = NOW_MS - (hours * 60 - minute) * MINUTE_MS, (n * 7 + minute) % SHAPES
                hist = HistMessage(ts_ms, "b1", minute + 1, 60.0, f"r{1 + n % 3}", sketches[shape], True, packed[shape])
                batch.hists.append((heard, hist))
        store.write(batch)

    for hour in range(hours - 1):
        for start in range(0, devices, AT_ONCE):
            write(numbers[start : start + AT_ONCE], range(hour * 60, hour * 60 + 60))
        print(f"{(hour + 1) * 60 * devices:,} windows written", file=sys.stderr)
    began, used = time.perf_counter(), time.process_time()
    for minute in range((hours - 1) * 60, hours * 60):
        write(numbers, range(minute, minute + 1))
    took_s, used_s = time.perf_counter() - began, time.process_time() - used
    store.close()
    return 60 * devices / took_s, used_s / (60 * devices), hours * 60 * devices


def sizes_of(url: str) -> dict[str, int]:
    """Return the bytes of each table with its indexes."""
    grains = {"windows": schema.hist_window, "minutes": schema.group_minute, "hours of groups": schema.group_hour, "hours of devices": schema.stream_hour}  # fmt: skip
    grains |= {
        f"stages of {name}": schema.STAGES[table.name] for name, table in grains.items() if table.name in schema.STAGES
    }
    if "postgresql" in url:
        size = "SELECT pg_total_relation_size(:name)"
    else:
        size = "SELECT sum(pgsize) FROM dbstat JOIN sqlite_schema USING (name) WHERE tbl_name = :name"
    engine = database.open_engine(url, writes=False)
    with engine.connect() as connection:
        found = {name: connection.scalar(sa.text(size), {"name": table.name}) for name, table in grains.items()}
    engine.dispose()
    return {name: int(size or 0) for name, size in found.items()}


def removal_s(url: str, hours: int) -> float:
    """Remove the older half of the windows; return the time for a million of them."""
    store, began = Store(url), time.perf_counter()
    removed = store.prune(Retention(windows_h=hours // 2), NOW_MS)
    took_s = time.perf_counter() - began
    store.close()
    return 1e6 * took_s / max(1, removed)


def name_of(n: int) -> tuple[str, str]:
    return f"site-{n % 10}", f"d-{n:06}"


def a_sketch(dice: np.random.Generator) -> Sketch:
    return sketch_of(dice.lognormal(1, 0.3, 300).tolist())


def ask_all(url: str) -> dict[str, float]:
    said: dict[str, float] = {}
    whole: Sketch | None = None
    for name, (hours, by) in ASKED.items():
        times, processor, answers = [], time.process_time(), list[Answer]()
        for _ in range(REPEATS):
            began = time.perf_counter()
            fleet = FleetQuery(url)
            answers = fleet.answer(
                Question(NOW_MS - hours * 3_600_000, NOW_MS, by, {"model": "digits"}, 0, "stages" in name), NOW_MS
            )
            fleet.close()
            times.append(time.perf_counter() - began)
        said[f"{name}, s"] = round(statistics.median(times), 3)
        said[f"{name}, processor s"] = round((time.process_time() - processor) / REPEATS, 3)
        if hours == 24:
            whole = whole or merged(answer.latency for answer in answers)
            assert merged(answer.latency for answer in answers) == whole, "two groupings of one day differ"
    began = time.perf_counter()
    assert every_window(url) == whole, "the merged rows differ from the windows"
    said["every window of 24 h, s"] = round(time.perf_counter() - began, 3)
    said["24 h by hour and group in SQL, s"] = round(view_s(url), 3)
    said["ratio"] = round(said["every window of 24 h, s"] / said["24 h by version, profile, s"], 1)
    return said


def view_s(url: str) -> float:
    """Read the percentiles of each hour and group of the day from the view (docs/sql.md); return the time."""
    engine, began = database.open_engine(url, writes=False), time.perf_counter()
    with engine.connect() as connection:
        asked = sa.text("SELECT * FROM edgert_hour_percentile WHERE hour > :since_hour")
        assert connection.execute(asked, {"since_hour": NOW_MS // 3_600_000 - 24}).all()
    engine.dispose()
    return time.perf_counter() - began


def every_window(url: str) -> Sketch:
    """Compute the same day without the merged rows, in bulk with NumPy."""
    engine, table, pool = database.open_engine(url, writes=False), schema.hist_window.c, HistogramPool(1)
    scalars = [sa.func.sum(table.zero), sa.func.sum(table.count), sa.func.sum(table.sum), sa.func.min(table.least), sa.func.max(table.most)]  # fmt: skip
    day = table.minute >= NOW_MS // MINUTE_MS - 24 * 60
    with engine.connect() as connection:
        for block in connection.execution_options(stream_results=True).execute(sa.select(table.buckets).where(day)).partitions(50_000):  # fmt: skip
            pool.add([0] * len(block), [row[0] for row in block], WINDOW_FORM)
        zero, count, total, least, most = connection.execute(sa.select(*scalars).where(day, table.count > 0)).one()
    engine.dispose()
    sketch = pool.sketch(0)
    sketch.zero, sketch.count, sketch.sum, sketch.min, sketch.max = int(zero), int(count), total, least, most
    return sketch


if __name__ == "__main__":
    main()
