"""The cost of HTTP on top of the local socket: `python -m bench.http`.

One client, a model that only copies, Triton's binary tensors both ways. Rounds of both ways alternate, so that both
see the same machine; once with everything pinned to one core and once free.
"""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.support.http_client import http_asker
from edgert import Client
from edgert.machine import process_mb
from edgert.protocol.control import ask
from tests.support.devices import Device, a_device, wait_until

SIZES_BYTES = (4096, 150_528, 1_228_800)
ROUNDS, REQUESTS = 30, 20
CONFIG = '[serving]\ncache_mb = 0\n[http]\nlisten = "127.0.0.1:0"\n'


def measure(device: Device, values: NDArray[np.float32], port: int) -> dict[str, list[float]]:
    client = Client(device.socket)
    http = http_asker(port, values)
    assert bytes(http.ask()[-64:]) == values.tobytes()[-64:]
    ways = {"local": lambda: client.infer("echo", values), "http": http.ask}
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
    cores = os.sched_getaffinity(0)
    for placement, use in (("one core", {min(cores)}), ("free", cores)):
        os.sched_setaffinity(0, use)
        for size in SIZES_BYTES:
            with a_device(CONFIG) as device:
                device.put(item_shape=(size // 4,))
                said = "http: listens on 127.0.0.1:"
                wait_until(lambda: said in device.log(), "the HTTP server listens")  # noqa: B023  # called at once
                port = int(device.log().rsplit(said, 1)[1].split()[0])
                values = np.arange(size // 4, dtype=np.float32)[None]
                took_us = measure(device, values, port)
                local, http = (statistics.median(took_us[name]) for name in ("local", "http"))
                p99 = {name: statistics.quantiles(took, n=100)[98] for name, took in took_us.items()}
                print(
                    f"{placement:9} {size:8} bytes   local {local:6.0f} us (p99 {p99['local']:6.0f})   "
                    f"http {http:6.0f} us (p99 {p99['http']:6.0f})   +{http - local:5.0f} us   x{http / local:4.1f}   "
                    f"server {process_mb(http_pid(device)) or 0:4.0f} MB PSS",
                    flush=True,
                )


if __name__ == "__main__":
    main()
