"""`edgert deploy`: send a bundle to devices and make it live, or roll back."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import click

from edgert.checks.status import DeviceStatus
from edgert.cli.output import emit, json_option
from edgert.errors import Interrupted, NotBootstrapped, exit_code_of
from edgert.versions.trial_limits import TrialLimits
from edgert_deploy.cli.deploy.options import (
    TransferOptions,
    TrialOptions,
    WaveOptions,
    transfer_options,
    trial_options,
    wave_options,
)
from edgert_deploy.cli.deploy.progress import RolloutProgress
from edgert_deploy.cli.shared.option_groups import SectionedCommand
from edgert_deploy.cli.shared.options import inventory_option, selector_argument, verbose_option
from edgert_deploy.cli.shared.rollout_output import ROWS_MAX, plan_json, plan_table, rollout_json, rollout_table
from edgert_deploy.cli.shared.team import open_rollouts
from edgert_deploy.cli.shared.types import BundlePath
from edgert_deploy.common.project import find_project
from edgert_deploy.devices.claims import check_recordable, user_and_host
from edgert_deploy.devices.inventory import Device, Inventory
from edgert_deploy.devices.profiles import load_profile
from edgert_deploy.devices.same_machine import select_to_change
from edgert_deploy.devices.transports import LineSink, Transport, open_transport
from edgert_deploy.rollout.plan import Offer
from edgert_deploy.rollout.request import DeployRequest, read_offer
from edgert_deploy.rollout.rollout import deploy_each, roll_out
from edgert_deploy.rollout.rollout_record import Rollout, RolloutState
from edgert_deploy.rollout.rollout_store import RolloutStore
from edgert_deploy.rollout.waves import Strategy


@click.command(cls=SectionedCommand)
@click.argument("bundle", type=BundlePath())
@selector_argument()
@trial_options
@wave_options
@transfer_options
@click.option("--dry-run", is_flag=True, help="Show the steps; change nothing.")
@verbose_option
@inventory_option
@json_option
def deploy(
    bundle: Path,
    selector: str,
    trial: TrialOptions,
    order: WaveOptions,
    transfer: TransferOptions,
    dry_run: bool,
    verbose: bool,
    inventory: Inventory,
    as_json: bool,
) -> None:
    """Send BUNDLE to the devices of SELECTOR and make it live, or roll back.

    Each device loads the new version beside the live version and checks its golden samples. Then the device makes the
    new version live on trial, checks it again through the socket, and keeps it. If a step fails, the previous version
    stays live or becomes live again. With --limit and --watch, the device also measures the version on trial. Without
    SELECTOR, the command deploys to the devices of the project's `selector`.

    Ctrl-C ends a transfer or a watch at once; any other step finishes first. Then the command rolls back the devices
    whose new version is on trial. After a second Ctrl-C, these devices roll back by themselves. `edgert rollout resume`
    continues a rollout that ended early. docs/deploying.md explains waves, limits and transfers.

    The exit code is 0 if the release is live on every device, else the code of the first failure: 5 bundle refused, 6
    unreachable or another host key, 7 device error, 9 rolled back; 130 interrupted.

    \b
    Examples:
      edgert deploy digits.edgert kitchen
      edgert deploy digits.edgert canary,nuc-3 --trial 5m
      edgert deploy digits.edgert kitchen --limit p99_ms=8 --limit error_share=0.1% --watch 10m
      edgert deploy digits.edgert all --canary 1 --wave 10%,50%,100% --max-failures 5% --pause 10m
      edgert deploy digits.edgert all --bwlimit 500KB/s
      edgert deploy digits.edgert all --dry-run --json
    """
    strategy = order.strategy()
    devices = select_to_change(inventory, selector)
    offer = read_offer(bundle)
    limits = trial.limits_of(offer.manifest.model)
    request = request_for(bundle, offer, trial.trial_s, transfer.bytes_per_s or 0.0, limits, dry_run)
    for path in transfer.delta_from:
        request.deltas.keep_bundle(path)
    if dry_run:
        _show_plan(request, strategy, devices, verbose, as_json)
        return
    check_recordable()  # before the rollout is recorded
    store = open_rollouts(changes=True)
    rollout = store.begin(_new_rollout(request, strategy, devices, inventory))
    run_rollout(store, rollout, request, devices, verbose, as_json)


def _new_rollout(request: DeployRequest, strategy: Strategy, devices: list[Device], inventory: Inventory) -> Rollout:
    """Return the record of a new rollout; the store assigns its id."""
    project, manifest = find_project(), request.offer.manifest
    return Rollout(
        id="",
        bundle=project.name_of(request.bundle),
        digest=request.offer.digest,
        model=manifest.model,
        release=manifest.release,
        inventory=project.name_of(inventory.path),
        devices=tuple(device.name for device in devices),
        strategy=strategy,
        trial_s=request.trial_s,
        started_at=time.time(),
        bytes_per_s=request.bytes_per_s,
        limits=request.limits,
        by=user_and_host(),
    )


def request_for(
    bundle: Path, offer: Offer, trial_s: float, bytes_per_s: float, limits: TrialLimits | None, dry_run: bool = False
) -> DeployRequest:
    """Return the request. The deployment first bootstraps a local device that has no EdgeRT."""
    to = (open_transport, _make_ready)
    return DeployRequest(bundle, offer, trial_s, *to, dry_run, bytes_per_s=bytes_per_s, limits=limits)


def run_rollout(
    store: RolloutStore, rollout: Rollout, request: DeployRequest, devices: list[Device], verbose: bool, as_json: bool
) -> None:
    """Run the rollout until it ends or stops, print the results and exit with their code."""
    title = f"{rollout.model} release {rollout.release}"
    todo = sum(not rollout.has_release(device.name) for device in devices)
    progress = RolloutProgress(title, todo, request.stop, verbose=verbose)
    with store.at_work(rollout.id), progress:
        present = store.read(rollout.id)
        refuse_aborted(present)  # another process may have aborted it since this command read it
        rollout = replace(present, devices=rollout.devices, by=user_and_host())
        request = replace(request, on_bytes=progress.sent)
        rollout = roll_out(store, rollout, request, devices, progress, on_outcome=progress.done)
    # A rollout that stopped between two waves has no errors, but some devices do not have the release yet.
    code = exit_code_of(rollout.errors) or (Interrupted.exit_code if rollout.left else 0)
    value = rollout_json(rollout) | {"ok": code == 0}
    first = next((error for error in rollout.errors if error is not None), None)
    if first is not None and len(devices) == 1:
        value["error"] = first.as_json()
    emit(value, rollout_table(rollout, every=verbose or len(devices) <= ROWS_MAX), as_json)
    click.get_current_context().exit(code)


def refuse_aborted(rollout: Rollout) -> None:
    """Raise UsageError if the rollout was aborted."""
    if rollout.state is RolloutState.ABORTED:
        raise click.UsageError(f"rollout {rollout.id} was aborted: start a new one with edgert deploy")


def _show_plan(request: DeployRequest, strategy: Strategy, devices: list[Device], verbose: bool, as_json: bool) -> None:
    with RolloutProgress("plan", len(devices), request.stop, verbose=verbose) as progress:
        outcomes = deploy_each(request, devices, progress, at_once=strategy.parallel, on_outcome=progress.done)
    code = exit_code_of([outcome.error for outcome in outcomes])
    waves = [[devices[i].name for i in wave] for wave in strategy.split(len(devices))]
    value = {"ok": code == 0, **plan_json(request, outcomes, waves)}
    emit(value, plan_table(request, outcomes, waves), as_json)
    click.get_current_context().exit(code)


def _make_ready(device: Device, transport: Transport, progress: LineSink) -> DeviceStatus:
    """Bootstrap a local device with the default key. Raises NotBootstrapped for other devices."""
    if device.kind.needs_runtime:
        raise NotBootstrapped(f"EdgeRT is not set up on {device.name}: edgert bootstrap {device.name}")
    # The imports are here, because the code of a bootstrap takes as long to import as the rest of a deployment.
    from edgert_deploy.bootstrap.bootstrap import bootstrap as set_up
    from edgert_deploy.bootstrap.plan import BootstrapOptions
    from edgert_deploy.cli.shared.bootstrap_options import trusted_keys

    progress("bootstrapping this machine as a device, with the default key")
    options = BootstrapOptions(trusted_keys(("default",)))
    return set_up(device, load_profile(device.profile), options, transport, progress).status
