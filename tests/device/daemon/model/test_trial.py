"""A trial begins a watch when the slots are free, passes its result on once, and ends when its time has passed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from edgert.daemon.model.slot_writer import BUSY_RETRY_S, SlotWriter
from edgert.daemon.model.trial import Trial
from edgert.versions.slot_store import SlotStore
from edgert.versions.slots import CUT_OFF, Slots, SlotState, Version
from edgert.versions.trial_limits import BROKEN_CHECKS_MAX, TrialLimits
from tests.support.devices import wait_until
from tests.support.stand_ins.workers import FakeWorker, figures_message

OLD, NEW = Version(1, "old", good=True), Version(2, "new", good=False)


class World:
    """A trial of NEW, with slots on disk and a clock of its own."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 100.0
        self.store = SlotStore(folder / "echo")
        self.store.folder.mkdir()
        self.writer = SlotWriter(lambda: self.now_s)
        self.rolled_back: list[tuple[str, dict[str, Any]]] = []
        self.expired: list[str | None] = []
        self.events: list[str] = []
        self.trial = Trial(
            "echo",
            self.store,
            self.writer,
            lambda: self.now_s,
            report=lambda event, fields: self.events.append(event),
            roll_back=lambda _, reason, fields: self.rolled_back.append((reason.message, fields)),
            rolled_back=lambda _, reason: self.expired.append(reason.message),
            sync=lambda: self.expired.append(None),
        )
        self.worker = FakeWorker(NEW, self.now_s)

    def activate(self, limits: TrialLimits | None, trial_s: float = 60.0) -> None:
        self.store.commit(Slots(SlotState.STAGED, "a", a=OLD, b=NEW, ratchet=1))
        self.trial.update(self.store.activate(trial_s, limits))

    def figures(self, **figures: Any) -> None:
        self.trial.handle_message(self.worker, figures_message(**figures))

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.writer.tick()
        self.trial.tick()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_trial_without_limits_is_not_watched(world: World) -> None:
    world.activate(None)
    world.trial.begin(world.worker)
    assert (world.trial.in_progress, world.trial.watches(world.worker), world.trial.status()) == (True, False, None)


def test_a_trial_whose_limits_held_waits_for_the_host(world: World) -> None:
    world.activate(TrialLimits({}, 10.0))
    world.trial.begin(world.worker)
    assert world.trial.watches(world.worker)
    world.now_s += 10
    world.figures()
    assert (world.events, world.store.read().state, world.trial.watches(world.worker)) == (
        ["limits_held"],
        SlotState.TRIAL,
        False,
    )
    status = world.trial.status()
    assert status is not None
    assert status.phase == "held"


def test_an_unattended_trial_is_kept_as_soon_as_the_slots_are_free(world: World) -> None:
    world.activate(TrialLimits({}, 10.0, unattended=True))
    world.trial.begin(world.worker)
    world.now_s += 10
    with world.store.locked():
        world.figures()
        world.figures()  # a result is passed on once
        assert (world.events, world.trial.watches(world.worker)) == ([], True)
    world.wait(BUSY_RETRY_S)
    assert (world.events, world.store.read().state, world.trial.in_progress) == (["kept"], SlotState.STEADY, False)


def test_a_broken_limit_rolls_the_version_back_and_the_event_has_its_figures(world: World) -> None:
    world.activate(TrialLimits({"memory_mb": 5.0}, 10.0))
    world.trial.begin(world.worker)
    for _ in range(BROKEN_CHECKS_MAX):
        world.figures()
    ((reason, fields),) = world.rolled_back
    assert reason.startswith("memory_mb is 10 MB, above its limit of 5 MB")
    assert (fields["broken"], fields["limit"], fields["release"]) == ("memory_mb", 5.0, 2)


def test_a_watch_begins_once_the_slots_are_free(world: World) -> None:
    world.activate(TrialLimits({}, 10.0))
    with world.store.locked():
        world.trial.begin(world.worker)
    assert (world.trial.watches(world.worker), world.trial.status()) == (True, None)
    world.wait(BUSY_RETRY_S)
    assert world.trial.status() is not None


def test_a_watch_that_was_cut_off_ends_in_a_rollback(world: World) -> None:
    world.activate(TrialLimits({}, 10.0))
    world.store.start_watch()
    world.trial.begin(world.worker)
    assert [reason for reason, _ in world.rolled_back] == [CUT_OFF]


def test_a_trial_that_runs_out_is_ended_once_the_slots_are_free(world: World) -> None:
    world.activate(None, trial_s=0.001)
    trial = world.store.read().trial
    assert trial is not None
    wait_until(lambda: not trial.left_s(world.store.clock), "the trial is over by the machine's clock", pause_s=0.001)
    with world.store.locked():
        world.wait(1.0)
    assert (world.expired, world.store.read().state) == ([], SlotState.TRIAL)
    world.wait(BUSY_RETRY_S)
    assert world.expired == ["the trial was not confirmed in time"]
    assert world.store.read().state is SlotState.STEADY


def test_a_command_can_end_a_trial(world: World) -> None:
    world.activate(TrialLimits({}, 10.0))
    world.trial.begin(world.worker)
    world.trial.update(world.store.mark_good(force=True))
    assert (world.trial.in_progress, world.trial.watches(world.worker), world.trial.due_s()) == (False, False, None)
