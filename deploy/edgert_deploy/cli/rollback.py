"""`edgert rollback`: the version before, live again."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from edgert.errors import EdgeRTError
from edgert_deploy.cli.fleet_options import columns, emit, inventory_option, json_option, say
from edgert_deploy.inventory import Device, find_inventory
from edgert_deploy.remote import ACTIVATE_S_MAX, RemoteDaemon
from edgert_deploy.rollout import AT_ONCE_MAX
from edgert_deploy.transports import open_transport


@click.command()
@click.argument("model")
@click.option("--on", "selector", required=True, help="Names, groups or `all`, separated by commas.")
@inventory_option
@json_option
def rollback(model: str, selector: str, inventory_file: Path | None, as_json: bool) -> None:
    """Make the version of MODEL before the live one live again, or drop one that is only installed.

    \b
    Examples:
      edgert rollback digits --on kitchen
      edgert rollback digits --on canary --json
    """
    devices = find_inventory(inventory_file).select(selector)
    with ThreadPoolExecutor(max_workers=AT_ONCE_MAX) as pool:
        answers = list(pool.map(lambda device: _roll_back(device, model), devices))
    errors = [answer for answer in answers if isinstance(answer, EdgeRTError)]
    if errors and len(devices) == 1:
        raise errors[0]
    rows = [_as_json(device, answer) for device, answer in zip(devices, answers, strict=True)]
    emit({"ok": not errors, "model": model, "devices": rows}, _table(model, rows), as_json)
    click.get_current_context().exit(errors[0].exit_code if errors else 0)


def _roll_back(device: Device, model: str) -> dict[str, Any] | EdgeRTError:
    transport = open_transport(device)
    try:
        daemon = RemoteDaemon(transport, device, lambda line: say(device.name, line))
        return daemon.call("rollback", model, timeout_s=ACTIVATE_S_MAX)
    except EdgeRTError as error:
        return error
    finally:
        transport.close()


def _as_json(device: Device, answer: dict[str, Any] | EdgeRTError) -> dict[str, Any]:
    if isinstance(answer, EdgeRTError):
        return {"device": device.name, "error": {"code": answer.code, "message": answer.message}}
    return {"device": device.name, "release": answer["release"]}


def _table(model: str, rows: list[dict[str, Any]]) -> str:
    cells = [("DEVICE", "LIVE")]
    for row in rows:
        if "error" in row:
            cells.append((row["device"], f"{row['error']['code']}: {row['error']['message']}"))
        else:
            cells.append((row["device"], "nothing" if row["release"] is None else f"{model} release {row['release']}"))
    return columns(cells)
