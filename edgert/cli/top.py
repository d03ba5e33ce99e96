"""`edgertd top`."""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import click

from edgert.checks.status import DaemonStatus, ServingStatus, ask_daemon
from edgert.cli.quantity import Duration
from edgert.printable import counted, printable
from edgert.state_dir import StateDir
from edgert.typed_json import FLAT, to_json

CLEAR = "\x1b[H\x1b[J"  # cursor home, erase below
BOLD, PLAIN = "\x1b[1m", "\x1b[0m"
LEFT = ("MODEL", "STATE", "ENGINE")  # the columns that are aligned left
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
# The columns that a narrow terminal omits, in this order.
DROPPED = ("MB", "SHED", "ENGINE", "P95 MS", "WAIT", "CLIENTS", "STATE", "ERRORS")


@click.command()
@click.option(
    "--interval",
    "interval_s",
    type=Duration(0.1, 60),
    default="1s",
    show_default=True,
    help="Time between two updates.",
)
@click.option("--once", is_flag=True, help="Print one interval and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each update.")
@click.pass_obj
def top(state: StateDir, interval_s: float, once: bool, as_json: bool) -> None:
    """Show the models live: rates, percentiles, batches and why they closed, stages, caches, shadow.

    Rates are from the last interval. Percentiles and stages are from the current window, or from the last window while
    the current window has no answers. Ctrl-C ends the command.

    \b
    Examples:
      edgertd top
      edgertd top --once --json | python3 -m json.tool
    """
    with contextlib.suppress(KeyboardInterrupt):  # the usual way to end the command
        _watch(state, interval_s, once, as_json)


def _watch(state: StateDir, interval_s: float, once: bool, as_json: bool) -> None:
    before, before_s = ask_daemon(state.control_socket), time.monotonic()
    screen = sys.stdout.isatty() and not (once or as_json)
    while True:
        time.sleep(interval_s)
        now, now_s = ask_daemon(state.control_socket), time.monotonic()
        view = view_of(before, now, now_s - before_s)
        width = shutil.get_terminal_size().columns
        text = json.dumps(to_json(view)) if as_json else "\n".join(lines_of(view, width, screen))
        click.echo((CLEAR if screen else "") + text)
        if once:
            return
        before, before_s = now, now_s


@dataclass(frozen=True)
class ModelView:
    """One model and its rates in the last interval. JSON has the fields of `serving` next to the rates."""

    model: str
    serving: ServingStatus = field(metadata={FLAT: True})
    requests_per_s: float
    cache_hits_per_s: float
    batches_per_s: float
    closed_per_s: Mapping[str, float]


@dataclass(frozen=True)
class View:
    """The models at one refresh."""

    pid: int
    interval_s: float
    models: tuple[ModelView, ...]


def view_of(before: DaemonStatus, now: DaemonStatus, elapsed_s: float) -> View:
    """Return the view for two successive answers of the daemon."""
    models = (_model(name, before.models.get(name), after, elapsed_s) for name, after in sorted(now.models.items()))
    return View(now.pid, round(elapsed_s, 3), tuple(models))


def _model(name: str, before: ServingStatus | None, after: ServingStatus, elapsed_s: float) -> ModelView:
    """Return the rates of a model; the counters of a new worker start at 0."""
    old = before.figures if before is not None and before.pid == after.pid else None
    new = after.figures
    if new is None:
        return ModelView(name, after, 0.0, 0.0, 0.0, {})

    def rate(now: int, then: int) -> float:
        return round(max(0, now - then) / elapsed_s, 1)

    closed = {
        reason: rate(count, old.batches_closed.get(reason, 0) if old else 0)
        for reason, count in new.batches_closed.items()
    }
    return ModelView(
        name,
        after,
        requests_per_s=rate(new.requests.requests, old.requests.requests if old else 0),
        cache_hits_per_s=rate(new.requests.cache_hits, old.requests.cache_hits if old else 0),
        batches_per_s=round(sum(closed.values()), 1),
        closed_per_s={reason: per_s for reason, per_s in closed.items() if per_s},
    )


