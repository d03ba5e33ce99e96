"""What the daemon adds to the engine: a socket round trip over the same `Session.run` in process.

At 1, 4 and 16 clients, each a process of its own, beside FastAPI + uvicorn with the same engine. Rounds of
all contenders are interleaved; a figure is the median over the rounds. The cache is off, so every
request reaches the engine.

`overhead_us` is p50 less the p50 of one client's `Session.run` in process, measured in the same rounds. With more
clients than cores it is mostly their waiting for each other, for every contender alike. Both transports are
sockets: ours a Unix one, the peer's TCP on loopback.

    python -m bench.serving            # a table
    python -m bench.serving --json     # JSON lines
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import DIGITS, ROOT, Ask, Clients, digits_device, edgertd, emit, median_load
from bench.raw import open_session
from edgert import Client

CLIENTS = (1, 4, 16)
COLUMNS = ("case", "placement", "clients", "peer", "p50_us", "p99_us", "raw_p50_us", "overhead_us", "requests_per_s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.6, help="length of one round of one contender")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with digits_device() as (state, path), contextlib.ExitStack() as stack:
        serving = edgertd(state, "status")["models"][0]["serving"]
        worker, threads = serving["pid"], serving["threads"]
        port, peer_pid = stack.enter_context(fastapi_server(state, threads))
        for placement, cores in (("one core", {0}), ("free", None)):
            pin([worker, peer_pid], cores)
            for clients in CLIENTS:
                print(f"{placement}, {clients} clients", file=sys.stderr)
                rows += measure(state, path, port, threads, clients, placement, cores, options.rounds, options.seconds)
    emit(rows, COLUMNS, options.json)


def measure(
    state: Path,
    path: Path,
    port: int,
    threads: int,
    clients: int,
    placement: str,
    cores: set[int] | None,
    rounds: int,
    seconds: float,
) -> list[dict[str, Any]]:
    image = np.ascontiguousarray(np.load(DIGITS / "holdout.npz")["image"][:1])

    def raw(_: int) -> Ask:
        session = open_session(state, threads)
        return lambda: session.run([image])

    def ours(_: int) -> Ask:
        client = Client(path)
        return lambda: client.infer("digits", image, cache=False)

    def peer(_: int) -> Ask:
        return http_ask(port, image.tobytes())

    contenders = {
        "raw": Clients(1, raw, cores),
        "ours": Clients(clients, ours, cores),
        "fastapi+uvicorn": Clients(clients, peer, cores),
    }
    loads = {name: [] for name in contenders}  # type: dict[str, list[Any]]
    for _ in range(rounds):
        for name, group in contenders.items():
            loads[name].append(group.round(seconds))
    for group in contenders.values():
        group.close()
    raw_p50_us = median_load(loads["raw"]).p50_us
    return [
        {
            "case": "digits",
            "placement": placement,
            "transport": "socket",
            "clients": clients,
            "payload_bytes": image.nbytes,
            "p50_us": round(load.p50_us, 1),
            "p99_us": round(load.p99_us, 1),
            "raw_p50_us": round(raw_p50_us, 1),
            "overhead_us": round(load.p50_us - raw_p50_us, 1),
            "requests_per_s": round(load.requests_per_s),
            "peer": None if name == "ours" else name,
        }
        for name, load in ((name, median_load(loads[name])) for name in ("ours", "fastapi+uvicorn"))
    ]


def http_ask(port: int, body: bytes) -> Ask:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    connection.connect()
    connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    headers = {"Content-Type": "application/octet-stream"}

    def ask() -> object:
        connection.request("POST", "/infer", body, headers)
        response = connection.getresponse()
        data = response.read()
        assert response.status == 200, data
        return np.frombuffer(data, np.float32)

    return ask


@contextmanager
def fastapi_server(state: Path, threads: int) -> Iterator[tuple[int, int]]:
    """The peer on a free port: the port and its process id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = subprocess.Popen(
        [sys.executable, "-m", "bench.peers.fastapi_server", str(state), str(port), str(threads)], cwd=ROOT
    )
    try:
        for _ in range(200):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if server.poll() is not None:
                sys.exit("the FastAPI server did not start; install what it needs with: make setup")
            time.sleep(0.05)
        yield port, server.pid
    finally:
        server.terminate()
        server.wait(10)


def pin(pids: list[int], cores: set[int] | None) -> None:
    """Put every thread of the processes on `cores`; None: on all there are."""
    for pid in pids:
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setaffinity(int(thread), cores or set(range(os.cpu_count() or 1)))


if __name__ == "__main__":
    main()
