"""`edgert status`: what is live on devices, and how it differs from what should be."""

from __future__ import annotations

from collections.abc import Sequence

import click

from edgert.cli.output import json_option
from edgert.environment import CODE, code_digest
from edgert.errors import DeviceUnreachable, HostKeyMismatch, LoginRefused, NotBootstrapped, RuntimeBroken
from edgert.typed_json import to_json
from edgert_deploy.cli.shared.each import Row, run_on_each
from edgert_deploy.cli.shared.options import inventory_option, selector_argument
from edgert_deploy.cli.shared.output import columns
from edgert_deploy.cli.shared.team import open_rollouts
from edgert_deploy.common.project import find_project
from edgert_deploy.devices.inventory import Device, Inventory
from edgert_deploy.devices.remote import RemoteDaemon
from edgert_deploy.devices.selector import ALL
from edgert_deploy.devices.transports import Transport
from edgert_deploy.rollout.drift import device_drifts, model_drifts, wanted_of
from edgert_deploy.rollout.rollout_record import Rollout

EXIT_DRIFT = 12
LACKS_RELEASE = frozenset(("behind", "missing", "rolled-back"))  # kinds of drift
HEADING = ("DEVICE", "PROFILE", "DAEMON", "MODEL", "LIVE", "WANTED", "STATE", "ENGINE", "DRIFT")
# Why a device could not be asked, in two words; the error follows below the table.
_UNASKED = {
    NotBootstrapped.code: "not bootstrapped",
    RuntimeBroken.code: "runtime broken",
    **dict.fromkeys((DeviceUnreachable.code, LoginRefused.code, HostKeyMismatch.code), "unreachable"),
}


@click.command()
@selector_argument(ALL)
@click.option("--check", is_flag=True, help=f"Exit with {EXIT_DRIFT} if a device drifted from what is wanted.")
@inventory_option
@json_option
def status(selector: str, check: bool, inventory: Inventory, as_json: bool) -> None:
    """Show what devices serve, and mark drift from what they should serve.

    The wanted release is that of the device's channel, marked with the channel's name, or else that of the project's
    newest rollout that names the device. These are drift: a release that is behind or ahead, other content, a missing
    model, a trial, a rollback (with the reason), a degraded engine, a model that does not serve, a daemon that does not
    run, another version or other code of edgert than this host's. Without SELECTOR, the devices are those of the
    project's `selector`, else all.

    Exits with the code of the first device that could not be asked.

    \b
    Examples:
      edgert status
      edgert status canary --json
      edgert status all --check
    """
    rollouts = open_rollouts().all()
    wanted, code = wanted_of(rollouts, find_project().name_of(inventory.path)), code_digest(CODE)

    def ask(device: Device, transport: Transport) -> Row:
        """Return the device's `status`, whether it `drifts`, and what does: its own `drift`, and `models`."""
        status = RemoteDaemon(transport, device).status()
        models, device_drift = model_drifts(status, wanted.get(device.name, {})), device_drifts(status, own_code=code)
        return {
            "drifts": bool(device_drift) or any(model.drift for model in models),
            "drift": to_json(device_drift),
            "models": to_json(models),
            "status": status.as_json(),
        }

    results = run_on_each(inventory.select(selector), ask)
    for row in results.rows:
        row.setdefault("drifts", True)
    drifts = any(row["drifts"] for row in results.rows)
    results.show(
        columns([HEADING, *(cells for row in results.rows for cells in _cells(row))]),
        as_json,
        below="\n".join([*_reasons(results.good), *_doubts(results.good), *_next_steps(results.good, rollouts)]),
        code=EXIT_DRIFT if check and drifts else 0,
        raise_lone=False,
        drifts=drifts,
    )


def _reasons(rows: list[Row]) -> list[str]:
    lines = []
    for row in rows:
        lines += [f"{row['device']}: {drift['text']}" for drift in row["drift"]]
        for model in row["models"]:
            lines += [f"{row['device']} {model['model']}: {drift['text']}" for drift in model["drift"]]
    return lines


