"""How fast the live version answers apps on this device: golden inputs through the daemon's own socket, never cached.

First one client, one question after the other: the latency. Then several at once: the throughput, with batches as they
form. The clients are threads of one process, so that for models under about 0.1 ms they are the limit themselves.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from edgert import machine as host
from edgert.checks import golden_samples as golden
from edgert.checks.bench import machine
from edgert.checks.status import ServingStatus, ask_daemon
from edgert.client.blocking import Client
from edgert.config import DeviceConfig, StateDir
from edgert.errors import EdgeRTError
from edgert.versions.installed import InstalledVersion, load_live
from edgert.versions.slot_store import SlotStore

WARM_ASKS = 5
ASK_S_MAX = 60.0


def serving_of(model: str, state: StateDir) -> ServingStatus:
    """Return how the daemon serves `model`. Raises DaemonUnreachable."""
    return ask_daemon(state.control_socket).models.get(model) or ServingStatus("not served")


def bench_live(
    model: str,
    store: SlotStore,
    state: StateDir,
    config: DeviceConfig,
    seconds: float,
    clients: int,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Measure for about `seconds`, half of it with one client, half with `clients`. Raises what the daemon answers."""
    version = load_live(store, config)
    before_c = host.temp_c()
    progress(f"{model}: one client for {seconds / 2:g} s")
    alone_s, _ = _asked(version, state, config, 1, seconds / 2)
    progress(f"{model}: {clients} clients for {seconds / 2:g} s")
    together_s, took_s = _asked(version, state, config, clients, seconds / 2)
    serving = serving_of(model, state)
    loaded = serving.loaded
    result = {
        "id": f"live: {loaded and loaded.artifact} of release {version.manifest.release}",
        "engine": loaded and loaded.engine,
        "engine_version": loaded and loaded.engine_version,
        "degraded": loaded and loaded.degraded,
        "threads": loaded and loaded.threads,
        "memory_mb": serving.memory_mb,
        **{f"p{share}_ms": round(1e3 * float(np.percentile(alone_s, share)), 4) for share in (50, 90, 95, 99)},
        "runs": len(alone_s),
        "clients": clients,
        "per_s": round(len(together_s) / took_s, 2),
        "together_p99_ms": round(1e3 * float(np.percentile(together_s, 99)), 4),
    }
    temperatures = {"before": before_c, "after": host.temp_c()}
    return {"mode": "as-served", "machine": machine(), "temp_c": temperatures, "results": [result]}


def _asked(
    version: InstalledVersion, state: StateDir, config: DeviceConfig, clients: int, seconds: float
) -> tuple[list[float], float]:
    """How long each answer took, and how long all of it, in seconds: at least one answer a client."""
    names = [spec.name for spec in version.manifest.inputs]
    samples = [dict(zip(names, sample, strict=True)) for sample in golden.samples(version)]
    times_s: list[float] = []
    failures: list[EdgeRTError] = []
    begun = threading.Barrier(clients + 1)

    def ask_on() -> None:
        mine: list[float] = []
        try:
            with Client(state.socket(config), timeout_s=ASK_S_MAX) as client:
                for _ in range(WARM_ASKS):
                    client.infer(version.manifest.model, samples[0], cache=False)
                begun.wait()
                until = time.perf_counter() + seconds
                while not mine or time.perf_counter() < until:
                    began = time.perf_counter()
                    client.infer(version.manifest.model, samples[len(mine) % len(samples)], cache=False)
                    mine.append(time.perf_counter() - began)
        except EdgeRTError as error:
            failures.append(error)
            begun.abort()
        except threading.BrokenBarrierError:  # another one failed, and says why
            pass
        times_s.extend(mine)

    threads = [threading.Thread(target=ask_on, daemon=True) for _ in range(clients)]
    for thread in threads:
        thread.start()
    with contextlib.suppress(threading.BrokenBarrierError):
        begun.wait()
    began = time.perf_counter()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return times_s, time.perf_counter() - began
