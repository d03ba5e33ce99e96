"""`edgert rollout`: show, resume and abort rollouts."""

from __future__ import annotations

import time
from dataclasses import replace

import click

from edgert_deploy.cli.deploy import resume, rollout_json, rollout_table
from edgert_deploy.cli.options import json_option
from edgert_deploy.cli.output import columns, emit
from edgert_deploy.common.folders import rollouts_folder
from edgert_deploy.rollout.rollout_store import ABORTED, DONE, RUNNING, Rollout, RolloutStore


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def rollout() -> None:
    """Show, resume or abort rollouts. Each `edgert deploy` is a rollout; its progress is kept on disk.

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
    """List the rollouts of this user, the newest first."""
    store = RolloutStore(rollouts_folder())
    rows = [("ROLLOUT", "MODEL", "RELEASE", "STATE", "DONE", "STARTED")]
    found = [_seen(store, rollout) for rollout in store.all()]
    for rollout in found:
        done = f"{len(rollout.devices) - len(rollout.left)} of {len(rollout.devices)}"
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(rollout.started_at))
        rows.append((rollout.id, rollout.model, str(rollout.release), rollout.state, done, started))
    text = columns(rows) if found else "no rollouts: edgert deploy starts one"
    emit({"ok": True, "rollouts": [rollout_json(rollout) for rollout in found]}, text, as_json)


@rollout.command()
@click.argument("id", required=False)
@json_option
def status(id: str | None, as_json: bool) -> None:
    """Show the result for each device of rollout ID (default: the newest)."""
    store = RolloutStore(rollouts_folder())
    rollout = _seen(store, store.read(id) if id else store.last())
    emit({"ok": True, **rollout_json(rollout)}, f"{rollout.id}\n{rollout_table(rollout)}", as_json)


@rollout.command("resume")
@click.argument("id", required=False)
@json_option
def resume_rollout(id: str | None, as_json: bool) -> None:
    """Finish rollout ID (default: the newest): devices that failed, were interrupted or not tried yet.

    Waves, limits and pauses stay as they were; earlier failures do not count again. Exits like edgert deploy.
    """
    store = RolloutStore(rollouts_folder())
    rollout = store.read(id) if id else store.last()
    if rollout.state == ABORTED:
        raise click.UsageError(f"rollout {rollout.id} was aborted: start a new one with edgert deploy")
    if not rollout.left:
        emit({"ok": True, **rollout_json(rollout)}, f"rollout {rollout.id} is done on every device", as_json)
        return
    resume(rollout, as_json)


@rollout.command()
@click.argument("id", required=False)
@json_option
def abort(id: str | None, as_json: bool) -> None:
    """Abort rollout ID (default: the newest), so that nobody resumes it. Devices keep what they have.

    To abort a rollout that runs in another process, press Ctrl-C there.
    """
    store = RolloutStore(rollouts_folder())
    rollout = store.read(id) if id else store.last()
    with store.at_work(rollout.id):
        if rollout.state != DONE or rollout.left:
            rollout = replace(rollout, state=ABORTED, reason="aborted by the user")
            store.write(rollout)
    done = len(rollout.devices) - len(rollout.left)
    text = f"rollout {rollout.id} is {rollout.state}: release {rollout.release} is live on {done} devices"
    if rollout.changed and rollout.state == ABORTED:
        where = ",".join(rollout.changed)
        text += f"\nnext: edgert rollback {rollout.model} {where} makes the version before live again"
    emit({"ok": True, **rollout_json(rollout)}, text, as_json)


def _seen(store: RolloutStore, rollout: Rollout) -> Rollout:
    """Return the rollout; one that is marked as running and that no process works on was cut off."""
    if rollout.state == RUNNING and not store.is_at_work(rollout.id):
        return replace(rollout, state="cut off", reason="its process ended before it was done")
    return rollout
