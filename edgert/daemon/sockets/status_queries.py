"""Answers the command `status` when the figures of all workers have arrived, or after STATUS_S_MAX."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from edgert.checks.status import DaemonStatus, LoadedStatus, MemoryStatus, WorkerFigures
from edgert.daemon.model.model_service import ModelService
from edgert.daemon.sockets.control_server import ControlClient
from edgert.protocol.control import answer_of
from edgert.typed_json import from_json, to_json
from edgert.worker_link import link

STATUS_S_MAX = 1.0


@dataclass(eq=False)
class _Query:
    """A command `status` that waits for the figures of `expected` workers."""

    client: ControlClient
    ends_at_s: float
    expected: int = 0
    answers: dict[str, tuple[LoadedStatus, WorkerFigures]] = field(default_factory=dict)


class StatusQueries:
    """Requests figures from the workers of `services`, and answers each command once."""

    def __init__(
        self,
        boot: str,
        limit_mb: float,
        services: Mapping[str, ModelService],
        clock: Callable[[], float],
        read_only: Callable[[], bool] = lambda: False,
    ) -> None:
        self._read_only = read_only
        self._boot = boot
        self._limit_mb = limit_mb
        self._services = services
        self._clock = clock
        self._queries: dict[int, _Query] = {}
        self._number = 0

    def begin(self, client: ControlClient) -> None:
        """Request figures from every worker that serves, for the answer to `client`."""
        self._number += 1
        started = self._queries[self._number] = _Query(client, self._clock() + STATUS_S_MAX)
        for service in self._services.values():
            if (worker := service.workers.serving) is not None:
                worker.measure()
                with contextlib.suppress(OSError):
                    link.send(worker.link, {"op": "stats", "id": self._number})
                    started.expected += 1
        if not started.expected:
            self._finish(self._number)

    def handle_message(self, model: str, message: dict[str, Any]) -> None:
        """Handle a worker's figures. Raises ValueError, KeyError or TypeError for a malformed message."""
        current = self._queries.get(message["id"])
        if current is None:
            return
        loaded = from_json(LoadedStatus, message["loaded"])
        current.answers[model] = loaded, from_json(WorkerFigures, message["figures"])
        if len(current.answers) == current.expected:
            self._finish(message["id"])

    def tick(self) -> None:
        """Answer without the figures that did not arrive in time."""
        now_s = self._clock()
        for number in [number for number, each in self._queries.items() if now_s > each.ends_at_s]:
            self._finish(number)

    def due_s(self) -> float | None:
        return min((each.ends_at_s for each in self._queries.values()), default=None)

    def _finish(self, number: int) -> None:
        finished = self._queries.pop(number)
        models = {name: service.status() for name, service in self._services.items()}
        for name, (loaded, figures) in finished.answers.items():
            models[name] = replace(models[name], loaded=loaded, figures=figures)
        used_mb = sum(worker.mb for service in self._services.values() for worker in service.workers)
        shared_mb = sum(figures.shared_bytes for _, figures in finished.answers.values()) / 1e6
        memory = MemoryStatus(round(used_mb, 1), self._limit_mb, round(shared_mb, 1))
        read_only = False
        with contextlib.suppress(OSError):  # the folder was removed
            read_only = self._read_only()
        status = DaemonStatus(os.getpid(), self._boot, memory, models, read_only)
        finished.client.reply(answer_of(to_json(status)))
