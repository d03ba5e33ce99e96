"""The slots on disk after each command, after a reboot, with a damaged file, and after a newer runtime."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgert.errors import ConfigInvalid, SlotsBusy, StorageFailed, TransitionRefused
from edgert.versions.boot_clock import BootClock
from edgert.versions.slot_store import NOT_WRITTEN, SlotStore
from edgert.versions.slots import CUT_OFF, Slots, SlotState, TrialEnd, Version
from edgert.versions.trial_limits import FILL_S_MAX, TrialLimits
from tests.support.devices import nothing_may_be_written

ONE, TWO, THREE = (Version(n, f"digest-{n}", good=False) for n in (1, 2, 3))


class Clock(BootClock):
    """A boot clock that a test moves."""

    def __init__(self) -> None:
        self.boot_id = "boot-1"
        self.seconds = 1000.0

    def now_s(self) -> float:
        return self.seconds


@pytest.fixture
def store(tmp_path: Path) -> SlotStore:
    return SlotStore(tmp_path / "m", Clock())


def stage(store: SlotStore, version: Version) -> None:
    with store.locked():
        folder = store.folder / "stage"
        folder.mkdir()
        (folder / "content").write_text(version.digest)
        store.put_staged(version)


def content(store: SlotStore) -> str:
    return (store.live_folder(store.read()) / "content").read_text()


def test_a_trial_with_limits_is_marked_good_only_after_they_held(store: SlotStore) -> None:
    stage(store, ONE)
    store.activate(60.0, TrialLimits({"p99_ms": 8.0}, 600.0, confirm_s=60.0))
    assert store.read().trial == TrialEnd("boot-1", 1000.0 + 60.0 + 600.0 + FILL_S_MAX)
    with pytest.raises(TransitionRefused, match="edgertd trial --wait"):
        store.mark_good()
    assert store.start_watch()
    assert not store.start_watch(), "it was started before: that watch was cut off"
    with pytest.raises(TransitionRefused, match="no longer on trial"):
        store.pass_limits("another")
    store.pass_limits(ONE.digest)
    assert store.read().trial == TrialEnd("boot-1", 1000.0 + 60.0)
    marked = store.mark_good()
    assert (marked.state, marked.limits, marked.rolled_back) == (SlotState.STEADY, None, None)


def test_a_trial_fails_for_the_version_that_is_on_trial_alone(store: SlotStore) -> None:
    stage(store, ONE)
    assert not store.fail(ONE.digest, "not on trial yet")
    store.activate(60.0)
    store.mark_good()
    stage(store, TWO)
    store.activate(60.0)
    assert not store.fail(ONE.digest, "it is another one's trial")
    assert store.fail(TWO.digest, "it did not do")
    after = store.read()
    assert (after.live, after.rolled_back and after.rolled_back.reason) == (
        replace(ONE, good=True),
        "it did not do",
    )
    assert not store.fail(TWO.digest, "somebody was faster")
    assert store.read() == after


def test_a_good_version_that_fails_is_replaced_by_a_good_version_that_is_trusted(store: SlotStore) -> None:
    for version in (ONE, TWO):
        stage(store, version)
        store.activate(60.0)
        store.mark_good()
    with pytest.raises(TransitionRefused, match="no earlier version is left for a rollback"):
        store.fail(TWO.digest, "it crashed", {ONE.digest})
    assert not store.fail(TWO.digest, "it broke a limit of its trial, which a command has ended", of_trial=True)
    assert store.fail(TWO.digest, "it crashed")
    assert store.read().live == replace(ONE, good=True)
    stage(store, replace(TWO, release=3))
    with pytest.raises(TransitionRefused, match="no earlier version is left for a rollback"):
        store.fail(ONE.digest, "it crashed: what is staged stays")


@pytest.mark.parametrize("trial_s", [math.nan, math.inf, 0.0, 24 * 3600.0 + 1])
def test_the_time_of_a_trial_is_limited(store: SlotStore, trial_s: float) -> None:
    stage(store, ONE)
    with pytest.raises(ConfigInvalid, match="at most 86400 s"):
        store.activate(trial_s)
    store.activate(60.0, TrialLimits({}, 10.0, confirm_s=1e9))
    store.pass_limits(ONE.digest)
    assert store.read().trial == TrialEnd("boot-1", 1000.0 + 86400)
    assert not TrialEnd("boot-1", math.nan).left_s(store.clock)


def test_limits_that_this_runtime_does_not_know_end_the_trial_as_a_watch_that_was_cut_off(store: SlotStore) -> None:
    stage(store, ONE)
    store.activate(60.0, TrialLimits({"p99_ms": 8.0}))
    path = store.folder / "state.json"
    path.write_text(path.read_text().replace("p99_ms", "joules"))
    assert not store.start_watch()
    assert not store.expire_trial()
    assert store.expire_trial(unwatched=True)
    rolled_back = store.read().rolled_back
    assert rolled_back is not None
    assert rolled_back.reason == CUT_OFF


def test_two_releases_alternate_between_the_slots(store: SlotStore) -> None:
    for version in (ONE, TWO, THREE):
        stage(store, version)
        store.activate(60)
        assert content(store) == version.digest
        store.mark_good()
    assert store.rollback()[1].live == Version(2, "digest-2", good=True)
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
    assert store.read().state is SlotState.EMPTY


def test_keys_of_the_file_that_a_newer_runtime_added_are_ignored(store: SlotStore) -> None:
    """After the failed trial of a newer runtime, the previous runtime reads the newer runtime's file."""
    before = Slots(SlotState.TRIAL, "b", ONE, TWO, TrialEnd("boot-1", 2000.0), 1)
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
        lambda whole: json.dumps({**whole, "live_slot": "c"}),
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


