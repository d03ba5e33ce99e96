"""Models load in turn. Models that clients requested load first. Each model waits for memory for a limited time."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgert.config import parse_config
from edgert.daemon.memory.load_turns import MEMORY_RETRY_S, MEMORY_WAIT_S_MAX, TURN_S, LoadTurns
from edgert.daemon.memory.memory_budget import IDLE_S_MIN, MemoryBudget
from edgert.daemon.memory.worker_sizes import LearnedSizes
from edgert.daemon.model.model_service import ModelService
from edgert.daemon.model.restarts import RESTART_PAUSES_S
from edgert.errors import Unavailable
from edgert.state_dir import StateDir
from edgert.versions.slot_store import SlotStore
from edgert.versions.slots import Slots, SlotState, Version
from edgert.worker_link.load_message import LoadMessage
from tests.support.stand_ins.workers import FakeWorker, connected, ready_message

STEADY = Slots(SlotState.STEADY, "a", a=Version(1, "one", good=True), ratchet=1)


class World:
    """Services with fake workers, and a clock. Two workers may load at once."""

    def __init__(self, folder: Path, limit_mb: float = 0) -> None:
        self.now_s = 1000.0
        self.state = StateDir(folder)
        serving = f"[serving]\nmemory_mb = {limit_mb:g}\n[models.f]\npinned = true\n"
        self.config = parse_config(f'device = "d"\nprofile = "p"\nmachine = "m"\n{serving}', "test")
        self.services: dict[str, ModelService] = {}
        self.started: list[str] = []
        self.reported: list[str] = []
        budget = MemoryBudget(limit_mb, LearnedSizes(folder / "learned"), self.services, self.clock, lambda: True)
        self.turns = LoadTurns(self.services, budget, self.clock, at_once=2)

    def clock(self) -> float:
        return self.now_s

    def add(self, model: str) -> ModelService:
        store = SlotStore(self.state.models / model)
        store.folder.mkdir(parents=True)
        store.commit(STEADY)
        self.services[model] = ModelService(
            model, self.state, self.config, "boot", lambda event, fields: self.reported.append(event),
            self.turns.admit, self.clock, self._start,
        )  # fmt: skip
        return self.services[model]

    def _start(self, load_message: LoadMessage, version: Version, now_s: float) -> FakeWorker:
        self.started.append(load_message.model)
        return FakeWorker(version, now_s)

    def loaded(self, model: str) -> FakeWorker:
        worker = self.services[model].workers.loading
        assert isinstance(worker, FakeWorker)
        self.services[model].handle_message(worker, ready_message())
        self.turns.tick()
        return worker

    def ask(self, model: str) -> None:
        """Let a client request a model that does not serve."""
        theirs, ours = connected()
        with theirs, ours, pytest.raises(Unavailable) as refused:
            self.services[model].connect(theirs)
        assert refused.value.retry_after_s

    def wait(self, seconds: float) -> None:
        self.now_s += seconds
        self.turns.tick()


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Six models that must all load."""
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


def test_requested_models_load_first_and_pinned_models_next(world: World) -> None:
    world.ask("e")
    for model in "aebf":
        world.loaded(model)
    assert world.started == ["a", "b", "e", "f", "c", "d"]
    assert world.turns.due_s() is None


def test_a_load_that_takes_long_does_not_delay_others(world: World) -> None:
    assert world.turns.due_s() == world.now_s + TURN_S
    world.wait(TURN_S)
    assert len(world.started) == 4


def test_a_load_by_a_command_does_not_wait_for_its_turn(world: World) -> None:
    told: list[object] = []
    world.services["d"].sync(told.append)
    assert (world.started, told) == (["a", "b", "d"], [])


def test_a_model_that_is_removed_or_stopped_does_not_wait_for_its_turn(world: World) -> None:
    SlotStore(world.state.models / "c").commit(Slots())
    world.services["c"].sync()
    world.services["d"].stop()
    world.loaded("a")
    world.loaded("b")
    assert world.started == ["a", "b", "f", "e"]
    assert [world.services[model].state for model in "cd"] == ["stopped", "stopping"]


