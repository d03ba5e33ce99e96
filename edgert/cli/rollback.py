"""`edgertd rollback`."""

from __future__ import annotations

import click

from edgert.cli.output import emit
from edgert.cli.slot_commands import follow, store_of
from edgert.config import StateDir


@click.command()
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.pass_obj
def rollback(state: StateDir, model: str, as_json: bool) -> None:
    """Go back to MODEL's good version before; or, where a new one is only installed, drop that.

    \b
    Example:
      edgertd rollback digits
    """
    slots = store_of(state, model).rollback()
    follow(state, model)
    version = slots.version(slots.active)
    release = None if version is None else version.release
    text = f"nothing serves {model} now" if release is None else f"release {release} of {model} is live again"
    emit({"model": model, "release": release}, text, as_json)
