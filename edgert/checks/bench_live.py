"""Measures how fast the live version answers golden inputs through the socket, without the cache.

A single client measures the latency. Several clients measure the throughput, with batches as in real use. The clients
are threads of one process, so they limit the throughput of models under about 0.1 ms.
"""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from edgert import machine
from edgert.checks.bench import measured_on, times_of
from edgert.checks.bench_answer import BenchAnswer, BenchMode, BenchResult, Temperatures
from edgert.checks.golden_client import GoldenClient
from edgert.checks.status import ServingStatus, ask_daemon
from edgert.config import DeviceConfig
from edgert.printable import counted
from edgert.state_dir import StateDir
from edgert.versions.installed import InstalledVersion, load_live
from edgert.versions.slot_store import SlotStore

WARM_REQUESTS = 5


def serving_of(model: str, state: StateDir) -> ServingStatus:
    """Return the daemon's status of `model`. Raises DaemonUnreachable."""
    return ask_daemon(state.control_socket).models.get(model) or ServingStatus("not served")


def bench_live(
    model: str,
    store: SlotStore,
    state: StateDir,
    config: DeviceConfig,
    seconds: float,
    clients: int,
    progress: Callable[[str], None],
) -> BenchAnswer:
    """Measure the live version of `model`: with one client, then with several clients.

    Raises the daemon's errors. Both measurements together take about `seconds`.
    """
    version = load_live(store, config)
    before_c = machine.temp_c()
    progress(f"{model}: one client for {seconds / 2:g} s")
    alone_s, _ = _answer_times(version, state, config, 1, seconds / 2)
    progress(f"{model}: {counted(clients, 'client')} for {seconds / 2:g} s")
    together_s, took_s = _answer_times(version, state, config, clients, seconds / 2)
    serving = serving_of(model, state)
    loaded = serving.loaded
    result = BenchResult(
        f"live: {loaded and loaded.artifact} of release {version.manifest.release}",
        loaded.engine if loaded else None,
        loaded.engine_version if loaded else None,
        loaded.threads if loaded else None,
        serving.memory_mb,
        degraded=loaded.degraded if loaded else None,
        clients=clients,
        together_p99_ms=round(1e3 * float(np.percentile(together_s, 99)), 4),
        times=replace(times_of(alone_s, 4, p50_s=statistics.median(alone_s)), per_s=round(len(together_s) / took_s, 2)),
    )
    return BenchAnswer(BenchMode.AS_SERVED, measured_on(), Temperatures(before_c, machine.temp_c()), (result,))


def _answer_times(
    version: InstalledVersion, state: StateDir, config: DeviceConfig, clients: int, seconds: float
) -> tuple[list[float], float]:
    """Return the times of all answers, and the total, in seconds. Each client gets at least one answer."""
    times_s: list[float] = []
    failures: list[Exception] = []
    ready = threading.Barrier(clients + 1)

    def send_requests() -> None:
        own_s: list[float] = []
        try:
            with GoldenClient(version, state, config) as client:
                for _ in range(WARM_REQUESTS):
                    client.infer(client.samples[0])
                ready.wait()
                until = time.perf_counter() + seconds
                while not own_s or time.perf_counter() < until:
                    sample = client.samples[len(own_s) % len(client.samples)]
                    began = time.perf_counter()
                    client.infer(sample)
                    own_s.append(time.perf_counter() - began)
        except threading.BrokenBarrierError:  # another client failed
            pass
        except Exception as error:  # noqa: BLE001  # raised below, after the barrier is broken for the other clients
            failures.append(error)
            ready.abort()
        times_s.extend(own_s)

    threads = [threading.Thread(target=send_requests, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    with contextlib.suppress(threading.BrokenBarrierError):
        ready.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return times_s, time.perf_counter() - began
