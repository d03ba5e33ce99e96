"""The blocking client in processes and threads of an app."""

from __future__ import annotations

import copy
import gc
import math
import multiprocessing
import multiprocessing.queues
import pickle
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from edgert import AsyncClient, Client
from edgert.client.blocking import Session
from edgert.client.conversation import Outputs, Retry
from edgert.errors import DeadlineExceeded, ModelNotFound, RequestError, SessionLost, Unavailable
from edgert.protocol import wire
from tests.support.clients import ITEM
from tests.support.devices import Device, a_device
from tests.support.stand_ins.false_daemon import RESULT, WELCOME_FRAME, false_daemon


@pytest.fixture(scope="module")
def quick() -> Iterator[Device]:
    with a_device() as device:
        device.put()
        yield device


def wrong_answers(client: Client, number: int) -> int:
    """Send many requests and return the number of answers that belong to another request."""
    values = [np.full((1, 4), number * 1000 + i, np.float32) for i in range(200)]
    return sum(not np.array_equal(client.infer("echo", value, cache=False)["y"], value) for value in values)


def test_processes_that_are_forked_from_one_get_their_own_answers(quick: Device) -> None:
    with quick.client() as client:
        assert not wrong_answers(client, 0)
        with multiprocessing.get_context("fork").Pool(3, initializer=KEPT.append, initargs=(client,)) as pool:
            asked = pool.map_async(wrong_answers_of_kept, range(1, 7), chunksize=1)
            assert not wrong_answers(client, 9)
            assert asked.get(120) == [0] * 6


KEPT: list[Client] = []  # the clients of a child process


def wrong_answers_of_kept(number: int) -> int:
    return wrong_answers(KEPT[0], number)


def ask_session(stream: Session, told: multiprocessing.queues.Queue[str]) -> None:
    try:
        stream.infer(ITEM)
    except SessionLost as error:
        told.put(error.message)


def test_a_session_cannot_be_used_by_a_forked_process(quick: Device) -> None:
    quick.put(model="sums", op="add", state_id="v1")
    fork = multiprocessing.get_context("fork")
    told = fork.Queue()
    with quick.client() as client, client.session("sums") as stream:
        assert np.array_equal(stream.infer(ITEM)["y"], ITEM)
        child = fork.Process(target=ask_session, args=(stream, told))
        child.start()
        assert told.get(timeout=60) == "the session belongs to the parent process: start a new session"
        child.join()
        assert np.array_equal(stream.infer(ITEM)["y"], 2 * ITEM)


def test_a_pickled_client_has_the_same_settings_and_its_own_connections(quick: Device) -> None:
    with Client(quick.socket, timeout_s=19.0, transport="socket") as client:
        client.infer("echo", ITEM)
        for same in (pickle.loads(pickle.dumps(client)), copy.deepcopy(client)):
            assert (same.path, same.timeout_s, same.transport) == (client.path, 19.0, "socket")
            client.close_idle()
            assert not wrong_answers(same, 1)
            same.close()
    asyncio_client = pickle.loads(pickle.dumps(AsyncClient(quick.socket, connections_max=3)))
    assert (asyncio_client.path, asyncio_client.connections_max) == (quick.socket, 3)


class IdleConnection:
    """An idle connection without a daemon."""

    conversation = SimpleNamespace(outgrown=False)

    def __init__(self) -> None:
        self.closed = False

    def request(self, *_: Any) -> Outputs:
        return {}

    def close(self) -> None:
        self.closed = True


def test_a_connection_that_returns_while_its_client_closes_is_closed(tmp_path: Path) -> None:
    class ClosesDuringAppend(list[Any]):
        def append(self, connection: Any) -> None:
            client.close()
            super().append(connection)

    client, connection = Client(tmp_path / "none.sock"), IdleConnection()
    client._idle["echo"] = ClosesDuringAppend([connection])
    client.infer("echo", ITEM)
    assert connection.closed
    assert not client._idle["echo"]


def test_a_request_may_take_the_last_idle_connection_while_the_client_closes_it(tmp_path: Path) -> None:
    class TakenAfterTheCheck(list[Any]):
        def __len__(self) -> int:
            return 1

    client = Client(tmp_path / "none.sock")
    client._idle["echo"] = TakenAfterTheCheck()
    client.close()


def test_a_client_forgets_the_name_of_a_model_that_the_device_does_not_have(quick: Device) -> None:
    with quick.client() as client:
        for name in ("nothing", "no/model"):
            with pytest.raises(ModelNotFound):
                client.infer(name, ITEM)
        assert not client._idle


