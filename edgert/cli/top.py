"""`edgertd top`."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Sequence
from typing import Any

import click

from edgert.config import StateDir
from edgert.protocol.control import ask

CLEAR = "\x1b[H\x1b[J"  # cursor home, erase below
BOLD, PLAIN = "\x1b[1m", "\x1b[0m"
ASK_S_MAX = 5.0
LEFT = ("MODEL", "STATE", "ENGINE")  # columns of words
COLUMNS = (
    ("MODEL", 14),
    ("STATE", 11),
    ("ENGINE", 18),
    ("REQ/S", 8),
    ("P50 MS", 8),
    ("P95 MS", 8),
    ("P99 MS", 8),
    ("CLIENTS", 7),
    ("WAIT", 5),
    ("ERRORS", 7),
    ("SHED", 6),
    ("MB", 7),
)
DROPPED = ("MB", "SHED", "ENGINE", "P95 MS", "WAIT", "CLIENTS", "STATE", "ERRORS")  # first where lines are short


@click.command()
@click.option(
    "--interval", type=click.FloatRange(0.1, 60), default=1.0, show_default=True, help="Seconds between looks."
)
@click.option("--once", is_flag=True, help="Look for one interval, print, and end.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a look.")
@click.pass_obj
def top(state: StateDir, interval: float, once: bool, as_json: bool) -> None:
    """Show live what the models do: rates, percentiles, batches and what closed them, stages, caches, shadow.

    Rates are of the last interval. Percentiles and stages are of the window under way, and of the last whole one
    where that has just begun. Ends with Ctrl-C.

    \b
    Examples:
      edgertd top
      edgertd top --once --json | python3 -m json.tool
    """
    with contextlib.suppress(KeyboardInterrupt):  # the way to end it is no error
        _watch(state, interval, once, as_json)


def _watch(state: StateDir, interval: float, once: bool, as_json: bool) -> None:
    before, before_s = ask(state.control_socket, {"op": "status"}, ASK_S_MAX), time.monotonic()
    screen = sys.stdout.isatty() and not (once or as_json)
    while True:
        time.sleep(interval)
        now, now_s = ask(state.control_socket, {"op": "status"}, ASK_S_MAX), time.monotonic()
        view = view_of(before, now, now_s - before_s)
        text = json.dumps(view) if as_json else "\n".join(lines_of(view, shutil.get_terminal_size().columns, screen))
        click.echo((CLEAR if screen else "") + text)
        if once:
            return
        before, before_s = now, now_s


def view_of(before: dict[str, Any], now: dict[str, Any], elapsed_s: float) -> dict[str, Any]:
    """What is shown: one entry a model, made of two answers of the daemon's `status`."""
    models = [
        _model(name, before["models"].get(name, {}), after, elapsed_s) for name, after in sorted(now["models"].items())
    ]
    return {"pid": now["pid"], "interval_s": round(elapsed_s, 3), "models": models}


def lines_of(view: dict[str, Any], width: int, bold: bool = False) -> list[str]:
    """The view as lines of at most `width` characters."""
    columns = columns_within(width)
    heading = _row({name: name for name, _ in columns}, columns)[:width]
    count = len(view["models"])
    lines = [f"edgertd {view['pid']}, {count} model{'' if count == 1 else 's'}, {time.strftime('%H:%M:%S')}"[:width]]
    lines.append(f"{BOLD}{heading}{PLAIN}" if bold else heading)
    for model in view["models"]:
        latency = model["latency_ms"]
        cells = (
            model["model"],
            model["state"],
            f"{model['engine'] or ''} {(model['release'] and 'r' + str(model['release'])) or ''}",
            f"{model['requests_per_s']:.1f}",
            *(f"{latency[p]:.3g}" if latency else "" for p in ("p50", "p95", "p99")),
            model["connections"],
            model["waiting"],
            model["errors"],
            model["shed"],
            "" if model["memory_mb"] is None else f"{model['memory_mb']:.0f}",
        )
        named = {name: str(cell) for (name, _), cell in zip(COLUMNS, cells, strict=True)}
        lines.append(_row(named, columns)[:width])
        lines += [f"  {line}"[:width] for line in _details(model)]
    return lines


def columns_within(width: int) -> list[tuple[str, int]]:
    """The columns that fit into lines of `width` characters, whole: the least needed are left out first."""
    columns = list(COLUMNS)
    for name in DROPPED:
        if sum(size + 1 for _, size in columns) - 1 <= width:
            break
        columns = [column for column in columns if column[0] != name]
    return columns


def _row(cells: dict[str, str], columns: Sequence[tuple[str, int]]) -> str:
    return " ".join(_cell(cells[name], size, name in LEFT) for name, size in columns).rstrip()