def _doubts(rows: list[Row]) -> list[str]:
    """Return what makes the trial of a live version a weak one."""
    lines = []
    for row in rows:
        for model in row["status"]["models"]:
            trial = (model.get("serving") or {}).get("trial") or {}
            if trial.get("doubt") and model["live"] and trial["release"] == model["live"]["release"]:
                lines.append(
                    f"{row['device']} {model['model']}: release {trial['release']} held its limits, but {trial['doubt']}"
                )
    return lines


def _next_steps(rows: list[Row], rollouts: Sequence[Rollout]) -> list[str]:
    """Return what to do if no daemon runs, nothing was deployed, or a release rolled back."""
    stopped = ",".join(row["device"] for row in rows if not row["status"]["daemon"]["running"])
    bare = ",".join(row["device"] for row in rows if not row["models"])
    lines = []
    if stopped:
        lines.append(f"next: the daemon does not run on {stopped}: edgert bootstrap {stopped} starts it")
    if bare:
        lines.append(f"next: nothing was deployed to {bare}: edgert deploy BUNDLE {bare}")
    by_id = {rollout.id: rollout for rollout in rollouts}
    unfinished: dict[str, list[str]] = {}
    rolled_back: dict[tuple[str, int | None, str], list[str]] = {}
    missing: dict[tuple[str, int], list[str]] = {}
    for row in rows:
        for model in row["models"]:
            kinds = {drift["kind"] for drift in model["drift"]}
            rollout = by_id.get(model["wanted"]["rollout"]) if kinds & LACKS_RELEASE else None
            if rollout is not None and rollout.interrupted(row["device"], "rolled-back" in kinds):
                unfinished.setdefault(rollout.id, []).append(row["device"])
            elif "rolled-back" in kinds:
                about = model["model"], model["live"], model["wanted"]["channel"]
                rolled_back.setdefault(about, []).append(row["device"])
            elif "missing" in kinds and rollout is not None and not row["status"]["models"]:
                missing.setdefault((model["model"], rollout.release), []).append(row["device"])
    lines += [
        f"next: release {release} of {model} is wanted on {','.join(devices)}, and no model is there, as on a new machine: "
        f"edgert deploy BUNDLE {','.join(devices)}"
        for (model, release), devices in missing.items()
    ]
    lines += [
        f"next: rollout {name} was interrupted on {','.join(devices)}: edgert rollout resume {name} continues it, "
        f"edgert rollout abort {name} gives it up"
        for name, devices in unfinished.items()
    ]
    return lines + [_after_roll_back(*about, ",".join(names)) for about, names in rolled_back.items()]


def _after_roll_back(model: str, live: int | None, channel: str, devices: str) -> str:
    """Return how a release becomes the wanted one again if another was rolled back."""
    how = f"edgert publish BUNDLE --channel {channel}" if channel else f"edgert deploy BUNDLE {devices}"
    keep = "" if live is None or channel else f"; with the bundle of release {live}, that becomes the wanted one"
    return f"next: deploy a fixed release of {model} to {devices}: {how}{keep}"


def _cells(row: Row) -> list[tuple[str, ...]]:
    name = str(row["device"])
    if "error" in row:
        return [(name, "-", "not known", "-", "-", "-", "-", "-", _UNASKED.get(row["error"]["code"], "no answer"))]
    value = row["status"]
    daemon = "runs" if value["daemon"]["running"] else "does not run"
    by_model = {model["model"]: model for model in value["models"]}
    device_kinds = [kind["kind"] for kind in row["drift"]]
    lines: list[tuple[str, ...]] = []
    for model in row["models"]:
        reported = by_model.get(model["model"], {})
        live = "nothing" if model["live"] is None else f"release {model['live']}"
        live = "not known" if reported.get("damaged") else live
        by = model["wanted"]
        channel = f" ({by['channel']})" if by and by["channel"] else ""
        wanted = f"{by['release']}{channel}" if by else "-"
        engine = (reported.get("serving") or {}).get("engine", "-")
        drift = ", ".join([*device_kinds, *(kind["kind"] for kind in model["drift"])]) or "-"
        lines.append(
            (name, value["profile"], daemon, model["model"], live, wanted, reported.get("state", "-"), engine, drift)
        )
    return lines or [(name, value["profile"], daemon, "none", "-", "-", "-", "-", ", ".join(device_kinds) or "-")]
