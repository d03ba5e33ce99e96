"""A model service follows its slots: loads, swaps, crashes, quarantine, memory. Its workers are fakes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from edgert.backoff import STABLE_S
from edgert.config import DeviceConfig, parse_config
from edgert.daemon.model.model_service import ModelService
from edgert.daemon.model.restarts import CRASHES_MAX, QUARANTINE_PAUSES_S, RESTART_PAUSES_S
from edgert.daemon.model.slot_writer import BUSY_RETRY_S, STORAGE_RETRY_S
from edgert.daemon.workers.worker_process import LOAD_S_MAX
from edgert.daemon.workers.worker_set import CHECK_S_MAX, STUCK_S
from edgert.errors import (
    ConfigInvalid,
    EdgeRTError,
    EngineMissing,
    ModelNotFound,
    NotCompatible,
    Overloaded,
    ShuttingDown,
    Unavailable,
)
from edgert.protocol.hello import HelloFlags
from edgert.state_dir import StateDir
from edgert.versions.slot_store import SlotStore
from edgert.versions.slots import SlotEvent, Slots, SlotState, TrialEnd, Version, step
from edgert.versions.trial_limits import BROKEN_CHECKS_MAX, TrialLimits
from edgert.worker_link import link
from edgert.worker_link.load_message import LoadMessage
from tests.support.stand_ins.workers import FakeWorker, connected, figures_message, ready_message

OLD, NEW = Version(1, "old", good=True), Version(2, "new", good=False)
STEADY = Slots(SlotState.STEADY, "a", a=OLD, ratchet=1)


class World:
    """A service with slots on disk, a clock and workers of its own."""

    def __init__(self, folder: Path, serving: str = "") -> None:
        self.now_s = 1000.0
        self.state = StateDir(folder)
        self.store = SlotStore(self.state.models / "echo")
        self.store.folder.mkdir(parents=True)
        self.workers: list[FakeWorker] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.room: bool | EdgeRTError = True
        self.cannot_start = False
        config: DeviceConfig = parse_config(f'device = "d"\nprofile = "p"\nmachine = "m"\n[serving]\n{serving}', "test")
        self.service = ModelService(
            "echo",
            self.state,
            config,
            "boot",
            lambda event, fields: self.events.append((event, fields)),
            self._admit,
            lambda: self.now_s,
            self._start,
        )

    def _admit(self, service: ModelService, slots: Slots) -> bool:
        if isinstance(self.room, EdgeRTError):
            raise self.room
        return self.room

    def _start(self, load_message: LoadMessage, version: Version, now_s: float) -> FakeWorker:
        if self.cannot_start:
            raise OSError(12, "Cannot allocate memory")
        self.workers.append(FakeWorker(version, now_s, pid=len(self.workers) + 1))
        return self.workers[-1]

    def slots(self, slots: Slots) -> list[EdgeRTError | None]:
        """Change the slots like a command; return the results that the command gets."""
        self.store.commit(slots)
        told: list[EdgeRTError | None] = []
        self.service.sync(told.append)
        return told

    def loaded(self) -> FakeWorker:
        """Let the last worker become ready."""
        self.service.handle_message(self.workers[-1], ready_message())
        return self.workers[-1]

    def finish_loading(self) -> None:
        """Let the worker that loads become ready, if there is one."""
        if self.service.workers.loading is not None:
            self.service.handle_message(self.service.workers.loading, ready_message())

    def end(self, which: int) -> None:
        """End one of the workers, if there is one."""
        if workers := list(self.service.workers):
            self.service.handle_end(workers[which])

    def serve(self) -> FakeWorker:
        """Serve the version OLD."""
        self.slots(STEADY)
        return self.loaded()

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.service.tick()

    def pass_time(self, seconds: float) -> None:
        """Let the time pass without a pause: tick at least every CHECK_S_MAX."""
        while seconds > 0:
            self.wait(min(seconds, CHECK_S_MAX))
            seconds -= CHECK_S_MAX

    def names(self) -> list[str]:
        return [name for name, _ in self.events]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_live_version_is_loaded_and_serves(world: World) -> None:
    told = world.slots(STEADY)
    assert (world.service.state, world.service.settled, told) == ("loading", False, [])
    worker = world.loaded()
    assert (world.service.state, world.service.settled, told) == ("ready", True, [None])
    theirs, ours = connected()
    with theirs, ours:
        world.service.connect(theirs, HelloFlags(shared=True))
    assert worker.asked() == ["connection"]
    status = world.service.status()
    assert (status.pid, status.loaded and status.loaded.engine, status.fault) == (1, "tflite", None)


def test_a_new_version_is_swapped_in_and_the_old_worker_is_retired(world: World) -> None:
    old = world.serve()
    told = world.slots(Slots(SlotState.STEADY, "b", a=OLD, b=Version(2, "new", good=True), ratchet=2))
    assert (world.service.state, told) == ("ready", [])
    new = world.loaded()
    assert (world.service.workers.serving, told, old.asked()) == (new, [None], ["stop"])
    world.service.handle_end(old)
    assert list(world.service.workers) == [new]


def test_a_load_that_is_out_of_date_is_killed(world: World) -> None:
    world.slots(STEADY)
    world.slots(Slots())
    assert (world.workers[0].killed, world.service.state) == (True, "stopped")
    theirs, ours = connected()
    with theirs, ours, pytest.raises(ModelNotFound):
        world.service.connect(theirs)


def test_a_load_that_takes_too_long_is_killed_unless_it_progresses(world: World) -> None:
    world.slots(STEADY)
    world.service.handle_message(world.workers[0], {"op": "progress", "line": "builds a plan"})
    assert world.service.status().loading == "builds a plan"
    world.pass_time(LOAD_S_MAX + 1)
    assert not world.workers[0].killed
    world.pass_time(900 - LOAD_S_MAX)
    assert world.workers[0].killed
    assert not world.service.workers.stuck
    world.now_s += STUCK_S + 1
    assert world.service.workers.stuck


def test_crashes_lead_to_restarts_and_then_to_quarantine(world: World) -> None:
    worker = world.serve()
    for pause_s in RESTART_PAUSES_S:
        world.service.handle_end(worker)
        assert (world.service.state, world.service.status().retry_s) == ("restarting", round(pause_s, 1))
        world.wait(pause_s)
        worker = world.loaded()
    world.service.handle_end(worker)
    assert (world.service.state, world.service.status().crashes) == ("quarantined", CRASHES_MAX)
    theirs, ours = connected()
    with theirs, ours, pytest.raises(Unavailable, match="quarantined, because it failed 3 times") as refused:
        world.service.connect(theirs)
    assert refused.value.retry_after_s == pytest.approx(QUARANTINE_PAUSES_S[0])
    world.wait(QUARANTINE_PAUSES_S[0])
    world.service.handle_end(world.workers[-1])
    assert world.service.status().retry_s == QUARANTINE_PAUSES_S[1]
    world.wait(QUARANTINE_PAUSES_S[1])
    assert world.loaded() is world.service.workers.serving
    assert (world.service.state, world.service.status().fault) == ("ready", None)


def test_earlier_crashes_are_forgotten_after_a_worker_served_for_long(world: World) -> None:
    worker = world.serve()
    world.service.handle_end(worker)
    world.wait(RESTART_PAUSES_S[0])
    worker = world.loaded()
    world.now_s += STABLE_S + 1
    world.service.handle_end(worker)
    assert world.service.status().crashes == 1


def test_a_restart_is_tried_again_once_the_slots_can_be_read(world: World) -> None:
    world.service.handle_end(world.serve())
    file = world.store.folder / "state.json"
    slots = file.read_bytes()
    file.write_bytes(b"{")
    world.wait(RESTART_PAUSES_S[0])
    assert world.service.state == "restarting"
    file.write_bytes(slots)
    world.wait(STORAGE_RETRY_S)
    assert world.loaded() is world.service.workers.serving


def test_slots_that_cannot_be_read_at_the_start_are_a_fault_and_are_read_again(world: World) -> None:
    world.store.commit(STEADY)
    file = world.store.folder / "state.json"
    slots = file.read_bytes()
    file.write_bytes(b"{")
    world.service.sync()
    theirs, ours = connected()
    with theirs, ours, pytest.raises(Unavailable, match=r"does not load: .*json cannot be read .*; remove "):
        world.service.connect(theirs)
    assert world.service.alarms == ("failed",)
    file.write_bytes(slots)
    world.wait(STORAGE_RETRY_S)
    assert world.loaded() is world.service.workers.serving
    assert world.service.status().fault is None


def test_slots_that_were_removed_because_they_could_not_be_read_are_no_fault(world: World) -> None:
    file = world.store.folder / "state.json"
    file.write_bytes(b"{")
    world.service.sync()
    file.unlink()
    world.wait(STORAGE_RETRY_S)
    assert (world.service.state, world.service.status().fault) == ("stopped", None)


def test_a_model_whose_folder_was_removed_is_stopped_and_not_faulty_after_its_worker_ended(world: World) -> None:
    world.serve()
    (world.store.folder / "state.json").unlink()
    world.end(0)
    world.wait(RESTART_PAUSES_S[0])
    assert (world.service.state, world.service.status().fault) == ("stopped", None)


def test_a_good_version_that_keeps_crashing_is_replaced_by_the_version_before(world: World) -> None:
    world.slots(Slots(SlotState.STEADY, "b", a=OLD, b=Version(2, "new", good=True), ratchet=2))
    for _ in range(CRASHES_MAX):
        world.service.handle_end(world.loaded())
        world.wait(max(RESTART_PAUSES_S))
    assert "rolled_back" in world.names()
    assert (world.loaded().version, world.service.state) == (OLD, "ready")


@pytest.mark.parametrize(
    "fault", [ConfigInvalid("not TOML"), NotCompatible("this device is a pi4"), EngineMissing("not installed")]
)
def test_a_good_version_is_not_replaced_for_a_fault_of_the_configuration_or_of_the_runtime(
    world: World, fault: EdgeRTError
) -> None:
    world.slots(Slots(SlotState.STEADY, "b", a=OLD, b=Version(2, "new", good=True), ratchet=2))
    for _ in range(CRASHES_MAX):
        world.service.handle_message(world.workers[-1], link.failure_message(fault))
        world.service.handle_end(world.workers[-1])
        world.wait(RESTART_PAUSES_S[-1])
    live, status = world.store.read().live, world.service.status()
    assert (live and live.digest, world.service.state, status.fault) == ("new", "restarting", fault.message)
    world.wait(QUARANTINE_PAUSES_S[0])
    world.loaded()
    assert (world.service.state, world.service.status().fault) == ("ready", None)


def test_a_version_on_trial_that_does_not_load_is_rolled_back_at_once(world: World) -> None:
    old = world.serve()
    world.slots(Slots(SlotState.STAGED, "a", a=OLD, b=NEW, ratchet=1))
    world.store.activate(60.0)
    told: list[EdgeRTError | None] = []
    world.service.sync(told.append)
    world.service.handle_end(world.workers[-1])
    assert "ended: killed by signal 11" in str(told[0])
    assert (world.store.read().state, world.service.workers.serving, world.service.state) == (
        SlotState.STEADY,
        old,
        "ready",
    )


def test_while_the_slots_are_busy_a_rollback_is_tried_again(world: World) -> None:
    world.serve()
    world.slots(Slots(SlotState.STAGED, "a", a=OLD, b=NEW, ratchet=1))
    world.store.activate(60.0)
    world.service.sync()
    with world.store.locked():
        world.service.handle_end(world.workers[-1])
        assert world.store.read().state is SlotState.TRIAL
        world.wait(BUSY_RETRY_S)
    assert "rolled_back" not in world.names()
    world.wait(BUSY_RETRY_S)
    assert world.store.read().state is SlotState.STEADY
    assert world.names()[-1] == "rolled_back"


@pytest.mark.parametrize("held", [True, False])
def test_a_version_that_a_command_keeps_is_not_rolled_back_for_a_broken_limit(world: World, held: bool) -> None:
    """The command changes the slots before it notifies the daemon."""
    world.serve()
    world.slots(Slots(SlotState.STAGED, "a", a=OLD, b=NEW, ratchet=1))
    world.store.activate(60.0, TrialLimits({"memory_mb": 5.0}, 60.0))
    world.service.sync()
    worker = world.loaded()
    figures = [figures_message()] * BROKEN_CHECKS_MAX
    with world.store.locked():
        for message in figures if held else ():
            world.service.handle_message(worker, message)
        world.store.commit(step(world.store.read(), SlotEvent.MARK_GOOD))
    for message in figures:
        world.service.handle_message(worker, message)
    world.wait(BUSY_RETRY_S)
    assert world.store.read().live == replace(NEW, good=True)
    assert "rolled_back" not in world.names()
    status = world.service.status()
    assert (world.service.workers.serving, status.state, status.fault) == (worker, "ready", None)


def test_a_version_that_a_command_keeps_while_it_crashes_is_started_again(world: World) -> None:
    world.slots(Slots(SlotState.FIRST_STAGED, a=NEW))
    world.store.activate(60.0)
    world.service.sync()
    with world.store.locked():
        world.service.handle_end(world.workers[-1])
        world.store.commit(step(world.store.read(), SlotEvent.MARK_GOOD))
    world.wait(BUSY_RETRY_S)
    assert (world.loaded().version.digest, world.service.state) == (NEW.digest, "ready")


def test_a_trial_that_runs_out_is_rolled_back(world: World) -> None:
    world.serve()
    world.slots(Slots(SlotState.STAGED, "a", a=OLD, b=NEW, ratchet=1))
    world.store.activate(0.001)
    world.service.sync()
    world.loaded()
    for _ in range(10):  # the slots may be busy for a moment
        world.wait(1.0)
    event, fields = next(each for each in world.events if each[0] == "rolled_back")
    assert (event, fields["release"]) == ("rolled_back", 2)
    assert world.loaded().version == OLD


def test_a_worker_that_cannot_be_started_counts_as_a_crash(world: World) -> None:
    world.cannot_start = True
    world.slots(STEADY)
    assert (world.service.state, world.service.status().fault) == (
        "restarting",
        "no worker can be started: Cannot allocate memory",
    )
    world.cannot_start = False
    world.wait(RESTART_PAUSES_S[0])
    assert world.service.state == "loading"


def test_a_lack_of_processes_does_not_count_as_a_fault_of_the_version(world: World) -> None:
    """However long the shortage lasts, the live version stays live, and its worker starts again."""
    world.cannot_start = True
    world.slots(Slots(SlotState.STEADY, "b", a=OLD, b=Version(2, "new", good=True), ratchet=2))
    for _ in range(6):
        world.wait(QUARANTINE_PAUSES_S[-1])
    assert {name for name, _ in world.events} == {"crashed"}
    world.cannot_start = False
    world.wait(QUARANTINE_PAUSES_S[-1])
    assert world.loaded().version.release == 2


def test_with_a_budget_a_model_loads_for_its_first_client(tmp_path: Path) -> None:
    world = World(tmp_path, "memory_mb = 100")
    assert world.slots(STEADY) == [None]
    assert world.service.state == "unloaded"
    theirs, ours = connected()
    with theirs, ours:
        with pytest.raises(Unavailable, match="is loading"):
            world.service.connect(theirs)
        worker = world.loaded()
        world.service.unload("room for other")
        assert (world.service.state, worker.asked()) == ("unloaded", ["stop"])


def test_a_model_that_finds_no_memory_refuses_its_clients_after_a_wait(tmp_path: Path) -> None:
    world = World(tmp_path, "memory_mb = 100")
    world.slots(STEADY)
    world.room = False
    theirs, ours = connected()
    with theirs, ours:
        with pytest.raises(Unavailable, match="is waiting"):
            world.service.connect(theirs)
        world.room = Overloaded("other models use the memory")
        world.service.sync()
        assert world.service.state == "unloaded"
        assert world.names() == ["no_room"]
        with pytest.raises(Unavailable):
            world.service.connect(theirs)
        assert world.names() == ["no_room"], "the same refusal is reported once"
        world.room = True
        with pytest.raises(Unavailable, match="is loading"):
            world.service.connect(theirs)
        world.loaded()
        world.service.unload("room for other")
        world.room = Overloaded("other models use the memory")
        with pytest.raises(Unavailable):
            world.service.connect(theirs)
        assert world.names() == ["no_room", "serving", "unloaded", "no_room"], "after a load, it is reported again"
        world.room = Unavailable("release 1 of echo needs 500 MB")
        with pytest.raises(Unavailable, match="does not load: release 1 of echo needs 500 MB"):
            world.service.connect(theirs)
        world.room = True
        with pytest.raises(Unavailable, match="is loading"):
            world.service.connect(theirs)


def test_a_worker_beyond_its_memory_is_replaced_while_it_serves(tmp_path: Path) -> None:
    world = World(tmp_path, "worker_mb_max = 100")
    worker = world.serve()
    worker.now_mb = 110.0
    world.wait(10)
    assert world.names()[-1] == "recycled"
    assert (world.loaded(), worker.asked()) == (world.service.workers.serving, ["stop"])


def test_a_worker_beyond_its_memory_whose_limits_are_watched_is_rolled_back_for_its_memory(tmp_path: Path) -> None:
    world = World(tmp_path, "worker_mb_max = 100")
    world.serve()
    world.store.commit(replace(STEADY, state=SlotState.STAGED, b=NEW))
    world.store.activate(600.0, TrialLimits({"error_share": 0.5}, 60.0))
    world.service.sync()
    world.loaded().now_mb = 110.0
    world.wait(10)
    rolled_back = world.store.read().rolled_back
    assert rolled_back is not None
    assert rolled_back.reason.startswith("the worker used 110 MB on trial, more than its limit of 100 MB")
    assert world.names()[-2:] == ["serving", "rolled_back"]
    assert (world.loaded().version, world.service.state) == (OLD, "ready")


def test_a_stopped_service_refuses_clients_and_starts_no_worker(world: World) -> None:
    worker = world.serve()
    world.service.stop()
    told = world.slots(STEADY)
    assert isinstance(told[0], Unavailable)
    theirs, ours = connected()
    with theirs, ours, pytest.raises(ShuttingDown):
        world.service.connect(theirs)
    world.service.handle_end(worker)
    assert (list(world.service.workers), world.service.due_s(), world.service.state) == ([], None, "stopping")


@pytest.mark.parametrize("seed", range(6))
def test_after_events_in_any_order_the_state_is_true(tmp_path: Path, seed: int) -> None:
    chance = Random(seed)
    world = World(tmp_path, "memory_mb = 100" if seed % 2 else "")
    versions = [OLD, Version(2, "new", good=True)]
    choices: list[Callable[[], object]] = [
        lambda: world.slots(replace(STEADY, live_slot=chance.choice("ab"), a=OLD, b=versions[1])),
        lambda: world.slots(Slots()),
        lambda: world.slots(Slots(SlotState.FIRST_TRIAL, "a", a=NEW, trial=TrialEnd(world.store.clock.boot_id, 1e9))),
        lambda: world.slots(Slots(SlotState.STEADY, "a", a=replace(OLD, digest=str(chance.random())))),
        world.finish_loading,
        lambda: world.end(0),
        lambda: world.end(-1),
        lambda: world.service.unload("room"),
        lambda: setattr(world, "room", chance.choice([True, False, Unavailable("it is too large")])),
        lambda: setattr(world, "cannot_start", chance.random() < 0.3),
        lambda: world.wait(chance.choice([0.05, 0.5, 30.0, 200.0])),
    ]
    for _ in range(120):
        with world.store.locked() if chance.random() < 0.1 else nullcontext():
            chance.choice(choices[4:])()
            world.wait(0.1)
        chance.choice(choices)()
        workers, state = world.service.workers, world.service.state
        assert (workers.serving is not None) == (state == "ready")
        assert (workers.loading is not None and not workers.serving) == (state == "loading")
        assert world.store.read().live is not None or state in ("stopped", "failed")
        assert world.service.waits_for_restart or state not in ("restarting", "quarantined")
        theirs, ours = connected()
        with theirs, ours, suppress(EdgeRTError):
            world.service.connect(theirs)
    for worker in world.workers:
        worker.close()