def _model(name: str, before: dict[str, Any], after: dict[str, Any], elapsed_s: float) -> dict[str, Any]:
    requests, batcher = after.get("requests") or {}, after.get("batcher") or {}
    window = _window(requests)

    def gained(*path: str) -> float:
        """How much a counter grew; a worker that is new counts from 0."""
        old, new = _at(before, path), _at(after, path)
        return new if before.get("pid") != after.get("pid") else max(0, new - old)

    closed = {reason: gained("batches_closed", reason) for reason in after.get("batches_closed") or {}}
    return {
        "model": name,
        "state": after.get("state"),
        "fault": after.get("fault"),
        "engine": after.get("engine"),
        "release": after.get("release"),
        "memory_mb": after.get("memory_mb"),
        "requests_per_s": round(gained("requests", "requests") / elapsed_s, 1),
        "errors": requests.get("errors", 0),
        "shed": requests.get("shed", 0),
        "connections": after.get("connections", 0),
        "waiting": after.get("waiting", 0),
        "latency_ms": window.get("latency_ms"),
        "stages_ms": window.get("stages_ms"),
        "batch_mean": window.get("batch_mean", 0.0),
        "batch_cap": after.get("batch_cap"),
        "threads": after.get("threads"),
        "instances": batcher.get("instances", 1),
        "batches_per_s": round(sum(closed.values()) / elapsed_s, 1),
        "closed_per_s": {reason: round(count / elapsed_s, 1) for reason, count in closed.items() if count},
        "tuner": batcher.get("tuner"),
        "cache": after.get("cache"),
        "cache_hits_per_s": round(gained("requests", "cache_hits") / elapsed_s, 1),
        "near": after.get("near"),
        "shadow": after.get("shadow"),
    }


def _window(requests: dict[str, Any]) -> dict[str, Any]:
    """The window under way, or the last whole one where that holds nothing yet."""
    current, last = requests.get("window") or {}, requests.get("last_window") or {}
    return current if current.get("answered") or not last else last


def _at(value: dict[str, Any], path: Sequence[str]) -> float:
    found: Any = value
    for name in path:
        found = found.get(name) if isinstance(found, dict) else None
    return found if isinstance(found, (int, float)) else 0


def _details(model: dict[str, Any]) -> list[str]:
    """What stands under a model's row."""
    lines = []
    if model["fault"]:
        lines.append(f"fault    {model['fault']}")
    if not model["engine"]:
        return lines
    reasons = ", ".join(f"{reason} {rate:g}/s" for reason, rate in sorted(model["closed_per_s"].items())) or "none"
    lines.append(
        f"batches  mean {model['batch_mean']:g} of {model['batch_cap']}, closed by {reasons}; "
        f"{model['instances']} x {model['threads']} threads"
    )
    if tuner := model["tuner"]:
        lines.append(
            f"target   p95 {tuner['target_p95_ms']:g} ms: {tuner['state']}, measured {tuner['p95_ms']} ms, "
            f"cap {tuner['cap']}, linger {tuner['linger_share']:g}"
        )
    if model["stages_ms"]:
        stages = (f"{name} {p['p50']:.3g}/{p['p99']:.3g}" for name, p in model["stages_ms"].items() if p["max"])
        lines.append(f"stages   p50/p99 ms: {', '.join(stages) or 'nothing yet'}")
    if cache := model["cache"]:
        lines.append(
            f"cache    {cache['why']}; {model['cache_hits_per_s']:g} hits/s, {cache['entries']} answers, "
            f"{cache['bytes'] / 1e6:.1f} of {cache['max_bytes'] / 1e6:.0f} MB"
        )
    if near := model["near"]:
        lines.append(
            f"near     {'on' if near['on'] else 'off'}: {near['why']}; hit rate {near['hit_rate']:.1%}, distance "
            f"mean {near['distance_mean']:.4f} max {near['distance_max']:.4f} of {near['distance']:g}, "
            f"agreement {_share(near['agreement'])} of {near['sampled']}"
        )
    if shadow := model["shadow"]:
        said = "ALARM" if shadow["alarm"] else "on" if shadow["on"] else "off"
        lines.append(
            f"shadow   {said}: agreement {shadow['agreement']:.1%}, cosine {shadow['cosine_mean']:.4f}, "
            f"drift {shadow['drift']:+.3f}, {shadow['total']} compared, {shadow['dropped_total']} dropped"
            + (f"; {shadow['fault']}" if shadow["fault"] else "")
        )
    return lines


def _share(value: float | None) -> str:
    return "none" if value is None else f"{value:.1%}"


def _cell(text: str, size: int, left: bool) -> str:
    return text[:size].ljust(size) if left else text.rjust(size)
