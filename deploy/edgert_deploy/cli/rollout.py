"""`edgert rollout`: show, resume and abort rollouts."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import click

from edgert.cli.command import Group
from edgert.cli.output import emit, json_option, progress
from edgert.errors import ConfigInvalid
from edgert.printable import counted, some_of
from edgert_deploy.cli.deploy import refuse_aborted, request_for, run_rollout
from edgert_deploy.cli.shared.options import verbose_option, yes_option
from edgert_deploy.cli.shared.output import NAMES_MAX, columns
from edgert_deploy.cli.shared.rollout_output import rollout_json, rollout_table
from edgert_deploy.cli.shared.team import open_rollouts
from edgert_deploy.cli.shared.types import BundlePath
from edgert_deploy.common.project import find_project
from edgert_deploy.devices.claims import check_recordable, user_and_host
from edgert_deploy.devices.inventory import Inventory
from edgert_deploy.devices.same_machine import refuse_same_state
from edgert_deploy.rollout.plan import Offer
from edgert_deploy.rollout.request import read_offer
from edgert_deploy.rollout.rollout_record import Rollout, RolloutState
from edgert_deploy.rollout.rollout_store import RolloutStore


@click.group(cls=Group)
def rollout() -> None:
    """Show, resume or abort rollouts. Each `edgert deploy` is a rollout; the project keeps its progress.

    ID is the id of a rollout, or the start of an id.

    \b
    Examples:
      edgert rollout list
      edgert rollout status
      edgert rollout resume digits-r7-12
      edgert rollout abort
    """


@rollout.command("list")
@json_option
def list_rollouts(as_json: bool) -> None:
    """List the rollouts of this project, the newest first.

    \b
    Example:
      edgert rollout list
    """
    store = open_rollouts()
    rows = [("ROLLOUT", "MODEL", "RELEASE", "STATE", "DONE", "STARTED", "BY")]
    rollouts = [_with_present_state(store, rollout) for rollout in store.all()]
    for rollout in rollouts:
        done = f"{len(rollout.devices) - len(rollout.left)} of {len(rollout.devices)}"
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(rollout.started_at))
        rows.append((rollout.id, rollout.model, str(rollout.release), _state_text(rollout), done, started, rollout.by))
    text = columns(rows) if rollouts else "no rollouts: edgert deploy starts one"
    emit({"ok": True, "rollouts": [rollout_json(rollout) for rollout in rollouts]}, text, as_json)


@rollout.command()
@click.argument("id", required=False)
@json_option
def status(id: str | None, as_json: bool) -> None:
    """Show the result for each device of rollout ID (default: the newest).

    \b
    Examples:
      edgert rollout status
      edgert rollout status digits-r7-12 --json
    """
    store = open_rollouts()
    rollout = _with_present_state(store, store.find(id) if id else store.last())
    emit({"ok": True, **rollout_json(rollout)}, f"{rollout.id}\n{rollout_table(rollout)}", as_json)


@rollout.command("resume")
@click.argument("id", required=False)
@click.option("--bundle", type=BundlePath(), help="The rollout's bundle, if it is at another path on this host.")
@yes_option
@verbose_option
@json_option
def resume_rollout(id: str | None, bundle: Path | None, yes: bool, verbose: bool, as_json: bool) -> None:
    """Finish rollout ID (default: the newest) on the remaining devices.

    These are the devices that failed, were interrupted or did not start. Waves, limits and pauses stay the same; the
    limit of failures ignores earlier failures. The command has the exit codes of edgert deploy. Any host of the team
    may finish a rollout of another host.

    \b
    Examples:
      edgert rollout resume
      edgert rollout resume digits-r7-12 --bundle digits-7.edgert
    """
    store = open_rollouts(changes=True)
    rollout = store.find(id) if id else store.last()
    refuse_aborted(rollout)
    if not rollout.left:
        emit({"ok": True, **rollout_json(rollout)}, f"rollout {rollout.id} is done on every device", as_json)
        return
    check_recordable()
    _agree_if_it_may_run(store, rollout, yes)
    bundle, offer = _bundle_of(rollout, bundle)
    request = request_for(bundle, offer, rollout.trial_s, rollout.bytes_per_s, rollout.limits)
    inventory = find_project().path_of(rollout.inventory)
    by_name = {device.name: device for device in Inventory(inventory).devices()}
    # A device that is no longer in the inventory is no longer part of the rollout.
    devices = [by_name[name] for name in rollout.devices if name in by_name]
    refuse_same_state(devices)
    if not devices:
        raise ConfigInvalid(
            f"no device of rollout {rollout.id} is in {inventory} any more: start a new rollout with edgert deploy"
        )
    if missing := [name for name in rollout.devices if name not in by_name]:
        progress(
            f"note: {inventory} no longer has {some_of(missing, NAMES_MAX)}, so the rollout continues without. If a device "
            "was renamed, deploy to its new name"
        )
    rollout = replace(rollout, devices=tuple(device.name for device in devices))
    run_rollout(store, rollout, request, devices, verbose, as_json)


@rollout.command()
@click.argument("id", required=False)
@yes_option
@json_option
def abort(id: str | None, yes: bool, as_json: bool) -> None:
    """Abort rollout ID (default: the newest), so that no host resumes it. Devices keep their version.

    To abort a rollout that runs in another process, press Ctrl-C in that process.

    \b
    Example:
      edgert rollout abort digits-r7-12
    """
    store = open_rollouts(changes=True)
    rollout = store.find(id) if id else store.last()
    _agree_if_it_may_run(store, rollout, yes)
    with store.at_work(rollout.id):
        rollout = store.read(rollout.id)
        if rollout.state is not RolloutState.DONE or rollout.left:
            rollout = replace(rollout, state=RolloutState.ABORTED, reason="aborted by the user", by=user_and_host())
            store.write(rollout)
    done = len(rollout.devices) - len(rollout.left)
    text = (
        f"rollout {rollout.id} is {rollout.state.value}: release {rollout.release} is live on {counted(done, 'device')}"
    )
    if rollout.changed and rollout.state is RolloutState.ABORTED:
        where = ",".join(rollout.changed)
        text += f"\nnext: edgert rollback {rollout.model} {where} makes the previous version live again"
    emit({"ok": True, **rollout_json(rollout)}, text, as_json)


def _bundle_of(rollout: Rollout, given: Path | None) -> tuple[Path, Offer]:
    """Return the rollout's bundle and its offer. Raises ConfigInvalid if the bundle is not on this host."""
    project, other = find_project(), ""
    recorded = project.path_of(rollout.bundle)
    for path in [given] if given is not None else [recorded, (project.bundles or recorded.parent) / recorded.name]:
        if path.is_file():
            offer = read_offer(path)
            if offer.digest == rollout.digest:
                return path, offer
            other = f"; {path} has other content"
    raise ConfigInvalid(
        f"the bundle of rollout {rollout.id} is not on this host: {rollout.bundle}, digest {rollout.digest[:12]}{other}. "
        f"Copy it here, then: edgert rollout resume {rollout.id} --bundle FILE"
    )


