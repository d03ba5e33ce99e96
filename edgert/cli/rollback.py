"""`edgertd rollback`."""

from __future__ import annotations

import click

from edgert.cli.claim import claim_option, under_claim
from edgert.cli.output import emit
from edgert.cli.slot_commands import follow, store_of
from edgert.config import StateDir
from edgert.errors import TransitionRefused
from edgert.versions.slots import SlotState, State


@click.command()
@click.argument("model")
@click.option("--force", is_flag=True, help="Also where the live release is one that a rollback came back to.")
@claim_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@click.pass_obj
def rollback(state: StateDir, model: str, force: bool, token: str, as_json: bool) -> None:
    """Go back to MODEL's good version before; or, where a new one is only installed, drop that.

    Done twice it would lead forward again, to the version that one went back from: that is refused.

    \b
    Example:
      edgertd rollback digits
    """
    with under_claim(state, token):
        store = store_of(state, model)
        before = store.read()
        if not force:
            refuse_forward(model, before)
        after = store.rollback()
        follow(state, model)
    was, release = _release(before), _release(after)
    text = f"{model}: release {was or 'none'} -> {release or 'none'}"
    if was == release:
        text = f"{model}: what was installed is dropped; release {release or 'none'} is live as before"
    emit({"model": model, "was": was, "release": release}, text, as_json)


def refuse_forward(model: str, slots: SlotState) -> None:
    """Raises TransitionRefused where going back would lead to a higher release than the one that serves."""
    active, other = slots.live, slots.spare
    if slots.state is not State.STEADY or active is None or other is None or not other.good:
        return
    if active.release < slots.ratchet and other.release > active.release:
        raise TransitionRefused(
            f"release {active.release} is live already after a rollback; deploy release {other.release} again to return "
            f"(or switch to what is in the other slot of {model}: --force)"
        )


def _release(slots: SlotState) -> int | None:
    version = slots.live
    return None if version is None else version.release
