"""`edgert rollback`: make the previous version live again."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from edgert.cli.output import json_option
from edgert.errors import EdgeRTError
from edgert_deploy.cli.shared.each import run_on_each
from edgert_deploy.cli.shared.options import inventory_option, selector_argument
from edgert_deploy.cli.shared.output import columns, say
from edgert_deploy.cli.shared.types import ModelName
from edgert_deploy.devices.claims import claimed
from edgert_deploy.devices.inventory import Device, Inventory
from edgert_deploy.devices.remote_daemon import ACTIVATE_S_MAX, RemoteDaemon
from edgert_deploy.devices.same_machine import select_to_change
from edgert_deploy.devices.transports import Transport


@click.command()
@click.argument("model", type=ModelName())
@selector_argument()
@click.option("--force", is_flag=True, help="Roll back even during a deployment, or directly after another rollback.")
@inventory_option
@json_option
def rollback(model: str, selector: str, force: bool, inventory: Inventory, as_json: bool) -> None:
    """Make the previous version of MODEL live again, or remove a version that is installed but not live.

    A second rollback would restore the version that the first rollback replaced. Without --force, the device refuses
    a second rollback, and a rollback during a deployment.

    \b
    Examples:
      edgert rollback digits kitchen
      edgert rollback digits canary --json
    """

    def roll_back(device: Device, transport: Transport) -> dict[str, Any]:
        daemon = RemoteDaemon(transport, device, partial(say, device.name))
        if force:
            answer = daemon.call("rollback", model, "--force", timeout_s=ACTIVATE_S_MAX)
        else:
            with claimed(daemon, model) as claim:
                answer = claim.call("rollback", model, timeout_s=ACTIVATE_S_MAX)
        return {"was": answer["was"], "release": answer["release"]}

    devices = select_to_change(inventory, selector)
    results = run_on_each(devices, roll_back)
    cells = [("DEVICE", "MODEL", "LIVE")]
    for name, answer in results.answers:
        change = ""
        if not isinstance(answer, EdgeRTError):
            change = f"{answer['was'] or 'nothing'} -> {answer['release'] or 'nothing'}"
        cells.append((name, model, change))
    results.show(columns(cells), as_json, model=model)
