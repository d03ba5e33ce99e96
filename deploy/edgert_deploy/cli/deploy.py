"""`edgert deploy`: ship a bundle to devices and make it live, or roll back."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from edgert.cli.output import emit, json_option
from edgert.errors import Interrupted, NotBootstrapped
from edgert.printable import counted, some_of
from edgert.versions.trial_limits import TrialLimits, parse_limits
from edgert_deploy.cli.shared.options import inventory_option, limit_option, selector_argument, verbose_option
from edgert_deploy.cli.shared.output import NAMES_MAX, columns, error_lines, errors_by_cause
from edgert_deploy.cli.shared.rollout_progress import RolloutProgress
from edgert_deploy.cli.shared.team import open_rollouts
from edgert_deploy.cli.shared.types import BundlePath, Duration, Rate
from edgert_deploy.common.parallel import at_once_here
from edgert_deploy.common.project import find_project
from edgert_deploy.common.quantities import size_text
from edgert_deploy.common.trial_limits import limits_for
from edgert_deploy.devices.claims import who
from edgert_deploy.devices.inventory import Device, Inventory
from edgert_deploy.devices.profiles import load_profile
from edgert_deploy.devices.transports import LineSink, Transport, open_transport
from edgert_deploy.rollout.deployment import Outcome, Result
from edgert_deploy.rollout.plan import Offer
from edgert_deploy.rollout.request import DeployRequest, read_offer
from edgert_deploy.rollout.rollout import deploy_each, exit_code, roll_out
from edgert_deploy.rollout.rollout_record import Rollout
from edgert_deploy.rollout.rollout_store import RolloutStore
from edgert_deploy.rollout.waves import PARALLEL_MAX, Strategy

BYTES_PER_S_MIN = 1000.0
ROWS_MAX = 40  # devices; beyond, results are counted and errors are grouped


@click.command()
@click.argument("bundle", type=BundlePath())
@selector_argument()
@click.option(
    "--trial",
    "trial_s",
    type=Duration(1, 86_400),
    default="60s",
    show_default=True,
    help="A version that nobody marked good rolls back after this time.",
)
@limit_option
@click.option(
    "--watch",
    "watch_s",
    type=Duration(),
    help="How long the device watches the limits: 90s, 10m, 2h [default: 60s if there are limits].",
)
@click.option(
    "--unattended/--attended",
    default=None,
    help="Let devices keep the version by themselves once all limits held [default: only this host marks it good].",
)
@click.option(
    "--canary",
    type=click.IntRange(0),
    metavar="COUNT",
    default=0,
    help="Deploy to this many devices first; --wave takes shares.",
    show_default=True,
)
@click.option(
    "--wave", "waves", default="", metavar="SHARES", help="Then deploy in waves: 10%,50%,100% of the devices."
)
@click.option(
    "--max-failures",
    metavar="SHARE",
    help="Stop when more devices failed than this number (3) or share (5%) of the waves begun "
    "[default: 0 with --canary or --wave, else never].",
)
@click.option("--pause", "pause_s", type=Duration(), default="0s", help="Wait between two waves.")
@click.option(
    "--parallel",
    type=click.IntRange(1, PARALLEL_MAX),
    help="Devices at a time [default: by this host's cores and its limit of open files].",
)
@click.option(
    "--bwlimit",
    "bytes_per_s",
    type=Rate(BYTES_PER_S_MIN),
    help="Send each device at most this much: 500KB/s, 2MB/s [default: no limit].",
)
@click.option(
    "--delta-from",
    "delta_from",
    type=BundlePath(),
    multiple=True,
    metavar="OLD.edgert",
    help="A bundle that devices have and this host never shipped: only differences are sent. May be repeated.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be done; change nothing.")
@verbose_option
@inventory_option
@json_option
def deploy(
    bundle: Path,
    selector: str,
    trial_s: float,
    limits: tuple[str, ...],
    watch_s: float | None,
    unattended: bool | None,
    canary: int,
    waves: str,
    max_failures: str | None,
    pause_s: float,
    parallel: int | None,
    bytes_per_s: float | None,
    delta_from: tuple[Path, ...],
    dry_run: bool,
    verbose: bool,
    inventory: Inventory,
    as_json: bool,
) -> None:
    """Ship BUNDLE to the devices of SELECTOR and make it live, or roll back.

    Each device installs the bundle, loads it beside the live version, checks its golden samples, switches to it on
    trial, checks it again through the socket, and keeps it. If anything fails, the previous version stays live. A device
    that does not answer delays no other. A local device is bootstrapped on the way. A device takes one deployment of a
    model at a time and refuses a second one. Without SELECTOR, the devices are those of the project's `selector`.

    With --limit and --watch the device measures the version on trial. It rolls back by itself, with the reason, when a
    limit breaks or when this host does not confirm the version. Limits may also be in edgert.toml, table [trial].

    A rollout over a fleet may go in steps: some devices first (--canary), then waves with a pause between them. It
    stops when too many devices fail. Its progress is kept in the project: after Ctrl-C, a stop or a crash of this host,
    `edgert rollout resume` continues, also on another host of the team.

    Many devices show a table of those in progress on a terminal, and each tenth of them elsewhere; --verbose prints a
    line for each step. Beyond 40 devices the result is a summary, in which failures of one cause share a line.

    A device gets only the files that it lacks, and patches where it has an older version. An interrupted transfer
    continues where it stopped, also when you repeat the command.

    Ctrl-C stops at the next step and rolls back the devices that are not done. A second Ctrl-C detaches at once: a
    device in the middle then rolls back by itself when the trial ends.

    Exits with 0 if every device took the bundle, else with the code of the first that did not: 5 bundle refused,
    6 unreachable or another host key, 7 device error, 9 rolled back; 130 interrupted.

    \b
    Examples:
      edgert deploy digits.edgert kitchen
      edgert deploy digits.edgert canary,nuc-3 --trial 5m
      edgert deploy digits.edgert kitchen --limit p99_ms=8 --limit error_rate=0.1% --watch 10m
      edgert deploy digits.edgert all --canary 1 --wave 10%,50%,100% --max-failures 5% --pause 10m
      edgert deploy digits.edgert all --bwlimit 500KB/s
      edgert deploy digits.edgert all --dry-run --json
    """
    strategy = Strategy.parse(canary, waves, max_failures, parallel or at_once_here(), pause_s)
    devices = inventory.select(selector)
    offer = read_offer(bundle)
    trial_limits = limits_for(
        offer.manifest.model, find_project().trial, parse_limits(limits), watch_s, unattended, trial_s
    )
    request = request_for(bundle, offer, trial_s, bytes_per_s or 0.0, trial_limits, dry_run)
    for path in delta_from:
        request.deltas.objects.keep_bundle(path)
    if dry_run:
        _show_plan(request, strategy, devices, verbose, as_json)
        return
    manifest = request.offer.manifest
    store, project = open_rollouts(changes=True), find_project()
    rollout = Rollout(
        id="",
        bundle=project.name_of(bundle),
        digest=request.offer.digest,
        model=manifest.model,
        release=manifest.release,
        inventory=project.name_of(inventory.path),
        devices=tuple(device.name for device in devices),
        strategy=strategy,
        trial_s=trial_s,
        started_at=time.time(),
        bytes_per_s=request.bytes_per_s,
        limits=trial_limits,
        by=who(),
    )
    run_rollout(store, store.begin(rollout), request, devices, verbose, as_json)


def request_for(
    bundle: Path, offer: Offer, trial_s: float, bytes_per_s: float, limits: TrialLimits | None, dry_run: bool = False
) -> DeployRequest:
    """Return the request for devices of the inventory; one on this machine is bootstrapped first."""
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
        rollout = replace(store.read(rollout.id), devices=rollout.devices, by=who())
        request = replace(request, on_bytes=progress.sent)
        rollout = roll_out(store, rollout, request, devices, progress, on_outcome=progress.done)
    # A rollout that stopped between two waves has no errors, but devices are left.
    code = exit_code(rollout.errors) or (Interrupted.exit_code if rollout.left else 0)
    value = rollout_json(rollout) | {"ok": code == 0}
    first = next((error for error in rollout.errors if error is not None), None)
    if first is not None and len(devices) == 1:
        value["error"] = first.as_json()
    emit(value, rollout_table(rollout, every=verbose or len(devices) <= ROWS_MAX), as_json)
    click.get_current_context().exit(code)


def rollout_json(rollout: Rollout) -> dict[str, Any]:
    return {
        "rollout": {
            "id": rollout.id,
            "state": rollout.state.value,
            "reason": rollout.reason,
            "left": rollout.left,
            "by": rollout.by,
        },
        "bundle": {"model": rollout.model, "release": rollout.release, "digest": rollout.digest},
        "devices": [
            {**Outcome(name, Result.HELD).as_json(), **rollout.outcomes.get(name, {}), "device": name}
            for name in rollout.devices
        ],
    }


def rollout_table(rollout: Rollout, *, every: bool = True) -> str:
    """Return a row for each device, the errors, and the rollout's progress.

    Without `every`, the rows are results with the number of their devices, and errors of one cause share a line.
    """
    outcomes = rollout_json(rollout)["devices"]
    named = zip(rollout.devices, rollout.errors, strict=True)
    errors = [(name, error.code, error.message) for name, error in named if error is not None]
    if every:
        rows = [("DEVICE", "RESULT", "LIVE", "SECONDS")]
        for outcome in outcomes:
            live = "" if outcome["serving"] is None else f"{rollout.model} {outcome['serving']}"
            rows.append((outcome["device"], outcome["result"], live, f"{outcome['seconds']:.1f}"))
        lines = f"{columns(rows)}\n{error_lines(errors)}"
    else:
        counts = Counter(outcome["result"] for outcome in outcomes)
        totals = [("RESULT", "DEVICES"), *((result, str(count)) for result, count in counts.most_common())]
        lines = f"{columns(totals)}\n{errors_by_cause(errors)}"
        lines += f"every device: edgert rollout status {rollout.id}\n"
    lines += _warning_lines(outcomes)
    done = len(rollout.devices) - len(rollout.left)
    lines += f"{rollout.model} release {rollout.release}: {done} of {counted(len(rollout.devices), 'device')}"
    if rollout.left and len(rollout.devices) > 1:
        lines += f"; {rollout.state.value}" + (f": {rollout.reason}" if rollout.reason else "")
        lines += _next_steps(rollout)
    if any(outcome["warning"] for outcome in outcomes):
        lines += f"\nnext: edgert bundle diff shows what became worse; edgert rollback {rollout.model} DEVICE goes back"
    return lines


def _warning_lines(outcomes: Sequence[Mapping[str, Any]]) -> str:
    """Return a line for each warning, with the devices that it is about."""
    devices: dict[str, list[str]] = {}
    for outcome in outcomes:
        if outcome["warning"]:
            devices.setdefault(outcome["warning"], []).append(outcome["device"])
    return "".join(f"warning: {text}: {some_of(names, NAMES_MAX)}\n" for text, names in devices.items())


def _next_steps(rollout: Rollout) -> str:
    """Name only the commands that help: rolling back a device without the release undoes something else."""
    steps = [f"edgert rollout resume {rollout.id}"] if rollout.resumable else []
    if 0 < len(rollout.changed) <= ROWS_MAX:
        steps.append(f"edgert rollback {rollout.model} {','.join(rollout.changed)}")
    return f"\nnext: {', or '.join(steps)}" if steps else ""


def _show_plan(request: DeployRequest, strategy: Strategy, devices: list[Device], verbose: bool, as_json: bool) -> None:
    with RolloutProgress("plan", len(devices), request.stop, verbose=verbose) as progress:
        outcomes = deploy_each(request, devices, progress, at_once=strategy.parallel, on_outcome=progress.done)
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
        rows.append(
            (outcome.device, str(wave), outcome.result.value, size, " ".join(step.value for step in outcome.steps))
        )
    errors = [(o.device, o.error.code, o.error.message) for o in outcomes if o.error is not None]
    planned = sum(outcome.error is None for outcome in outcomes)
    text = f"{columns(rows)}\n{error_lines(errors)}{_warning_lines(value['devices'])}{manifest.model} release {manifest.release}: {planned} of {counted(len(outcomes), 'device')}"
    if request.limits is not None:
        text += f"\non trial: {request.limits.described()}"
    emit(value, text, as_json)
    click.get_current_context().exit(code)


def _make_ready(device: Device, transport: Transport, progress: LineSink) -> None:
    """Bootstrap a folder on this machine with the default key. Other devices need a decision of the user."""
    if device.kind.needs_runtime:
        raise NotBootstrapped(f"EdgeRT is not set up on {device.name}: edgert bootstrap {device.name}")
    # Here: importing a bootstrap takes as long as importing all else of a deployment.
    from edgert_deploy.bootstrap.bootstrap import bootstrap as set_up
    from edgert_deploy.bootstrap.plan import BootstrapOptions
    from edgert_deploy.cli.bootstrap import trusted_keys

    progress("bootstrapping this machine as a device, with the default key")
    set_up(device, load_profile(device.profile), BootstrapOptions(trusted_keys(("default",))), transport, progress)
