"""`edgert deploy`: a bundle to devices, live or as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from edgert.errors import NotBootstrapped
from edgert_deploy.bootstrap import Wishes
from edgert_deploy.bootstrap import bootstrap as set_up
from edgert_deploy.cli.bootstrap import trusted_keys
from edgert_deploy.cli.fleet_options import columns, emit, error_lines, inventory_option, json_option, say
from edgert_deploy.inventory import Device, find_inventory
from edgert_deploy.profiles import load_profile
from edgert_deploy.rollout import Outcome, Rollout, Say, exit_code, read_offer
from edgert_deploy.rollout import deploy as roll_out
from edgert_deploy.transports import Transport, open_transport

FIRST = "stopping at the next step; devices that are not done go back to what they had. Ctrl-C again lets go at once"
SECOND = "let go: a device in the middle of it goes back by itself when the trial ends"


@click.command()
@click.argument("bundle", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--to", "selector", required=True, help="Names, groups or `all`, separated by commas.")
@click.option(
    "--trial-s",
    type=click.FloatRange(min=1, max=86400),
    default=60.0,
    show_default=True,
    help="After so many seconds a version that was not marked good ends by itself.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be done; change nothing.")
@inventory_option
@json_option
def deploy(
    bundle: Path, selector: str, trial_s: float, dry_run: bool, inventory_file: Path | None, as_json: bool
) -> None:
    """Ship BUNDLE to devices and make it live, or put back what was.

    On each device it is installed, loaded beside what serves, checked with its golden inputs, switched to on
    trial, asked again through the socket, and kept. Where anything fails, the version before serves on.
    A device that does not answer does not hold up the others. A local device that was never bootstrapped is
    made ready on the way. One deployment of a model works on a device at a time; another one is refused.

    Ctrl-C stops at the next step and puts back what was live on devices that are not done; again, it lets go at
    once: a device in the middle of it then goes back by itself when the trial ends.

    Exits with 0 where every device took it, else with the code of the first that did not: 5 the bundle was
    refused, 6 unreachable or another host key, 7 the device could not, 9 rolled back; 130 interrupted.

    \b
    Examples:
      edgert deploy digits.edgert --to kitchen
      edgert deploy digits.edgert --to canary,nuc-3 --trial-s 300
      edgert deploy digits.edgert --to all --dry-run --json
    """
    devices = find_inventory(inventory_file).select(selector)
    offer = read_offer(bundle)
    rollout = Rollout(bundle, offer, trial_s, open_transport, _make_ready, dry_run)
    with rollout.stop.on_interrupt(FIRST, SECOND):
        outcomes = roll_out(rollout, devices, say)
    code = exit_code(outcomes)
    manifest = offer.manifest
    value: dict[str, Any] = {
        "ok": code == 0,
        "bundle": {"model": manifest.model, "release": manifest.release, "digest": offer.digest},
        "devices": [outcome.as_json() for outcome in outcomes],
    }
    first = next((outcome.error for outcome in outcomes if outcome.error is not None), None)
    if first is not None and len(outcomes) == 1:
        value["error"] = {"code": first.code, "message": first.message}
    emit(value, _table(manifest.model, manifest.release, outcomes), as_json)
    click.get_current_context().exit(code)


def _make_ready(device: Device, transport: Transport, say_line: Say) -> None:
    """A folder on this machine needs no decision of the user's: it gets the default key. Others do."""
    if device.transport != "local":
        raise NotBootstrapped(f"EdgeRT is not set up on {device.name}: edgert bootstrap {device.name}")
    say_line("setting this machine up as a device, with the default key")
    set_up(device, load_profile(device.profile), Wishes(trusted_keys(("default",))), transport, say_line)


def _table(model: str, release: int, outcomes: list[Outcome]) -> str:
    rows = [("DEVICE", "RESULT", "LIVE", "SECONDS", "")]
    for outcome in outcomes:
        detail = " ".join(step.value for step in outcome.steps) if outcome.result == "planned" else ""
        live = "" if outcome.serving is None else f"{model} {outcome.serving}"
        rows.append((outcome.device, outcome.result, live, f"{outcome.seconds:.1f}", detail))
    done = sum(outcome.error is None for outcome in outcomes)
    errors = [(outcome.device, outcome.error.code, outcome.error.message) for outcome in outcomes if outcome.error]
    return f"{columns(rows)}\n{error_lines(errors)}{model} release {release}: {done} of {len(outcomes)} devices"
