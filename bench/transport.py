"""The cost of a round trip by payload, over the socket and over shared memory, for one client.

The model reads nothing (the null engine returns ten numbers), so the time is the time of the transport alone. The
payloads are 4 KB, 150 KB (224 x 224 x 3 UINT8) and 1.2 MB (640 x 640 x 3) with the cache off, and cache hits at 150 KB.
`over_us` is p50 minus the p50 of `Session.run` on the same array in its own process. It is the median over the rounds,
in which all cases of a placement take turns. Frames under 16 KB always use the socket. `echo_us` is the p50 of the same
bytes between two bare Python processes (`support/echo.py`). It is the lower bound for any server in Python. The asyncio
client is called from outside its loop with one `run_until_complete` per request, and its figures include this call.

There are two placements: client and daemon are pinned to one core, or are not pinned. To wake an idle core costs more
than the transport.

A second table is for apps that connect for each request, like scripts. It has the processor time of the daemon's
processes, and the time to connect, send one request to digits and close. The loop `minimal` of `bench.peers` is
measured in the same rounds.

    python -m bench.transport            # two tables
    python -m bench.transport --json     # JSON lines
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.support.clients import Ask, Clients, Load, ours
from bench.support.devices import DIGITS_MODEL, digits_device, edgertd, null_device, serving
from bench.support.echo import echo
from bench.support.live_artifact import live_artifact, open_session
from bench.support.peer_servers.servers import running
from bench.support.peer_servers.session import write_spec
from bench.support.processes import cpu_us, pin, processes
from bench.support.tables import emit
from edgert import AsyncClient, Client
from edgert.protocol.sharing import SHARE_BYTES_MIN

PAYLOADS = {"4 KB": (4096,), "150 KB": (224, 224, 3), "1.2 MB": (640, 640, 3)}
HIT = "150 KB"
HIT_DELAY_S = 0.002  # with this delay, the model is slow enough for the cache to stay on
TRANSPORTS = {"socket": "socket", "shared": "auto"}
ASYNCIO = {f"asyncio {name}": given for name, given in TRANSPORTS.items()}
TARGETS_US = {
    ("4 KB", "socket"): 20,
    ("150 KB", "socket"): 40,
    ("150 KB", "shared"): 12,
    ("1.2 MB", "shared"): 60,
    ("150 KB hit", "socket"): 40,
    ("150 KB hit", "shared"): 20,
}
COLUMNS = ("placement", "payload", "transport", "p50_us", "p99_us", "raw_p50_us", "echo_us", "over_us", "target_us")

CONNECTING_COLUMNS = ("server", "cpu_us", "times_minimal", "took_us", "took_times_minimal")
CONNECTIONS = 300  # the number of connections in a round; the daemon accepts more than this at once
SETTLE_S = 0.2

Make = Callable[[int], Ask]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.2, help="length of one round of one case")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    items = {name: rng.integers(0, 256, (1, *shape), np.uint8) for name, shape in PAYLOADS.items()}
    models = {_model(name): item for name, item in items.items()}
    rows: list[dict[str, Any]] = []
    with null_device(models) as state, null_device({"hit": items[HIT]}, delay_s=HIT_DELAY_S) as slow:
        workers = [serving(state, model)["pid"] for model in models] + [serving(slow, "hit")["pid"]]
        makes: dict[tuple[str, str], Make] = {}
        for name, item in items.items():
            makes[name, "raw"] = raw(state, _model(name), item)
            for transport in TRANSPORTS:
                makes[name, transport] = ours(state, _model(name), item, TRANSPORTS[transport])
                makes[name, f"{transport} echo"] = echo(
                    item, shared=transport == "shared" and item.nbytes > SHARE_BYTES_MIN
                )
            for transport in ASYNCIO:
                makes[name, transport] = ours_asyncio(state, _model(name), item, transport)
        for transport in TRANSPORTS:
            makes[f"{HIT} hit", transport] = ours(slow, "hit", items[HIT], TRANSPORTS[transport], cache=True)
        for placement, cores in (("one core", {0}), ("free", None)):
            print(placement, file=sys.stderr)
            pin(workers, cores)
            rows += measure(makes, placement, cores, options.rounds, options.seconds)
        cache = serving(slow, "hit")["cache"]
    assert cache["hits"] > 0.9 * (cache["hits"] + cache["misses"]), cache
    emit(rows, COLUMNS, options.json)
    if not options.json:
        print()
    emit(connecting(options.rounds), CONNECTING_COLUMNS, options.json)


def connecting(rounds: int) -> list[dict[str, Any]]:
    """Return the cost of a connection for one request, for EdgeRT and for the minimal loop."""
    (item,) = DIGITS_MODEL.items(1)
    with digits_device() as (state, path):
        status = edgertd(state, "status")
        spec = state.parent / "spec.json"
        write_spec(spec, {"digits": (live_artifact(state), status["models"][0]["serving"]["threads"])})
        with running("minimal", state.parent, state.parent, spec, "digits", item) as minimal:
            servers: dict[str, tuple[list[int], Ask]] = {
                "EdgeRT": (processes(status["daemon"]["pid"]), lambda: _ask_once(path, item)),
                "minimal": (processes(minimal.pid), lambda: minimal.asking("digits", item)(item)),
            }
            spent_us: dict[str, list[tuple[float, float]]] = {name: [] for name in servers}
            for _ in range(rounds):
                for name, (pids, ask) in servers.items():
                    spent_us[name].append(_cost_us(pids, ask))
    rows = []
    for name, seen in spent_us.items():
        cpu, took = (sum(one) / rounds for one in zip(*seen, strict=True))
        least_cpu, least_took = (sum(one) / rounds for one in zip(*spent_us["minimal"], strict=True))
        rows.append(
            {
                "server": name,
                "cpu_us": cpu,
                "times_minimal": f"{cpu / max(1.0, least_cpu):.1f}",
                "took_us": took,
                "took_times_minimal": f"{took / least_took:.1f}",
            }
        )
    return rows


def _ask_once(path: Path, item: Any) -> None:
    with Client(path) as client:
        client.infer("digits", item, cache=False)


def _cost_us(pids: list[int], ask: Ask) -> tuple[float, float]:
    """Return the processor time of the server and the wall time, both for each of CONNECTIONS requests."""
    before_us, began = cpu_us(pids), time.perf_counter()
    for _ in range(CONNECTIONS):
        ask()
    took_us = (time.perf_counter() - began) * 1e6
    time.sleep(SETTLE_S)  # in this time, the last connections end
    return (cpu_us(pids) - before_us) / CONNECTIONS, took_us / CONNECTIONS


def measure(
    makes: dict[tuple[str, str], Make], placement: str, cores: set[int] | None, rounds: int, seconds: float
) -> list[dict[str, Any]]:
    groups = {case: Clients(1, make, cores) for case, make in makes.items()}
    loads: dict[tuple[str, str], list[Load]] = {case: [] for case in groups}
    for _ in range(rounds):
        for case, group in groups.items():
            loads[case].append(group.round(seconds))
    for group in groups.values():
        group.close()
    rows = []
    for (payload, transport), seen in loads.items():
        if transport not in TRANSPORTS and transport not in ASYNCIO:
            continue
        hit = payload.endswith(" hit")
        base = [0.0] * rounds if hit else [load.p50_us for load in loads[payload, "raw"]]
        rows.append(
            {
                "placement": placement,
                "payload": payload,
                "transport": transport,
                "p50_us": round(statistics.median(load.p50_us for load in seen), 1),
                "p99_us": round(statistics.median(load.p99_us for load in seen), 1),
                "raw_p50_us": round(statistics.median(base), 1),
                "echo_us": None
                if hit or transport in ASYNCIO
                else round(statistics.median(e.p50_us for e in loads[payload, f"{transport} echo"]), 1),
                "over_us": round(statistics.median(s.p50_us - b for s, b in zip(seen, base, strict=True)), 1),
                "target_us": TARGETS_US.get((payload, transport)) if placement == "one core" else None,
            }
        )
    return rows


def raw(state: Path, model: str, item: Any) -> Make:
    def make(_: int) -> Ask:
        session = open_session(state, 1, model)
        return lambda: session.run([item])

    return make


def ours_asyncio(state: Path, model: str, item: Any, transport: str) -> Make:
    def make(_: int) -> Ask:
        loop = asyncio.new_event_loop()
        client = AsyncClient(state / "edgert.sock", transport=ASYNCIO[transport])
        return lambda: loop.run_until_complete(client.infer(model, item, cache=False))

    return make


def _model(payload: str) -> str:
    return "m" + payload.replace(" ", "").replace(".", "-").lower()


if __name__ == "__main__":
    main()
