"""Every row of the slots' transition table, and the JSON of the slots."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from edgert.errors import TransitionRefused
from edgert.versions.boot_clock import BootClock
from edgert.versions.slots import (
    ON_TRIAL,
    TRANSITIONS,
    RolledBackVersion,
    SlotEvent,
    Slots,
    SlotState,
    TrialEnd,
    Version,
    step,
)
from edgert.versions.trial_limits import TrialLimits

ONE, TWO, THREE = (Version(n, f"digest-{n}", good=False) for n in (1, 2, 3))


def reachable() -> Iterator[Slots]:
    """Yield slots in every state, reached by real events."""
    trial = TrialEnd("boot-1", 2000.0)
    empty = Slots()
    staged = step(empty, SlotEvent.INSTALL, version=ONE)
    on_trial = step(staged, SlotEvent.ACTIVATE, trial=trial)
    steady = step(on_trial, SlotEvent.MARK_GOOD)
    staged_two = step(steady, SlotEvent.INSTALL, version=TWO)
    trial_two = step(staged_two, SlotEvent.ACTIVATE, trial=trial)
    steady_two = step(trial_two, SlotEvent.MARK_GOOD)
    yield from (empty, staged, on_trial, steady, staged_two, trial_two, steady_two)


@pytest.mark.parametrize(
    ("state", "event"), list(itertools.product(reachable(), SlotEvent)), ids=lambda v: getattr(v, "state", v)
)
def test_every_state_and_event_lead_to_the_state_of_the_table(state: Slots, event: SlotEvent) -> None:
    expected = TRANSITIONS.get((state.state, event))
    no_way_back = event is SlotEvent.ROLLBACK and state.state is SlotState.STEADY and state.spare is None
    if expected is None or no_way_back:
        with pytest.raises(TransitionRefused):
            step(state, event, version=THREE, trial=TrialEnd("boot-1", 1.0))
        return
    after = step(state, event, version=THREE, trial=TrialEnd("boot-1", 1.0))
    assert after.state is expected
    assert (after.trial is not None) == (after.state in ON_TRIAL)
    assert (after.live is None) == (after.state in (SlotState.EMPTY, SlotState.FIRST_STAGED))
    assert after.ratchet >= state.ratchet
    good_before = {v for v in (state.a, state.b) if v is not None and v.good}
    if state.state in (SlotState.STAGED, SlotState.TRIAL, SlotState.STEADY) and event is not SlotEvent.INSTALL:
        # A good version is never lost, whatever happens to a new version.
        assert good_before <= {after.a, after.b}


def test_a_failed_trial_rolls_back_to_the_good_version_and_drops_the_bad_version() -> None:
    trial = list(reachable())[5]
    after = step(trial, SlotEvent.ROLLBACK)
    assert after.live == Version(1, "digest-1", good=True)
    assert after.spare is None
    assert after.rolled_back is not None
    assert (after.rolled_back.release, after.limits) == (2, None)


def test_a_second_rollback_undoes_the_first() -> None:
    steady_two = list(reachable())[6]
    back = step(steady_two, SlotEvent.ROLLBACK)
    assert back.live == Version(1, "digest-1", good=True)
    assert back.ratchet == 2
    assert replace(step(back, SlotEvent.ROLLBACK), rolled_back=None) == steady_two


def test_a_state_is_read_back_from_json_unchanged() -> None:
    full = Slots(
        SlotState.TRIAL, "b", ONE, TWO, TrialEnd("boot-1", 2000.0), 1, TrialLimits({"p99_ms": 8.0}),
        RolledBackVersion(3, "digest-3", "too slow", 5.0),
    )  # fmt: skip
    for state in (full, *reachable()):
        assert Slots.from_json(json.loads(json.dumps(state.as_json()))) == state


def test_an_expired_trial_has_its_reason() -> None:
    clock = BootClock()
    trial = TrialEnd(clock.boot_id, 0.0)
    limits = TrialLimits({}, confirm_s=60.0)
    reasons = {
        "the device was restarted": Slots(trial=TrialEnd("another boot", 0.0)),
        "did not confirm the version within 60 s": Slots(trial=trial, limits=replace(limits, passed=True)),
        "could not be judged": Slots(trial=trial, limits=limits),
        "was not confirmed in time": Slots(trial=trial),
    }
    for reason, state in reasons.items():
        assert reason in state.why_expired(clock)
