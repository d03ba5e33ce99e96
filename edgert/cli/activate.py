"""`edgertd activate`."""

from __future__ import annotations

import click

from edgert.checks.trial_preparation import fit_for
from edgert.cli.claim import claim_option, under_claim
from edgert.cli.output import emit, progress
from edgert.cli.slot_commands import follow, store_of
from edgert.config import StateDir, read_config
from edgert.versions.trial_limits import LIMIT_NAMES, WATCH_S, TrialLimits, parse_limits


@click.command()
@click.argument("model")
@click.option(
    "--trial-s",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    help="Seconds after which the version before returns by itself, unless mark-good came; with limits, after they held.",
)
@click.option(
    "--limit", "limits", multiple=True, metavar="NAME=VALUE", help=f"Watch a limit: {', '.join(LIMIT_NAMES)}."
)
@click.option(
    "--watch-s", type=click.FloatRange(min=0, min_open=True), help="For how many seconds [default: 60 with --limit]."
)
@click.option("--unattended", is_flag=True, help="Mark it good by itself where all limits held.")
@claim_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
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

    The daemon loads it and checks its golden inputs in a process of its own while the old version serves.
    If that fails, the old version stays and the command says why.

    With limits or a time to watch, the device watches the version by itself from the moment it serves, and goes back
    once a limit is broken or the worker ends. Until all held for the whole time it cannot be marked good.

    \b
    Examples:
      edgertd activate digits --trial-s 120
      edgertd activate digits --limit p99_ms=8 --limit error_rate=0.1% --watch-s 600 --unattended
    """
    if unattended and not limits and watch_s is None:
        raise click.UsageError("--unattended keeps what was watched: give --limit or --watch-s as well")
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
    assert version is not None  # activate leaves an active version or raises
    emit(
        {"model": model, "release": version.release, "state": slots.state.value, "serving": serving},
        _text(model, version.release, trial_s, watched),
        as_json,
    )


def _limits(limits: tuple[str, ...], watch_s: float | None, unattended: bool, trial_s: float) -> TrialLimits | None:
    if not limits and watch_s is None:
        return None
    given = {name: value for name, value in parse_limits(limits).items() if value is not None}
    return TrialLimits(given, WATCH_S if watch_s is None else watch_s, unattended, trial_s)


def _text(model: str, release: int, trial_s: float, limits: TrialLimits | None) -> str:
    if limits is None:
        keep = f"for {trial_s:.0f} s; keep it with: edgertd mark-good {model}"
    else:
        keep = f"and watched for {limits.watch_s:g} s; see how it does with: edgertd trial {model} --wait"
    return f"release {release} of {model} is live on trial {keep}"
