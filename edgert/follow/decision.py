"""What to do with one model of a channel, decided from the statement, the slots and the record. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from edgert.bundle.channel import Entry
from edgert.follow.record import Tried
from edgert.versions.slots import SlotState


class Do(Enum):
    """The next step with a model."""

    NOTHING = "nothing"
    WAIT = "wait"  # for the end of a trial
    FETCH = "fetch"  # fetch, install and activate
    ACTIVATE = "activate"  # it is installed


@dataclass(frozen=True)
class Decision:
    """A step, and its reason as text."""

    do: Do
    text: str


def decide(entry: Entry, slots: SlotState, tried: Tried | None) -> Decision:
    """Return what the follower does for `entry`, which selects this device. `tried` is the attempt with this entry."""
    name = f"release {entry.release} of {entry.model}"
    live = slots.live
    if live is not None and live.digest == entry.digest:
        return Decision(Do.WAIT, f"{name} is on trial") if slots.on_trial else Decision(Do.NOTHING, f"{name} is live")
    if slots.on_trial:
        return Decision(Do.WAIT, f"{name} waits for the trial of another release")
    installed = slots.staged and slots.spare is not None and slots.spare.digest == entry.digest
    if tried is not None and (tried.reason or not installed):
        return Decision(Do.NOTHING, f"{name} is not tried again: {_why(entry, slots, tried)}")
    if entry.halted:
        return Decision(Do.NOTHING, f"{name} is halted")
    if installed:
        return Decision(Do.ACTIVATE, f"{name} is installed")
    return Decision(Do.FETCH, f"{name} is wanted")


def _why(entry: Entry, slots: SlotState, tried: Tried) -> str:
    if tried.reason:
        return tried.reason
    if slots.rolled_back is not None and slots.rolled_back.digest == entry.digest:
        return f"it was rolled back ({slots.rolled_back.reason})"
    return "another release was made live here after it"