def test_a_change_of_locked_slots_raises_busy(store: SlotStore) -> None:
    stage(store, ONE)
    with store.locked(), pytest.raises(SlotsBusy):
        store.fail(ONE.digest, "it crashed")


def on_trial(folder: Path, **options: bool) -> SlotStore:
    """Return slots with release 2 on trial and release 1 before it."""
    store = SlotStore(folder, Clock(), **options)
    for version in (ONE, TWO):
        stage(store, version)
        store.activate(60)
        if version is ONE:
            store.mark_good()
    return store


def test_a_rollback_that_cannot_be_written_takes_effect_in_the_daemon(tmp_path: Path) -> None:
    store = on_trial(tmp_path / "m", remembers=True)
    with nothing_may_be_written():
        assert store.fail(TWO.digest, "it crashed")
        assert not store.fail(TWO.digest, "it crashed")
        with pytest.raises(StorageFailed):
            store.record()
        assert store.read().live == SlotStore(store.folder).read().live == replace(ONE, good=True)
        assert json.loads((store.folder / "state.json").read_bytes())["state"] == "trial"
    assert store.fault is not None
    store.collect()
    assert store.slot_folder("b").exists()  # state.json still names this slot
    store.record()
    assert SlotStore(store.folder).read() == store.read()
    assert "could not" not in str(store.fault)
    assert SlotStore(store.folder).read().state is SlotState.STEADY


def test_a_rollback_that_could_not_be_written_is_remembered_beyond_the_end_of_the_daemon(tmp_path: Path) -> None:
    store = on_trial(tmp_path / "m", remembers=True)
    with nothing_may_be_written():
        store.fail(TWO.digest, "it crashed")
    with pytest.raises(TransitionRefused):
        SlotStore(store.folder, store.clock).mark_good()
    again = SlotStore(store.folder, store.clock, remembers=True)
    again.read()
    assert "could not be written" in str(again.fault)
    again.record()
    state = SlotStore(store.folder).read()
    assert (state.state, state.live, again.fault) == (SlotState.STEADY, replace(ONE, good=True), None)
    assert state.rolled_back is not None
    assert (state.rolled_back.release, state.rolled_back.reason) == (TWO.release, NOT_WRITTEN)


def test_a_version_that_failed_may_be_tried_once_more(tmp_path: Path) -> None:
    store = on_trial(tmp_path / "m")
    with nothing_may_be_written():
        store.rollback()
    stage(store, TWO)
    assert store.activate(60).state is SlotState.TRIAL
    assert SlotStore(store.folder).read().live == TWO


def test_a_slot_that_the_file_still_names_is_not_filled(tmp_path: Path) -> None:
    store = on_trial(tmp_path / "m")
    (store.folder / "stage").mkdir()
    with nothing_may_be_written():
        store.rollback()
        with store.locked(), pytest.raises(StorageFailed):
            store.put_staged(THREE)
        assert (store.folder / "stage").exists()
    with store.locked():
        assert store.put_staged(THREE).spare == THREE
