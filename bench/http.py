"""The cost of HTTP on top of the local socket: `python -m bench.http`.

One client sends requests to a model that only copies, over the socket and over HTTP with Triton's binary tensors. The
rounds of both ways alternate, so that other work on the machine affects both. The benchmark runs once with all
processes pinned to one core, and once without pinning.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.support.http_client import http_asker
from bench.support.tables import emit
from edgert import Client
from edgert.machine import process_mb
from edgert.protocol.control import ask
from tests.support.devices import Device, a_device, http_port

SIZES_BYTES = (4096, 150_528, 1_228_800)
ROUNDS, REQUESTS = 30, 20
COLUMNS = (
    "placement", "bytes", "local_p50_us", "local_p99_us", "http_p50_us", "http_p99_us", "more_us", "times", "server_mb",
)  # fmt: skip
CONFIG = '[serving]\ncache_mb = 0\n[http]\nlisten = "127.0.0.1:0"\n'


def measure(device: Device, values: NDArray[np.float32], port: int) -> dict[str, list[float]]:
    client = Client(device.socket)
    http = http_asker(port, values)
    assert bytes(http.ask(values.data)[-64:]) == values.tobytes()[-64:]
    ways: dict[str, Callable[[], object]] = {
        "local": lambda: client.infer("echo", values),
        "http": lambda: http.ask(values.data),
    }
    took_us: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            for i in range(REQUESTS):
                began = time.perf_counter()
                way()
                if i > 1:
                    took_us[name].append((time.perf_counter() - began) * 1e6)
    return took_us


def http_pid(device: Device) -> int:
    daemon = ask(device.state.control_socket, {"op": "status"}, 10.0)["pid"]
    children = Path(f"/proc/{daemon}/task/{daemon}/children").read_text().split()
    return next(int(c) for c in children if b"edgert.http" in Path(f"/proc/{c}/cmdline").read_bytes())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout")
    options = parser.parse_args()
    cores = os.sched_getaffinity(0)
    rows = []
    for placement, use in (("one core", {min(cores)}), ("free", cores)):
        os.sched_setaffinity(0, use)
        rows += [{"placement": placement, **row(size)} for size in SIZES_BYTES]
    emit(rows, COLUMNS, options.json)


def row(size_bytes: int) -> dict[str, float]:
    """Measure a daemon that answers requests of this size over both ways."""
    with a_device(CONFIG) as device:
        device.put(item_shape=(size_bytes // 4,))
        values = np.arange(size_bytes // 4, dtype=np.float32)[None]
        took_us = measure(device, values, http_port(device))
        local, http = (statistics.median(took_us[name]) for name in ("local", "http"))
        p99 = {name: statistics.quantiles(took, n=100)[98] for name, took in took_us.items()}
        return {
            "bytes": size_bytes,
            "local_p50_us": local,
            "local_p99_us": p99["local"],
            "http_p50_us": http,
            "http_p99_us": p99["http"],
            "more_us": http - local,
            "times": http / local,
            "server_mb": process_mb(http_pid(device)) or 0.0,
        }


if __name__ == "__main__":
    main()
