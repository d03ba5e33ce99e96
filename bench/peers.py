"""EdgeRT compared with other servers of the same engine: overhead, tail, requests, processor, memory.

    python -m bench.peers                                    # a table, and the ratios
    python -m bench.peers --models mlp --peers minimal,fastapi-unix --json
    python -m bench.peers --peers                            # EdgeRT alone

**The peers** are `minimal`, a socket loop without any feature; FastAPI + uvicorn over TCP and over a Unix socket;
LitServe; and MLServer. Each of them, except `minimal`, gets its own environment below `--envs` at its first use. If a
peer cannot be installed or does not start, the benchmark names it and leaves it out. Each peer is tuned for a small
model. Its clients keep one connection, make the heads of their requests beforehand, and send binary bodies without a
copy if the peer accepts them.

**EdgeRT** runs without a cache, in three ways:

- through its own client, without tuning
- over HTTP with binary tensors (`EdgeRT HTTP`)
- for models with small inputs, by a client that sends prepared frames (`EdgeRT frames`), which compares only the
  servers

**The models** run on ONNX Runtime: digits (INT8, trained), and three models in FP32 with random weights, which take
from microseconds to milliseconds. Each server serves all models at once, except LitServe and MLServer, which serve only
digits. Each request of a client has another input than the request before.

**The figures.** Every client is its own process; rounds of all servers are interleaved, and a figure is the median over
the rounds. `over_us` is the p50 of one client minus the p50 of `Session.run` in its own process. `cpu_us` is the
processor time per request of all the server's processes. Memory is the sum of the server's processes (PSS), after all
rounds of a placement. There are two placements: one core, and all cores. All servers are started anew for each
placement, because EdgeRT learns at load how to run a model on these cores.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.support.architectures import write_model
from bench.support.clients import Ask, Clients, Load
from bench.support.devices import DIGITS_MODEL, BenchModel, device_with, edgertd
from bench.support.frame_client import frame_asker
from bench.support.http_client import http_asker
from bench.support.live_artifact import live_artifact, open_session
from bench.support.peer_servers.environments import default_folder
from bench.support.peer_servers.servers import ONE_MODEL, PEERS, AskWith, running
from bench.support.peer_servers.session import write_spec
from bench.support.processes import cpu_us, processes
from bench.support.tables import emit
from edgert import Client
from edgert.machine import process_mb
from edgert.protocol.sharing import SHARE_BYTES_MIN
from tests.support.servers.ports import free_port

OURS, HTTP, FRAMES, RAW = "EdgeRT", "EdgeRT HTTP", "EdgeRT frames", "Session.run"
NO_PEERS = frozenset((OURS, HTTP, FRAMES))  # the three ways to use EdgeRT
MODELS = ("digits", "mlp", "cnn", "mobilenet_v2")
INPUTS = 16  # each client sends this number of inputs in turn
PLACEMENTS: dict[str, set[int] | None] = {"one core": {0}, "free": None}
ALL_CORES = os.sched_getaffinity(0)
COLUMNS = (
    "placement", "clients", "model", "server", "p50_us", "p99_us", "p999_us", "over_us", "requests_per_s", "cpu_us",
    "memory_mb",
)  # fmt: skip
# EdgeRT's aims for each cell: the limit, and whether the limit is a maximum (True) or a minimum (False).
AIMS = {
    "requests": (1.0, False), "frames": (1.0, False), "p99": (1.2, True), "p999": (1.2, True), "more_cpu_us": (20.0, True),
    "times_fastapi": (4.0, False), "http_requests": (1.0, False), "http_p99": (1.0, True), "memory": (1.2, True),
}  # fmt: skip
RATIO_COLUMNS = ("model", "clients", "placement", "best_peer", *AIMS)
TAIL_CLIENTS_MAX = 8  # with more clients, the queue causes the tail, not the server
SMALL_US = 100.0  # if a model takes less than this, the server's own cost is most of the time of a request


@dataclass(frozen=True)
class Contender:
    """A server under measurement: its processes, and the clients' requests by model."""

    pids: tuple[int, ...]
    makes: Mapping[str, Callable[[int], Ask]]

    def cpu_us(self) -> float:
        """Return the processor time of the server's processes so far."""
        return cpu_us(self.pids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout")
    parser.add_argument("--peers", type=lambda text: text.split(","), nargs="?", const=[], default=list(PEERS))
    parser.add_argument(
        "--models", type=lambda text: text.split(","), default=list(MODELS), help=f"some of {', '.join(MODELS)}"
    )
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.6, help="length of one round of one contender")
    parser.add_argument("--envs", type=Path, default=default_folder(), help="folder of the peers' environments")
    options = parser.parse_args()
    for kind, chosen, known in (("peer", options.peers, PEERS), ("model", options.models, MODELS)):
        if unknown := sorted(set(chosen) - set(known)):
            parser.error(f"no {kind} is called {', '.join(unknown)}; known: {', '.join(known)}")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="edgert-peers-") as folder:
        models = [_model(name, Path(folder)) for name in options.models]
        for placement, cores in PLACEMENTS.items():
            os.sched_setaffinity(0, cores or ALL_CORES)  # every process that is started from here inherits it
            rows += _rows(placement, cores, models, options)
    emit(rows, COLUMNS, options.json)
    if {row["server"] for row in rows} - NO_PEERS:
        if not options.json:
            print()
        emit(ratios(rows), RATIO_COLUMNS, options.json)