def _state_text(rollout: Rollout) -> str:
    """Return the state. If the rollout ended without some devices, return the results of these devices."""
    if rollout.state is not RolloutState.DONE or not rollout.left:
        return rollout.state.value
    results = Counter(rollout.result(device).value for device in rollout.left)
    return f"ended, {', '.join(f'{count} {result}' for result, count in results.items())}"


def _with_present_state(store: RolloutStore, rollout: Rollout) -> Rollout:
    """Return the rollout, with the state "cut off" if it is marked as running but no process works on it."""
    if rollout.state is not RolloutState.RUNNING:
        return rollout
    at_work = store.is_at_work(rollout.id)
    if at_work is None:
        return replace(rollout, reason=f"by the last record of {rollout.by}")
    if at_work:
        return rollout
    return replace(rollout, state=RolloutState.CUT_OFF, reason="its process ended before the end of the rollout")


def _agree_if_it_may_run(store: RolloutStore, rollout: Rollout, yes: bool) -> None:
    """If another host may still work on the rollout, ask the user. End the command if the user refuses."""
    may_run = rollout.state in (RolloutState.RUNNING, RolloutState.PAUSED) and store.is_at_work(rollout.id) is None
    if yes or not may_run:
        return
    why = f"by the last record of {rollout.by}, rollout {rollout.id} is {rollout.state.value}, so it may still run on that host"
    if not sys.stdin.isatty():
        raise click.UsageError(f"{why}: check that no command runs there, then give --yes")
    click.confirm(f"{why}. Take it over?", abort=True, err=True)
