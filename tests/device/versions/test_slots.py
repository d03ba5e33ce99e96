"""A/B slots: every row of the table, and what is true after a crash at any point."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgert.errors import ConfigInvalid, SlotsBusy, StorageFailed, TransitionRefused
from edgert.versions.slots import (
    CUT_OFF,
    ON_TRIAL,
    TRANSITIONS,
    Event,
    SlotState,
    SlotStore,
    State,
    Trial,
    Version,
    step,
)
from edgert.versions.trial_limits import FILL_S_MAX, TrialLimits


class TestClock:
    """A boot clock that a test moves."""

    __test__ = False
    boot_id = "boot-1"
    seconds = 1000.0

    def now_s(self) -> float:
        return self.seconds


ONE, TWO, THREE = (Version(n, f"digest-{n}", good=False) for n in (1, 2, 3))


def reachable() -> Iterator[SlotState]:
    """Every kind of slot state, each reached by the events that lead there."""
    trial = Trial("boot-1", 2000.0)
    empty = SlotState()
    staged = step(empty, Event.INSTALL, version=ONE)
    on_trial = step(staged, Event.ACTIVATE, trial=trial)
    steady = step(on_trial, Event.MARK_GOOD)
    staged_two = step(steady, Event.INSTALL, version=TWO)
    trial_two = step(staged_two, Event.ACTIVATE, trial=trial)
    steady_two = step(trial_two, Event.MARK_GOOD)
    yield from (empty, staged, on_trial, steady, staged_two, trial_two, steady_two)


@pytest.mark.parametrize(
    ("state", "event"), list(itertools.product(reachable(), Event)), ids=lambda v: getattr(v, "state", v)
)
def test_every_row_of_the_table(state: SlotState, event: Event) -> None:
    expected = TRANSITIONS.get((state.state, event))
    no_way_back = event is Event.ROLLBACK and state.state is State.STEADY and state.version(state.spare) is None
    if expected is None or no_way_back:
        with pytest.raises(TransitionRefused):
            step(state, event, version=THREE, trial=Trial("boot-1", 1.0))
        return
    after = step(state, event, version=THREE, trial=Trial("boot-1", 1.0))
    assert after.state is expected
    assert (after.trial is not None) == (after.state in ON_TRIAL)
    assert (after.active is None) == (after.state in (State.EMPTY, State.FIRST_STAGED))
    assert after.ratchet >= state.ratchet
    good_before = {v for v in (state.a, state.b) if v is not None and v.good}
    if state.state in (State.STAGED, State.TRIAL, State.STEADY) and event is not Event.INSTALL:
        # Whatever happens to a new version, a good one is never lost to it.
        assert good_before <= {after.a, after.b}


def test_a_failed_trial_returns_to_the_good_version_and_forgets_the_bad_one() -> None:
    trial = list(reachable())[5]
    after = step(trial, Event.ROLLBACK)
    assert after.version(after.active) == Version(1, "digest-1", good=True)
    assert after.version(after.spare) is None
    assert after.returned is not None
    assert (after.returned.release, after.gate) == (2, None)


def test_rolling_back_twice_returns_to_where_one_was() -> None:
    steady_two = list(reachable())[6]
    back = step(steady_two, Event.ROLLBACK)
    assert back.version(back.active) == Version(1, "digest-1", good=True)
    assert back.ratchet == 2
    assert replace(step(back, Event.ROLLBACK), returned=None) == steady_two


@pytest.fixture
def store(tmp_path: Path) -> SlotStore:
    return SlotStore(tmp_path / "m", TestClock())  # type: ignore[arg-type]  # the seam is two members


def stage(store: SlotStore, version: Version) -> None:
    with store.locked():
        folder = store.folder / "stage"
        folder.mkdir()
        (folder / "content").write_text(version.digest)
        store.put_staged(version)


def content(store: SlotStore) -> str:
    active = store.read().active
    assert active is not None
    return (store.slot_folder(active) / "content").read_text()


def test_limits_that_are_watched_stand_between_a_trial_and_its_end(store: SlotStore) -> None:
    stage(store, ONE)
    store.activate(60.0, TrialLimits({"p99_ms": 8.0}, 600.0, confirm_s=60.0))
    assert store.read().trial == Trial("boot-1", 1000.0 + 60.0 + 600.0 + FILL_S_MAX)
    with pytest.raises(TransitionRefused, match="edgertd trial --wait"):
        store.mark_good()
    assert store.begin_watch()
    assert not store.begin_watch(), "it was begun: that watch was cut off"
    with pytest.raises(TransitionRefused, match="not on trial any more"):
        store.pass_gate("another")
    store.pass_gate(ONE.digest)
    assert store.read().trial == Trial("boot-1", 1000.0 + 60.0)
    marked = store.mark_good()
    assert (marked.state, marked.gate, marked.returned) == (State.STEADY, None, None)


def test_a_trial_fails_for_the_version_that_is_on_trial_alone(store: SlotStore) -> None:
    stage(store, ONE)
    assert not store.fail_trial(ONE.digest, "not on trial yet")
    store.activate(60.0)
    store.mark_good()
    stage(store, TWO)
    store.activate(60.0)
    assert not store.fail_trial(ONE.digest, "it is another one's trial")
    assert store.fail_trial(TWO.digest, "it did not do")
    after = store.read()
    assert (after.version(after.active), after.returned and after.returned.reason) == (
        replace(ONE, good=True),
        "it did not do",
    )
    assert not store.fail_trial(TWO.digest, "somebody was faster")
    assert store.read() == after


@pytest.mark.parametrize("trial_s", [math.nan, math.inf, 0.0])
def test_a_trial_has_an_end(store: SlotStore, trial_s: float) -> None:
    stage(store, ONE)
    with pytest.raises(ConfigInvalid, match="at most 86400 s"):
        store.activate(trial_s)
    store.activate(60.0, TrialLimits({}, 10.0, confirm_s=1e9))
    store.pass_gate(ONE.digest)
    assert store.read().trial == Trial("boot-1", 1000.0 + 86400)
    assert Trial("boot-1", math.nan).over(store.clock)


def test_limits_of_a_newer_runtime_that_this_one_cannot_judge_are_a_watch_that_was_cut_off(store: SlotStore) -> None:
    stage(store, ONE)
    store.activate(60.0, TrialLimits({"p99_ms": 8.0}))
    path = store.folder / "state.json"
    path.write_text(path.read_text().replace("p99_ms", "joules"))
    assert not store.begin_watch()
    assert not store.expire_trial()
    assert store.expire_trial(unwatched=True)
    returned = store.read().returned
    assert returned is not None
    assert returned.reason == CUT_OFF


def test_a_state_without_limits_and_reasons_is_read_as_an_earlier_version_wrote_it(store: SlotStore) -> None:
    stage(store, ONE)
    value = json.loads((store.folder / "state.json").read_text())
    for name in ("gate", "returned"):
        del value[name]
    (store.folder / "state.json").write_text(json.dumps(value))
    assert store.read().state is State.FIRST_STAGED


def test_two_releases_alternate_between_the_slots(store: SlotStore) -> None:
    for version in (ONE, TWO, THREE):
        stage(store, version)
        store.activate(60)
        assert content(store) == version.digest
        store.mark_good()
    assert store.rollback().version(store.read().active) == Version(2, "digest-2", good=True)
    assert content(store) == "digest-2"


def test_a_trial_ends_by_itself_when_its_time_is_over(store: SlotStore) -> None:
    stage(store, ONE)
    store.activate(60)
    store.mark_good()
    stage(store, TWO)
    store.activate(60)
    assert not store.expire_trial()
    store.clock.seconds += 61  # type: ignore[attr-defined]
    assert store.expire_trial()
    assert content(store) == "digest-1"


def test_a_reboot_ends_a_trial(store: SlotStore) -> None:
    stage(store, ONE)
    store.activate(60)
    store.clock.boot_id = "boot-2"
    assert store.expire_trial()
    assert store.read().state is State.EMPTY


def test_what_a_newer_runtime_wrote_beside_it_is_passed_over(store: SlotStore) -> None:
    """After its trial failed, the runtime before reads this file again."""
    before = SlotState(State.TRIAL, "b", ONE, TWO, Trial("boot-1", 2000.0), 1)
    store.folder.mkdir(parents=True, exist_ok=True)
    store.commit(before)
    path = store.folder / "state.json"
    value = json.loads(path.read_text())
    for part in (value, value["a"], value["b"], value["trial"]):
        part["of_tomorrow"] = 1
    path.write_text(json.dumps(value))
    assert store.read() == before


@pytest.mark.parametrize(
    "damage",
    [
        lambda whole: "{",
        lambda whole: "[]",
        lambda whole: "[" * 100_000,
        lambda whole: json.dumps({**whole, "a": "x"}),
        lambda whole: json.dumps({**whole, "active": "c"}),
        lambda whole: json.dumps({**whole, "ratchet": math.inf}),
        lambda whole: json.dumps({**whole, "trial": {"boot_id": "b", "ends_at_s": "soon"}}),
    ],
)
def test_a_damaged_state_file_is_an_error_that_says_what_to_do(
    store: SlotStore, damage: Callable[[dict[str, Any]], str]
) -> None:
    stage(store, ONE)
    path = store.folder / "state.json"
    path.write_text(damage(json.loads(path.read_text())))
    with pytest.raises(StorageFailed, match="deploy the model again"):
        store.read()


def test_who_may_not_wait_is_told_that_the_slots_are_busy(store: SlotStore) -> None:
    stage(store, ONE)
    with store.locked(), pytest.raises(SlotsBusy):
        store.rollback(wait=False)
