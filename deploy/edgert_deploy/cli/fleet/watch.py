"""`edgert fleet watch`: the fleet's latency as it arrives over MQTT."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from edgert.cli.output import emit, json_option, progress
from edgert.cli.quantity import Duration
from edgert.durations import duration_text
from edgert.errors import ConfigInvalid
from edgert.printable import counted, printable
from edgert.telemetry.mqtt import MqttSettings
from edgert_deploy.cli.shared.broker_options import broker_options
from edgert_deploy.cli.shared.option_groups import SectionedCommand
from edgert_deploy.cli.shared.options import for_option
from edgert_deploy.cli.shared.output import CELL_CHARS_MAX
from edgert_deploy.cli.shared.types import ModelName
from edgert_deploy.fleet.live_percentiles import LivePercentiles, Row
from edgert_deploy.fleet.subscriber import FleetSubscriber

SETTLE_S = 2.0
INTERVAL_S = 2.0
PLAIN_WIDTH = 180
COLUMNS_LEFT = ("device", "state", "model", "version", "alarms")
COLUMNS = (
    *("device", "state", "model", "version"),
    *("req/s", "p50 ms", "p95", "p99", "p99.9", "p95 trend", "errors", "shed", "cache", "batch", "missing", "age"),
    "alarms",
)
# The columns that a narrow terminal omits, in this order.
DROPPED = (
    *("missing", "batch", "cache", "shed", "p95 trend", "p99.9", "version"),
    *("age", "p50 ms", "errors", "p95", "req/s", "p99", "model", "alarms", "state"),
)
GAP = 2  # spaces between two columns
ALARMS_WIDTH_MIN = 20
BARS = "▁▂▃▄▅▆▇█"
# The orders of the table. Numbers are in descending order, names in ascending order.
SORTS: dict[str, Callable[[Row], Any]] = {
    "device": lambda row: (row.site, row.device, row.model or ""),
    "model": lambda row: (row.model or "", row.site, row.device),
    "version": lambda row: (row.model_version, row.site, row.device),
    "state": lambda row: (row.state, row.site, row.device),
    "rate": lambda row: -(row.rate_per_s or 0),
    "p50": lambda row: -(row.p50_ms or 0),
    "p95": lambda row: -(row.p95_ms or 0),
    "p99": lambda row: -(row.p99_ms or 0),
    "errors": lambda row: -row.errors,
    "missing": lambda row: -row.missing,
    "age": lambda row: -(row.age_s or 0),
    "alarms": lambda row: (-len(row.alarms), row.site, row.device),
}
STATES = ("online", "offline", "lost", "stale", "unknown")
LINES_KEPT = 6  # lines of the terminal for the heading, the fleet's lines and a note


@click.command(cls=SectionedCommand)
@broker_options
@click.option("--model", type=ModelName(), help="Only this model.")
@click.option(
    "--device", metavar="PATTERN", help="Only devices whose name matches; * matches any text, ? any character."
)
@click.option("--state", "states", metavar="WORDS", help=f"Only devices in these states: {', '.join(STATES)}.")
@click.option("--alarms", "alarms_only", is_flag=True, help="Only lines with an alarm.")
@click.option(
    "--sort", type=click.Choice(list(SORTS)), default="device", show_default=True, help="The order of the lines."
)
@click.option("-n", "--lines", metavar="N", type=click.IntRange(min=1), help="Show at most N lines of devices.")
@json_option
@click.option(
    "--once", is_flag=True, help=f"Print one snapshot, after --for ({duration_text(SETTLE_S)} by default), and exit."
)
@for_option
@click.option(
    "--interval",
    "interval_s",
    type=Duration(0.1),
    default=duration_text(INTERVAL_S),
    show_default=True,
    help="Time between two updates of the table.",
)
def watch(
    settings: MqttSettings,
    site: str | None,
    model: str | None,
    device: str | None,
    states: str | None,
    alarms_only: bool,
    sort: str,
    lines: int | None,
    as_json: bool,
    once: bool,
    for_s: float | None,
    interval_s: float,
) -> None:
    """Show every device's models: state, version, rate, percentiles, errors, cache, batching.

    Percentiles cover the last ten minutes. They are merged from the devices' histograms, so the percentiles of the
    whole fleet are true (error at most 1.09 %). Errors, shed and cache hits are totals since a model's worker started.
    `missing` counts sent histograms that never arrived. A device is `stale` if its status is online, but the device
    sent nothing for 2.5 windows. Devices report once in each window (60 s unless configured).

    With --json, each line of the table is one JSON object. The command prints an object again when its line changes.

    The exit code is 4 if an option cannot be used or the broker refuses the login, and 6 if the broker cannot be
    reached.

    \b
    Examples:
      edgert fleet watch --broker broker.local
      edgert fleet watch --broker broker.example:8883 --tls --ca ca.pem --username ops --password-file pw
      edgert fleet watch --broker broker.local --site plant-a --once
      edgert fleet watch --broker broker.local --model digits --sort p99 --lines 20
      edgert fleet watch --broker broker.local --device 'line-3-*' --state lost,stale
      edgert fleet watch --broker broker.local --json --for 2m | jq 'select(.alarms != [])'
    """
    view = View(model, device, states_of(states), alarms_only, sort, lines)
    state = LivePercentiles()
    subscriber = FleetSubscriber(settings, [state], site, log=lambda line: progress(f"watch: {line}"))
    subscriber.open()
    try:
        if once:
            subscriber.listen(for_s or SETTLE_S)
            show_once(state, view, as_json)
        else:
            show_until(state, view, subscriber, as_json, interval_s, for_s)
    except KeyboardInterrupt:  # Ctrl-C is the usual end without --for
        pass
    finally:
        subscriber.close()


@dataclass(frozen=True)
class View:
    """The choice of lines to show, and their order."""

    model: str | None = None
    device: str | None = None
    states: tuple[str, ...] = ()
    alarms_only: bool = False
    sort: str = "device"
    lines: int | None = None

    def of(self, rows: list[Row]) -> list[Row]:
        """Return the chosen lines of devices, then the lines of the whole fleet."""
        fleet = [row for row in rows if row.device is None and self.model in (None, row.model)]
        chosen = sorted((row for row in rows if row.device is not None and self._shows(row)), key=SORTS[self.sort])
        return chosen[: self.lines] + fleet

    def _shows(self, row: Row) -> bool:
        return (
            self.model in (None, row.model)
            and (self.device is None or fnmatchcase(row.device or "", self.device))
            and (not self.states or row.state in self.states)
            and (not self.alarms_only or bool(row.alarms))
        )


def states_of(words: str | None) -> tuple[str, ...]:
    """Return the states to show; empty means all. Raises ConfigInvalid."""
    states = tuple(word.strip() for word in (words or "").split(",") if word.strip())
    if unknown := [word for word in states if word not in STATES]:
        raise ConfigInvalid(f"--state {unknown[0]!r} is not a state of a device; known: {', '.join(STATES)}")
    return states


def show_once(state: LivePercentiles, view: View, as_json: bool) -> None:
    rows = view.of(state.rows(time.monotonic()))
    if as_json:
        _print_json(rows)
    else:
        console = _console()
        console.print(table_of(rows, state, console.width))


def show_until(
    state: LivePercentiles,
    view: View,
    subscriber: FleetSubscriber,
    as_json: bool,
    interval_s: float,
    for_s: float | None,
) -> None:
    """Draw the table until the time is up or the user ends the command."""
    ends_at = None if for_s is None else time.monotonic() + for_s

    def listen() -> bool:
        wait_s = interval_s if ends_at is None else min(interval_s, ends_at - time.monotonic())
        if wait_s > 0:
            subscriber.listen(wait_s)
        return wait_s > 0

    if as_json:
        _stream_json(state, view, listen)
    elif sys.stdout.isatty() and not (console := _console()).is_dumb_terminal:
        with Live(console=console, screen=False, auto_refresh=False) as live:
            while listen():
                rows = view.of(state.rows(time.monotonic()))
                live.update(table_of(rows, state, console.width, console.height - LINES_KEPT), refresh=True)
    else:
        while listen():
            show_once(state, view, as_json)


def table_of(rows: list[Row], state: LivePercentiles, width: int, height: int | None = None) -> Table:
    """Return the fleet as a table whose last lines sum up each model. A narrow table has fewer columns.

    If the table is higher than `height`, its last device lines are omitted; the caption states their number.
    """
    devices, fleet = [row for row in rows if row.device is not None], [row for row in rows if row.device is None]
    room = len(devices) if height is None else max(1, height - len(fleet))
    left_out = max(0, len(devices) - room)
    rows = devices[:room] + fleet
    lines = [dict(zip(COLUMNS, _cells(row), strict=True)) for row in rows]
    shown = _columns_within(width, lines, alarms=any(row.alarms for row in rows))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, width_max in shown.items():
        justify: Literal["left", "right"] = "left" if name in COLUMNS_LEFT else "right"
        table.add_column(name, justify=justify, no_wrap=True, max_width=width_max)
    summed_up = False
    for row, cells in zip(rows, lines, strict=True):
        if row.device is None and not summed_up:
            summed_up = True
            table.add_section()
        table.add_row(*(cells[name] for name in shown), style="bold" if row.device is None else None)
    if not rows:
        any_rows = state.rows(time.monotonic())
        table.caption = "(no line fits the options)" if any_rows else "(no message received yet)"
    elif waiting := [row for row in rows if row.model is None and row.state == "online" and not row.alarms]:
        table.caption = (
            f"{len(waiting)} online without a report: the first report comes within a window (60 s by default)"
        )
    if left_out:
        table.caption = f"{counted(left_out, 'more line')}; choose by --model, --device, --state, --alarms or --sort"
    if state.refused:
        table.caption = _text(f"{counted(state.refused, 'message')} not understood; the last: {state.last_refusal}")
    return table


def _columns_within(width: int, lines: Sequence[Mapping[str, Text]], alarms: bool) -> dict[str, int]:
    """Return the columns that fit into `width` characters, with their widths. "device" always stays.

    A long list of alarms is cut, so that it removes no other column.
    """
    widths = {name: max([len(name), *(cells[name].cell_len for cells in lines)]) for name in COLUMNS}
    alarms_width = widths.pop("alarms")
    if alarms:
        widths["alarms"] = min(alarms_width, ALARMS_WIDTH_MIN)
    for name in DROPPED:
        if sum(widths.values()) + GAP * (len(widths) - 1) <= width:
            break
        widths.pop(name, None)
    if "alarms" in widths:
        widths["alarms"] += width - sum(widths.values()) - GAP * (len(widths) - 1)
    return widths


def _cells(row: Row) -> list[Text]:
    where = "all devices" if row.device is None else f"{row.site}/{row.device}"
    cells = [
        where,
        row.state,
        row.model or "-",
        row.model_version or "-",
        _number(row.rate_per_s, "{:.1f}"),
        *(_milliseconds(value) for value in (row.p50_ms, row.p95_ms, row.p99_ms, row.p999_ms)),
        sparkline(row.trend_p95_ms),
        str(row.errors) if row.model else "-",
        str(row.shed) if row.model else "-",
        _number(row.cache_hit_share, "{:.0%}"),
        _number(row.batch_mean, "{:.1f}"),
        str(row.missing) if row.model else "-",
        "-" if row.device is None else _age(row.age_s),
        ", ".join(row.alarms) or "-",
    ]
    coloured = [_text(cell) for cell in cells]
    coloured[1].stylize({"online": "green", "offline": "yellow", "lost": "red", "stale": "red"}.get(row.state, ""))
    if row.alarms:
        coloured[-1].stylize("bold red")
    return coloured


def _text(cell: str) -> Text:
    """Return a device's text without control characters. rich does not interpret markup in it."""
    return Text(printable(cell, CELL_CHARS_MAX, newlines=False))


