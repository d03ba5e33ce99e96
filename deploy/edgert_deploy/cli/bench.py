"""`edgert bench`: the speed of a model on devices."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click

from edgert.checks.bench_answer import BenchAnswer, BenchResult
from edgert.cli.output import json_option
from edgert.cli.quantity import Duration
from edgert_deploy.cli.shared.each import Results, run_on_each
from edgert_deploy.cli.shared.options import inventory_option, selector_argument
from edgert_deploy.cli.shared.output import columns, error_lines, say
from edgert_deploy.cli.shared.types import ModelOrBundle
from edgert_deploy.devices.bench import bench_bundle_on, bench_live_on
from edgert_deploy.devices.inventory import Device, Inventory
from edgert_deploy.devices.transports import Transport

HEADING = ("DEVICE", "WHAT", "ENGINE", "P50 MS", "P95 MS", "P99 MS", "PER S", "TO LIVE", "MEMORY MB", "TEMP C")


@click.command()
@click.argument("model_or_bundle", type=ModelOrBundle(), metavar="MODEL|BUNDLE")
@selector_argument()
@click.option(
    "--for", "for_s", type=Duration(0.1, 600), default="10s", show_default=True, help="Time to measure each device."
)
@click.option(
    "--clients",
    type=click.IntRange(1, 64),
    metavar="COUNT",
    default=4,
    show_default=True,
    help="Number of clients for the throughput.",
)
@inventory_option
@json_option
def bench(
    model_or_bundle: str | Path, selector: str, for_s: float, clients: int, inventory: Inventory, as_json: bool
) -> None:
    """Measure latency, throughput, memory and temperature on devices.

    For a BUNDLE (a file, or a name that ends in .edgert), the command sends each device the artifacts for its profile.
    The device runs each artifact directly in its engine, without the daemon. These runs alternate with runs of the live
    version of the same model. Then the device removes the artifacts, so nothing stays installed.

    For a MODEL, the device measures the live version with golden inputs through the daemon's socket. One client
    measures the latency, and several clients (--clients) measure the throughput. Without SELECTOR, the command measures
    the devices of the project's `selector`.

    The exit code is the code of the first device that could not be measured.

    \b
    Examples:
      edgert bench digits kitchen
      edgert bench digits.edgert kitchen,nuc-3 --for 20s
      edgert bench digits all --json
    """

    def measured(device: Device, transport: Transport) -> BenchAnswer:
        tell = partial(say, device.name)
        if isinstance(model_or_bundle, Path):
            return bench_bundle_on(device, transport, model_or_bundle, for_s, tell)
        return bench_live_on(device, transport, model_or_bundle, for_s, clients, tell)

    results = run_on_each(inventory.select(selector), measured)
    results.show(_table(results), as_json)


def _table(measured: Results[BenchAnswer]) -> str:
    cells: list[tuple[str, ...]] = [HEADING]
    errors = []
    for name, answer in measured.good:
        live = (result.times.p50_ms for result in answer.results if result.times and result.id.startswith("live"))
        live_ms = next(live, None) if len(answer.results) > 1 else None
        before_c, after_c = answer.temp_c.before, answer.temp_c.after
        heat = "-" if after_c is None else f"{before_c} -> {after_c}"
        cells += [(name, *_cells(result, live_ms), heat) for result in answer.results]
        failed = [(result.id, result.error) for result in answer.results if result.error]
        errors += [(f"{name} {artifact}", error.code, error.message) for artifact, error in failed]
    return f"{columns(cells)}\n{error_lines(errors)}".rstrip("\n")


def _cells(result: BenchResult, live_ms: float | None) -> tuple[str, ...]:
    times, about = result.times, (result.id, result.engine or "-")
    if times is None:
        return (*about, "-", "-", "-", "-", "-", "-")
    percentiles = [f"{value:.3f}" for value in (times.p50_ms, times.p95_ms, times.p99_ms)]
    ratio = f"{times.p50_ms / live_ms:.2f}x" if live_ms else "-"
    memory = "-" if result.memory_mb is None else f"{result.memory_mb:.1f}"
    return (*about, *percentiles, f"{times.per_s:.1f}", ratio, memory)
