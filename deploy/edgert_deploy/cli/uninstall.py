"""`edgert uninstall`: remove EdgeRT from devices."""

from __future__ import annotations

import sys
from functools import partial

import click

from edgert.cli.output import json_option
from edgert_deploy.bootstrap.uninstall import Removal
from edgert_deploy.bootstrap.uninstall import uninstall as uninstall_from
from edgert_deploy.cli.shared.each import run_on_each
from edgert_deploy.cli.shared.options import inventory_option, selector_argument, yes_option
from edgert_deploy.cli.shared.output import say
from edgert_deploy.devices.inventory import Device, Inventory
from edgert_deploy.devices.same_machine import select_to_change
from edgert_deploy.devices.transports import Transport


@click.command()
@selector_argument()
@click.option("--purge", is_flag=True, help="Remove models, trusted keys and configuration too.")
@yes_option
@click.option("--dry-run", is_flag=True, help="List the parts to remove and the parts that stay; change nothing.")
@inventory_option
@json_option
def uninstall(selector: str, purge: bool, yes: bool, dry_run: bool, inventory: Inventory, as_json: bool) -> None:
    """Remove EdgeRT from devices: service, runtimes, sockets, logins, account and groups.

    The command asks before it removes anything. Models, trusted keys and configuration stay, unless you give --purge
    or confirm their removal. Other files in EdgeRT's folders stay, and the output names these files. The devices stay
    in the inventory: see `edgert device remove`.

    \b
    Examples:
      edgert uninstall kitchen --dry-run
      edgert uninstall kitchen
      edgert uninstall line-2 --purge --yes
    """
    devices = select_to_change(inventory, selector)
    if not yes and not dry_run:
        purge = _agreed(devices, purge)

    def remove(device: Device, transport: Transport) -> Removal:
        return uninstall_from(device, transport, purge=purge, dry_run=dry_run, progress=partial(say, device.name))

    results = run_on_each(devices, remove)
    lines = [line for _, removal in results.good for line in _lines(removal, dry_run)]
    below = "" if dry_run else _next_step([name for name, _ in results.good])
    results.show("\n".join(lines), as_json, below=below, dry_run=dry_run)


def _agreed(devices: list[Device], purge: bool) -> bool:
    """Return whether to also remove models and configuration. End the command if the user refuses."""
    if not sys.stdin.isatty():
        raise click.UsageError("not a terminal, so nobody can confirm: give --yes, and --purge to remove models too")
    names = ", ".join(device.name for device in devices)
    click.confirm(f"Remove EdgeRT from {names}?", abort=True, err=True)
    return purge or click.confirm("Remove models, trusted keys and configuration too?", err=True)


def _next_step(names: list[str]) -> str:
    """Return the next step for these devices; `edgert device remove` removes one device at a time."""
    if not names:
        return ""
    forget = f"edgert device remove {names[0]}" if len(names) == 1 else "edgert device remove NAME for each"
    return f"next: {forget}, or edgert bootstrap {','.join(names)} to set up again"


def _lines(removal: Removal, dry_run: bool) -> list[str]:
    removed, left = ("would remove", "would leave") if dry_run else ("removed", "left")
    lines = [f"{removal.device}: {removed} {path}" for path in removal.removed]
    lines += [f"{removal.device}: {left} {path}" for path in removal.left]
    return lines or [f"{removal.device}: nothing of EdgeRT is there"]