def test_a_second_attempt_after_an_idle_connection_has_only_the_remaining_time(tmp_path: Path) -> None:
    given_s: list[float] = []

    class BusyOnce(IdleConnection):
        def request(self, inputs: Any, timeout_s: float, *rest: Any) -> Outputs:
            given_s.append(timeout_s)
            if len(given_s) == 1:
                raise Retry(Unavailable("busy", retry_after_s=0.2))
            return {}

    with Client(tmp_path / "none.sock") as client:
        client._idle["echo"] = [BusyOnce(), BusyOnce()]  # type: ignore[list-item]
        assert client.infer("echo", ITEM, timeout_s=1.0) == {}
    assert given_s[0] == 1.0
    assert given_s[1] <= 0.8


def test_a_request_of_a_session_that_moves_ends_at_its_time_out(tmp_path: Path) -> None:
    wait = wire.error_frame(Unavailable("it is being loaded", retry_after_s=0.7))
    moves = [WELCOME_FRAME, wire.json_frame(wire.MOVED, {})]
    with (
        false_daemon(tmp_path, moves, [wait], [WELCOME_FRAME, b""]) as path,
        Client(path) as client,
        client.session("echo") as stream,
    ):
        began_s = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            stream.infer(ITEM, timeout_s=1.0)
        assert time.monotonic() - began_s < 1.5


def test_a_time_out_during_a_retry_gives_the_reason_of_the_retry(tmp_path: Path) -> None:
    loading = wire.error_frame(Unavailable("it is being loaded", retry_after_s=0.05))
    with (
        false_daemon(tmp_path, [loading], [b""]) as path,
        Client(path) as client,
        pytest.raises(Unavailable, match="it is being loaded"),
    ):
        client.infer("echo", ITEM, timeout_s=0.3)


def test_a_session_refuses_the_request_of_a_second_thread_and_a_copy(
    quick: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    quick.put(model="turns", op="add", state_id="v1")
    with quick.client() as client, client.session("turns") as stream:
        request = stream._connection.request

        def during_a_request(*args: Any) -> Any:
            with pytest.raises(RequestError, match="another request of this session is in progress"):
                stream.infer(ITEM)
            return request(*args)

        monkeypatch.setattr(stream._connection, "request", during_a_request)
        assert stream.infer(ITEM)["y"].shape == ITEM.shape
        for copied in (pickle.dumps, copy.copy):
            with pytest.raises(TypeError, match="start a session in the other process"):
                copied(stream)
        with pytest.raises(TypeError, match="start a session in the other process"):
            pickle.dumps(AsyncClient(quick.socket).session("turns"))


def test_a_request_after_an_answer_and_a_moved_frame_in_one_piece_goes_to_the_new_worker(tmp_path: Path) -> None:
    """The old worker is still connected, but it reads no further request."""
    leaves = [WELCOME_FRAME, RESULT + wire.json_frame(wire.MOVED, {}), b""]
    with false_daemon(tmp_path, leaves, [WELCOME_FRAME, RESULT]) as path, Client(path, timeout_s=5.0) as client:
        assert client.infer("echo", ITEM).keys() == client.infer("echo", ITEM).keys()


def shared_areas() -> int:
    """Return the number of areas shared with a daemon that this process has mapped."""
    gc.collect()
    return Path("/proc/self/maps").read_text().count("/memfd:edgert")


def test_memory_is_shared_with_the_daemon_once_a_request_is_large(quick: Device) -> None:
    before = shared_areas()
    large = np.arange(4096, dtype=np.float32).reshape(1024, 4)
    with Client(quick.socket) as client:
        for _ in range(2):
            client.infer("echo", ITEM)
        assert shared_areas() == before
        for values in (large, -large, ITEM):
            assert (client.infer("echo", values, cache=False)["y"] == values).all()
            assert shared_areas() == before + 1
    with Client(quick.socket) as client:
        client.infer("echo", {"x": large})
        assert shared_areas() == before + 1
    with Client(quick.socket, transport="socket") as client:
        client.infer("echo", large)
        assert shared_areas() == before


@pytest.mark.parametrize("timeout_s", [None, "5", -1, math.nan])
def test_an_invalid_time_out_is_refused_at_once(quick: Device, timeout_s: Any) -> None:
    with pytest.raises(RequestError, match="give seconds"):
        Client(quick.socket, timeout_s=timeout_s)


def test_an_invalid_time_out_of_one_request_is_refused(quick: Device) -> None:
    quick.put(model="totals", op="add", state_id="v1")
    none: list[Any] = ["5", -1, math.nan]
    with quick.client() as client, client.session("totals") as stream:
        for ask in (partial(client.infer, "echo"), stream.infer):
            for timeout_s in none:
                with pytest.raises(RequestError, match="give seconds, 0 or more"):
                    ask(ITEM, timeout_s=timeout_s)
            assert ask(ITEM, timeout_s=None)["y"].shape == ITEM.shape


def test_inputs_with_other_names_are_refused(quick: Device) -> None:
    with quick.client() as client:
        odd: Any = {1: ITEM, "x": ITEM}
        with pytest.raises(RequestError, match="send these names and no others"):
            client.infer("echo", odd)
