"""The answer to `status` waits for the workers' figures, but only for a limited time."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from edgert.checks.status import DaemonStatus, ServingStatus
from edgert.daemon.model.model_service import ModelService
from edgert.daemon.sockets.control_server import ControlClient
from edgert.daemon.sockets.status_queries import STATUS_S_MAX, StatusQueries
from edgert.daemon.workers.worker_set import WorkerSet
from edgert.typed_json import from_json, to_json
from edgert.versions.slots import Version
from tests.support.devices import WAIT_S_MAX
from tests.support.stand_ins.workers import LOAD_MESSAGE, FakeWorker
from tests.support.statuses import LOADED, worker_figures


class World:
    """Two models, one of which serves, a command, and a clock that the test moves."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.services = {"echo": self._service("ready"), "idle": self._service("unloaded")}
        self.services["echo"].workers.start(LOAD_MESSAGE, Version(3, "d", good=True))
        self.services["echo"].workers.switch()
        self.worker = cast(FakeWorker, self.services["echo"].workers.serving)
        self.queries = StatusQueries("boot", 500.0, self.services, lambda: self.now_s)
        self.command, theirs = socket.socketpair()
        self.command.settimeout(WAIT_S_MAX)
        self.client = ControlClient(theirs, 0.0)

    def _service(self, state: str) -> ModelService:
        workers = WorkerSet(lambda: self.now_s, lambda load_message, version, now_s: FakeWorker(version, now_s))
        return cast(ModelService, SimpleNamespace(workers=workers, status=lambda: ServingStatus(state)))

    def answer(self) -> DaemonStatus:
        value: dict[str, Any] = json.loads(self.command.recv(100_000))
        return from_json(DaemonStatus, value["ok"])


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.command.close()
    made.worker.close()


def report(number: int) -> dict[str, Any]:
    figures = to_json(worker_figures(7, {"idle": 7}))
    return {"op": "stats", "id": number, "loaded": to_json(LOADED), "figures": figures}


def test_the_answer_has_the_figures_of_every_worker(world: World) -> None:
    world.queries.begin(world.client)
    assert (world.worker.asked(), world.queries.due_s()) == (["stats"], world.now_s + STATUS_S_MAX)
    world.queries.handle_message("echo", report(1))
    status = world.answer()
    echo = status.models["echo"].figures
    assert (echo and echo.requests.requests, status.models["idle"].figures) == (7, None)
    assert (status.boot, status.memory.used_mb, status.memory.limit_mb) == ("boot", 10.0, 500.0)
    assert world.queries.due_s() is None


def test_a_worker_that_does_not_answer_is_reported_without_figures(world: World) -> None:
    world.queries.begin(world.client)
    world.now_s += STATUS_S_MAX + 0.1
    world.queries.tick()
    assert world.answer().models["echo"] == ServingStatus("ready")
    world.queries.handle_message("echo", report(1))  # this message is too late, so it is ignored


def test_an_invalid_report_of_a_worker_is_an_error(world: World) -> None:
    world.queries.begin(world.client)
    with pytest.raises(ValueError, match="lacks 'engine'"):
        world.queries.handle_message("echo", {**report(1), "loaded": {"release": 1, "digest": "d"}})
