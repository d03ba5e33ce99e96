"""`edgertd mark-good`."""

from __future__ import annotations

import click

from edgert.cli.claim import claim_option
from edgert.cli.output import emit, json_option
from edgert.cli.slot_commands import serve_live, store_of
from edgert.state_dir import StateDir
from edgert.versions.claims import under_claim


@click.command("mark-good")
@click.argument("model")
@click.option("--force", is_flag=True, help="Keep the version even if its limits have not held for the whole time.")
@claim_option
@json_option
@click.pass_obj
def mark_good(state: StateDir, model: str, force: bool, token: str, as_json: bool) -> None:
    """End the trial of MODEL and keep the live version. The device then refuses older releases.

    If the trial has limits, they must have held for the whole time.

    \b
    Example:
      edgertd check digits && edgertd mark-good digits
    """
    with under_claim(state, token):
        slots = store_of(state, model).mark_good(force=force)
        serve_live(state, model)
    version = slots.live
    assert version is not None
    emit({"model": model, "release": version.release}, f"release {version.release} of {model} is good", as_json)
