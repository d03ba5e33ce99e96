"""`edgert watch`: the fleet's latency as it arrives over MQTT."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import click
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from edgert.telemetry.mqtt import MqttSettings
from edgert_deploy.cli.broker_options import broker_options
from edgert_deploy.fleet.subscriber import FleetState, FleetSubscriber, Row

SETTLE_S = 2.0
INTERVAL_S = 2.0
PLAIN_WIDTH = 160
FULL_WIDTH = 110
COLUMNS_LEFT = ("device", "state", "model", "version")
COLUMNS = (
    *COLUMNS_LEFT,
    *("req/s", "p50 ms", "p95", "p99", "p99.9", "errors", "shed", "cache", "batch", "missing", "age"),
)
IN_FULL_ONLY = ("version", "p99.9", "shed", "cache", "batch", "missing")

EPILOG = """\b
Examples:
  edgert watch --broker broker.local
  edgert watch --broker broker.example:8883 --tls --ca ca.pem --username ops --password-file pw
  edgert watch --broker broker.local --site plant-a --once
  edgert watch --broker broker.local --json --for 120 | jq 'select(.state != "online")'

\b
Percentiles cover the last ten minutes and are merged from the devices' histograms, so those of the
whole fleet are true (error at most 1.09 %). Errors, shed and cache hits count since a model's worker
began. `missing` counts histograms that were sent and never arrived. `stale` is a device that says it
is online and has been silent for 2.5 windows. Devices report once a window (60 s unless configured).

\b
Exit codes: 0 done, 4 refused or misconfigured, 6 the broker cannot be reached.
"""


@click.command(epilog=EPILOG, context_settings={"max_content_width": 110})
@broker_options
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON lines: one object per line of the table, when it changes."
)
@click.option("--once", is_flag=True, help=f"Print one snapshot, after --for SECONDS (default {SETTLE_S:g}), and exit.")
@click.option("--for", "for_s", metavar="SECONDS", type=click.FloatRange(min=0.1), help="Stop after that long.")
@click.option(
    "--interval",
    "interval_s",
    metavar="SECONDS",
    type=click.FloatRange(min=0.1),
    default=INTERVAL_S,
    help=f"How often the table is drawn (default {INTERVAL_S:g}).",
)
def watch(
    settings: MqttSettings,
    site: str | None,
    as_json: bool,
    once: bool,
    for_s: float | None,
    interval_s: float,
) -> None:
    """Show every device's models: state, version, rate, percentiles, errors, cache, batching."""
    state = FleetState()
    subscriber = FleetSubscriber(settings, state, site, log=lambda line: click.echo(f"watch: {line}", err=True))
    subscriber.open()
    try:
        if once:
            subscriber.listen(for_s or SETTLE_S)
            show_once(state, as_json)
        else:
            show_until(state, subscriber, as_json, interval_s, for_s)
    except KeyboardInterrupt:  # the way to end it, where --for gives no other
        pass
    finally:
        subscriber.close()


def show_once(state: FleetState, as_json: bool) -> None:
    rows = state.rows(time.monotonic())
    if as_json:
        _print_json(rows)
    else:
        console = _console()
        console.print(table_of(rows, state, console.width))


def show_until(
    state: FleetState, subscriber: FleetSubscriber, as_json: bool, interval_s: float, for_s: float | None
) -> None:
    """Draw until the time is up, or until interrupted."""
    ends_at = None if for_s is None else time.monotonic() + for_s

    def listen() -> bool:
        left = interval_s if ends_at is None else min(interval_s, ends_at - time.monotonic())
        if left > 0:
            subscriber.listen(left)
        return left > 0

    if as_json:
        _stream_json(state, listen)
    elif sys.stdout.isatty():
        with Live(console=_console(), screen=False, auto_refresh=False) as live:
            while listen():
                live.update(table_of(state.rows(time.monotonic()), state, live.console.width), refresh=True)
    else:
        while listen():
            show_once(state, as_json)


def table_of(rows: list[Row], state: FleetState, width: int) -> Table:
    """The fleet as a table; the last lines sum each model up over all devices. A narrow one has fewer columns."""
    shown = [name for name in COLUMNS if width >= FULL_WIDTH or name not in IN_FULL_ONLY]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in shown:
        table.add_column(name, justify="left" if name in COLUMNS_LEFT else "right", no_wrap=True)
    summed_up = False
    for row in rows:
        if row.device is None and not summed_up:
            summed_up = True
            table.add_section()
        cells = dict(zip(COLUMNS, _cells(row), strict=True))
        table.add_row(*(cells[name] for name in shown), style="bold" if row.device is None else None)
    if not rows:
        table.add_row("(nothing heard yet)")
    elif waiting := [row for row in rows if row.model is None and row.state == "online"]:
        table.caption = (
            f"{len(waiting)} online without a report yet: the first comes within a window (60 s unless configured)"
        )
    if state.refused:
        table.caption = f"{state.refused} messages not understood; the last: {state.last_refusal}"
    return table


def _cells(row: Row) -> list[Text]:
    where = "all devices" if row.device is None else f"{row.site}/{row.device}"
    cells = [
        where,
        row.state,
        row.model or "-",
        row.model_version or "-",
        _number(row.rate_per_s, "{:.1f}"),
        *(_milliseconds(value) for value in (row.p50_ms, row.p95_ms, row.p99_ms, row.p999_ms)),
        str(row.errors) if row.model else "-",
        str(row.shed) if row.model else "-",
        _number(row.cache_hit_share, "{:.0%}"),
        _number(row.batch_mean, "{:.1f}"),
        str(row.missing) if row.model else "-",
        "-" if row.device is None else _age(row.age_s),
    ]
    # Text, not str: what devices say is data, never rich's markup.
    coloured = [Text(cell) for cell in cells]
    coloured[1].stylize({"online": "green", "offline": "yellow", "lost": "red", "stale": "red"}.get(row.state, ""))
    return coloured


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _milliseconds(value: float | None) -> str:
    """Three significant digits, which is what the histogram can promise."""
    if value is None:
        return "-"
    return (
        f"{value:.0f}"
        if value >= 100
        else f"{value:.1f}"
        if value >= 10
        else f"{value:.2f}"
        if value >= 1
        else f"{value:.3f}"
    )


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.0f} h"
    )


def _stream_json(state: FleetState, listen: Callable[[], bool]) -> None:
    shown: dict[tuple[str | None, ...], dict[str, object]] = {}
    while listen():
        changed = []
        for row in state.rows(time.monotonic()):
            # A growing age alone is no news.
            content = {name: value for name, value in row.as_json().items() if name != "age_s"}
            key = (row.site, row.device, row.model)
            if shown.get(key) != content:
                shown[key] = content
                changed.append(row)
        _print_json(changed)


def _print_json(rows: list[Row]) -> None:
    for row in rows:
        click.echo(json.dumps(row.as_json()))
    sys.stdout.flush()


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=PLAIN_WIDTH, no_color=True)
