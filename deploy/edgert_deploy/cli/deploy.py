"""`edgert deploy`: a bundle to devices, live or as it was."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from edgert.errors import ConfigInvalid, Interrupted, NotBootstrapped
from edgert.versions.trial_limits import LIMIT_NAMES, parse_limits
from edgert_deploy.bootstrap.bootstrap import Wishes
from edgert_deploy.bootstrap.bootstrap import bootstrap as set_up
from edgert_deploy.cli.bootstrap import trusted_keys
from edgert_deploy.cli.fleet_options import (
    BundlePath,
    SelectorWord,
    columns,
    emit,
    error_lines,
    inventory_option,
    json_option,
    say,
)
from edgert_deploy.common.folders import config_folder
from edgert_deploy.common.project import find_project
from edgert_deploy.common.sizes import size_text
from edgert_deploy.common.trial_limits import limits_for
from edgert_deploy.devices.inventory import Device, Inventory, find_inventory
from edgert_deploy.devices.profiles import load_profile
from edgert_deploy.devices.transports import Transport, open_transport
from edgert_deploy.rollout.deployment import HELD, Outcome
from edgert_deploy.rollout.request import DeployRequest, Say, read_offer
from edgert_deploy.rollout.rollout import deploy_each, exit_code, roll_out
from edgert_deploy.rollout.rollout_store import Rollout, RolloutStore
from edgert_deploy.rollout.waves import PARALLEL, PARALLEL_MAX, Strategy

FIRST = "stopping at the next step; devices that are not done go back to what they had. Ctrl-C again lets go at once"
SECOND = "let go: a device in the middle of it goes back by itself when the trial ends"
BYTES_PER_S_MIN = 1000.0


def byte_rate(context: click.Context, option: click.Parameter, value: str) -> float:
    """Bytes a second from `500k`, `2M` or a plain number; "" is 0, no limit."""
    if not value:
        return 0.0
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", value)
    rate = float(found[1]) * {"": 1, "k": 1e3, "m": 1e6}[found[2].lower()] if found else 0.0
    if rate < BYTES_PER_S_MIN:
        raise click.BadParameter(f"{value!r} is no rate: give bytes a second, as 500k or 2M, at least 1k")
    return rate


@click.command()
@click.argument("bundle", type=BundlePath())
@click.option(
    "--to",
    "selector",
    required=True,
    type=SelectorWord(),
    metavar="SELECTOR",
    help="Devices: names, groups, tag:KEY, site:NAME or `all`, with commas.",
)
@click.option(
    "--trial-s",
    type=click.FloatRange(min=1, max=86400),
    default=60.0,
    show_default=True,
    help="After so many seconds a version that was not marked good ends by itself.",
)
@click.option(
    "--limit",
    "limits",
    multiple=True,
    metavar="NAME=VALUE",
    help=f"What must hold on trial, watched by the device: {', '.join(LIMIT_NAMES)}. May be repeated.",
)
@click.option(
    "--watch", metavar="TIME", default="", help="For how long: 90s, 10m, 2h [default: 60s where there are limits]."
)
@click.option(
    "--unattended/--attended",
    default=None,
    help="Devices keep it by themselves where all limits held [default: only this host can confirm it].",
)
@click.option("--canary", type=click.IntRange(min=0), default=0, help="So many devices go first.", show_default=True)
@click.option("--wave", "waves", default="", metavar="SHARES", help="Then in waves: 10%,50%,100% of the devices.")
@click.option(
    "--max-failures",
    metavar="SHARE",
    help="Stop when more than so many (3) or such a share (5%) of the devices of the waves begun failed "
    "[default: 0 with --canary or --wave, else never].",
)
@click.option("--pause", "pause_s", type=click.FloatRange(min=0), default=0.0, help="Seconds between two waves.")
@click.option("--parallel", type=click.IntRange(1, PARALLEL_MAX), default=PARALLEL, show_default=True)
@click.option(
    "--bwlimit",
    "bytes_per_s",
    callback=byte_rate,
    default="",
    metavar="RATE",
    help="Send at most so many bytes a second to each device: 500k, 2M [default: no limit].",
)
@click.option(
    "--delta-from",
    "delta_from",
    type=click.Path(dir_okay=False, path_type=Path),
    multiple=True,
    metavar="OLD.edgert",
    help="A bundle that devices have and this host never shipped: differences from it are sent. May be repeated.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be done; change nothing.")
@inventory_option
@json_option
def deploy(
    bundle: Path,
    selector: str,
    trial_s: float,
    limits: tuple[str, ...],
    watch: str,
    unattended: bool | None,
    canary: int,
    waves: str,
    max_failures: str | None,
    pause_s: float,
    parallel: int,
    bytes_per_s: float,
    delta_from: tuple[Path, ...],
    dry_run: bool,
    inventory_file: Path | None,
    as_json: bool,
) -> None:
    """Ship BUNDLE to devices and make it live, or put back what was.

    On each device it is installed, loaded beside what serves, checked with its golden inputs, switched to on
    trial, asked again through the socket, and kept. Where anything fails, the version before serves on.
    A device that does not answer does not hold up the others. A local device that was never bootstrapped is
    made ready on the way. One deployment of a model works on a device at a time; another one is refused.

    With --limit and --watch the device measures what it serves on trial, and goes back by itself, with the reason, once a
    limit is broken, or where this host does not confirm it in the end. Limits may stand in edgert.toml, table [trial].

    Over a fleet it may go in steps: some devices first (--canary), then in waves, with a pause between them, and it
    stops where too many fail. How far it came is kept on disk: after Ctrl-C, a stop or a crash of this host,
    `edgert rollout resume` goes on.

    A device is sent only the files that it lacks; those that it has an older version of, as patches. A transfer that
    was cut goes on where it stopped, also when the command is given again.

    Ctrl-C stops at the next step and puts back what was live on devices that are not done; again, it lets go at
    once: a device in the middle of it then goes back by itself when the trial ends.

    Exits with 0 where every device took it, else with the code of the first that did not: 5 the bundle was
    refused, 6 unreachable or another host key, 7 the device could not, 9 rolled back; 130 interrupted.

    \b
    Examples:
      edgert deploy digits.edgert --to kitchen
      edgert deploy digits.edgert --to canary,nuc-3 --trial-s 300
      edgert deploy digits.edgert --to kitchen --limit p99_ms=8 --limit error_rate=0.1% --watch 10m
      edgert deploy digits.edgert --to all --canary 1 --wave 10%,50%,100% --max-failures 5% --pause 600
      edgert deploy digits.edgert --to all --bwlimit 500k
      edgert deploy digits.edgert --to all --dry-run --json
    """
    strategy = Strategy.parse(canary, waves, max_failures, parallel, pause_s)
    inventory = find_inventory(inventory_file)
    devices = inventory.select(selector)
    offer = read_offer(bundle)
    trial_limits = limits_for(offer.manifest.model, _trial_table(), parse_limits(limits), watch, unattended, trial_s)
    request = DeployRequest(
        bundle, offer, trial_s, open_transport, _make_ready, dry_run, bytes_per_s=bytes_per_s, limits=trial_limits
    )
    for path in delta_from:
        request.deltas.objects.keep_bundle(path)
    if dry_run:
        _say_what_would_be_done(request, strategy, devices, as_json)
        return
    manifest = request.offer.manifest
    store = RolloutStore(rollouts_folder())
    number = store.new_number()
    rollout = Rollout(
        id=f"{manifest.model}-r{manifest.release}-{number}",
        number=number,
        bundle=str(bundle.absolute()),
        digest=request.offer.digest,
        model=manifest.model,
        release=manifest.release,
        inventory=str(inventory.path.absolute()),
        devices=tuple(device.name for device in devices),
        strategy=strategy,
        trial_s=trial_s,
        started_at=time.time(),
        bytes_per_s=bytes_per_s,
        limits=trial_limits,
    )
    store.tidy()
    run_rollout(store, rollout, request, devices, as_json)


def resume(rollout: Rollout, as_json: bool) -> None:
    """Do what is left of a rollout, with its bundle and inventory as they are now."""
    request = DeployRequest(
        Path(rollout.bundle),
        read_offer(Path(rollout.bundle)),
        rollout.trial_s,
        open_transport,
        _make_ready,
        bytes_per_s=rollout.bytes_per_s,
        limits=rollout.limits,
    )
    if request.offer.digest != rollout.digest:
        raise ConfigInvalid(
            f"{rollout.bundle} is another bundle now than the one that rollout {rollout.id} began with; "
            "begin a new one with edgert deploy"
        )
    found = {device.name: device for device in Inventory(Path(rollout.inventory)).devices()}
    # A device that was taken out of the inventory meanwhile is no longer part of the rollout.
    devices = [found[name] for name in rollout.devices if name in found]
    if not devices:
        raise ConfigInvalid(f"no device of rollout {rollout.id} is in {rollout.inventory} any more")
    rollout = replace(rollout, devices=tuple(device.name for device in devices))
    run_rollout(RolloutStore(rollouts_folder()), rollout, request, devices, as_json)


def run_rollout(
    store: RolloutStore, rollout: Rollout, request: DeployRequest, devices: list[Device], as_json: bool
) -> None:
    """Run it to its end or stop, print what became of it, and exit with the code that says so."""
    with store.at_work(rollout.id), request.stop.on_interrupt(FIRST, SECOND):
        rollout = roll_out(store, rollout, request, devices, say)
    # Stopped between two waves, no device has an error, and some have not got it.
    code = exit_code(rollout.errors) or (Interrupted.exit_code if rollout.left else 0)
    value = rollout_json(rollout) | {"ok": code == 0}
    first = next((error for error in rollout.errors if error is not None), None)
    if first is not None and len(devices) == 1:
        value["error"] = {"code": first.code, "message": first.message}
    emit(value, rollout_table(rollout), as_json)
    click.get_current_context().exit(code)


def rollouts_folder() -> Path:
    """Where how far rollouts came is kept."""
    return config_folder() / "rollouts"


def rollout_json(rollout: Rollout) -> dict[str, Any]:
    return {
        "rollout": {"id": rollout.id, "state": rollout.state, "reason": rollout.reason, "left": rollout.left},
        "bundle": {"model": rollout.model, "release": rollout.release, "digest": rollout.digest},
        "devices": [rollout.outcomes.get(name, Outcome(name, HELD).as_json()) for name in rollout.devices],
    }


def rollout_table(rollout: Rollout) -> str:
    """A row a device, what went wrong, and where the rollout stands."""
    rows = [("DEVICE", "RESULT", "LIVE", "SECONDS")]
    for outcome in rollout_json(rollout)["devices"]:
        live = "" if outcome["serving"] is None else f"{rollout.model} {outcome['serving']}"
        rows.append((outcome["device"], outcome["result"], live, f"{outcome['seconds']:.1f}"))
    named = zip(rollout.devices, rollout.errors, strict=True)
    errors = [(name, error.code, error.message) for name, error in named if error is not None]
    done = len(rollout.devices) - len(rollout.left)
    lines = f"{columns(rows)}\n{error_lines(errors)}"
    lines += f"{rollout.model} release {rollout.release}: {done} of {len(rollout.devices)} devices"
    if rollout.left and len(rollout.devices) > 1:
        lines += f"; {rollout.state}" + (f": {rollout.reason}" if rollout.reason else "")
        lines += _next_steps(rollout)
    return lines


def _next_steps(rollout: Rollout) -> str:
    """Name only the commands that help: a roll-back on devices without the release would undo something else."""
    steps = [f"edgert rollout resume {rollout.id}"] if rollout.resumable else []
    if rollout.changed:
        steps.append(f"edgert rollback {rollout.model} --on {','.join(rollout.changed)}")
    return f"\nnext: {', or '.join(steps)}" if steps else ""


def _say_what_would_be_done(request: DeployRequest, strategy: Strategy, devices: list[Device], as_json: bool) -> None:
    with request.stop.on_interrupt(FIRST, SECOND):
        outcomes = deploy_each(request, devices, say, at_once=strategy.parallel)
    code = exit_code([outcome.error for outcome in outcomes])
    manifest = request.offer.manifest
    waves = [[devices[i].name for i in wave] for wave in strategy.split(len(devices))]
    value: dict[str, Any] = {
        "ok": code == 0,
        "bundle": {"model": manifest.model, "release": manifest.release, "digest": request.offer.digest},
        "devices": [outcome.as_json() for outcome in outcomes],
        "waves": waves,
    }
    rows = [("DEVICE", "WAVE", "RESULT", "TO SEND", "STEPS")]
    for outcome in outcomes:
        wave = next(number for number, names in enumerate(waves, start=1) if outcome.device in names)
        size = "" if outcome.error is not None else size_text(outcome.sent_bytes)
        rows.append((outcome.device, str(wave), outcome.result, size, " ".join(step.value for step in outcome.steps)))
    errors = [(o.device, o.error.code, o.error.message) for o in outcomes if o.error is not None]
    planned = sum(outcome.error is None for outcome in outcomes)
    text = f"{columns(rows)}\n{error_lines(errors)}{manifest.model} release {manifest.release}: {planned} of {len(outcomes)} devices"
    if request.limits is not None:
        text += f"\non trial: {request.limits.described()}"
    emit(value, text, as_json)
    click.get_current_context().exit(code)


def _trial_table() -> dict[str, Any]:
    """Return the project's table [trial]."""
    project = find_project()
    return {} if project is None else project.trial


def _make_ready(device: Device, transport: Transport, say_line: Say) -> None:
    """A folder on this machine needs no decision of the user's: it gets the default key. Others do."""
    if device.kind.needs_runtime:
        raise NotBootstrapped(f"EdgeRT is not set up on {device.name}: edgert bootstrap {device.name}")
    say_line("setting this machine up as a device, with the default key")
    set_up(device, load_profile(device.profile), Wishes(trusted_keys(("default",))), transport, say_line)
