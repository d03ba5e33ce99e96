"""`edgertd mark-good`."""

from __future__ import annotations

import click

from edgert.cli.claim import claim_option, under_claim
from edgert.cli.output import emit
from edgert.cli.slot_commands import follow, store_of
from edgert.config import StateDir


@click.command("mark-good")
@click.argument("model")
@click.option("--force", is_flag=True, help="Also where its limits have not held for long enough yet.")
@claim_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.pass_obj
def mark_good(state: StateDir, model: str, force: bool, token: str, as_json: bool) -> None:
    """End the trial of MODEL's live version: it stays, and older releases are refused from now on.

    A trial with limits must have kept them for as long as it was to be watched.

    \b
    Example:
      edgertd check digits && edgertd mark-good digits
    """
    with under_claim(state, token):
        slots = store_of(state, model).mark_good(force=force)
        follow(state, model)
    version = slots.live
    assert version is not None
    emit({"model": model, "release": version.release}, f"release {version.release} of {model} is good", as_json)
