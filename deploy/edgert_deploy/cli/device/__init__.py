"""`edgert device`: the devices of the inventory."""

from __future__ import annotations

import click

from edgert.cli.command import LazyGroup

COMMANDS = {
    "add": ("edgert_deploy.cli.device.add:add", "Add a device to the inventory: over SSH, or this machine."),
    "probe": ("edgert_deploy.cli.device.probe:probe_", "Show the facts of machines, and the profiles that fit them."),
    "list": ("edgert_deploy.cli.device.list:list_", "List the devices of SELECTOR (default: all)."),
    "set": ("edgert_deploy.cli.device.set:set_", "Change the devices of SELECTOR in the inventory."),
    "remove": ("edgert_deploy.cli.device.remove:remove", "Remove a device from the inventory."),
}


@click.group(cls=LazyGroup, commands_by_name=COMMANDS)
def device() -> None:
    """Add, probe, list, change and remove devices.

    \b
    Examples:
      edgert device add here --local ./device
      edgert device add kitchen pi@10.0.0.7 --group canary
      edgert device probe kitchen
      edgert device list tag:rack=3
      edgert device set kitchen --site plant-2
    """
