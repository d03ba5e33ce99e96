"""The growth of the cost with the number of models, the number of connections, and the size of a request.

- **Models** (1 to 50; two fully connected layers in FP32 on ONNX Runtime; each model has its own worker): memory
  of all processes, the time from the daemon's start until the first model has answered and until each model has
  answered, and the times of one client.
- **Connections** (1 to 2,000, all but one idle): memory, and the times of the client that sends requests.
- **Bytes** (0.2 KB to 40 MB, a model that reads nothing): the times of one client, and the times of two bare Python
  processes that pass the same bytes (`support/echo.py`). `cpu_us` is the worker's processor time per request.

Times are in microseconds. Each is the median over the rounds. If one daemon serves all sizes of an axis, these sizes
take turns. Look for a kink between two neighbours, because the figures of a noisy machine vary.

    python -m bench.growth                       # a table
    python -m bench.growth --plot growth.svg     # and a page with a plot of each axis
    python -m bench.growth --axes bytes --json
"""

from __future__ import annotations

import argparse
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from bench.support.architectures import mlp, samples
from bench.support.bundles import make_bundle
from bench.support.clients import Ask, Clients, Load, ours
from bench.support.devices import deploy, edgertd, null_device, serving, start, state_folder
from bench.support.echo import echo
from bench.support.processes import cpu_us, processes
from bench.support.tables import emit
from edgert import Client
from edgert.bundle.signing import new_key
from edgert.machine import process_mb
from edgert.protocol.sharing import SHARE_BYTES_MIN

MODELS = (1, 2, 5, 10, 20, 50)
CONNECTIONS = (1, 10, 100, 500, 1000, 2000)
SIZES_BYTES = (
    200, 1000, 4000, 16_000, 64_000, 250_000, 1_000_000, 4_000_000, 6_000_000, 8_000_000,
    12_000_000, 20_000_000, 40_000_000,
)  # fmt: skip
COLUMNS = ("axis", "n", "p50_us", "p99_us", "echo_us", "cpu_us", "memory_mb", "first_s", "start_s")
ROUNDS, ROUND_S = 7, 0.3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout")
    parser.add_argument(
        "--axes", type=lambda text: text.split(","), default=list(AXES), help=f"some of {', '.join(AXES)}"
    )
    parser.add_argument("--most", type=int, default=10**9, help="leave out larger numbers of models and connections")
    parser.add_argument("--plot", type=Path, help="write an SVG with a plot of each axis")
    options = parser.parse_args()
    if unknown := sorted(set(options.axes) - set(AXES)):
        parser.error(f"no axis is called {', '.join(unknown)}; known: {', '.join(AXES)}")
    rows = [{"axis": axis, **row} for axis in options.axes for row in AXES[axis](options.most)]
    emit(rows, COLUMNS, options.json)
    if options.plot:
        options.plot.write_text(plotted(rows))


def models(most: int) -> list[dict[str, Any]]:
    """Return a row for each number of models, each in a daemon that starts with all of them."""
    import onnxruntime

    proto = mlp()
    item = samples((256,), 1, 0)
    program = proto.SerializeToString(deterministic=True)
    (answer,) = onnxruntime.InferenceSession(program).run(None, {"x": item})
    rows = []
    for count in (n for n in MODELS if n <= most):
        print(f"{count} models", file=sys.stderr)
        with state_folder() as state:
            key = new_key()
            start(state, key.public.pem())
            for number in range(count):
                name = f"m{number}"
                bundle = make_bundle(state.parent, key, name, "onnxruntime", program, item, answer, output="scores")
                deploy(state, name, bundle)
            edgertd(state, "stop")
            began = time.monotonic()
            edgertd(state, "start")
            with Client(state / "edgert.sock") as client:
                answered_s = []
                for number in range(count):
                    client.infer(f"m{number}", item, cache=False, timeout_s=600.0)
                    answered_s.append(round(time.monotonic() - began, 2))
            loads = _loads({"": ours(state, "m0", item, "socket")}, {})[0][""]
            rows.append(_row(count, loads, _memory_mb(state), first_s=answered_s[0], start_s=answered_s[-1]))
    return rows


