"""`edgert logs`: the log of a device's daemon."""

from __future__ import annotations

from contextlib import closing

import click

from edgert.cli.output import emit, json_option, progress
from edgert_deploy.cli.shared.options import device_argument, inventory_option
from edgert_deploy.cli.shared.types import ModelName
from edgert_deploy.devices.inventory import Device, Inventory
from edgert_deploy.devices.logs import LINES_MAX, LogRequest, following, parse_since, read_log
from edgert_deploy.devices.transports import open_transport


@click.command()
@device_argument()
@click.option("-f", "--follow", is_flag=True, help="Continue with new lines until Ctrl-C.")
@click.option(
    "-n",
    "--lines",
    metavar="N",
    type=click.IntRange(1, LINES_MAX),
    default=200,
    show_default=True,
    help="At most N lines.",
)
@click.option(
    "--since",
    metavar="WHEN",
    default="",
    help="Only lines since 10m, 2h, 1d ago, or since a time (UTC): 2026-11-21T07:30.",
)
@click.option("--model", default="", type=ModelName(), help="Only lines that name this model.")
@inventory_option
@json_option
def logs(selector: str, follow: bool, lines: int, since: str, model: str, inventory: Inventory, as_json: bool) -> None:
    """Show the log of edgertd on one device: its journal if systemd runs the daemon, else its log file.

    The daemon need not run. With --follow and --json each line is one JSON object.

    \b
    Examples:
      edgert logs kitchen
      edgert logs kitchen -f --model digits
      edgert logs kitchen --since 2h --lines 1000
    """
    device = inventory.device(selector)
    request = LogRequest(lines, parse_since(since) if since else "", model)
    if follow:
        _follow(device, request, as_json)
        return
    with closing(open_transport(device)) as transport:
        log = read_log(transport, device, request)
    if log or as_json:
        emit({"device": device.name, "lines": log}, "\n".join(log), as_json)
    if not log:
        progress(f"{device.name} has no such lines: omit --model, or give an earlier --since")


def _follow(device: Device, request: LogRequest, as_json: bool) -> None:
    try:
        with following(device, request) as lines:
            for line in lines:
                emit({"device": device.name, "line": line}, line, as_json)
    except KeyboardInterrupt:
        progress("")