def _rows(placement: str, cores: set[int] | None, models: list[BenchModel], options: Any) -> list[dict[str, Any]]:
    """Start all contenders on `cores` and measure every cell. EdgeRT learns how to run each model on these cores."""
    rows: list[dict[str, Any]] = []
    port = free_port()
    config = f'[serving]\ncache_mb = 0\n[http]\nlisten = "127.0.0.1:{port}"\n'
    with contextlib.ExitStack() as stack:
        state, path = stack.enter_context(device_with(models, config))
        contenders = _contenders(stack, state, path, port, models, options)
        for model in models:
            for clients in options.clients:
                print(f"{placement}, {model.name}, {clients} clients", file=sys.stderr)
                seen = measure(contenders, model.name, clients, cores, options.rounds, options.seconds)
                rows += [{"placement": placement, "clients": clients, "model": model.name, **row} for row in seen]
        memory_mb = {name: sum(process_mb(pid) or 0.0 for pid in one.pids) for name, one in contenders.items()}
    return [row | {"memory_mb": round(memory_mb[row["server"]], 1)} for row in rows]


def _model(name: str, folder: Path) -> BenchModel:
    if name == DIGITS_MODEL.name:
        return DIGITS_MODEL
    return BenchModel(name, *write_model(name, folder, calibration=16, holdout=16), precision="fp32")


def _contenders(
    stack: contextlib.ExitStack, state: Path, path: Path, port: int, models: list[BenchModel], options: Any
) -> dict[str, Contender]:
    """Start the peers; return every contender by name, with `Session.run`, which has no process."""
    status = edgertd(state, "status")
    threads = {entry["model"]: entry["serving"]["threads"] for entry in status["models"]}
    items = {model.name: model.items(INPUTS) for model in models}
    pids = tuple(processes(status["daemon"]["pid"]))
    found = {
        RAW: Contender((), {name: in_turn(asking_raw(state, threads[name], name), own) for name, own in items.items()}),
        OURS: Contender(pids, {name: in_turn(asking_ours(path, name), own) for name, own in items.items()}),
        HTTP: Contender(pids, {name: in_turn(asking_http(port, name, own[0]), own) for name, own in items.items()}),
    }
    if small := {name: own for name, own in items.items() if own[0].nbytes < SHARE_BYTES_MIN}:
        makes = {name: in_turn(partial(frame_asker, path, name, own[0]), own) for name, own in small.items()}
        found[FRAMES] = Contender(pids, makes)
    spec = state.parent / "spec.json"
    write_spec(spec, {name: (live_artifact(state, name), threads[name]) for name in items})
    for name in options.peers:
        served = items if name not in ONE_MODEL else {models[0].name: items[models[0].name]}
        try:
            server = stack.enter_context(
                running(name, options.envs, state.parent, spec, models[0].name, items[models[0].name][0])
            )
        except OSError as error:
            print(f"{name} is left out: {error}", file=sys.stderr)
            continue
        makes = {model: in_turn(partial(server.asking, model, own[0]), own) for model, own in served.items()}
        found[name] = Contender(tuple(processes(server.pid)), makes)
    return found


