"""The connections of a worker together: which clients get a connection, and how each connection ends."""

from __future__ import annotations

import fcntl
import resource
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from edgert.config import ServingConfig
from edgert.errors import Overloaded, ShuttingDown
from edgert.protocol import wire
from edgert.protocol.hello import HelloFlags
from edgert.telemetry.span_counter import SpanCounter
from edgert.worker.connections.connections import Connections
from edgert.worker.connections.sessions import ClientSession, Sessions
from edgert.worker.connections.shared_memory import SharedMemoryBudget
from edgert.worker.pipeline.pipeline import Pipeline
from tests.support.clients import ITEM, read_frame, request
from tests.support.devices import WAIT_S_MAX, wait_until
from tests.support.stand_ins.loaded_models import loaded, pipeline_of

FRAME_BYTES_MAX = 64 * 1024
PING = wire.json_frame(wire.PING, {}, request_id=3)
WELCOME = wire.json_frame(wire.WELCOME, {})


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Pipeline:
    return pipeline_of(loaded(tmp_path_factory.mktemp("model")))


@pytest.fixture
def connections(pipeline: Pipeline) -> Iterator[Connections]:
    connections = Connections(
        pipeline,
        SpanCounter("m"),
        SpanCounter("m"),
        WELCOME,
        FRAME_BYTES_MAX,
        2,
        reactor_limits=None,
        shared_memory=SharedMemoryBudget(0),
        sessions=None,  # type: ignore[arg-type]  # a session is an internal fault here
    )
    yield connections
    connections.stop_reading()
    connections.wait_until_gone(20)
    assert len(connections) == 0


def accepted(connections: Connections) -> socket.socket:
    ours, theirs = socket.socketpair()
    ours.settimeout(WAIT_S_MAX)
    connections.accept(theirs)
    return ours


def test_a_client_is_greeted_and_then_served_and_then_sent_to_the_next_worker(connections: Connections) -> None:
    with accepted(connections) as client:
        assert read_frame(client).kind == wire.WELCOME
        client.sendall(request(1))
        assert read_frame(client).kind == wire.RESULT
        connections.stop_reading()
        assert read_frame(client).kind == wire.MOVED
        assert client.recv(1) == b""


def test_a_client_that_takes_the_last_file_descriptors_gets_an_error_about_them(connections: Connections) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.settimeout(WAIT_S_MAX)
        last = fcntl.fcntl(theirs, fcntl.F_DUPFD_CLOEXEC, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 2)
        connections.accept(socket.socket(fileno=last))
        error = wire.error_of(read_frame(ours))
        assert isinstance(error, Overloaded)
        assert "no free file descriptor: raise LimitNOFILE" in error.message
    with accepted(connections) as client:
        assert read_frame(client).kind == wire.WELCOME


def test_clients_that_follow_each_other_get_their_own_answers(connections: Connections) -> None:
    """A connection uses the memory of an earlier connection, which may have ended inside a frame."""
    for number, last in enumerate((b"", request(9)[:70], b"garbage" * 20, request(9)[:-1], request(9), PING[:10])):
        with accepted(connections) as client:
            assert read_frame(client).kind == wire.WELCOME
            for turn in range(2):
                item = np.full_like(ITEM, 2 * number + turn)
                client.sendall(request(turn, item))
                answer = read_frame(client)
                assert answer.request_id == turn
                assert answer.tensors[0].data == item.tobytes()
            client.sendall(last)
        wait_until(lambda: len(connections) == 0, "the connection has ended")


def test_a_stopping_daemon_tells_its_clients(connections: Connections) -> None:
    connections.final_frame = wire.error_frame(ShuttingDown("the daemon is stopping", retry_after_s=1.0))
    with accepted(connections) as client:
        read_frame(client)
        connections.stop_reading()
        assert wire.error_of(read_frame(client)).code == "unavailable.shutting_down"


def test_a_client_beyond_the_limit_is_refused(connections: Connections) -> None:
    with accepted(connections) as first, accepted(connections) as second, accepted(connections) as third:
        assert "connections_max" in wire.error_of(read_frame(third)).message
        assert read_frame(first).kind == read_frame(second).kind == wire.WELCOME


def test_an_error_in_the_greeting_ends_only_its_connection(connections: Connections) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(WAIT_S_MAX)
        connections.accept(theirs, HelloFlags(session=True))  # fails, because `connections` has no sessions
        assert ours.recv(1) == b""
    wait_until(lambda: len(connections) == 0, "the connection has ended")


def test_a_client_that_breaks_the_protocol_gets_an_error(connections: Connections) -> None:
    with accepted(connections) as client:
        read_frame(client)
        client.sendall(b"garbage" * 20)
        assert wire.error_of(read_frame(client)).code == "request.protocol"
        assert client.recv(1) == b""


def test_a_client_may_start_a_new_session_as_soon_as_it_knows_that_its_session_ended(
    connections: Connections, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, serving = loaded(tmp_path, op="add", state_id=""), ServingConfig(sessions_max=1)
    sessions = Sessions(pipeline_of(model), model.version, serving, FRAME_BYTES_MAX)
    connections._sessions = sessions
    counts, moved = list[int](), ClientSession.moved

    def counted(session: ClientSession) -> Sequence[wire.Buffer]:
        counts.append(sessions.count)
        return moved(session)

    monkeypatch.setattr(ClientSession, "moved", counted)
    ours, theirs = socket.socketpair()
    with ours:
        ours.settimeout(WAIT_S_MAX)
        connections.accept(theirs, HelloFlags(session=True))
        assert read_frame(ours).kind == wire.WELCOME
        assert sessions.count == 1
        connections.stop_reading()
        assert read_frame(ours).kind == wire.MOVED
    assert counts == [0]
