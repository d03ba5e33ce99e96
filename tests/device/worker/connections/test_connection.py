"""One client's connection in a worker, over a pair of sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.engines import Session
from edgert.errors import Overloaded
from edgert.protocol import wire
from edgert.protocol.frame_builder import FrameBuilder
from edgert.protocol.local_socket import timeval
from edgert.protocol.sharing import SharedArea
from edgert.telemetry.span_counter import SpanCounter
from edgert.worker.connections.buffers import FIRST_BUFFER_BYTES, BufferBudget
from edgert.worker.connections.connection import STALL_S, Connection
from edgert.worker.connections.own_thread import OwnThread
from edgert.worker.connections.reactor import Departure, Reactor, RunLimits
from edgert.worker.connections.reactor_switch import REACTOR_REQUESTS_MIN, ReactorSwitch
from edgert.worker.pipeline.batcher import Batcher
from edgert.worker.pipeline.cache import PredictionCache
from edgert.worker.pipeline.pipeline import Pipeline
from tests.support.clients import ITEM, read_frame, request
from tests.support.devices import WAIT_S_MAX, wait_until
from tests.support.stand_ins.loaded_models import loaded, pipeline_of

FRAME_BYTES_MAX = 64 * 1024
PING = wire.json_frame(wire.PING, {}, request_id=3)
LARGE = request(1, np.repeat(ITEM, 1000, axis=0))
WELCOME = wire.json_frame(wire.WELCOME, {})


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    return pipeline_of(loaded(tmp_path_factory.mktemp("model")))


class HeldSession(Session):
    """Answers like `session`, but each run waits for a permit of `go`."""

    def __init__(self, session: Session, go: threading.Semaphore) -> None:
        self.inputs, self.outputs = session.inputs, session.outputs
        self._session, self._go = session, go
        self.running = 0

    def run(self, tensors: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
        self.running += 1
        assert self._go.acquire(timeout=WAIT_S_MAX)
        return self._session.run(tensors)

    def close(self) -> None:
        self._session.close()


class Served:
    """The client's end of a connection, and the result or error of the connection's thread."""

    def __init__(self, pipeline: Pipeline, switch: ReactorSwitch, frame_bytes_max: int, budget: BufferBudget) -> None:
        self.client, self.server = socket.socketpair()
        self.client.settimeout(WAIT_S_MAX)
        self._pipeline = pipeline
        self.counter = SpanCounter("m")
        self.connection = Connection(self.server, pipeline, self.counter, frame_bytes_max, budget)
        self.result: bool | Exception | None = None
        self._thread = threading.Thread(target=self._serve, args=(switch,), daemon=True)
        self._thread.start()

    def _serve(self, switch: ReactorSwitch) -> None:
        try:
            self.result = OwnThread(self.connection, self._pipeline, switch).serve()
        except Exception as error:  # noqa: BLE001  # the test checks the error
            self.result = error

    def ended(self) -> bool | Exception | None:
        self._thread.join(WAIT_S_MAX)
        assert not self._thread.is_alive()
        return self.result


@pytest.fixture
def serve(pipeline: Pipeline) -> Iterator[Callable[..., Served]]:
    made: list[Served] = []

    def one(
        switch: ReactorSwitch | None = None,
        frame_bytes_max: int = FRAME_BYTES_MAX,
        budget: BufferBudget | None = None,
    ) -> Served:
        made.append(Served(pipeline, switch or ReactorSwitch(), frame_bytes_max, budget or BufferBudget()))
        return made[-1]

    yield one
    for served in made:
        served.client.close()
        served.ended()
        served.server.close()


def test_requests_are_answered_and_counted(serve: Callable[..., Served]) -> None:
    served = serve()
    for number in range(3):
        served.client.sendall(request(number, ITEM * number))
        frame = read_frame(served.client)
        assert (frame.kind, frame.request_id) == (wire.RESULT, number)
        assert np.frombuffer(frame.tensors[0].data, np.float32).tolist() == (ITEM * number).ravel().tolist()
    served.client.sendall(PING)
    assert read_frame(served.client).kind == wire.PONG
    served.client.close()
    assert served.ended() is False
    assert served.counter.snapshot().totals.answered == 3


def test_a_request_that_fails_leaves_the_connection_usable(
    serve: Callable[..., Served], capsys: pytest.CaptureFixture[str]
) -> None:
    served = serve()
    served.client.sendall(request(1, ITEM[:, :3]) + request(2))
    assert wire.error_of(read_frame(served.client)).code == "request.invalid"
    assert read_frame(served.client).kind == wire.RESULT
    served.client.close()
    served.ended()
    assert (served.counter.snapshot().totals.errors, capsys.readouterr().err) == (1, "")


def test_an_answer_longer_than_a_frame_is_refused(serve: Callable[..., Served]) -> None:
    served = serve(frame_bytes_max=256)  # with its header, the answer exceeds this limit
    served.connection.frames.limit(FRAME_BYTES_MAX)
    served.client.sendall(request(1, np.ones((10, 4), np.float32)))
    assert "send fewer items" in wire.error_of(read_frame(served.client)).message


def test_a_frame_that_is_not_for_the_daemon_ends_the_connection(serve: Callable[..., Served]) -> None:
    served = serve()
    served.client.sendall(wire.json_frame(wire.WELCOME, {}))
    assert "send INFER or PING" in str(served.ended())


def test_an_end_inside_a_frame_ends_the_connection(serve: Callable[..., Served]) -> None:
    served = serve()
    served.client.sendall(request()[:100])
    served.client.close()
    assert served.ended() is False


def test_a_client_that_stops_inside_a_frame_that_arrived_with_another_frame_is_disconnected(
    serve: Callable[..., Served],
) -> None:
    served = serve()
    served.server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(0.1))  # instead of STALL_S, from now on
    served.client.sendall(PING + PING[:40])
    assert read_frame(served.client).kind == wire.PONG
    assert "stopped inside a frame" in str(served.ended())


def test_a_connection_moves_to_the_reactor_when_many_connections_take_turns(serve: Callable[..., Served]) -> None:
    switch = ReactorSwitch()
    served = serve(switch)
    switch.many = True
    for i in range(REACTOR_REQUESTS_MIN):  # no other connection is answered meanwhile
        assert switch.last is None, i
        served.client.sendall(request(i))
        read_frame(served.client)
    assert served.ended() is True
    assert switch.last is served.connection
    high = serve(switch)
    parts = bytearray(request(1))
    parts[6] |= wire.FLAG_HIGH_PRIORITY
    for _ in range(REACTOR_REQUESTS_MIN + 1):
        high.client.sendall(parts)
        read_frame(high.client)
    high.client.close()
    assert high.ended() is False  # high priority keeps its thread


def test_the_buffer_of_a_large_frame_is_kept_until_the_client_is_silent(serve: Callable[..., Served]) -> None:
    served = serve()
    frames = served.connection.frames
    sizes = []
    for _ in range(3):
        served.client.sendall(LARGE)
        assert read_frame(served.client).kind == wire.RESULT
        sizes.append((frames.size_bytes, id(frames.room.obj)))
    assert sizes[0][0] >= len(LARGE)
    assert len(set(sizes)) == 1
    served.server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(0.1))  # instead of STALL_S, from now on
    memory = weakref.ref(frames.room.obj)
    for sent in (PING, LARGE):
        served.client.sendall(sent)
        read_frame(served.client)
    wait_until(lambda: frames.size_bytes == FIRST_BUFFER_BYTES, "the buffer is given back")
    wait_until(lambda: memory() is None, "no variable of the thread keeps its memory")
    served.server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval(STALL_S))
    served.client.sendall(PING + LARGE)
    assert read_frame(served.client).kind == wire.PONG
    assert read_frame(served.client).kind == wire.RESULT


def test_silent_clients_in_the_reactor_cannot_keep_the_buffers_that_others_need(pipeline: Pipeline) -> None:
    items = np.repeat(ITEM, 1024, axis=0)
    budget, switch = BufferBudget(20 * FIRST_BUFFER_BYTES + 6 * items.nbytes), ReactorSwitch()
    switch.many = True
    departed: list[Departure] = []
    reactor = Reactor(pipeline, RunLimits(2, 1), switch, lambda connection, departure: departed.append(departure))
    reactor.start()
    with contextlib.ExitStack() as stack:
        for number in range(20):
            client, server = (stack.enter_context(sock) for sock in socket.socketpair())
            client.settimeout(WAIT_S_MAX)
            connection = Connection(server, pipeline, SpanCounter("m"), FRAME_BYTES_MAX, budget)
            made = SharedArea.create(2 * items.nbytes)
            assert made is not None
            connection.greet(WELCOME, made)
            assert read_frame(client).kind == wire.WELCOME
            reactor.add(connection)
            (head,) = FrameBuilder(wire.INFER, shared=made[0].request).parts([items], [0], 0, number, 0)
            client.sendall(head)
            assert client.recv(64)[5] == wire.RESULT
        assert departed == []


@pytest.mark.parametrize(
    ("least", "runs"), [(2, {2: 1}), (3, {1: 2})], ids=["two share a run", "two are run one by one"]
)
def test_as_many_requests_share_a_run_as_the_limits_allow(tmp_path: Path, least: int, runs: Mapping[int, int]) -> None:
    model = loaded(tmp_path)
    batcher = Batcher(model.session, cap=4)
    pipeline = Pipeline(model, batcher, PredictionCache(0, 60.0))
    switch = ReactorSwitch()
    switch.many = True
    reactor = Reactor(pipeline, RunLimits(least, 4), switch, lambda connection, departure: None)
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(2):
            client, server = (stack.enter_context(sock) for sock in socket.socketpair())
            client.settimeout(WAIT_S_MAX)
            client.sendall(request(1))
            reactor.add(Connection(server, pipeline, SpanCounter("m"), FRAME_BYTES_MAX, BufferBudget()))
            clients.append(client)
        reactor.start()
        for client in clients:
            assert read_frame(client).kind == wire.RESULT
    assert {items: count for items, (count, _) in batcher.runs.items()} == runs


def test_requests_with_separate_runs_run_at_once_and_their_wait_counts_as_queueing(tmp_path: Path) -> None:
    """Two threads run the first two requests. The third request waits unread until one of these runs ends."""
    model, go = loaded(tmp_path), threading.Semaphore(0)
    session = HeldSession(model.session, go)
    pipeline = Pipeline(model, Batcher(session, 1, more_sessions=[session]), PredictionCache(0, 60.0))
    switch, departed = ReactorSwitch(), list[Departure]()
    switch.many = True
    reactor = Reactor(pipeline, RunLimits(2, 1, 2), switch, lambda _, departure: departed.append(departure))
    reactor.start()
    with contextlib.ExitStack() as stack:
        clients = []
        for _ in range(3):
            client, server = (stack.enter_context(sock) for sock in socket.socketpair())
            client.settimeout(WAIT_S_MAX)
            reactor.add(Connection(server, pipeline, SpanCounter("m"), FRAME_BYTES_MAX, BufferBudget()))
            client.sendall(request(1))
            clients.append(client)
        wait_until(lambda: session.running == 2, "two requests run at once")
        time.sleep(0.2)  # the third request waits for at least half of this time
        go.release(3)
        stages = [wire.stage_times(read_frame(client)) for client in clients]
        assert departed == []
    waited = sorted(stage.queue_us for stage in stages)
    assert waited[1] < waited[2]
    assert waited[2] >= 100_000


def test_a_request_whose_deadline_passed_while_all_threads_were_busy_is_refused(tmp_path: Path) -> None:
    model, go = loaded(tmp_path), threading.Semaphore(0)
    session = HeldSession(model.session, go)
    pipeline = Pipeline(model, Batcher(session, 1), PredictionCache(0, 60.0))
    switch = ReactorSwitch()
    switch.many = True
    reactor = Reactor(pipeline, RunLimits(2, 1), switch, lambda connection, departure: None)
    reactor.start()
    with contextlib.ExitStack() as stack:
        clients = []
        for timeout_us in (0, 1000):
            client, server = (stack.enter_context(sock) for sock in socket.socketpair())
            client.settimeout(WAIT_S_MAX)
            reactor.add(Connection(server, pipeline, SpanCounter("m"), FRAME_BYTES_MAX, BufferBudget()))
            client.sendall(b"".join(FrameBuilder(wire.INFER).parts([ITEM], [0], 0, 1, timeout_us)))
            clients.append(client)
            wait_until(lambda: session.running == 1, "the first request runs")
        time.sleep(0.1)
        go.release(2)
        assert read_frame(clients[0]).kind == wire.RESULT
        assert wire.error_of(read_frame(clients[1])).code == "request.deadline_exceeded"


@pytest.mark.parametrize("items", [ITEM, ITEM[:, :3]], ids=["answered", "refused"])
def test_silent_clients_cannot_keep_the_buffers_that_others_need(
    serve: Callable[..., Served], items: NDArray[np.float32]
) -> None:
    large = request(1, np.repeat(items, 1000, axis=0))
    budget = BufferBudget(20 * FIRST_BUFFER_BYTES + 6 * len(large))
    for _ in range(20):
        served = serve(budget=budget)
        for _ in range(2):
            served.client.sendall(large)
            error = None if (frame := read_frame(served.client)).kind == wire.RESULT else wire.error_of(frame)
            assert error is None or error.code == "request.invalid"


def test_the_buffers_of_all_connections_are_limited_together() -> None:
    budget = BufferBudget(3 * FIRST_BUFFER_BYTES)
    budget.resize(0, FIRST_BUFFER_BYTES)
    with pytest.raises(Overloaded):
        budget.resize(FIRST_BUFFER_BYTES, 4 * FIRST_BUFFER_BYTES)
    budget.resize(FIRST_BUFFER_BYTES, 3 * FIRST_BUFFER_BYTES)
    budget.resize(3 * FIRST_BUFFER_BYTES, 0)


def test_a_connection_leaves_its_memory_to_the_next_one_if_it_ended_between_two_small_frames(
    pipeline: Pipeline,
) -> None:
    def left_after(data: bytes, answers: int) -> bool:
        with contextlib.ExitStack() as stack:
            client, server = (stack.enter_context(end) for end in socket.socketpair())
            client.settimeout(WAIT_S_MAX)
            connection = Connection(server, pipeline, SpanCounter("m"), 1 << 20, BufferBudget())
            client.sendall(data)
            client.shutdown(socket.SHUT_WR)
            OwnThread(connection, pipeline, ReactorSwitch()).serve()
            for _ in range(answers):
                read_frame(client)
            return connection.close() is not None

    assert left_after(request(1), 1)
    assert left_after(b"", 0)
    assert not left_after(request(1)[:70], 0)
    assert not left_after(request(1) + request(2)[:10], 1)
    assert not left_after(LARGE, 1)
