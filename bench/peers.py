"""EdgeRT beside popular servers with the same engine and model (digits, INT8 on ONNX Runtime).

FastAPI + uvicorn over TCP and over a Unix socket, LitServe and MLServer, each in its own environment, made at first
use below `--envs`; a peer that cannot be installed or does not start is named and left out. Each peer is tuned as for
a small model, and its clients are as fast as possible: one kept connection each, the request made beforehand, binary
bodies where the peer accepts them. EdgeRT is used through its own client without tuning, the cache off.

Every client is its own process; rounds of all servers are interleaved, and a figure is the median over the rounds.
`over_us` is the p50 of one client minus that of `Session.run` in its own process. Memory is the sum of the server's
processes (PSS), engine and model included, after all rounds.

    python -m bench.peers                             # a table, and the ratios
    python -m bench.peers --peers fastapi-unix --json
    python -m bench.peers --peers                     # EdgeRT alone
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.common import DIGITS, Ask, Clients, Load, digits_device, edgertd, emit, pin, processes
from bench.peer_servers.environments import default_folder
from bench.peer_servers.servers import PEERS, running
from bench.peer_servers.session import write_spec
from bench.raw import live_artifact, open_session
from edgert import Client
from edgert.daemon.memory import process_mb

OURS, RAW = "EdgeRT", "Session.run"
PLACEMENTS: dict[str, set[int] | None] = {"one core": {0}, "free": None}
COLUMNS = ("placement", "clients", "server", "p50_us", "p99_us", "over_us", "requests_per_s", "memory_mb")
TARGETS = {"overhead": 5.0, "requests": 5.0, "memory": 0.5}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout")
    parser.add_argument("--peers", type=lambda text: text.split(","), nargs="?", const=[], default=list(PEERS))
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.6, help="length of one round of one contender")
    parser.add_argument("--envs", type=Path, default=default_folder(), help="where the peers' environments lie")
    options = parser.parse_args()
    if unknown := sorted(set(options.peers) - set(PEERS)):
        parser.error(f"no peer is called {', '.join(unknown)}; known: {', '.join(PEERS)}")
    rows: list[dict[str, Any]] = []
    image = np.ascontiguousarray(np.load(DIGITS / "holdout.npz")["image"][:1])
    with digits_device() as (state, path), contextlib.ExitStack() as stack:
        status = edgertd(state, "status")
        serving = status["models"][0]["serving"]
        servers = {OURS: [status["daemon"]["pid"], serving["pid"]]}
        makes = {RAW: asking_raw(state, serving["threads"], image), OURS: asking_ours(path, image)}
        spec = state.parent / "spec.json"
        write_spec(spec, live_artifact(state), serving["threads"])
        for name in options.peers:
            try:
                server = stack.enter_context(running(name, options.envs, state.parent, spec, image))
            except OSError as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
                continue
            servers[name] = processes(server.pid)
            makes[name] = asking_peer(server.asking, image)
        for placement, cores in PLACEMENTS.items():
            for pids in servers.values():
                pin(pids, cores)
            for clients in options.clients:
                print(f"{placement}, {clients} clients", file=sys.stderr)
                rows += measure(makes, clients, placement, cores, options.rounds, options.seconds)
        memory_mb = {name: sum(process_mb(pid) or 0.0 for pid in pids) for name, pids in servers.items()}
    rows = [row | {"memory_mb": round(memory_mb[row["server"]], 1)} for row in rows]
    emit(rows, COLUMNS, options.json)
    if len(servers) > 1:
        if not options.json:
            print()
        emit(ratios(rows), ("what", "best_peer", "ratio", "target", "met"), options.json)


def measure(
    makes: dict[str, Callable[[int], Ask]],
    clients: int,
    placement: str,
    cores: set[int] | None,
    rounds: int,
    seconds: float,
) -> list[dict[str, Any]]:
    groups = {name: Clients(1 if name == RAW else clients, make, cores) for name, make in makes.items()}
    loads: dict[str, list[Load]] = {name: [] for name in groups}
    for _ in range(rounds):
        for name, group in groups.items():
            loads[name].append(group.round(seconds))
    for group in groups.values():
        group.close()
    raw = [load.p50_us for load in loads.pop(RAW)]
    return [
        {
            "placement": placement,
            "clients": clients,
            "server": name,
            "p50_us": round(statistics.median(load.p50_us for load in seen), 1),
            "p99_us": round(statistics.median(load.p99_us for load in seen), 1),
            "raw_p50_us": round(statistics.median(raw), 1),
            "over_us": round(statistics.median(s.p50_us - r for s, r in zip(seen, raw, strict=True)), 1),
            "requests_per_s": round(statistics.median(load.requests_per_s for load in seen)),
        }
        for name, seen in loads.items()
    ]


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return EdgeRT against the best of its peers: overhead of one client, rate of several, memory."""
    found = []
    for placement, clients in dict.fromkeys((row["placement"], row["clients"]) for row in rows):
        here = [row for row in rows if (row["placement"], row["clients"]) == (placement, clients)]
        ours = next(row for row in here if row["server"] == OURS)
        peers = [row for row in here if row["server"] != OURS]
        if clients == 1:
            best = min(peers, key=lambda row: row["over_us"])
            ratio, kind, what = best["over_us"] / max(0.1, ours["over_us"]), "overhead", "times less overhead"
        else:
            best = max(peers, key=lambda row: row["requests_per_s"])
            ratio, kind, what = ours["requests_per_s"] / best["requests_per_s"], "requests", "times the requests"
        found.append(_ratio(f"{what}, {clients} clients, {placement}", best, ratio, TARGETS[kind]))
    ours = next(row for row in rows if row["server"] == OURS)
    best = min((row for row in rows if row["server"] != OURS), key=lambda row: row["memory_mb"])
    share = ours["memory_mb"] / best["memory_mb"]
    return [*found, _ratio("share of the memory", best, share, TARGETS["memory"], at_most=True)]


def _ratio(what: str, best: dict[str, Any], ratio: float, target: float, *, at_most: bool = False) -> dict[str, Any]:
    met = ratio <= target if at_most else ratio >= target
    return {"what": what, "best_peer": best["server"], "ratio": f"{ratio:.2f}", "target": target, "met": met}


def asking_raw(state: Path, threads: int, image: NDArray[np.float32]) -> Callable[[int], Ask]:
    def make(_: int) -> Ask:
        session = open_session(state, threads)
        return lambda: session.run([image])

    return make


def asking_ours(path: Path, image: NDArray[np.float32]) -> Callable[[int], Ask]:
    def make(_: int) -> Ask:
        client = Client(path)
        return lambda: client.infer("digits", image, cache=False)

    return make


def asking_peer(asking: Callable[[NDArray[Any]], Ask], image: NDArray[np.float32]) -> Callable[[int], Ask]:
    return lambda _: asking(image)


if __name__ == "__main__":
    main()
