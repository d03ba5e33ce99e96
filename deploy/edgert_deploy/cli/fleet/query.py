"""`edgert fleet query`: true percentiles from the store."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing
from typing import Any

import click

from edgert.cli.output import emit, json_option, progress
from edgert.cli.quantity import Duration
from edgert.durations import duration_text
from edgert.errors import ConfigInvalid
from edgert.printable import some_of
from edgert.telemetry.messages import wall_ms
from edgert_deploy.cli.shared.options import store_option
from edgert_deploy.cli.shared.output import columns
from edgert_deploy.cli.shared.types import ModelName, ProfileName
from edgert_deploy.fleet.reports import DIMENSIONS, dimensions_of
from edgert_deploy.fleet.store.query import FleetQuery, Question
from edgert_deploy.fleet.store.results import (
    PERCENTILES_DEFAULT,
    QueryRequest,
    csv_text,
    shares_of,
    time_text,
)

NEWEST_AGE_MS_MAX = 150_000  # two and a half windows of 60 s
NAMED_MAX = 5  # the maximum number of devices that a warning names


@click.command()
@store_option
@click.option(
    "--period",
    "period_s",
    type=Duration(60),
    default="1h",
    show_default=True,
    help="The length of the period: 30m, 24h, 7d.",
)
@click.option(
    "--until",
    "until_s",
    type=Duration(),
    default="0s",
    help="The end of the period, as a time before now [default: now].",
)
@click.option("--step", "step_s", type=Duration(60), help="Split the period into steps of this length.")
@click.option(
    "--by",
    default="model,version",
    show_default=True,
    metavar="WORDS",
    help=f"Group by any of {', '.join(DIMENSIONS)}; '' makes one group.",
)
@click.option(
    "--percentiles", default=PERCENTILES_DEFAULT, show_default=True, metavar="NUMBERS", help="The percentiles to show."
)
@click.option("--model", type=ModelName(), help="Only this model.")
@click.option("--version", "version_", metavar="VERSION", help="Only this version, such as r7.")
@click.option("--site", metavar="SITE", help="Only this site.")
@click.option("--device", metavar="DEVICE", help="Only this device.")
@click.option("--profile", type=ProfileName(), help="Only devices of this profile.")
@click.option("--stages", is_flag=True, help="Show the stages of the requests instead of their latency.")
@click.option("--buckets", is_flag=True, help="Add each group's histogram: zero, sum_ms, min_ms and buckets.")
@click.option("--csv", "as_csv", is_flag=True, help="Print CSV with a heading.")
@json_option
def query(
    store_url: str,
    period_s: float,
    until_s: float,
    step_s: float | None,
    by: str,
    percentiles: str,
    version_: str | None,
    stages: bool,
    buckets: bool,
    as_csv: bool,
    as_json: bool,
    **only: str | None,
) -> None:
    """Show percentiles, rates and errors over any period, merged exactly from the store.

    Percentiles cover all requests of a group (error at most 1.09 %); they are never means of percentiles. A report
    belongs to the minute in which its window ended. The beginning or the end of the period moves to a whole hour if it
    is more than two days ago. Errors, shed and cache hits show how much the counters grew. `missing` counts sent
    reports that never arrived; stderr names the devices of these reports, and warns if the store's newest report is
    old.

    --stages shows a line for each stage of a group, with its requests, its share of the time, and its percentiles.
    queue and engine count the requests that an engine answered; engine is the run of the whole batch.

    The exit code is 0 even if there are no reports, 4 if an option cannot be used, and 6 if the store cannot be
    reached.

    \b
    Examples:
      edgert fleet query --model digits
      edgert fleet query --model digits --period 1h --by version,profile --percentiles 50,95,99
      edgert fleet query --period 7d --by device --site plant-a --store postgresql://ops@db/fleet
      edgert fleet query --model digits --period 24h --step 1h --by version --json
      edgert fleet query --model digits --period 7d --by profile --stages
      edgert fleet query --period 7d --step 1h --by model,version --buckets --csv > week.csv
    """
    now_ms = wall_ms()
    until_ms = now_ms - int(until_s * 1000)
    if as_csv and as_json:
        raise click.UsageError("--csv and --json exclude each other: choose one")
    if step_s is not None and step_s % 60:
        raise ConfigInvalid(f"--step {duration_text(step_s)} is not a number of whole minutes: give 1m, 15m or 1h")
    question = Question(
        since_ms=until_ms - int(period_s * 1000),
        until_ms=until_ms,
        by=dimensions_of(by),
        where={name: value for name, value in {**only, "version": version_}.items() if value},
        step_min=int(step_s or 0) // 60,
        stages=stages,
    )
    request = QueryRequest(question, shares_of(percentiles), buckets)
    with closing(FleetQuery(store_url)) as fleet:
        answer = request.run(fleet, now_ms)
        store = fleet.store
    rows = answer["groups"]
    if rows or as_json:
        shown = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)] if rows else []
        table = csv_text(rows).rstrip("\n") if as_csv else columns(shown) if rows else ""
        emit(answer, table, as_json)
    else:
        progress(_nothing(answer, question, store))
    for line in _warnings(answer, now_ms):
        progress(line)


def _nothing(answer: Mapping[str, Any], question: Question, store: str) -> str:
    if not answer["newest_ms"]:
        return f"the store {store} has no reports yet: `edgert fleet record` fills it"
    period = " to ".join(time_text(answer[key]) for key in ("since_ms", "until_ms"))
    if question.stages and answer["windows"]:
        return f"no stages in the matching reports from {period} ({answer['windows']}): upgrade the devices' runtime"
    words = "".join(f" --{name} {value}" for name, value in question.where.items())
    return f"no matching reports from {period}{words}"


def _warnings(answer: Mapping[str, Any], now_ms: int) -> Iterator[str]:
    """Yield warnings about missing, unsynchronized and old reports."""
    missing, unsynced, newest_ms = (answer[key] for key in ("missing_devices", "clocks_not_synchronized", "newest_ms"))
    if missing:
        lost, received = sum(missing.values()), answer["windows"]
        yield (
            f"{lost} of {lost + received} reports ({lost / (lost + received):.1%}) missing, from "
            f"{some_of([f'{device} ({count})' for device, count in missing.items()], NAMED_MAX)}"
        )
    if unsynced:
        yield f"times are times of receipt for devices whose clock is not synchronized: {some_of(unsynced, NAMED_MAX)}"
    if newest_ms and now_ms - newest_ms > NEWEST_AGE_MS_MAX:
        yield (
            f"the newest report in the store is {(now_ms - newest_ms) // 60_000} min old: check that "
            "`edgert fleet record` runs and reaches the broker"
        )


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.3f}" if isinstance(value, float) else str(value)
