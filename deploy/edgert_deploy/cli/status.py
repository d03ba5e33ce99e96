"""`edgert status`: what is live on devices."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from edgert.errors import EdgeRTError
from edgert_deploy.cli.fleet_options import columns, emit, error_lines, inventory_option, json_option
from edgert_deploy.inventory import Device, find_inventory
from edgert_deploy.remote import RemoteDaemon
from edgert_deploy.stop import AT_ONCE_MAX
from edgert_deploy.transports import open_transport


@click.command()
@click.argument("selector", default="all")
@inventory_option
@json_option
def status(selector: str, inventory_file: Path | None, as_json: bool) -> None:
    """Ask devices what they serve. SELECTOR is names, groups or `all` (the default), separated by commas.

    Exits with the code of the first device that could not be asked.

    \b
    Examples:
      edgert status
      edgert status canary --json
    """
    devices = find_inventory(inventory_file).select(selector)
    with ThreadPoolExecutor(max_workers=AT_ONCE_MAX) as pool:
        answers = list(pool.map(_ask, devices))
    errors = [answer for answer in answers if isinstance(answer, EdgeRTError)]
    rows = [_as_json(device, answer) for device, answer in zip(devices, answers, strict=True)]
    emit({"ok": not errors, "devices": rows}, _table(rows), as_json)
    click.get_current_context().exit(errors[0].exit_code if errors else 0)


def _ask(device: Device) -> dict[str, Any] | EdgeRTError:
    transport = open_transport(device)
    try:
        return RemoteDaemon(transport, device).status()
    except EdgeRTError as error:
        return error
    finally:
        transport.close()


def _as_json(device: Device, answer: dict[str, Any] | EdgeRTError) -> dict[str, Any]:
    if isinstance(answer, EdgeRTError):
        return {"device": device.name, "error": {"code": answer.code, "message": answer.message}}
    return {"device": device.name, "status": answer}


def _table(rows: list[dict[str, Any]]) -> str:
    cells = [("DEVICE", "PROFILE", "DAEMON", "MODEL", "LIVE", "STATE", "ENGINE")]
    for row in rows:
        cells += _cells(row)
    errors = [(row["device"], row["error"]["code"], row["error"]["message"]) for row in rows if "error" in row]
    return "\n".join([columns(cells), *error_lines(errors).splitlines(), *_next_steps(rows)])


def _next_steps(rows: list[dict[str, Any]]) -> list[str]:
    """What to do where a daemon does not run, or nothing was deployed yet."""
    reached = [row for row in rows if "error" not in row]
    still = ",".join(row["device"] for row in reached if not row["status"]["daemon"]["running"])
    bare = ",".join(row["device"] for row in reached if not row["status"]["models"])
    lines = []
    if still:
        lines.append(f"next: the daemon does not run on {still}: edgert bootstrap {still} starts it")
    if bare:
        lines.append(f"next: nothing was deployed to {bare}: edgert deploy BUNDLE --to {bare}")
    return lines


def _cells(row: dict[str, Any]) -> list[tuple[str, str, str, str, str, str, str]]:
    name = str(row["device"])
    if "error" in row:
        return [(name, "-", "not known", "-", "-", "-", "-")]
    value = row["status"]
    daemon = "runs" if value["daemon"]["running"] else "does not run"
    lines = []
    for model in value["models"]:
        active, serving = model["active"], model["serving"] or {}
        live = f"release {active['release']}" if active else "nothing"
        lines.append(
            (name, value["profile"], daemon, model["model"], live, model["state"], serving.get("engine") or "-")
        )
    return lines or [(name, value["profile"], daemon, "none", "-", "-", "-")]
