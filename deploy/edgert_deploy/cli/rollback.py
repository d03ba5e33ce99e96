"""`edgert rollback`: the version before, live again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgert.errors import EdgeRTError, Interrupted
from edgert_deploy.cli.fleet_options import columns, emit, error_lines, inventory_option, json_option, say
from edgert_deploy.common.parallel import Stop, for_each
from edgert_deploy.devices.claims import claimed
from edgert_deploy.devices.inventory import Device, find_inventory
from edgert_deploy.devices.remote import ACTIVATE_S_MAX, RemoteDaemon
from edgert_deploy.devices.transports import open_transport

FIRST = "stopping: devices not asked yet are left as they are. Ctrl-C again lets go of the others too"
SECOND = "let go: look with edgert status how far the others came"

Answer = dict[str, Any] | EdgeRTError


@click.command()
@click.argument("model")
@click.option(
    "--on", "selector", required=True, help="Devices: names, groups, tag:KEY, site:NAME or `all`, with commas."
)
@click.option(
    "--force",
    is_flag=True,
    help="Also where the live release is one that a rollback came back to, and while a deploy is under way.",
)
@inventory_option
@json_option
def rollback(model: str, selector: str, force: bool, inventory_file: Path | None, as_json: bool) -> None:
    """Make the version of MODEL before the live one live again, or drop one that is only installed.

    Done twice it would lead forward again, to the version that you went back from: that is refused, and so is
    going back in the middle of a deployment, unless --force.

    \b
    Examples:
      edgert rollback digits --on kitchen
      edgert rollback digits --on canary --json
    """
    devices = find_inventory(inventory_file).select(selector)
    stop = Stop()
    with stop.on_interrupt(FIRST, SECOND):
        given = for_each(devices, lambda device: _roll_back(device, model, force, stop), stop)
    answers = [Interrupted("let go in the middle: look with edgert status") if a is None else a for a in given]
    errors = [answer for answer in answers if isinstance(answer, EdgeRTError)]
    if errors and len(devices) == 1:
        raise errors[0]
    rows = [_as_json(device, answer) for device, answer in zip(devices, answers, strict=True)]
    emit({"ok": not errors, "model": model, "devices": rows}, _table(model, rows), as_json)
    stopped = any(isinstance(error, Interrupted) for error in errors)
    click.get_current_context().exit(Interrupted.exit_code if stopped else errors[0].exit_code if errors else 0)


def _roll_back(device: Device, model: str, force: bool, stop: Stop) -> Answer:
    if stop.asked:
        return Interrupted("interrupted before it was asked: left as it is")
    transport = open_transport(device)
    try:
        daemon = RemoteDaemon(transport, device, lambda line: say(device.name, line))
        if force:
            return daemon.call("rollback", model, "--force", timeout_s=ACTIVATE_S_MAX)
        with claimed(daemon, model) as claim:
            return claim.call("rollback", model, timeout_s=ACTIVATE_S_MAX)
    except EdgeRTError as error:
        return error
    finally:
        transport.close()


def _as_json(device: Device, answer: Answer) -> dict[str, Any]:
    if isinstance(answer, EdgeRTError):
        return {"device": device.name, "error": {"code": answer.code, "message": answer.message}}
    return {"device": device.name, "was": answer["was"], "release": answer["release"]}


def _table(model: str, rows: list[dict[str, Any]]) -> str:
    cells = [("DEVICE", "MODEL", "LIVE")]
    for row in rows:
        change = "" if "error" in row else f"{row['was'] or 'nothing'} -> {row['release'] or 'nothing'}"
        cells.append((row["device"], model, change))
    errors = [(row["device"], row["error"]["code"], row["error"]["message"]) for row in rows if "error" in row]
    return f"{columns(cells)}\n{error_lines(errors)}".rstrip("\n")
