"""The budget admits a version, frees memory for a version, or refuses a version that can never fit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edgert.daemon.memory.memory_budget import IDLE_S_MIN, MemoryBudget, MemoryPlan, Reservation, plan_memory
from edgert.daemon.memory.worker_sizes import PROGRAM_MB, LearnedSizes
from edgert.daemon.model.model_service import ModelService
from edgert.daemon.workers.worker_set import WorkerSet
from edgert.errors import Unavailable
from edgert.versions.slot_store import SlotStore
from edgert.versions.slots import Slots, SlotState, Version
from tests.support.stand_ins.workers import LOAD_MESSAGE, FakeWorker

NOW = 1000.0


class World:
    """Services with fake workers, sizes on disk, and a clock."""

    def __init__(self, folder: Path, limit_mb: float, *, forks: bool = False) -> None:
        self.folder, self.unloaded = folder, list[str]()
        self.services: dict[str, ModelService] = {}
        self.sizes = LearnedSizes(folder / "learned")
        self.budget = MemoryBudget(limit_mb, self.sizes, self.services, lambda: 1000.0, lambda: forks)

    def add(self, model: str, mb: float = 0.0, used_at_s: float = 0.0, **changes: Any) -> ModelService:
        """Return a model whose worker uses `mb`; with 0, the model has no worker."""
        workers = WorkerSet(lambda: 1000.0, lambda load_message, version, now_s: FakeWorker(version, now_s))
        if mb:
            worker = cast(FakeWorker, workers.start(LOAD_MESSAGE, version_of(model)))
            workers.switch()
            worker.now_mb, worker.connected_at_s = mb, used_at_s
        service = SimpleNamespace(
            model=model,
            pinned=changes.get("pinned", False),
            trial=SimpleNamespace(in_progress=changes.get("on_trial", False)),
            workers=workers,
            store=SlotStore(self.folder / model),
            unload=lambda reason: self.unloaded.append(model),
        )
        self.services[model] = cast(ModelService, service)
        return self.services[model]

    def admit(self, service: ModelService) -> bool:
        return self.budget.admit(service, Slots(SlotState.STEADY, "a", a=version_of(service.model)))


def version_of(model: str) -> Version:
    return Version(1, model.ljust(64, "0"), good=True)


def test_without_a_limit_every_model_is_admitted(tmp_path: Path) -> None:
    world = World(tmp_path, 0)
    world.add("large", 10_000.0)
    assert world.admit(world.add("new"))
    assert world.sizes.of(version_of("large").digest) is None, "and nothing is measured"


def test_the_least_recently_used_model_makes_room(tmp_path: Path) -> None:
    world = World(tmp_path, 100)
    for model, used_at_s in (("early", 10.0), ("late", 20.0)):
        world.add(model, 40.0, used_at_s)
    assert not world.admit(world.add("new"))
    assert world.unloaded == ["early"]
    assert world.sizes.of(version_of("early").digest) == 40.0, "its size is known from now on"


@pytest.mark.parametrize("forks", [False, True])
def test_the_estimate_of_a_fork_counts_only_memory_that_it_does_not_share(tmp_path: Path, forks: bool) -> None:
    world = World(tmp_path, 100, forks=forks)
    world.add("pinned", 80.0, pinned=True)
    world.add("other", 5.0)
    assert world.admit(world.add("new")) is forks
    assert world.unloaded == ([] if forks else ["other"])


def test_the_estimate_of_a_version_that_loads_does_not_count_the_files_of_the_other_slot(tmp_path: Path) -> None:
    world = World(tmp_path, 2 * PROGRAM_MB + 1.0)
    loading = world.add("loading")
    for slot in ("a", "b"):
        (loading.store.folder / slot).mkdir(parents=True)
    with (loading.store.folder / "a" / "weights.bin").open("wb") as file:
        file.truncate(10**7)
    loading.workers.start(LOAD_MESSAGE, version_of("loading")).folder = loading.store.folder / "b"
    assert world.admit(world.add("new"))


def test_a_model_that_is_larger_than_its_estimate_makes_room_once_it_has_loaded(tmp_path: Path) -> None:
    world = World(tmp_path, 100, forks=True)
    for model, used_at_s in (("early", 10.0), ("late", 20.0)):
        world.add(model, 40.0, used_at_s)
    assert world.admit(world.add("new"))
    world.add("new", 50.0, used_at_s=NOW)
    world.budget.loaded("new")
    assert world.unloaded == ["early"]


def test_a_model_on_trial_is_not_unloaded_for_another(tmp_path: Path) -> None:
    world = World(tmp_path, 100)
    world.add("trial", 70.0, on_trial=True)
    assert not world.admit(world.add("new"))
    assert world.unloaded == []


def test_a_model_beside_pinned_models_is_not_refused_for_its_estimate_alone(tmp_path: Path) -> None:
    world = World(tmp_path, 100)
    world.add("pinned", 70.0, pinned=True)
    assert world.admit(world.add("new")), "a new version is estimated with 40 MB"


def test_the_memory_of_the_worker_that_a_new_version_replaces_does_not_count(tmp_path: Path) -> None:
    world = World(tmp_path, 100)
    assert world.admit(world.add("echo", 90.0))


def test_a_version_that_is_known_to_be_too_large_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path, 100)
    world.add("pinned", 30.0, pinned=True)
    world.sizes.learn(version_of("new").digest, 80.0)
    with pytest.raises(Unavailable, match="needs 80 MB, but the pinned models leave 70 MB of the budget"):
        world.admit(world.add("new"))


def reservation(model: str, mb: float, idle_s: float = 100.0, **kinds: bool) -> Reservation:
    return Reservation(model, mb, NOW - idle_s, **kinds)


@pytest.mark.parametrize(
    ("need", "reservations", "plan"),
    [
        (50, [], MemoryPlan(True)),
        (50, [reservation("a", 50)], MemoryPlan(True)),
        (50, [reservation("a", 60)], MemoryPlan(False, ("a",))),
        (50, [reservation("new", 40, 5), reservation("old", 40, 9)], MemoryPlan(False, ("old",))),
        (90, [reservation("new", 40, 5), reservation("old", 40, 9)], MemoryPlan(False, ("old", "new"))),
        (50, [reservation("a", 60, fixed=True)], MemoryPlan(False)),
        (50, [reservation("a", 60, idle_s=IDLE_S_MIN / 2)], MemoryPlan(False)),
        (50, [reservation("a", 60, ending=True)], MemoryPlan(False)),
        (50, [reservation("pinned", 30, fixed=True), reservation("a", 40)], MemoryPlan(False, ("a",))),
        (80, [reservation("pinned", 30, fixed=True), reservation("a", 40)], MemoryPlan(False)),
    ],
    ids=["empty", "fits", "one-goes", "oldest-goes", "two-go", "fixed", "in-use", "on-its-way", "beside", "in-vain"],
)
def test_the_least_recently_used_models_are_unloaded_and_no_more_than_necessary(
    need: float, reservations: list[Reservation], plan: MemoryPlan
) -> None:
    assert plan_memory(need, 100, reservations, NOW) == plan