def test_a_model_waits_for_memory_for_a_limited_time_and_again_when_clients_ask(tmp_path: Path) -> None:
    world = World(tmp_path, limit_mb=15)
    first, second = world.add("first"), world.add("second")
    world.ask("first")
    worker = world.loaded("first")
    worker.run_page.since_s = world.now_s  # the model is in use
    world.ask("second")
    assert (second.state, world.turns.due_s()) == ("waiting", world.now_s + MEMORY_RETRY_S)
    world.wait(MEMORY_WAIT_S_MAX)
    assert (second.state, world.turns.due_s()) == ("unloaded", None)
    world.ask("second")
    assert second.state == "waiting"
    worker.run_page.since_s = None
    world.wait(IDLE_S_MIN)
    assert (first.state, second.state) == ("unloaded", "waiting")
    first.handle_end(worker)
    world.wait(MEMORY_RETRY_S)
    assert (second.state, world.turns.due_s()) == ("loading", None)


def test_clients_that_ask_again_do_not_prolong_the_wait_of_a_command(tmp_path: Path) -> None:
    world = World(tmp_path, limit_mb=15)
    world.add("first")
    second = world.add("second")
    world.ask("first")
    world.loaded("first").run_page.since_s = world.now_s  # the model is in use
    told: list[object] = []
    world.ask("second")
    second.sync(told.append)
    for _ in range(5):
        world.ask("second")
        world.wait(MEMORY_WAIT_S_MAX / 5)
    assert [str(error) for error in told] == [
        "there was no memory for second for 10 s, because other models use it: raise memory_mb in config.toml, or send "
        "fewer requests to the other models"
    ]
    assert world.reported == ["serving", "no_room"]
    world.ask("second")
    assert second.state == "waiting"
    world.wait(MEMORY_WAIT_S_MAX)
    assert world.reported == ["serving", "no_room"], "the same lack of memory is reported once"


def test_a_model_that_is_removed_stops_waiting_for_memory(tmp_path: Path) -> None:
    world = World(tmp_path, limit_mb=15)
    world.add("first")
    second = world.add("second")
    world.ask("first")
    world.loaded("first").run_page.since_s = world.now_s
    world.ask("second")
    second.store.commit(Slots())
    second.sync()
    world.wait(MEMORY_RETRY_S)
    assert (second.state, world.turns.due_s()) == ("stopped", None)


def with_a_next_version(tmp_path: Path) -> tuple[World, ModelService]:
    """Two models that fill the memory. The slots of the first model name a next version."""
    world = World(tmp_path, limit_mb=21)
    first = world.add("first")
    world.add("second")
    for model in ("first", "second"):
        world.ask(model)
        world.loaded(model).run_page.since_s = world.now_s
    first.store.commit(Slots(SlotState.STEADY, "a", a=Version(2, "two", good=True), ratchet=1))
    return world, first


def test_a_crash_leads_to_a_pause_although_the_next_version_waits_for_memory(tmp_path: Path) -> None:
    world, first = with_a_next_version(tmp_path)
    first.sync()
    assert (first.state, world.turns.due_s()) == ("ready", world.now_s + MEMORY_RETRY_S)
    first.handle_end(next(iter(first.workers)))
    world.wait(MEMORY_RETRY_S)
    assert (first.state, world.turns.due_s()) == ("restarting", None)
    world.now_s += RESTART_PAUSES_S[0]
    first.tick()
    assert first.state == "waiting"


def test_a_command_is_answered_if_the_model_is_unloaded_while_the_next_version_waits(tmp_path: Path) -> None:
    world, first = with_a_next_version(tmp_path)
    told: list[object] = []
    first.sync(told.append)
    first.unload("room for other")
    assert told == []
    world.wait(MEMORY_RETRY_S)
    assert (told, first.state) == ([None], "unloaded")
