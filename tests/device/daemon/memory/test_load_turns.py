"""Models load in turn: as many at once as may, those that clients ask for first, and a slow load holds up no other."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgert.config import StateDir, parse_config
from edgert.daemon.memory.load_turns import TURN_S, LoadTurns
from edgert.daemon.memory.memory_budget import MemoryBudget
from edgert.daemon.memory.worker_sizes import LearnedSizes
from edgert.daemon.model.model_service import ModelService
from edgert.errors import Unavailable
from edgert.versions.slot_store import SlotStore
from edgert.versions.slots import SlotState, State, Version
from edgert.worker_link.load_order import LoadOrder
from tests.support.workers import FakeWorker, connected, ready_message

STEADY = SlotState(State.STEADY, "a", a=Version(1, "one", good=True), ratchet=1)


class World:
    """Services with fake workers, of which two may load at once, and a clock."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 1000.0
        self.state = StateDir(folder)
        self.config = parse_config('device = "d"\nprofile = "p"\nmachine = "m"\n[models.f]\npinned = true\n', "test")
        self.services: dict[str, ModelService] = {}
        self.started: list[str] = []
        budget = MemoryBudget(0, LearnedSizes(folder / "learned"), self.services, self.clock, lambda: True)
        self.turns = LoadTurns(self.services, budget, self.clock, at_once=2)

    def clock(self) -> float:
        return self.now_s

    def add(self, model: str) -> ModelService:
        store = SlotStore(self.state.models / model)
        store.folder.mkdir(parents=True)
        store.commit(STEADY)
        self.services[model] = ModelService(
            model, self.state, self.config, "boot", lambda service, worker: None, lambda event, model, fields: None,
            self.turns.admit, self.clock, self._start,
        )  # fmt: skip
        return self.services[model]

    def _start(self, order: LoadOrder, version: Version, now_s: float) -> FakeWorker:
        self.started.append(order.model)
        return FakeWorker(version, now_s)

    def loaded(self, model: str) -> None:
        worker = self.services[model].workers.loading
        assert worker is not None
        self.services[model].received(worker, ready_message())
        self.turns.tick()


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Six models, all of which have been told to load."""
    world = World(tmp_path)
    for model in "abcdef":
        world.add(model).sync()
    return world


def test_at_the_start_two_models_load_and_the_others_wait(world: World) -> None:
    assert world.started == ["a", "b"]
    states = [service.state for service in world.services.values()]
    assert states == ["loading", "loading", "waiting", "waiting", "waiting", "waiting"]
    assert not any(service.settled for service in world.services.values())
    world.loaded("b")
    assert world.services["b"].state == "ready"


def test_what_clients_ask_for_goes_first_then_what_is_pinned(world: World) -> None:
    theirs, ours = connected()
    with theirs, ours, pytest.raises(Unavailable, match="waiting") as refused:
        world.services["e"].connect(theirs)
    assert refused.value.retry_after_s
    for model in "aebf":
        world.loaded(model)
    assert world.started == ["a", "b", "e", "f", "c", "d"]
    assert world.turns.due_s() is None


def test_a_load_that_takes_long_holds_up_no_other(world: World) -> None:
    assert world.turns.due_s() == world.now_s + TURN_S
    world.now_s += TURN_S
    world.turns.tick()
    assert len(world.started) == 4


def test_a_command_waits_for_no_turn(world: World) -> None:
    told: list[object] = []
    world.services["d"].sync(told.append)
    assert (world.started, told) == (["a", "b", "d"], [])


def test_a_model_that_is_removed_or_stopped_waits_no_more(world: World) -> None:
    SlotStore(world.state.models / "c").commit(SlotState())
    world.services["c"].sync()
    world.services["d"].stop()
    world.loaded("a")
    world.loaded("b")
    assert world.started == ["a", "b", "f", "e"]
    assert [world.services[model].state for model in "cd"] == ["stopped", "stopping"]
