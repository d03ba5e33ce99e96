"""`edgert status`: what is live on devices, against what should be."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from edgert.checks.status import DeviceStatus
from edgert.errors import DeviceUnreachable, EdgeRTError, HostKeyMismatch, LoginRefused, NotBootstrapped
from edgert_deploy.cli.deploy import rollouts_folder
from edgert_deploy.cli.fleet_options import columns, emit, error_lines, inventory_option, json_option
from edgert_deploy.common.parallel import AT_ONCE_MAX
from edgert_deploy.devices.inventory import Device, find_inventory
from edgert_deploy.devices.remote import RemoteDaemon
from edgert_deploy.devices.transports import open_transport
from edgert_deploy.rollout.drift import Wanted, device_drifts, model_drifts, wanted_of
from edgert_deploy.rollout.rollout_store import RolloutStore

EXIT_DRIFT = 12


@click.command()
@click.argument("selector", default="all")
@click.option("--check", is_flag=True, help=f"Exit with {EXIT_DRIFT} where a device is not as wanted.")
@inventory_option
@json_option
def status(selector: str, check: bool, inventory_file: Path | None, as_json: bool) -> None:
    """Ask devices what they serve, and mark what is not as wanted. SELECTOR is as in `edgert device list`, all by default.

    Wanted is the release of the newest rollout of this host that names the device. Marked is what is behind, ahead, of
    other content, missing, on trial, rolled back (with the reason), degraded to another engine, not serving, a daemon
    that does not run, and another version of edgert than this host's.

    Exits with the code of the first device that could not be asked.

    \b
    Examples:
      edgert status
      edgert status canary --json
      edgert status all --check
    """
    inventory = find_inventory(inventory_file)
    devices = inventory.select(selector)
    wanted = wanted_of(RolloutStore(rollouts_folder()).all(), str(inventory.path.absolute()))
    with ThreadPoolExecutor(max_workers=AT_ONCE_MAX) as pool:
        answers = list(pool.map(_ask, devices))
    errors = [answer for answer in answers if isinstance(answer, EdgeRTError)]
    rows = [
        _as_json(device, answer, wanted.get(device.name, {})) for device, answer in zip(devices, answers, strict=True)
    ]
    drifts = any(row["drifts"] for row in rows)
    emit({"ok": not errors, "drifts": drifts, "devices": rows}, _table(rows), as_json)
    code = EXIT_DRIFT if check and drifts else 0
    click.get_current_context().exit(errors[0].exit_code if errors else code)


def _ask(device: Device) -> DeviceStatus | EdgeRTError:
    transport = open_transport(device)
    try:
        return RemoteDaemon(transport, device).status()
    except EdgeRTError as error:
        return error
    finally:
        transport.close()


def _as_json(device: Device, answer: DeviceStatus | EdgeRTError, wanted: Mapping[str, Wanted]) -> dict[str, Any]:
    """`drifts` says whether anything is not as wanted, `drift` and `models` say what; `status` is the device's own."""
    if isinstance(answer, EdgeRTError):
        return {"device": device.name, "drifts": True, "error": {"code": answer.code, "message": answer.message}}
    models, own = model_drifts(answer, wanted), device_drifts(answer)
    return {
        "device": device.name,
        "drifts": bool(own) or any(model.drift for model in models),
        "drift": [vars(one) for one in own],
        "models": [model.as_json() for model in models],
        "status": answer.as_json(),
    }


def _table(rows: list[dict[str, Any]]) -> str:
    cells: list[tuple[str, ...]] = [
        ("DEVICE", "PROFILE", "DAEMON", "MODEL", "LIVE", "WANTED", "STATE", "ENGINE", "DRIFT")
    ]
    for row in rows:
        cells += _cells(row)
    errors = [(row["device"], row["error"]["code"], row["error"]["message"]) for row in rows if "error" in row]
    reached = [row for row in rows if "error" not in row]
    return "\n".join([columns(cells), *error_lines(errors).splitlines(), *_reasons(reached), *_next_steps(reached)])


def _reasons(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        lines += [f"{row['device']}: {one['text']}" for one in row["drift"]]
        for model in row["models"]:
            lines += [f"{row['device']} {model['model']}: {one['text']}" for one in model["drift"]]
    return lines


def _next_steps(rows: list[dict[str, Any]]) -> list[str]:
    """What to do where a daemon does not run, or nothing was deployed yet."""
    still = ",".join(row["device"] for row in rows if not row["status"]["daemon"]["running"])
    bare = ",".join(row["device"] for row in rows if not row["status"]["models"])
    lines = []
    if still:
        lines.append(f"next: the daemon does not run on {still}: edgert bootstrap {still} starts it")
    if bare:
        lines.append(f"next: nothing was deployed to {bare}: edgert deploy BUNDLE --to {bare}")
    return lines


def _unasked(code: str) -> str:
    """In a word, why a device could not be asked; the error stands below the table."""
    if code == NotBootstrapped.code:
        return "not bootstrapped"
    cut_off = (DeviceUnreachable.code, LoginRefused.code, HostKeyMismatch.code)
    return "unreachable" if code in cut_off else "no answer"


def _cells(row: dict[str, Any]) -> list[tuple[str, ...]]:
    name = str(row["device"])
    if "error" in row:
        return [(name, "-", "not known", "-", "-", "-", "-", "-", _unasked(row["error"]["code"]))]
    value = row["status"]
    daemon = "runs" if value["daemon"]["running"] else "does not run"
    there = {model["model"]: model for model in value["models"]}
    own = [one["kind"] for one in row["drift"]]
    lines: list[tuple[str, ...]] = []
    for model in row["models"]:
        found = there.get(model["model"], {})
        live = (
            "not known" if found.get("damaged") else "nothing" if model["live"] is None else f"release {model['live']}"
        )
        wanted = "-" if model["wanted"] is None else str(model["wanted"]["release"])
        engine = (found.get("serving") or {}).get("engine", "-")
        drift = ", ".join([*own, *(one["kind"] for one in model["drift"])]) or "-"
        lines.append(
            (name, value["profile"], daemon, model["model"], live, wanted, found.get("state", "-"), engine, drift)
        )
    return lines or [(name, value["profile"], daemon, "none", "-", "-", "-", "-", ", ".join(own) or "-")]
