"""`edgert fleet record`: the fleet's reports into SQLite or PostgreSQL."""

from __future__ import annotations

import time

import click

from edgert.telemetry.mqtt import MqttSettings
from edgert_deploy.cli.broker_options import broker_options, named_session, session_option
from edgert_deploy.cli.stopping import stopping
from edgert_deploy.cli.store_options import store_option
from edgert_deploy.fleet.store.batch import KEEP_WINDOWS_H
from edgert_deploy.fleet.store.recorder import Recorder
from edgert_deploy.fleet.store.schema import StoreFailed
from edgert_deploy.fleet.store.store import FINE_HOURS, KEEP_HOURS_H, KEEP_MINUTES_H, SIZE_GB_MAX, Retention, Store
from edgert_deploy.fleet.subscriber import FleetSubscriber

FLUSH_EVERY_S = 1.0
PRUNE_EVERY_S = 600.0
FINE_DAYS_MIN = FINE_HOURS // 24 + 1

EPILOG = """\b
Examples:
  edgert fleet record --broker broker.local
  edgert fleet record --broker broker.local --session main      # the broker keeps what comes while it is down
  edgert fleet record --broker broker.local --store /var/lib/edgert/fleet.db --keep-windows 7 --size-gb 50
  edgert fleet record --broker broker.example --tls --username ops --password-file pw --store postgresql://ops@db/fleet

\b
A repeated report is written once: the key is (device, boot, model, seq). Any number of recorders may write to one
store; with --share NAME they divide the reports among them. Windows are merged by integer addition into rows a
minute and an hour as they come; those stay when the windows go. A recorder that is down, or killed with reports in
hand, misses them, and the holes show by `seq`; with --session NAME the broker keeps them, and forgets a report when it
is in the store. Ctrl-C or SIGTERM ends it.

\b
Exit codes: 0 done, 4 refused or misconfigured, 6 the broker or the store cannot be reached.
"""


@click.command(epilog=EPILOG, context_settings={"max_content_width": 110})
@broker_options
@store_option
@click.option("--share", metavar="NAME", help="Divide the reports among all recorders of this NAME.")
@session_option
@click.option(
    "--keep-windows",
    metavar="DAYS",
    type=click.IntRange(min=FINE_DAYS_MIN),
    default=KEEP_WINDOWS_H // 24,
    show_default=True,
    help="Days that single windows are kept.",
)
@click.option(
    "--keep-minutes",
    metavar="DAYS",
    type=click.IntRange(min=FINE_DAYS_MIN),
    default=KEEP_MINUTES_H // 24,
    show_default=True,
    help="Days that a group's minutes are kept.",
)
@click.option(
    "--keep-hours",
    metavar="DAYS",
    type=click.IntRange(min=FINE_DAYS_MIN),
    default=KEEP_HOURS_H // 24,
    show_default=True,
    help="Days that hours and events are kept.",
)
@click.option(
    "--size-gb",
    metavar="GB",
    type=click.FloatRange(min=0.01),
    default=SIZE_GB_MAX,
    show_default=True,
    help="A SQLite store larger than this loses its oldest windows early.",
)
@click.option("--for", "for_s", metavar="SECONDS", type=click.FloatRange(min=0.1), help="Stop after that long.")
def record(
    settings: MqttSettings,
    site: str | None,
    store_url: str,
    share: str | None,
    session_name: str | None,
    keep_windows: int,
    keep_minutes: int,
    keep_hours: int,
    size_gb: float,
    for_s: float | None,
) -> None:
    """Write windows, metrics, events and what devices say of themselves to a store, each once."""
    retention = Retention(keep_windows * 24, keep_minutes * 24, keep_hours * 24, size_gb)
    store = Store(store_url)
    recorder = Recorder(store, lambda: time.time_ns() // 1_000_000)
    client_id, session = named_session("record", session_name)
    subscriber = FleetSubscriber(
        settings,
        recorder,
        site,
        client_id=client_id,
        share=share,
        session=session,
        settled=lambda: recorder.settled,
        log=_say,
    )
    subscriber.open()
    _say(f"recording from {settings.address} to {store.name}")
    stop, pruned_at = stopping(for_s), float("-inf")
    try:
        while not stop():
            subscriber.listen(FLUSH_EVERY_S)
            _flush(recorder)
            if time.monotonic() - pruned_at > PRUNE_EVERY_S:
                pruned_at = time.monotonic()
                _prune(store, retention)
    finally:
        try:
            recorder.flush()
        finally:
            subscriber.close()
            store.close()
        _say(_summary(recorder))


def _flush(recorder: Recorder) -> None:
    """A store that refuses costs nothing at first: what came waits for the next try."""
    try:
        recorder.flush()
    except StoreFailed as error:
        if recorder.tells:
            _say(f"{error.message}; {recorder.waiting} reports wait, {recorder.dropped} dropped; trying again")


def _prune(store: Store, retention: Retention) -> None:
    try:
        store.prune(retention, time.time_ns() // 1_000_000)
    except StoreFailed as error:
        _say(f"{error.message}; old reports are forgotten later")


def _summary(recorder: Recorder) -> str:
    line = f"{recorder.recorded} reports written, {recorder.duplicates} came again, {recorder.refused} not understood"
    return f"{line}; the last: {recorder.last_refusal}" if recorder.refused else line


def _say(line: str) -> None:
    click.echo(f"record: {line}", err=True)
