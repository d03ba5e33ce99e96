"""Decides the next step with a channel's model from statement, slots and record, without side effects."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from edgert.bundle.channel import Entry
from edgert.follow.record import Attempt
from edgert.versions.slots import Slots


class Action(Enum):
    """The next step with a model."""

    NOTHING = "nothing"
    WAIT = "wait"  # wait for the end of a trial
    FETCH = "fetch"  # fetch, install and activate
    ACTIVATE = "activate"  # activate the installed release


@dataclass(frozen=True)
class Decision:
    """An action and its reason. `wanted` tells whether the channel's release should be live here."""

    action: Action
    text: str
    wanted: bool = True


def decide(entry: Entry, slots: Slots, tried: Attempt | None) -> Decision:
    """Return the follower's next action for `entry`, a release of the channel for this device.

    `slots` are the model's slots. `tried` is the earlier attempt with the same entry, if there was one.
    """
    name = f"release {entry.release} of {entry.model}"
    live = slots.live
    if live is not None and live.digest == entry.digest:
        return (
            Decision(Action.WAIT, f"{name} is on trial")
            if slots.on_trial
            else Decision(Action.NOTHING, f"{name} is live")
        )
    if slots.on_trial:
        return Decision(Action.WAIT, f"{name} waits for the trial of another release")
    installed = slots.staged and slots.spare is not None and slots.spare.digest == entry.digest
    if tried is not None and (tried.reason or not installed):
        why = tried.reason or _rollback(entry, slots)
        text = f"{name} is not tried again: {why or 'another release became live here after it'}"
        return Decision(Action.NOTHING, text, wanted=bool(why))
    if entry.halted:
        return Decision(Action.NOTHING, f"{name} is halted", wanted=False)
    if installed:
        return Decision(Action.ACTIVATE, f"{name} is installed")
    return Decision(Action.FETCH, f"{name} is wanted")


def _rollback(entry: Entry, slots: Slots) -> str:
    failed = slots.rolled_back
    return f"it was rolled back ({failed.reason})" if failed is not None and failed.digest == entry.digest else ""