def lines_of(view: View, width: int, bold: bool = False) -> list[str]:
    """Return the view as lines of at most `width` characters."""
    columns = columns_within(width)
    heading = _row({name: name for name, _ in columns}, columns)[:width]
    count = len(view.models)
    lines = [f"edgertd {view.pid}, {counted(count, 'model')}, {time.strftime('%H:%M:%S')}"[:width]]
    lines.append(f"{BOLD}{heading}{PLAIN}" if bold else heading)
    for model in view.models:
        named = {name: cell for (name, _), cell in zip(COLUMNS, _cells(model), strict=True)}
        texts = (_row(named, columns), *(f"  {line}" for line in _details(model)))
        lines += [printable(text[:width], newlines=False) for text in texts]
    return lines


def _cells(model: ModelView) -> tuple[str, ...]:
    serving, loaded, figures = model.serving, model.serving.loaded, model.serving.figures
    latency = figures.requests.recent.latency_ms if figures else None
    return (
        model.model,
        serving.state,
        f"{loaded.engine} r{loaded.release}" if loaded else "",
        f"{model.requests_per_s:.1f}",
        *((f"{latency.p50:.3g}", f"{latency.p95:.3g}", f"{latency.p99:.3g}") if latency else ("", "", "")),
        str(figures.connections if figures else 0),
        str(figures.waiting if figures else 0),
        str(figures.requests.errors if figures else 0),
        str(figures.requests.shed if figures else 0),
        "" if serving.memory_mb is None else f"{serving.memory_mb:.0f}",
    )


def columns_within(width: int) -> list[tuple[str, int]]:
    """Return the columns that fit into `width` characters; omit the least important first."""
    columns = list(COLUMNS)
    for name in DROPPED:
        if sum(size + 1 for _, size in columns) - 1 <= width:
            break
        columns = [column for column in columns if column[0] != name]
    return columns


def _row(cells: dict[str, str], columns: Sequence[tuple[str, int]]) -> str:
    cut = ((cells[name][:size].ljust(size) if name in LEFT else cells[name].rjust(size)) for name, size in columns)
    return " ".join(cut).rstrip()


def _details(model: ModelView) -> list[str]:
    """Return the lines below a model's row."""
    serving = model.serving
    lines = [f"fault    {serving.fault}"] if serving.fault else []
    loaded, figures = serving.loaded, serving.figures
    if loaded is None or figures is None:
        return lines
    window = figures.requests.recent
    reasons = ", ".join(f"{reason} {rate:g}/s" for reason, rate in sorted(model.closed_per_s.items())) or "-"
    lines.append(
        f"batches  mean {window.batch_mean:g} of {loaded.batch_cap} items; closed by: {reasons}; "
        f"{counted(figures.batcher.instances, 'run')} x {counted(loaded.threads, 'thread')}"
    )
    if tuner := figures.batcher.tuner:
        lines.append(
            f"target   p95 {tuner.target_p95_ms:g} ms: {tuner.state}, measured {tuner.p95_ms} ms, "
            f"cap {tuner.cap}, linger {tuner.linger_share:g}"
        )
    stages = (f"{name} {p.p50:.3g}/{p.p99:.3g}" for name, p in window.stages_ms.items() if p.max)
    lines.append(f"stages   p50/p99 ms: {', '.join(stages) or 'nothing yet'}")
    cache = figures.cache
    lines.append(
        f"cache    {cache.why}; {model.cache_hits_per_s:g} hits/s, {counted(cache.entries, 'answer')}, "
        f"{cache.bytes / 1e6:.1f} of {cache.max_bytes / 1e6:.0f} MB"
    )
    if near := figures.near:
        agreement = "none" if near.agreement is None else f"{near.agreement:.1%}"
        lines.append(
            f"near     {'on' if near.on else 'off'}: {near.why}; hit rate {near.hit_rate:.1%}, distance "
            f"mean {near.distance_mean:.4f} max {near.distance_max:.4f} of {near.distance:g}, "
            f"agreement {agreement} of {near.sampled}"
        )
    if shadow := figures.shadow:
        state = "ALARM" if shadow.alarm else "on" if shadow.on else "off"
        lines.append(
            f"shadow   {state}: agreement {shadow.agreement:.1%}, cosine {shadow.cosine_mean:.4f}, "
            f"drift {shadow.drift:+.3f}, {shadow.total} compared, {shadow.dropped_total} dropped"
            + (f"; {shadow.fault}" if shadow.fault else "")
        )
    return lines
