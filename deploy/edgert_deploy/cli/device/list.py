"""`edgert device list`: the devices of the inventory that a selector matches."""

from __future__ import annotations

import click

from edgert.cli.output import emit, json_option, progress
from edgert_deploy.cli.shared.options import inventory_option, selector_argument
from edgert_deploy.cli.shared.output import columns
from edgert_deploy.devices.inventory import Inventory, fingerprint
from edgert_deploy.devices.selector import ALL


@click.command("list")
@selector_argument(ALL)
@inventory_option
@json_option
def list_(selector: str, inventory: Inventory, as_json: bool) -> None:
    """List the devices of SELECTOR (default: all).

    A SELECTOR is a list of words separated by commas: names, groups, `all`, tag:KEY, tag:KEY=VALUE, site:NAME,
    profile:NAME. `!` before a word excludes its devices. Every command with a SELECTOR reads it this way.

    \b
    Examples:
      edgert device list canary,kitchen
      edgert device list 'site:plant-1,!tag:outdoors'
    """
    devices = inventory.select(selector) if inventory.devices() else []
    rows = [("NAME", "PROFILE", "ADDRESS", "SITE", "GROUPS", "TAGS", "HOST KEY")]
    for d in devices:
        way = f"{d.address} through {d.jump}" if d.jump else d.address
        key = fingerprint(d.host_key) if d.host_key else "-"
        rows.append((d.name, d.profile, way, d.site, ",".join(d.groups) or "-", ",".join(d.tags) or "-", key))
    text = columns(rows) if devices else f"{inventory.path} has no devices: edgert device add"
    emit({"devices": [d.as_json() for d in devices], "inventory": str(inventory.path)}, text, as_json)
    if devices:
        progress("next: edgert status shows their live models; edgert bootstrap NAME sets up a device")
