"""The turns of models that load: as many at once as processors, so that the first answer soon."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from edgert.daemon.memory.memory_budget import MemoryBudget
from edgert.daemon.model.model_service import ModelService
from edgert.versions.slots import SlotState

TURN_S = 10.0  # a load that takes longer, such as TensorRT building a plan, holds up no other


class LoadTurns:
    """Admits loads of `services` in turn, each if `budget` has memory for it.

    The models that clients ask for go first, then pinned ones. A model that a command waits for, that is on trial or
    that serves while its next version loads needs no turn.
    """

    def __init__(
        self,
        services: Mapping[str, ModelService],
        budget: MemoryBudget,
        clock: Callable[[], float],
        at_once: int | None = None,
    ) -> None:
        self._services, self._budget, self._clock = services, budget, clock
        self._at_once = at_once or len(os.sched_getaffinity(0))

    def admit(self, service: ModelService, slots: SlotState) -> bool:
        """Return whether `service` may load its live version now; if not, queue it or make room for it.

        Raises Unavailable for a version that the memory budget can never hold.
        """
        service.queued = service.needs_turn and len(self._ends_s()) >= self._at_once
        return not service.queued and self._budget.admit(service, slots)

    def tick(self) -> None:
        """Start what is queued, as far as there are turns."""
        queued = [service for service in self._services.values() if service.queued]
        for service in sorted(queued, key=lambda service: (not service.asked, not service.pinned)):
            if len(self._ends_s()) >= self._at_once:
                return
            service.sync()

    def due_s(self) -> float | None:
        """Return when a turn ends that another model waits for, on the clock; None for never."""
        waits = any(service.queued for service in self._services.values())
        return min(self._ends_s(), default=None) if waits else None

    def _ends_s(self) -> list[float]:
        """Return when the turns of the models that load now end."""
        loading = [service.workers.loading for service in self._services.values()]
        ends_s = [worker.started_s + TURN_S for worker in loading if worker is not None]
        return [end_s for end_s in ends_s if end_s > self._clock()]
