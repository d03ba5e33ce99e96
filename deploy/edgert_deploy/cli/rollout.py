"""`edgert rollout`: where deployments stand, go on with one, give one up."""

from __future__ import annotations

import time
from dataclasses import replace

import click

from edgert_deploy.cli.deploy import campaign_json, campaign_table, campaigns_folder, resume
from edgert_deploy.cli.fleet_options import columns, emit, json_option
from edgert_deploy.rollout.rollout import ABORTED, DONE, RUNNING, Campaign, CampaignStore


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def rollout() -> None:
    """Show, resume or give up deployments. Each `edgert deploy` is a rollout; how far it came is kept on disk.

    \b
    Examples:
      edgert rollout list
      edgert rollout status
      edgert rollout resume digits-r7-20261121-101500
      edgert rollout abort
    """


@rollout.command("list")
@json_option
def list_rollouts(as_json: bool) -> None:
    """List the rollouts of this user, the newest first."""
    store = CampaignStore(campaigns_folder())
    rows = [("ROLLOUT", "MODEL", "RELEASE", "STATE", "DONE", "STARTED")]
    found = [_seen(store, campaign) for campaign in store.all()]
    for campaign in found:
        done = f"{len(campaign.devices) - len(campaign.left)} of {len(campaign.devices)}"
        started = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(campaign.started_at))
        rows.append((campaign.id, campaign.model, str(campaign.release), campaign.state, done, started))
    text = columns(rows) if found else "no rollout yet: edgert deploy begins one"
    emit({"ok": True, "rollouts": [campaign_json(campaign) for campaign in found]}, text, as_json)


@rollout.command()
@click.argument("id", required=False)
@json_option
def status(id: str | None, as_json: bool) -> None:
    """Show what became of each device in rollout ID (default: the newest)."""
    store = CampaignStore(campaigns_folder())
    campaign = _seen(store, store.read(id) if id else store.last())
    emit({"ok": True, **campaign_json(campaign)}, f"{campaign.id}\n{campaign_table(campaign)}", as_json)


@rollout.command("resume")
@click.argument("id", required=False)
@json_option
def resume_rollout(id: str | None, as_json: bool) -> None:
    """Do what is left of rollout ID (default: the newest): devices that failed, were interrupted or not tried yet.

    Waves, limits and pauses are those that it began with; earlier failures do not count again. Exits like
    edgert deploy.
    """
    store = CampaignStore(campaigns_folder())
    campaign = store.read(id) if id else store.last()
    if campaign.state == ABORTED:
        raise click.UsageError(f"rollout {campaign.id} was given up; begin a new one with: edgert deploy")
    if not campaign.left:
        emit({"ok": True, **campaign_json(campaign)}, f"rollout {campaign.id} is done on every device", as_json)
        return
    resume(campaign, as_json)


@rollout.command()
@click.argument("id", required=False)
@json_option
def abort(id: str | None, as_json: bool) -> None:
    """Give up rollout ID (default: the newest): it will not be resumed. Devices keep what they have.

    A rollout that is at work in another process is ended there, with Ctrl-C.
    """
    store = CampaignStore(campaigns_folder())
    campaign = store.read(id) if id else store.last()
    with store.at_work(campaign.id):
        if campaign.state != DONE or campaign.left:
            campaign = replace(campaign, state=ABORTED, reason="given up by the user")
            store.write(campaign)
    took = [device for device in campaign.devices if campaign.took(device)]
    text = f"rollout {campaign.id} is {campaign.state}: release {campaign.release} is live on {len(took)} devices"
    if took and campaign.state == ABORTED:
        text += f"\nnext: edgert rollback {campaign.model} --on {','.join(took)} takes it back there"
    emit({"ok": True, **campaign_json(campaign)}, text, as_json)


def _seen(store: CampaignStore, campaign: Campaign) -> Campaign:
    """The campaign as it is: one that says that it runs, and that nobody works on, was cut off."""
    if campaign.state == RUNNING and not store.is_at_work(campaign.id):
        return replace(campaign, state="cut off", reason="its process ended in the middle")
    return campaign