def sparkline(values: Sequence[float]) -> str:
    """Return one bar for each value, on a scale from zero to the greatest value."""
    top = max(values, default=0.0)
    return "".join(BARS[round(value / top * (len(BARS) - 1))] for value in values) if top > 0 else "-"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _milliseconds(value: float | None) -> str:
    """Return the value with three significant digits, the precision of the histogram."""
    if value is None:
        return "-"
    return f"{value:.{sum(value < limit for limit in (1, 10, 100))}f}"


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def _stream_json(state: LivePercentiles, view: View, listen: Callable[[], bool]) -> None:
    shown: dict[tuple[str | None, ...], dict[str, object]] = {}
    while listen():
        changed = []
        for row in view.of(state.rows(time.monotonic())):
            # If only the age in a line grows, the line has not changed.
            content = {name: value for name, value in row.as_json().items() if name != "age_s"}
            key = (row.site, row.device, row.model)
            if shown.get(key) != content:
                shown[key] = content
                changed.append(row)
        _print_json(changed)


def _print_json(rows: list[Row]) -> None:
    for row in rows:
        emit(row.as_json(), "", as_json=True)
    sys.stdout.flush()


class _Console(Console):
    """A console that raises BrokenPipeError, as other commands do; rich would exit with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _console() -> Console:
    return _Console() if sys.stdout.isatty() else _Console(width=PLAIN_WIDTH, no_color=True)
