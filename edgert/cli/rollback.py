"""`edgertd rollback`."""

from __future__ import annotations

import contextlib

import click

from edgert.checks.channel_status import ChannelEvent, send_event
from edgert.cli.claim import claim_option
from edgert.cli.output import emit, json_option
from edgert.cli.slot_commands import serve_live, store_of
from edgert.errors import EdgeRTError, TransitionRefused
from edgert.state_dir import StateDir
from edgert.versions.claims import under_claim
from edgert.versions.slots import BY_COMMAND, RolledBackVersion, Slots, SlotState


@click.command()
@click.argument("model")
@click.option("--force", is_flag=True, help="Switch even if the live release is the result of a rollback.")
@click.option("--reason", default=BY_COMMAND, show_default=True, metavar="TEXT", help="The reason, for the reports.")
@claim_option
@json_option
@click.pass_obj
def rollback(state: StateDir, model: str, force: bool, reason: str, token: str, as_json: bool) -> None:
    """Make MODEL's previous good version live again.

    If a new version is installed but not live, the command removes this version instead. The device refuses a second
    rollback, which would make the newer version live again.

    \b
    Example:
      edgertd rollback digits
    """
    with under_claim(state, token):
        store = store_of(state, model)
        before, after = store.rollback(lambda slots: None if force else refuse_forward(model, slots), reason)
        if after.rolled_back is not None and after.rolled_back != before.rolled_back:
            _report(state, model, after.rolled_back)
        serve_live(state, model)
    was, release = _release(before), _release(after)
    text = f"{model}: release {was or 'none'} -> {release or 'none'}"
    if was == release:
        text = f"{model}: the installed version is removed; release {release or 'none'} stays live"
    emit({"model": model, "was": was, "release": release}, text, as_json)


def refuse_forward(model: str, slots: Slots) -> None:
    """Raise TransitionRefused if a rollback would make a higher release live."""
    live, other = slots.live, slots.spare
    if slots.state is not SlotState.STEADY or live is None or other is None or not other.good:
        return
    if live.release < slots.ratchet and other.release > live.release:
        raise TransitionRefused(
            f"release {live.release} is live after a rollback: deploy release {other.release} again to return to it "
            f"(or use --force to switch to the other slot of {model})"
        )


def _report(state: StateDir, model: str, failed: RolledBackVersion) -> None:
    """Report the event `rolled_back` through the daemon. Without a daemon, the event is lost."""
    event = ChannelEvent("rolled_back", model, failed.release, reason=failed.reason)
    with contextlib.suppress(EdgeRTError):  # `serve_live` reports why the daemon does not answer
        send_event(state, event)


def _release(slots: Slots) -> int | None:
    version = slots.live
    return None if version is None else version.release
