"""Client processes that send requests in a closed loop, and the times that they see.

Every figure is compared with something measured in the same run, because machines are shared and noisy.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from edgert import Client

Ask = Callable[[], object]


@dataclass(frozen=True)
class Load:
    """The results of a group of clients. Times are microseconds."""

    p50_us: float
    p99_us: float
    p999_us: float
    requests_per_s: float


class Clients:
    """`count` client processes that send requests in a closed loop, on command, for a given time.

    Each process calls `make`, which returns the function that makes one request. The clients stay connected between
    rounds, so that rounds of different servers can be interleaved.
    """

    def __init__(self, count: int, make: Callable[[int], Ask], cores: set[int] | None = None) -> None:
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        self._processes = []
        for number in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_client, args=(theirs, make, number, cores), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def round(self, seconds: float) -> Load:
        """Let every client send requests for `seconds`."""
        for pipe in self._pipes:
            pipe.send(seconds)
        times: list[float] = []
        for pipe in self._pipes:
            times += pipe.recv()
        times.sort()
        return Load(
            p50_us=times[len(times) // 2],
            p99_us=times[min(len(times) - 1, int(len(times) * 0.99))],
            p999_us=times[min(len(times) - 1, int(len(times) * 0.999))],
            requests_per_s=len(times) / seconds,
        )

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(5)


def _client(pipe: Connection, make: Callable[[int], Ask], number: int, cores: set[int] | None) -> None:
    if cores:
        os.sched_setaffinity(0, cores)
    ask = make(number)
    for _ in range(20):
        ask()
    pipe.send("ready")
    while (seconds := pipe.recv()) is not None:
        times = []
        now = time.perf_counter
        until = now() + seconds
        while (began := now()) < until:
            ask()
            times.append((now() - began) * 1e6)
        pipe.send(times)


def ours(state: Path, model: str, item: Any, transport: str = "auto", *, cache: bool = False) -> Callable[[int], Ask]:
    """Return the request function for `Clients`: our blocking client, which asks the daemon of `state`."""

    def make(_: int) -> Ask:
        client = Client(state / "edgert.sock", transport=transport)
        return lambda: client.infer(model, item, cache=cache)

    return make


def median_load(loads: Sequence[Load]) -> Load:
    return Load(
        *(
            statistics.median(values)
            for values in zip(*((x.p50_us, x.p99_us, x.p999_us, x.requests_per_s) for x in loads), strict=True)
        )
    )
