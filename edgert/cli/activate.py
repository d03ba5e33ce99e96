"""`edgertd activate`."""

from __future__ import annotations

import click

from edgert.cli.claim import claim_option
from edgert.cli.output import emit, json_option, progress
from edgert.cli.quantity import Duration
from edgert.cli.slot_commands import serve_live, store_of
from edgert.config import read_config
from edgert.durations import TRIAL_S_MAX, duration_text
from edgert.state_dir import StateDir
from edgert.versions.claims import under_claim
from edgert.versions.trial_limits import LIMIT_NAMES, WATCH_S, TrialLimits, parse_limits


@click.command()
@click.argument("model")
@click.option(
    "--trial",
    "trial_s",
    type=Duration(1, TRIAL_S_MAX),
    default="60s",
    show_default=True,
    help="Time for mark-good; then the device rolls back. With limits, this time starts when their watch ends.",
)
@click.option(
    "--limit", "limits", multiple=True, metavar="NAME=VALUE", help=f"Watch a limit: {', '.join(LIMIT_NAMES)}."
)
@click.option("--watch", "watch_s", type=Duration(), help="Time to watch the limits [default: 60s with --limit].")
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

    The daemon loads the version and checks its golden answers in a separate process, while the old version serves. If
    the check fails, the old version stays live, and the command prints the reason.

    With --limit or --watch, the device watches the version as soon as the version serves. The device rolls back when a
    limit is broken or the worker ends. You can mark the version good once all limits held for the whole time.

    \b
    Examples:
      edgertd activate digits --trial 2m
      edgertd activate digits --limit p99_ms=8 --limit error_share=0.1% --watch 10m --unattended
    """
    if unattended and not limits and watch_s is None:
        raise click.UsageError("--unattended needs limits: add --limit or --watch")
    store = store_of(state, model)
    watched = _limits(limits, watch_s, unattended, trial_s)
    if watched is not None:
        from edgert.checks.trial_preparation import measurable_limits  # takes as long as all other imports of this file

        watched, notes = measurable_limits(watched, store, read_config(state))
        for note in notes:
            progress(f"not watched: {note}")
    with under_claim(state, token):
        slots = store.activate(trial_s, watched)
        serving = serve_live(state, model)
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
        keep = f"for {duration_text(trial_s)}; keep it with: edgertd mark-good {model}"
    else:
        keep = f"and watched for {duration_text(limits.watch_s)}; follow it with: edgertd trial {model} --wait"
    return f"release {release} of {model} is live on trial {keep}"
