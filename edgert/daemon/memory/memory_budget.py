"""The memory budget: decides whether a version may load now, and which models to unload for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edgert.daemon.memory.worker_sizes import LearnedSizes, estimated_mb
from edgert.daemon.model.model_service import ModelService
from edgert.errors import Unavailable
from edgert.versions.slots import Slots

IDLE_S_MIN = 1.0  # a model that was used within this time is not unloaded


class MemoryBudget:
    """Divides the memory for models among `services`.

    Args:
        limit_mb: The memory for all models; with 0, there is no limit, and nothing is measured.
        clock: Monotonic seconds, from the clock that the workers' run pages use.
        forks: Returns whether the next worker is a fork.
    """

    def __init__(
        self,
        limit_mb: float,
        sizes: LearnedSizes,
        services: Mapping[str, ModelService],
        clock: Callable[[], float],
        forks: Callable[[], bool],
    ) -> None:
        self._limit_mb = limit_mb
        self._sizes = sizes
        self._services = services
        self._clock = clock
        self._forks = forks

    def admit(self, service: ModelService, slots: Slots) -> bool:
        """Return whether `service` may load its live version now. If not, start to unload other models.

        The memory of the model's old version is ignored, because the old version serves until the new version is
        ready. Raises Unavailable if the version needs more memory than the pinned models leave of the budget.
        """
        version = slots.live
        if not self._limit_mb or version is None:
            return True
        self.learn()
        reservations = self._reservations(service)
        left_mb = self._limit_mb - sum(each.mb for each in reservations if self._services[each.model].pinned)
        known_mb = self._sizes.of(version.digest)
        if known_mb is not None and known_mb > left_mb:
            raise Unavailable(
                f"release {version.release} of {service.model} needs {known_mb:.0f} MB, "
                f"but the pinned models leave {left_mb:.0f} MB of the budget: raise memory_mb in config.toml"
            )
        # An estimate is no reason to refuse a version. If the estimate is too low, `loaded` unloads other models later.
        need_mb = known_mb or min(left_mb, estimated_mb(service.store.live_folder(slots), self._forks()))
        return self._make_room(need_mb, reservations, service.model)

    def loaded(self, model: str) -> None:
        """Measure the workers, and unload other models if `model` is larger than its estimate."""
        if self._limit_mb:
            self.learn()
            self._make_room(0.0, self._reservations(), model)

    def learn(self) -> None:
        """Measure the workers that serve, and store their sizes."""
        if self._limit_mb:
            for service in self._services.values():
                if (worker := service.workers.serving) is not None:
                    self._sizes.learn(worker.version.digest, worker.measure())

    def _make_room(self, need_mb: float, reservations: Sequence[Reservation], model: str) -> bool:
        plan = plan_memory(need_mb, self._limit_mb, reservations, self._clock())
        for other in plan.unload:
            self._services[other].unload(f"memory for {model}")
        return plan.fits

    def _reservations(self, asking: ModelService | None = None) -> list[Reservation]:
        """Return the memory of all workers. Of the service `asking`, include only workers that end."""
        return [each for service in self._services.values() for each in self._reservations_of(service, asking)]

    def _reservations_of(self, service: ModelService, asking: ModelService | None) -> list[Reservation]:
        reservations = []
        workers = service.workers
        for worker in workers:
            if service is asking and not worker.ending:
                continue
            mb = worker.mb or self._sizes.of(worker.version.digest) or estimated_mb(worker.folder, self._forks())
            fixed = (
                service.pinned
                or service.trial.in_progress
                or worker is not workers.serving
                or workers.loading is not None
            )
            used_at_s = self._clock() if workers.busy else worker.used_at_s
            reservations.append(Reservation(service.model, mb, used_at_s, worker.ending, fixed and not worker.ending))
        return reservations


@dataclass(frozen=True)
class Reservation:
    """A worker's part of the budget. An `ending` worker frees it soon; a `fixed` worker stays loaded."""

    model: str
    mb: float
    used_at_s: float = 0.0
    ending: bool = False
    fixed: bool = False  # the model is pinned, on trial, or loads a version


@dataclass(frozen=True)
class MemoryPlan:
    """Whether a version fits now. If not, unload the models in `unload`; if it is empty, wait."""

    fits: bool
    unload: tuple[str, ...] = ()


def plan_memory(need_mb: float, limit_mb: float, reservations: Sequence[Reservation], now_s: float) -> MemoryPlan:
    """Decide how `need_mb` fits under `limit_mb` beside `reservations`.

    The least recently used models are unloaded first, and as few models as possible. If all of them together would not
    free enough memory, no model is unloaded.
    """
    staying = [each for each in reservations if not each.ending]
    if need_mb <= limit_mb - sum(each.mb for each in reservations):
        return MemoryPlan(fits=True)
    missing = need_mb - (limit_mb - sum(each.mb for each in staying))
    going: list[str] = []
    for each in sorted(staying, key=lambda one: one.used_at_s):
        if missing <= 0:
            break
        if not each.fixed and now_s - each.used_at_s >= IDLE_S_MIN:
            going.append(each.model)
            missing -= each.mb
    return MemoryPlan(fits=False, unload=tuple(going) if missing <= 0 else ())
