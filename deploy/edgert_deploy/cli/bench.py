"""`edgert bench`: how fast a model is on devices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgert.errors import EdgeRTError, Interrupted
from edgert_deploy.cli.fleet_options import columns, emit, error_lines, inventory_option, json_option, say
from edgert_deploy.common.parallel import Stop, for_each
from edgert_deploy.devices.bench import bench_bundle_on, bench_live_on
from edgert_deploy.devices.inventory import Device, find_inventory
from edgert_deploy.devices.transports import open_transport

FIRST = "stopping: devices not asked yet are not measured. Ctrl-C again lets go of the others too"
SECOND = "let go: what still runs over there ends by itself"

Answer = dict[str, Any] | EdgeRTError


@click.command()
@click.argument("bundle", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--on", "selector", required=True, help="Devices: names, groups, tag:KEY, site:NAME or `all`, with commas."
)
@click.option("--model", help="What is live of this model, asked as apps ask.")
@click.option(
    "--seconds", type=click.FloatRange(0.1, 600), default=10.0, show_default=True, help="How long to measure."
)
@click.option(
    "--clients",
    type=click.IntRange(1, 64),
    default=4,
    show_default=True,
    help="How many ask at once, for the throughput.",
)
@inventory_option
@json_option
def bench(
    bundle: Path | None,
    selector: str,
    model: str | None,
    seconds: float,
    clients: int,
    inventory_file: Path | None,
    as_json: bool,
) -> None:
    """Measure latency, throughput, memory and temperature on devices, one beside the other.

    With BUNDLE, its artifacts for each device go there, are run by the engine alone, in turn with the live version of the
    same model, and are removed again; nothing is installed. With --model, the live version is asked golden inputs
    through the daemon's socket: by one client for the latency, by --clients for the throughput.

    Exits with the code of the first device that could not be measured.

    \b
    Examples:
      edgert bench --on kitchen --model digits
      edgert bench digits.edgert --on kitchen,nuc-3 --seconds 20
      edgert bench --on all --model digits --json
    """
    if (bundle is None) == (model is None):
        raise click.UsageError("give either a BUNDLE or --model")
    devices = find_inventory(inventory_file).select(selector)
    stop = Stop()

    def measured(device: Device) -> Answer:
        if stop.asked:
            return Interrupted("interrupted before it was measured")
        transport = open_transport(device)
        try:
            if bundle is not None:
                return bench_bundle_on(device, transport, bundle, seconds, lambda line: say(device.name, line))
            return bench_live_on(device, transport, str(model), seconds, clients, lambda line: say(device.name, line))
        except EdgeRTError as error:
            return error
        finally:
            transport.close()

    with stop.on_interrupt(FIRST, SECOND):
        given = for_each(devices, measured, stop)
    answers = [Interrupted("let go in the middle") if answer is None else answer for answer in given]
    errors = [answer for answer in answers if isinstance(answer, EdgeRTError)]
    if errors and len(devices) == 1:
        raise errors[0]
    rows = [_as_json(device, answer) for device, answer in zip(devices, answers, strict=True)]
    emit({"ok": not errors, "devices": rows}, _table(rows), as_json)
    click.get_current_context().exit(errors[0].exit_code if errors else 0)


def _as_json(device: Device, answer: Answer) -> dict[str, Any]:
    if isinstance(answer, EdgeRTError):
        return {"device": device.name, "error": {"code": answer.code, "message": answer.message}}
    return {"device": device.name, **answer}


def _table(rows: list[dict[str, Any]]) -> str:
    cells: list[tuple[str, ...]] = [
        ("DEVICE", "WHAT", "ENGINE", "P50 MS", "P95 MS", "P99 MS", "PER S", "TO LIVE", "MEMORY MB", "TEMP C")
    ]
    for row in rows:
        results = row.get("results", [])
        live = next((one["p50_ms"] for one in results if one["id"].startswith("live") and "p50_ms" in one), None)
        cells += [_cells(row, one, live if len(results) > 1 else None) for one in results]
    errors = [(row["device"], row["error"]["code"], row["error"]["message"]) for row in rows if "error" in row]
    for row in rows:
        failed = [one for one in row.get("results", []) if "error" in one]
        errors += [(f"{row['device']} {one['id']}", one["error"]["code"], one["error"]["message"]) for one in failed]
    return f"{columns(cells)}\n{error_lines(errors)}".rstrip("\n")


def _cells(row: dict[str, Any], one: dict[str, Any], live_ms: float | None) -> tuple[str, ...]:
    heat = "-" if row["temp_c"]["after"] is None else f"{row['temp_c']['before']} -> {row['temp_c']['after']}"
    if "error" in one:
        return (row["device"], one["id"], one["engine"], "-", "-", "-", "-", "-", "-", heat)
    times = [f"{one[name]:.3f}" for name in ("p50_ms", "p95_ms", "p99_ms")]
    ratio = f"{one['p50_ms'] / live_ms:.2f}x" if live_ms else "-"
    memory = "-" if one.get("memory_mb") is None else f"{one['memory_mb']:.1f}"
    return (row["device"], one["id"], one["engine"] or "-", *times, f"{one['per_s']:.1f}", ratio, memory, heat)
