"""`edgert unbootstrap`: everything away again that bootstrap made."""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import click

from edgert.errors import EdgeRTError
from edgert_deploy.bootstrap.uninstall import Removal
from edgert_deploy.bootstrap.uninstall import uninstall as take_away
from edgert_deploy.cli.each import on_each
from edgert_deploy.cli.fleet_options import emit, inventory_option, json_option, say
from edgert_deploy.devices.inventory import Device, find_inventory


@click.command()
@click.argument("selector")
@click.option("--purge", is_flag=True, help="Remove models, trusted keys and configuration, too.")
@click.option("--yes", is_flag=True, help="Ask nothing.")
@click.option("--dry-run", is_flag=True, help="Show what would go and what would stay; change nothing.")
@inventory_option
@json_option
def unbootstrap(
    selector: str, purge: bool, yes: bool, dry_run: bool, inventory_file: Path | None, as_json: bool
) -> None:
    """Take away what bootstrap made: service, runtimes, sockets, credentials, the account and groups that it made.

    Models, trusted keys and configuration stay unless --purge is given, or you say yes to that question. What somebody else
    put into EdgeRT's folders stays and is named. The devices stay in the inventory: edgert device remove.

    \b
    Examples:
      edgert unbootstrap kitchen --dry-run
      edgert unbootstrap kitchen
      edgert unbootstrap line-2 --purge --yes
    """
    devices = find_inventory(inventory_file).select(selector)
    if not yes and not dry_run:
        purge = _agreed(devices, purge)
    answers = on_each(
        devices,
        lambda device, link: take_away(device, link, purge=purge, dry_run=dry_run, say=partial(say, device.name)),
    )
    errors = [answer for answer in answers if isinstance(answer, EdgeRTError)]
    if errors and len(devices) == 1:
        raise errors[0]
    rows: list[dict[str, Any]] = []
    lines: list[str] = []
    for device, answer in zip(devices, answers, strict=True):
        if isinstance(answer, EdgeRTError):
            rows.append({"device": device.name, "error": {"code": answer.code, "message": answer.message}})
            lines.append(f"{device.name}: failed [{answer.code}]: {answer.message}")
        else:
            rows.append(asdict(answer))
            lines += _lines(answer, dry_run)
    emit({"ok": not errors, "dry_run": dry_run, "devices": rows}, "\n".join(lines), as_json)
    if errors:
        click.get_current_context().exit(errors[0].exit_code)


def _agreed(devices: list[Device], purge: bool) -> bool:
    """Ask; whether models and configuration are to go, too. Ends the command where the answer is no."""
    if not sys.stdin.isatty():
        raise click.UsageError("nobody can be asked here: give --yes, and --purge where models are to go, too")
    names = ", ".join(device.name for device in devices)
    click.confirm(f"Take EdgeRT off {names}?", abort=True, err=True)
    return purge or click.confirm("Models, trusted keys and configuration, too?", err=True)


def _lines(gone: Removal, dry_run: bool) -> list[str]:
    verb = "would remove" if dry_run else "removed"
    lines = [f"{gone.device}: {verb} {what}" for what in gone.removed]
    lines += [f"{gone.device}: {'would leave' if dry_run else 'left'} {what}" for what in gone.left]
    return lines or [f"{gone.device}: nothing of EdgeRT is there"]