def connections(most: int) -> list[dict[str, Any]]:
    """Return a row for each number of connections to one daemon. Only one connection sends requests."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    item = np.zeros((1, 1000), np.uint8)
    rows = []
    with (
        null_device({"m": item}, f"[serving]\nconnections_max = {2 * max(CONNECTIONS)}\n") as state,
        ExitStack() as idle,
    ):
        open_now = 1
        for count in (n for n in CONNECTIONS if n <= most):
            print(f"{count} connections", file=sys.stderr)
            while open_now < count:
                idle.enter_context(Client(state / "edgert.sock")).infer("m", item)
                open_now += 1
            rows.append(_row(count, _loads({"": ours(state, "m", item, "socket")}, {})[0][""], _memory_mb(state)))
    return rows


def sizes(most: int) -> list[dict[str, Any]]:
    """Return a row for each size of a request."""
    print("bytes", file=sys.stderr)
    items = {size: np.zeros((1, size), np.uint8) for size in SIZES_BYTES}
    with null_device({f"m{size}": item for size, item in items.items()}) as state:
        makes: dict[object, Callable[[int], Ask]] = {}
        for size, item in items.items():
            makes[size] = ours(state, f"m{size}", item, "auto")
            makes[size, "echo"] = echo(item, shared=size > SHARE_BYTES_MIN)
        loads, spent_us = _loads(makes, {size: [serving(state, f"m{size}")["pid"]] for size in SIZES_BYTES})
    return [
        _row(
            size,
            loads[size],
            None,
            echo_us=round(statistics.median(load.p50_us for load in loads[size, "echo"]), 1),
            cpu_us=round(spent_us[size], 1),
        )
        for size in SIZES_BYTES
    ]


AXES: dict[str, Callable[[int], list[dict[str, Any]]]] = {"models": models, "connections": connections, "bytes": sizes}


def _loads(
    makes: dict[Any, Callable[[int], Ask]], pids: Mapping[Any, Sequence[int]]
) -> tuple[dict[Any, list[Load]], dict[Any, float]]:
    """Return the rounds of each case, and the processor time per request of its processes, if `pids` has any."""
    groups = {case: Clients(1, make) for case, make in makes.items()}
    loads: dict[Any, list[Load]] = {case: [] for case in groups}
    spent_us = dict.fromkeys(groups, 0.0)
    for _ in range(ROUNDS):
        for case, group in groups.items():
            before_us = cpu_us(pids.get(case, ()))
            loads[case].append(group.round(ROUND_S))
            spent_us[case] += cpu_us(pids.get(case, ())) - before_us
    for group in groups.values():
        group.close()
    asked = {case: sum(load.requests_per_s * ROUND_S for load in seen) for case, seen in loads.items()}
    return loads, {case: spent_us[case] / asked[case] for case in groups}


def _row(n: int, loads: Sequence[Load], memory_mb: float | None, **more: Any) -> dict[str, Any]:
    return {
        "n": n,
        "p50_us": round(statistics.median(load.p50_us for load in loads), 1),
        "p99_us": round(statistics.median(load.p99_us for load in loads), 1),
        "memory_mb": memory_mb,
        **more,
    }


def _memory_mb(state: Path) -> float:
    pids = processes(edgertd(state, "status")["daemon"]["pid"])
    return round(sum(process_mb(pid) or 0.0 for pid in pids), 1)


WIDTH, HEIGHT, MARGIN = 420, 260, 46
LINES = {
    "p50_us": "#2563eb", "p99_us": "#dc2626", "echo_us": "#6b7280", "cpu_us": "#7c3aed", "memory_mb": "#059669",
    "first_s": "#a16207", "start_s": "#d97706",
}  # fmt: skip


def plotted(rows: Sequence[dict[str, Any]]) -> str:
    """Return an SVG with a logarithmic plot of each axis; each line has its name and last value."""
    axes = list(dict.fromkeys(row["axis"] for row in rows))
    plots = [_plot(axis, [row for row in rows if row["axis"] == axis], i * HEIGHT) for i, axis in enumerate(axes)]
    size = f'width="{WIDTH + 150}" height="{HEIGHT * len(axes)}"'
    body = "\n".join(plots)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def _plot(axis: str, rows: Sequence[dict[str, Any]], top: int) -> str:
    lines = {
        name: [(row["n"], row[name]) for row in rows if row.get(name)]
        for name in LINES
        if any(r.get(name) for r in rows)
    }
    values = [value for points in lines.values() for _, value in points]
    bounds = [math.log10(edge) for edge in (min(values) / 1.3, max(values) * 1.3)]
    ends = [math.log10(rows[0]["n"]), math.log10(max(rows[-1]["n"], rows[0]["n"] + 1))]

    def x(n: float) -> float:
        return MARGIN + (math.log10(n) - ends[0]) / (ends[1] - ends[0]) * (WIDTH - 2 * MARGIN)

    def y(value: float) -> float:
        return top + HEIGHT - MARGIN - (math.log10(value) - bounds[0]) / (bounds[1] - bounds[0]) * (HEIGHT - 2 * MARGIN)

    parts = [f'<text x="{MARGIN}" y="{top + 20}" font-weight="bold">{axis}</text>']
    parts += [f'<text x="{x(r["n"]):.0f}" y="{top + HEIGHT - 26}" text-anchor="middle">{r["n"]:g}</text>' for r in rows]
    for name, points in lines.items():
        path = " ".join(f"{x(n):.1f},{y(value):.1f}" for n, value in points)
        n, value = points[-1]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{LINES[name]}" stroke-width="1.5"/>')
        parts.append(f'<text x="{x(n) + 6:.0f}" y="{y(value) + 4:.0f}" fill="{LINES[name]}">{name} {value:,.4g}</text>')
    return "\n".join(parts)


if __name__ == "__main__":
    main()
