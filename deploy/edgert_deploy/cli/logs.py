"""`edgert logs`: what the daemon of a device says."""

from __future__ import annotations

import json
from pathlib import Path

import click

from edgert_deploy.cli.fleet_options import emit, inventory_option, json_option
from edgert_deploy.devices.inventory import Device, find_inventory
from edgert_deploy.devices.logs import LINES_MAX, LogRequest, following, parse_since, read_log
from edgert_deploy.devices.transports import open_transport


@click.command()
@click.argument("name", metavar="DEVICE")
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, until Ctrl-C.")
@click.option("-n", "--lines", type=click.IntRange(1, LINES_MAX), default=200, show_default=True)
@click.option("--since", metavar="WHEN", default="", help="10m, 2h, 1d, or a time (UTC): 2026-11-21T07:30.")
@click.option("--model", default="", help="Only lines that name this model.")
@inventory_option
@json_option
def logs(
    name: str, follow: bool, lines: int, since: str, model: str, inventory_file: Path | None, as_json: bool
) -> None:
    """Show the log of edgertd on DEVICE: its journal where systemd keeps it running, else its log file.

    It is read also where the daemon does not run. With --follow and --json each line is an object of its own.

    \b
    Examples:
      edgert logs kitchen
      edgert logs kitchen -f --model digits
      edgert logs kitchen --since 2h --lines 1000
    """
    device = find_inventory(inventory_file).device(name)
    request = LogRequest(lines, parse_since(since) if since else "", model)
    if follow:
        _follow(device, request, as_json)
        return
    transport = open_transport(device)
    try:
        found = read_log(transport, device, request)
    finally:
        transport.close()
    if found or as_json:
        emit({"device": device.name, "lines": found}, "\n".join(found), as_json)
    if not found:
        click.echo(f"{device.name} says nothing of that", err=True)


def _follow(device: Device, request: LogRequest, as_json: bool) -> None:
    try:
        with following(device, request) as lines:
            for line in lines:
                click.echo(json.dumps({"device": device.name, "line": line}) if as_json else line)
    except KeyboardInterrupt:
        click.echo(err=True)
