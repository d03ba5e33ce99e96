"""A worker in the test's own process: its messages to the supervisor, and the limits of its reactor."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgert.engines import Session
from edgert.protocol import wire
from edgert.telemetry.messages import MetricsMessage
from edgert.telemetry.spool import Spool
from edgert.tensors import TensorSpec
from edgert.typed_json import to_json
from edgert.worker.assembly import assemble, reactor_limits
from edgert.worker.connections.reactor import RunLimits
from edgert.worker.loading.model import load_model
from edgert.worker.pipeline.batcher import RELEASE_AFTER_S
from edgert.worker.worker import Worker
from edgert.worker_link import link
from edgert.worker_link.load_message import LoadMessage
from edgert.worker_link.run_page import RunPage
from tests.support.clients import ITEM, read_frame, request
from tests.support.devices import WAIT_S_MAX, wait_until
from tests.support.stand_ins.loaded_models import installed


class RestingSession(Session):
    """A session that notes the times when it was told to release memory."""

    def __init__(self, within: Session) -> None:
        self.inputs: tuple[TensorSpec, ...] = within.inputs
        self.outputs: tuple[TensorSpec, ...] = within.outputs
        self.released_at_s: list[float] = []
        self._within = within

    def run(self, tensors: Any) -> Any:
        return self._within.run(tensors)

    def release_memory(self, sample: Any) -> None:
        self.released_at_s.append(time.monotonic())

    def close(self) -> None:
        self._within.close()


class Started:
    """A worker in a thread that handles the messages of the supervisor's end of a link."""

    def __init__(self, folder: Path, config: str) -> None:
        version, state, settings = installed(folder, config)
        state.make()
        model = load_model(version, state, settings)
        self.session = RestingSession(model.session)
        model = replace(model, session=self.session)
        load_message = LoadMessage("echo", str(version.folder), version.digest, str(state.root), "b-test")
        self.supervisor, self._end = link.pair()
        self.worker = Worker(assemble(load_message, state, settings, model), state, settings)
        self._thread = threading.Thread(target=self._run, daemon=True)
        stack_size = threading.stack_size()
        try:
            self.worker.start(self._end)
        finally:
            threading.stack_size(stack_size)
        self._thread.start()

    def _run(self) -> None:
        self.worker.handle_messages(self._end)
        self.worker.stop()

    def receive(self) -> dict[str, Any]:
        received = link.receive(self.supervisor)
        assert received is not None
        return received[0]

    def ask(self, **message: Any) -> dict[str, Any]:
        link.send(self.supervisor, message)
        return self.receive()

    def stop(self) -> None:
        self.supervisor.close()
        self._thread.join(WAIT_S_MAX)
        assert not self._thread.is_alive()
        self._end.close()


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    worker = Started(tmp_path, "[serving]\nbatch_max = 4\nwindow_s = 1\n")
    yield worker
    worker.stop()


def test_a_worker_reports_its_model_and_serves_the_connections_that_it_receives(started: Started) -> None:
    ready = started.receive()
    assert (ready["op"], ready["loaded"]["release"], ready["loaded"]["batch_cap"]) == ("ready", 1, 4)
    client, server = socket.socketpair()
    with client:
        link.send(started.supervisor, {"op": "connection", "shared": False}, (server.fileno(),))
        server.close()
        client.settimeout(WAIT_S_MAX)
        assert read_frame(client).json()["model"] == "echo"
        client.sendall(request(1))
        assert read_frame(client).kind == wire.RESULT
        stats = started.ask(op="stats", id=7)
        assert (stats["op"], stats["id"], stats["figures"]["connections"]) == ("stats", 7, 1)
        figures = started.ask(op="figures")
        assert (figures["failed"], figures["compared"]) == (0, 0)
        link.send(started.supervisor, {"op": "stop", "final": False})
        assert read_frame(client).kind == wire.MOVED


def test_memory_of_large_runs_is_given_back_although_all_clients_have_left(started: Started) -> None:
    """The worker tells the engine at the end of a telemetry window (tests/device/engines tests the engine)."""
    started.receive()
    client, server = socket.socketpair()
    with client:
        link.send(started.supervisor, {"op": "connection", "shared": False}, (server.fileno(),))
        server.close()
        client.settimeout(WAIT_S_MAX)
        read_frame(client)
        asked_s = time.monotonic()
        client.sendall(request(1, np.repeat(ITEM, 4, axis=0)))
        assert read_frame(client).kind == wire.RESULT
    wait_until(lambda: started.session.released_at_s, "the engine releases memory")
    assert started.session.released_at_s[0] > asked_s + RELEASE_AFTER_S / 2


def test_a_worker_whose_daemon_stops_tells_its_clients_to_come_back_later(started: Started) -> None:
    started.receive()
    client, server = socket.socketpair()
    with client:
        link.send(started.supervisor, {"op": "connection"}, (server.fileno(),))
        server.close()
        client.settimeout(WAIT_S_MAX)
        read_frame(client)
        link.send(started.supervisor, {"op": "stop", "final": True})
        assert wire.error_of(read_frame(client)).code == "unavailable.shutting_down"


def test_a_worker_whose_daemon_died_during_the_load_reports_its_end_without_a_traceback(tmp_path: Path) -> None:
    version, state, _ = installed(tmp_path)
    state.make()
    load_message = LoadMessage("echo", str(version.folder), version.digest, str(state.root), "b-test")
    page = RunPage.create()
    supervisor, end = link.pair()
    with supervisor, end:
        link.send(supervisor, to_json(load_message), (page.descriptor,))
        supervisor.close()
        command = [sys.executable, "-m", "edgert.worker.worker", str(end.fileno())]
        worker = subprocess.run(command, pass_fds=[end.fileno()], stderr=subprocess.PIPE, text=True, timeout=WAIT_S_MAX)
    page.close()
    assert (worker.returncode, worker.stderr) == (0, "")
    (_, metrics) = Spool(state.spool).take(10)
    assert MetricsMessage.from_json(metrics.payload).number("up") == 0


@pytest.mark.parametrize(
    ("config", "cap"),
    [
        ("", None),
        ("[serving]\nthreads = 1\nbatch_max = 4\n", 4),
        ("[models.echo]\np95_ms = 5.0\n", 0),
        ("[serving]\ninstances = 2\nthreads = 1\n", 0),
    ],
    ids=["quick", "configured", "latency target", "instances"],
)
def test_only_a_quick_model_without_a_target_and_with_one_instance_has_a_reactor(
    tmp_path: Path, config: str, cap: int | None
) -> None:
    version, state, settings = installed(tmp_path, config)
    model = load_model(version, state, settings)
    load_message = LoadMessage("echo", str(version.folder), version.digest, str(state.root), "b")
    batcher = assemble(load_message, state, settings, model).batcher
    limits = [reactor_limits(model, settings, batcher, cpus) for cpus in (1, 2)]
    cap = batcher.cap if cap is None else cap
    assert limits == ([RunLimits(2, cap), RunLimits(3, cap)] if cap else [None, None])
