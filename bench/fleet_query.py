"""How fast the store takes reports and answers: a day of 1,000 devices, one window a minute, 1.44 M windows.

A device's windows hold a log-normal latency of its own, a few hundred requests each. The answers of the store are
held against each other (every grouping adds up to the same sketch), and timed as a new process would see
them, connection included; the ratio is against reading every window of the stretch, as a store without merged
rows would have to.

    python -m bench.fleet_query                                        # SQLite in a temporary folder
    python -m bench.fleet_query --store postgresql://ops@db/fleet      # an empty database
    python -m bench.fleet_query --devices 100 --hours 3 --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import sqlalchemy as sa

from edgert.telemetry.messages import HistMessage
from edgert.telemetry.sketch import Sketch, merged
from edgert_deploy.fleet import schema
from edgert_deploy.fleet.heard import MINUTE_MS, Batch, Heard
from edgert_deploy.fleet.packed import WINDOW, Pool
from edgert_deploy.fleet.query import Answer, FleetQuery, Question
from edgert_deploy.fleet.store import Store

NOW_MS = 1_790_000_000_000 // 3_600_000 * 3_600_000 + 20 * MINUTE_MS
ASKED = {
    "24 h by version, profile": (24, ("version", "profile")),
    "24 h by device": (24, ("device",)),
    "1 h by version, profile": (1, ("version", "profile")),
    "1 h by device": (1, ("device",)),
}
PROFILES = ("raspberry-pi-4", "raspberry-pi-5", "intel-nuc", "jetson-orin-nano")
REPEATS = 5
SHAPES = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--hours", type=int, default=24)
    parser.add_argument("--store", help="an empty store (default: a file in a temporary folder)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="edgert-bench-") as folder:
        url = options.store or str(Path(folder) / "fleet.db")
        began = time.perf_counter()
        windows = fill(url, options.devices, options.hours)
        write_s = time.perf_counter() - began
        store = Store(url)
        size = store.size_bytes()
        store.close()
        said = {
            "store": "postgresql" if "postgresql" in url else "sqlite",
            "devices": options.devices,
            "windows": windows,
            "windows_written_per_s": round(windows / write_s),
            "bytes_per_window": round(size / windows),
            **ask_all(url),
        }
    if options.json:
        print(json.dumps(said))
    else:
        for name, value in said.items():
            print(f"{name:32} {value:,}" if isinstance(value, (int, float)) else f"{name:32} {value}")


def fill(url: str, devices: int, hours: int) -> int:
    store, dice = Store(url), np.random.default_rng(7)
    sketches = [a_sketch(dice) for _ in range(SHAPES)]
    names = [(f"site-{n % 10}", f"d-{n:06}") for n in range(devices)]
    store.write(Batch(devices={name: {"profile": PROFILES[n % 4]} for n, name in enumerate(names)}))
    for minute in range(hours * 60):
        ts_ms = NOW_MS - (hours * 60 - minute) * MINUTE_MS
        batch = Batch()
        for n, (site, name) in enumerate(names):
            hist = HistMessage(ts_ms, "b1", minute + 1, 60.0, f"r{1 + n % 3}", sketches[(n * 7 + minute) % SHAPES])
            batch.hists.append((Heard(site, name, NOW_MS, "digits"), hist))
        store.write(batch)
        if minute % 60 == 59:
            print(f"{(minute + 1) * devices:,} windows written", file=sys.stderr)
    store.close()
    return hours * 60 * devices


def a_sketch(dice: np.random.Generator) -> Sketch:
    sketch = Sketch()
    for latency in dice.lognormal(1, 0.3, 300):
        sketch.record(float(latency))
    return sketch


def ask_all(url: str) -> dict[str, float]:
    said: dict[str, float] = {}
    whole: Sketch | None = None
    for name, (hours, by) in ASKED.items():
        times, answers = [], list[Answer]()
        for _ in range(REPEATS):
            began = time.perf_counter()
            fleet = FleetQuery(url)
            answers = fleet.answer(Question(NOW_MS - hours * 3_600_000, NOW_MS, by, {"model": "digits"}), NOW_MS)
            fleet.close()
            times.append(time.perf_counter() - began)
        said[f"{name}, s"] = round(statistics.median(times), 3)
        if hours == 24:
            whole = whole or merged(answer.latency for answer in answers)
            assert merged(answer.latency for answer in answers) == whole, "two groupings of one day differ"
    began = time.perf_counter()
    assert every_window(url) == whole, "the merged rows differ from the windows"
    said["every window of 24 h, s"] = round(time.perf_counter() - began, 3)
    said["ratio"] = round(said["every window of 24 h, s"] / said["24 h by version, profile, s"], 1)
    return said


def every_window(url: str) -> Sketch:
    """The same day without the merged rows, in bulk with numpy."""
    engine, table, pool = schema.open_engine(url, writes=False), schema.hist_window.c, Pool(1)
    scalars = [sa.func.sum(table.zero), sa.func.sum(table.count), sa.func.sum(table.sum), sa.func.min(table.least), sa.func.max(table.most)]  # fmt: skip
    day = table.minute >= NOW_MS // MINUTE_MS - 24 * 60
    with engine.connect() as connection:
        for block in connection.execution_options(stream_results=True).execute(sa.select(table.buckets).where(day)).partitions(50_000):  # fmt: skip
            pool.add([0] * len(block), [row[0] for row in block], WINDOW)
        zero, count, total, least, most = connection.execute(sa.select(*scalars).where(day, table.count > 0)).one()
    engine.dispose()
    sketch = pool.sketch(0)
    sketch.zero, sketch.count, sketch.sum, sketch.min, sketch.max = int(zero), int(count), total, least, most
    return sketch


if __name__ == "__main__":
    main()
