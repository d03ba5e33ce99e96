"""`edgert device remove`: remove a device from the inventory."""

from __future__ import annotations

import click

from edgert.cli.output import emit, json_option
from edgert_deploy.cli.shared.options import device_argument, inventory_option
from edgert_deploy.devices.inventory import Inventory


@click.command()
@device_argument()
@inventory_option
@json_option
def remove(selector: str, inventory: Inventory, as_json: bool) -> None:
    """Remove a device from the inventory. The device itself does not change.

    \b
    Example:
      edgert device remove kitchen
    """
    removed = inventory.remove(inventory.device(selector).name)
    text = f"removed {removed.name} from {inventory.path}; the device itself was not changed"
    emit({"removed": removed.as_json(), "inventory": str(inventory.path)}, text, as_json)
