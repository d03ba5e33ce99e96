"""`edgertd activate`."""

from __future__ import annotations

import click

from edgert.cli.claim import claim_option, under_claim
from edgert.cli.output import emit
from edgert.cli.slot_commands import follow, store_of
from edgert.config import StateDir


@click.command()
@click.argument("model")
@click.option(
    "--trial-s",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    help="Seconds after which the version before returns by itself, unless mark-good came.",
)
@claim_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.pass_obj
def activate(state: StateDir, model: str, trial_s: float, token: str, as_json: bool) -> None:
    """Make the installed version of MODEL live, on trial.

    The daemon loads it and checks its golden inputs in a process of its own while the old version serves.
    If that fails, the old version stays and the command says why.

    \b
    Example:
      edgertd activate digits --trial-s 120
    """
    with under_claim(state, token):
        slots = store_of(state, model).activate(trial_s)
        serving = follow(state, model)
    version = slots.version(slots.active)
    assert version is not None  # activate leaves an active version or raises
    emit(
        {"model": model, "release": version.release, "state": slots.state.value, "serving": serving},
        f"release {version.release} of {model} is live on trial for {trial_s:.0f} s; keep it with: edgertd mark-good {model}",
        as_json,
    )
