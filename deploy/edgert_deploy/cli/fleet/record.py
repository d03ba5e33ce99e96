"""`edgert fleet record`: the fleet's reports into SQLite or PostgreSQL."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from edgert.cli.output import progress
from edgert.cli.quantity import Duration
from edgert.durations import duration_text
from edgert.printable import counted
from edgert.telemetry.messages import wall_ms
from edgert.telemetry.mqtt import MqttSettings
from edgert_deploy.cli.shared.broker_options import broker_options, named_session, session_option
from edgert_deploy.cli.shared.option_groups import SectionedCommand
from edgert_deploy.cli.shared.options import for_option, store_option
from edgert_deploy.cli.shared.stopping import stopping
from edgert_deploy.cli.shared.types import Size
from edgert_deploy.fleet.store.batch import KEEP_WINDOWS_H
from edgert_deploy.fleet.store.recorder import Recorder
from edgert_deploy.fleet.store.retention import KEEP_HOURS_H, KEEP_MINUTES_H, SIZE_BYTES_MAX, Retention
from edgert_deploy.fleet.store.store import FINE_HOURS, Store
from edgert_deploy.fleet.subscriber import FleetSubscriber

FLUSH_EVERY_S = 1.0
HOUR_S = 3600
KEPT_S_MAX = 36_500 * 24 * HOUR_S  # a database counts milliseconds in 64 bits


def _keep(name: str, default_h: int, text: str) -> Callable[[Any], Any]:
    default = duration_text(default_h * HOUR_S)
    kind = Duration((FINE_HOURS + 24) // 24 * 24 * HOUR_S, KEPT_S_MAX)
    return click.option(name, type=kind, default=default, show_default=True, help=text)


@click.command(cls=SectionedCommand)
@broker_options
@store_option
@session_option
@_keep("--keep-windows", KEEP_WINDOWS_H, "Time to keep single windows.")
@_keep("--keep-minutes", KEEP_MINUTES_H, "Time to keep the rows for each minute.")
@_keep("--keep-hours", KEEP_HOURS_H, "Time to keep the rows for each hour, and events.")
@click.option(
    "--size",
    "size_bytes",
    type=Size(10_000_000),
    default=f"{SIZE_BYTES_MAX // 10**9}GB",
    show_default=True,
    help="The largest size of a SQLite store; above it, the oldest windows are removed early.",
)
@for_option
def record(
    settings: MqttSettings,
    site: str | None,
    store_url: str,
    session_name: str | None,
    keep_windows: float,
    keep_minutes: float,
    keep_hours: float,
    size_bytes: int,
    for_s: float | None,
) -> None:
    """Write the fleet's reports to a store, each report once.

    Any number of recorders may write to one store, for instance one for each --site. A repeated report is written once.
    The recorder also adds each window to a row for the minute and a row for the hour; these rows stay when the window
    is removed. While the recorder does not run, it misses reports, and `seq` shows the gaps. With --session NAME, the
    broker keeps the reports until they are in the store. Ctrl-C or SIGTERM ends the command.

    The exit code is 4 if an option cannot be used or the broker refuses the login, and 6 if the broker or the store
    cannot be reached.

    \b
    Examples:
      edgert fleet record --broker broker.local
      edgert fleet record --broker broker.local --session main   # the broker keeps messages while the recorder is down
      edgert fleet record --broker broker.local --store /var/lib/edgert/fleet.db --keep-windows 7d --size 50GB
      edgert fleet record --broker broker.example --tls --username ops --password-file pw --store postgresql://ops@db/fleet
    """
    windows_h, minutes_h, hours_h = (int(kept_s // HOUR_S) for kept_s in (keep_windows, keep_minutes, keep_hours))
    retention = Retention(windows_h, minutes_h, hours_h, size_bytes)
    store = Store(store_url, _print_status)
    recorder = Recorder(store, wall_ms, retention)
    client_id, session_s = named_session("record", session_name)
    subscriber = FleetSubscriber(
        settings,
        [recorder],
        site,
        client_id=client_id,
        session_s=session_s,
        handled=lambda: recorder.handled,
        log=_print_status,
    )
    subscriber.open()
    _print_status(f"recording from {settings.address} to {store.name}")
    stop = stopping(for_s)
    try:
        while not stop():
            subscriber.listen(FLUSH_EVERY_S)
            recorder.flush_or_wait(_print_status)
            recorder.prune_when_due(_print_status)
    finally:
        try:
            recorder.flush()
        finally:
            subscriber.close()
            store.close()
            _print_status(_summary(recorder))


def _summary(recorder: Recorder) -> str:
    line = f"{counted(recorder.recorded, 'report')} written, {recorder.duplicates} repeated, {recorder.refused} not understood"
    if recorder.waiting:
        line = f"{counted(recorder.waiting, 'report')} could not be written; {line}"
    return f"{line}; the last: {recorder.last_refusal}" if recorder.refused else line


def _print_status(line: str) -> None:
    progress(f"record: {line}")
