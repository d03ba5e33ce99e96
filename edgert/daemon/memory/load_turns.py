"""Decides when models load: one per processor at a time, and only if there is memory for the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edgert.daemon.memory.memory_budget import MemoryBudget
from edgert.daemon.model.model_service import ModelService
from edgert.errors import Overloaded
from edgert.versions.slots import Slots

TURN_S = 10.0  # a longer load, such as a TensorRT build, does not delay others
MEMORY_RETRY_S = 0.05
MEMORY_WAIT_S_MAX = 10.0  # then the load is refused; the next request of a client starts a new wait


@dataclass(frozen=True)
class _Wait:
    """The wait of a model for memory. The next attempt to load the model is at `retry_at_s`."""

    since_s: float
    retry_at_s: float


class LoadTurns:
    """Admits the loads of `services` in turn. Each load needs memory in `budget` for its model.

    Models that clients requested load first, then pinned models. Some loads need no turn: a load that a command waits
    for, a load of a version on trial, and a load of a model whose old version still serves. If a model must wait,
    `tick` calls the `sync` of its service later. By default, as many models load `at_once` as there are processors.
    """

    def __init__(
        self,
        services: Mapping[str, ModelService],
        budget: MemoryBudget,
        clock: Callable[[], float],
        at_once: int | None = None,
    ) -> None:
        self._services = services
        self._budget = budget
        self._clock = clock
        self._at_once = at_once or len(os.sched_getaffinity(0))
        self._queued: set[str] = set()  # models that wait for a turn
        self._waits: dict[str, _Wait] = {}  # models that wait for memory

    def admit(self, service: ModelService, slots: Slots) -> bool:
        """Return whether `service` may load its live version now. If not, `tick` tries again.

        Raises Unavailable if the version never fits into the memory budget. Raises Overloaded if other models have used
        the memory for MEMORY_WAIT_S_MAX, even if clients still request the model, because a command may wait for it.
        """
        model = service.model
        self._queued.discard(model)
        if service.needs_turn and not self._free_turn():
            self._queued.add(model)
            return False
        wait = self._waits.pop(model, None)
        if self._budget.admit(service, slots):
            return True
        now_s = self._clock()
        since_s = now_s if wait is None else wait.since_s
        if now_s >= since_s + MEMORY_WAIT_S_MAX:
            raise Overloaded(
                f"there was no memory for {model} for {MEMORY_WAIT_S_MAX:g} s, because other models use it: raise memory_mb in "
                "config.toml, or send fewer requests to the other models",
                retry_after_s=1.0,
            )
        self._waits[model] = _Wait(since_s, now_s + MEMORY_RETRY_S)
        return False

    def tick(self) -> None:
        """Try the loads that are due."""
        now_s = self._clock()
        for model, wait in list(self._waits.items()):
            if now_s >= wait.retry_at_s:
                self._try_again(self._services[model])
                if self._waits.get(model) is wait:  # the model no longer waits for memory
                    del self._waits[model]
        queued = [service for model, service in self._services.items() if model in self._queued]
        for service in sorted(queued, key=lambda service: (service.requested_at_s is None, not service.pinned)):
            if not self._free_turn():
                return
            self._queued.discard(service.model)
            self._try_again(service)

    def due_s(self) -> float | None:
        """Return the time when `tick` is due, on the clock; None if nothing is due."""
        times = [wait.retry_at_s for wait in self._waits.values()] + (self._ends_s() if self._queued else [])
        return min(times, default=None)

    def _try_again(self, service: ModelService) -> None:
        if not service.waits_for_restart:
            service.sync()

    def _free_turn(self) -> bool:
        return len(self._ends_s()) < self._at_once

    def _ends_s(self) -> list[float]:
        """Return the end times of the turns of the models that load now."""
        loading = [service.workers.loading for service in self._services.values()]
        ends_s = [worker.started_s + TURN_S for worker in loading if worker is not None]
        return [end_s for end_s in ends_s if end_s > self._clock()]