def measure(
    contenders: Mapping[str, Contender], model: str, clients: int, cores: set[int] | None, rounds: int, seconds: float
) -> list[dict[str, Any]]:
    groups = {
        name: Clients(1 if name == RAW else clients, contender.makes[model], cores)
        for name, contender in contenders.items()
        if model in contender.makes
    }
    loads: dict[str, list[Load]] = {name: [] for name in groups}
    spent_us = dict.fromkeys(groups, 0.0)
    for _ in range(rounds):
        for name, group in groups.items():
            before = contenders[name].cpu_us()
            loads[name].append(group.round(seconds))
            spent_us[name] += contenders[name].cpu_us() - before
    for group in groups.values():
        group.close()
    raw = [load.p50_us for load in loads.pop(RAW)]
    return [
        {
            "server": name,
            "p50_us": round(statistics.median(load.p50_us for load in seen), 1),
            "p99_us": round(statistics.median(load.p99_us for load in seen), 1),
            "p999_us": round(statistics.median(load.p999_us for load in seen), 1),
            "raw_p50_us": round(statistics.median(raw), 1),
            "over_us": round(statistics.median(s.p50_us - r for s, r in zip(seen, raw, strict=True)), 1),
            "requests_per_s": round(statistics.median(load.requests_per_s for load in seen)),
            "cpu_us": round(spent_us[name] / max(1.0, sum(load.requests_per_s * seconds for load in seen)), 1),
        }
        for name, seen in loads.items()
    ]


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each cell with the ratios of EdgeRT to its peers. A value that misses its aim in AIMS is bold.

    `requests` is the ratio to the best peer. `frames` is the same ratio for the client with frames made beforehand.
    `http_requests`, `http_p99` and `memory` are ratios to FastAPI over TCP, and `times_fastapi` is the ratio to FastAPI
    over its Unix socket. `p99` and `p999` are ratios to the minimal loop, and `more_cpu_us` is a difference from it.
    """
    cells: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["model"], row["clients"], row["placement"]), {})[row["server"]] = row
    found = []
    for cell, here in cells.items():
        best = max((row for name, row in here.items() if name not in NO_PEERS), key=lambda row: row["requests_per_s"])
        seen = _beside(here, best)
        missed = [name for name, value in seen.items() if not _met(name, value, cell[1])]
        told = {name: f"**{value:.2f}**" if name in missed else f"{value:.2f}" for name, value in seen.items()}
        found.append({**dict(zip(RATIO_COLUMNS, cell, strict=False)), "best_peer": best["server"], **told})
    return found


def _beside(here: Mapping[str, dict[str, Any]], best: dict[str, Any]) -> dict[str, float]:
    """Return those values of one cell that `AIMS` names and whose peers were measured."""

    def over(peer: dict[str, Any], key: str, server: str = OURS) -> float:
        return float(here[server][key] / max(0.1, peer[key]))

    seen = {"requests": over(best, "requests_per_s")}
    if FRAMES in here:
        seen["frames"] = over(best, "requests_per_s", FRAMES)
    if minimal := here.get("minimal"):
        seen |= {"p99": over(minimal, "p99_us"), "p999": over(minimal, "p999_us")}
        seen["more_cpu_us"] = here[OURS]["cpu_us"] - minimal["cpu_us"]
    if (plain := here.get("fastapi-unix")) and plain["raw_p50_us"] < SMALL_US:
        seen["times_fastapi"] = over(plain, "requests_per_s")
    if tcp := here.get("fastapi"):
        seen |= {"http_requests": over(tcp, "requests_per_s", HTTP), "http_p99": over(tcp, "p99_us", HTTP)}
        seen["memory"] = over(tcp, "memory_mb")
    return seen


def _met(name: str, value: float, clients: int) -> bool:
    limit, at_most = AIMS[name]
    if name in ("p99", "p999") and clients > TAIL_CLIENTS_MAX:
        return True
    return value <= limit if at_most else value >= limit


def in_turn(make: Callable[[], AskWith], items: Sequence[NDArray[Any]]) -> Callable[[int], Ask]:
    """Return the request function for `Clients`: each client sends `items` in turn, and begins with another item."""

    def make_one(number: int) -> Ask:
        ask, following = make(), itertools.cycle(items)
        for _ in range(number % len(items)):
            next(following)
        return lambda: ask(next(following))

    return make_one


def asking_raw(state: Path, threads: int, model: str) -> Callable[[], AskWith]:
    def make() -> AskWith:
        session = open_session(state, threads, model)
        return lambda item: session.run([item])

    return make


def asking_ours(path: Path, model: str) -> Callable[[], AskWith]:
    def make() -> AskWith:
        client = Client(path)
        return lambda item: client.infer(model, item, cache=False)

    return make


def asking_http(port: int, model: str, form: NDArray[np.float32]) -> Callable[[], AskWith]:
    def make() -> AskWith:
        http = http_asker(port, form, model, "image" if model == DIGITS_MODEL.name else "x")
        return lambda item: http.ask(item.data)

    return make


if __name__ == "__main__":
    main()
