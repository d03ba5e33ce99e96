"""`edgertd activate`."""

from __future__ import annotations

import click

from edgert.checks.trial_preparation import fit_for
from edgert.cli.claim import claim_option
from edgert.cli.number import Number
from edgert.cli.output import emit, json_option, progress
from edgert.cli.slot_commands import follow, store_of
from edgert.config import read_config
from edgert.state_dir import StateDir
from edgert.versions.claims import under_claim
from edgert.versions.trial_limits import LIMIT_NAMES, WATCH_S, TrialLimits, parse_limits


@click.command()
@click.argument("model")
@click.option(
    "--trial-s",
    type=Number(min=1),
    default=60.0,
    show_default=True,
    help="Seconds until the device rolls back without mark-good; with limits, counted from when they held.",
)
@click.option(
    "--limit", "limits", multiple=True, metavar="NAME=VALUE", help=f"Watch a limit: {', '.join(LIMIT_NAMES)}."
)
@click.option(
    "--watch-s",
    type=Number(min=0, min_open=True),
    help="How many seconds the limits are watched [default: 60 with --limit].",
)
@click.option("--unattended", is_flag=True, help="Mark the version good without the host once all limits held.")
@claim_option
@json_option
@click.pass_obj
def activate(
    state: StateDir,
    model: str,
    trial_s: float,
    limits: tuple[str, ...],
    watch_s: float | None,
    unattended: bool,
    token: str,
    as_json: bool,
) -> None:
    """Make the installed version of MODEL live, on trial.

    The daemon loads it and checks its golden answers in a process of its own while the old version serves. If that
    fails, the old version stays live, and the command prints the reason.

    With --limit or --watch-s, the device watches the version from the moment it serves. It rolls back when a limit is
    broken or the worker ends. You can mark the version good once all limits held for the whole time.

    \b
    Examples:
      edgertd activate digits --trial-s 120
      edgertd activate digits --limit p99_ms=8 --limit error_rate=0.1% --watch-s 600 --unattended
    """
    if unattended and not limits and watch_s is None:
        raise click.UsageError("--unattended needs limits: add --limit or --watch-s")
    store = store_of(state, model)
    watched = _limits(limits, watch_s, unattended, trial_s)
    if watched is not None:
        watched, left_out = fit_for(watched, store, read_config(state))
        for note in left_out:
            progress(f"not watched: {note}")
    with under_claim(state, token):
        slots = store.activate(trial_s, watched)
        serving = follow(state, model)
    version = slots.live
    assert version is not None
    emit(
        {"model": model, "release": version.release, "state": slots.state.value, "serving": serving},
        _text(model, version.release, trial_s, watched),
        as_json,
    )


def _limits(limits: tuple[str, ...], watch_s: float | None, unattended: bool, trial_s: float) -> TrialLimits | None:
    if not limits and watch_s is None:
        return None
    bounds = {name: value for name, value in parse_limits(limits).items() if value is not None}
    return TrialLimits(bounds, WATCH_S if watch_s is None else watch_s, unattended, trial_s)


def _text(model: str, release: int, trial_s: float, limits: TrialLimits | None) -> str:
    if limits is None:
        keep = f"for {trial_s:.0f} s; keep it with: edgertd mark-good {model}"
    else:
        keep = f"and watched for {limits.watch_s:g} s; follow it with: edgertd trial {model} --wait"
    return f"release {release} of {model} is live on trial {keep}"
