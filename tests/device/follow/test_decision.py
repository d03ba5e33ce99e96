"""The follower's decision about a model, from the entry, the slots and the earlier attempt."""

from __future__ import annotations

from dataclasses import replace

import pytest

from edgert.bundle.channel import Entry
from edgert.follow.decision import Action, decide
from edgert.follow.record import Attempt, Record
from edgert.versions.slots import RolledBackVersion, Slots, SlotState, Version

NEW, OLD = "ab" * 32, "cd" * 32
ENTRY = Entry("digits", 8, NEW, "0" * 64, "1" * 64)
OLD_LIVE = Slots(SlotState.STEADY, "a", a=Version(7, OLD, good=True), ratchet=7)
INSTALLED = replace(OLD_LIVE, state=SlotState.STAGED, b=Version(8, NEW, good=False))
ON_TRIAL = replace(INSTALLED, state=SlotState.TRIAL, live_slot="b")
LIVE = Slots(SlotState.STEADY, "b", a=Version(7, OLD, good=True), b=Version(8, NEW, good=True), ratchet=8)
OTHER_ON_TRIAL = replace(ON_TRIAL, b=Version(9, "ef" * 32, good=False))
WENT_BACK = replace(OLD_LIVE, rolled_back=RolledBackVersion(8, NEW, "p99_ms is 9", 0.0))
BEGUN = Attempt("any")


@pytest.mark.parametrize(
    ("slots", "tried", "halted", "action"),
    [
        (Slots(), None, False, Action.FETCH),
        (OLD_LIVE, None, False, Action.FETCH),
        (OLD_LIVE, None, True, Action.NOTHING),
        (INSTALLED, None, False, Action.ACTIVATE),
        (INSTALLED, None, True, Action.NOTHING),
        (INSTALLED, BEGUN, False, Action.ACTIVATE),  # the follower ended between the record and the activation
        (INSTALLED, Attempt("any", "no thermometer"), False, Action.NOTHING),
        (ON_TRIAL, BEGUN, False, Action.WAIT),
        (ON_TRIAL, BEGUN, True, Action.WAIT),
        (OTHER_ON_TRIAL, None, False, Action.WAIT),
        (LIVE, BEGUN, False, Action.NOTHING),
        (LIVE, BEGUN, True, Action.NOTHING),
        (WENT_BACK, BEGUN, False, Action.NOTHING),
        (WENT_BACK, None, False, Action.FETCH),  # another entry with the same release
        (OLD_LIVE, BEGUN, False, Action.NOTHING),
        (OLD_LIVE, Attempt("any", "not for this device"), False, Action.NOTHING),
    ],
)
def test_the_decision_follows_from_the_slots_and_the_previous_attempt(
    slots: Slots, tried: Attempt | None, halted: bool, action: Action
) -> None:
    assert decide(replace(ENTRY, halted=halted), slots, tried).action is action


def test_the_reason_for_no_second_attempt_is_reported() -> None:
    assert "p99_ms is 9" in decide(ENTRY, WENT_BACK, BEGUN).text
    assert "not for this device" in decide(ENTRY, OLD_LIVE, Attempt("any", "not for this device")).text
    assert "another release" in decide(ENTRY, OLD_LIVE, BEGUN).text


def test_only_new_content_or_new_limits_or_a_new_number_make_a_new_attempt() -> None:
    record = Record().with_attempt(ENTRY)
    for same in (ENTRY, replace(ENTRY, share=0.5), replace(ENTRY, sites=("lab",)), replace(ENTRY, halted=True)):
        assert record.attempt_of(same) is not None
    for other in (
        replace(ENTRY, digest=OLD),
        replace(ENTRY, limits={"p99_ms": 9.0}),
        replace(ENTRY, watch_s=61.0),
        replace(ENTRY, attempt=2),
    ):
        assert record.attempt_of(other) is None
