"""The reactor: few threads serve many clients of a quick model, and no bad client delays the other clients."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from edgert import Client
from edgert.engines.fault import MAGIC
from edgert.errors import EngineFailed, RequestError
from edgert.protocol import wire
from edgert.worker.connections.connections import MANY_MIN
from edgert.worker.connections.reactor import TURNS_IN_ROW_MAX
from edgert.worker.connections.reactor_switch import REACTOR_FRAME_BYTES_MAX
from tests.support.clients import HELLO, ITEM, greeted, raw, read_frame, request
from tests.support.devices import WAIT_S_MAX, Device, a_device, wait_until

LARGE = (60_000,)


@pytest.fixture(scope="module", params=["shared runs", "one by one"])
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    alone = request.param == "one by one"
    with a_device("[serving]\ncache_mb = 1\n" + "batch_max = 1\ninstances = 2\n" * alone) as device:
        device.put(delay_s=0.0002 * alone)  # so the reactor has several threads: the model is too slow for one thread
        device.put(model="large", item_shape=LARGE)
        yield device


@pytest.fixture
def many(device: Device) -> Iterator[list[Client]]:
    """Connect enough clients for the reactor to serve them all."""
    wait_until(lambda: serving(device)["connections"] == 0, "the clients of the test before are gone")
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(device.client()) for _ in range(MANY_MIN + 2)]
        wait_until(
            lambda: answered(clients) or serving(device)["reactor_connections"] == len(clients), "they share a thread"
        )
        yield clients


def serving(device: Device, model: str = "echo") -> dict[str, Any]:
    """Return the daemon's status of a model. Wait for its worker's figures, which a busy machine may delay."""
    found = device.serving(model)
    while "reactor_connections" not in found:
        found = device.serving(model)
    return found


def answered(clients: Sequence[Client], times: int = 1) -> bool:
    """Check that all clients at once get their own answers; return False, for use in a loop."""

    def ask(number: int) -> None:
        for i in range(times):
            one = ITEM + 1000 * number + i
            assert clients[number].infer("echo", one, cache=False)["y"].tolist() == one.tolist()

    with ThreadPoolExecutor(len(clients)) as pool:
        list(pool.map(ask, range(len(clients))))
    return False


def test_many_connections_share_one_thread_and_share_runs_of_the_engine(device: Device, many: list[Client]) -> None:
    if serving(device)["batch_cap"] > 1:
        wait_until(
            lambda: answered(many, TURNS_IN_ROW_MAX - 50) or any(int(rows) > 2 for rows in serving(device)["runs"]),
            "their requests share runs",
        )
    wait_until(lambda: answered(many) or serving(device)["reactor_connections"] == len(many), "they share a thread")
    for client in many[1:]:
        client.close()
    wait_until(lambda: serving(device)["connections"] == 1, "the others are gone")
    answered(many[:1])
    wait_until(lambda: serving(device)["reactor_connections"] == 0, "the last has a thread of its own again")
    answered(many[:1])


def test_a_client_that_asks_alone_gets_a_thread_until_others_ask_again(device: Device, many: list[Client]) -> None:
    answered(many[:1], TURNS_IN_ROW_MAX + 2)
    wait_until(lambda: serving(device)["reactor_connections"] == len(many) - 1, "it asks alone")
    answered(many[:1], 10)
    assert serving(device)["reactor_connections"] == len(many) - 1
    wait_until(lambda: answered(many) or serving(device)["reactor_connections"] == len(many), "they ask in turns again")


def test_a_client_that_stops_inside_a_frame_delays_no_other_and_is_answered(device: Device, many: list[Client]) -> None:
    with greeted(device) as slow:
        for at in (10, 64, 100, 130):
            whole = request(at)
            slow.sendall(whole[:at])
            answered(many, 20)
            slow.sendall(whole[at:])
            frame = read_frame(slow)
            assert (frame.kind, frame.request_id) == (wire.RESULT, at)


def test_an_answer_tells_whether_other_clients_ask_as_well(device: Device, many: list[Client]) -> None:
    with greeted(device) as sock:

        def told() -> bool:
            sock.sendall(request())
            return read_frame(sock).flags & wire.FLAG_MANY != 0

        assert not told()
        wait_until(lambda: answered(many) or told(), "it is served with the others")
        for _ in range(TURNS_IN_ROW_MAX + 2):
            told()
        wait_until(lambda: not told(), "it asks alone")


def test_requests_sent_without_waiting_are_answered_in_their_order(device: Device, many: list[Client]) -> None:
    with greeted(device) as eager:
        eager.sendall(b"".join(request(i) for i in range(500)))
        answered(many, 20)
        assert [read_frame(eager).request_id for _ in range(500)] == list(range(500))


def test_a_client_that_does_not_read_delays_no_other_and_loses_no_answer(device: Device, many: list[Client]) -> None:
    asked, rows = 0, np.ones((900, 4), np.float32)  # few answers of this size fill the client's receive buffer
    with greeted(device) as greedy:
        while serving(device)["reactor_connections"] <= len(many):
            greedy.sendall(request(0, rows))
            assert read_frame(greedy).kind == wire.RESULT
            answered(many)
        before = serving(device)["requests"]["requests"]
        greedy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        greedy.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while asked < 50_000:
                one = request(asked, rows)
                sent = greedy.send(one)
                asked += 1
                if sent < len(one):
                    asked -= 1  # the daemon has only a part of this request
                    break
                answered(many[:1])  # so the greedy client was not alone
            else:
                pytest.fail("the daemon takes requests without end")
        answered(many, 20)
        greedy.settimeout(WAIT_S_MAX)
        for i in range(asked):
            assert read_frame(greedy).request_id == i
    assert asked
    counted = before + 2 * asked + 20 * len(many)
    wait_until(lambda: serving(device)["requests"]["requests"] == counted, "every answer is counted")


def test_only_the_client_that_breaks_the_protocol_gets_an_error(device: Device, many: list[Client]) -> None:
    for wrong in (b"garbage" * 20, wire.json_frame(wire.WELCOME, {})):
        with greeted(device) as sock:
            sock.sendall(wrong)
            answered(many, 5)
            assert read_frame(sock).kind == wire.ERROR
            assert sock.recv(1) == b""


def test_the_reactor_serves_every_kind_of_request(device: Device, many: list[Client]) -> None:
    client, numbers = many[0], itertools.count(9)

    def hit() -> bool:
        """Return whether a repeated request hits the cache, which is off for a while after it slowed requests down."""
        one = ITEM + next(numbers)
        first, second = (client.infer("echo", one, trace=True).cache_hit for _ in range(2))
        assert not first
        return second

    with pytest.raises(RequestError, match="takes FP32"):
        client.infer("echo", np.zeros((1, 5), np.float32))
    rows = np.arange(4 * 700, dtype=np.float32).reshape(700, 4)
    assert np.array_equal(client.infer("echo", rows, cache=False)["y"], rows)
    wait_until(hit, "a cache answers")
    assert client.infer("echo", ITEM, priority="high", cache=False)["y"].tolist() == ITEM.tolist()
    wait_until(
        lambda: serving(device)["reactor_connections"] == len(many) - 1, "it has a thread: it may overtake the others"
    )
    answered(many)
    with raw(device) as sock:
        sock.sendall(HELLO + wire.json_frame(wire.PING, {}, request_id=3) + request(4))
        assert [read_frame(sock).kind for _ in range(3)] == [wire.WELCOME, wire.PONG, wire.RESULT]


def test_a_run_that_fails_affects_only_its_own_requests(device: Device) -> None:
    device.put(model="brittle", engine="fault", op="copy")
    failing = np.full((1024, 4), next(value for value, name in MAGIC.items() if name == "raise"), np.float32)
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(device.client()) for _ in range(MANY_MIN + 2)]

        def ask(number: int) -> int:
            failed = 0
            for i in range(400):
                one = ITEM + 1000 * number + i
                fails = not number and i > 100  # by then the clients share a thread
                try:
                    answer = clients[number].infer("brittle", failing if fails else one, cache=False)["y"]
                    assert answer.tolist() == one.tolist()
                except EngineFailed:
                    failed += 1
            return failed

        with ThreadPoolExecutor(len(clients)) as pool:
            assert list(pool.map(ask, range(len(clients)))) == [299, *[0] * (len(clients) - 1)]


def test_clients_of_large_frames_keep_threads_of_their_own(device: Device) -> None:
    """The frames use shared memory: over the socket they come in pieces, and such connections have threads anyway."""
    device.put(model="wide", item_shape=(2**18,), op="zeros")
    large = np.zeros((6, 2**18), np.float32)
    assert large.nbytes > REACTOR_FRAME_BYTES_MAX
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(device.client()) for _ in range(2 * MANY_MIN)]
        for _ in range(6):
            for client in clients:
                client.infer("wide", large, cache=False)
        wait_until(lambda: serving(device, "wide")["reactor_connections"] == 0, "they have left")


def test_large_tensors_of_many_connections_go_through_shared_memory(device: Device) -> None:
    clients = [device.client() for _ in range(MANY_MIN + 2)]
    together = threading.Barrier(len(clients))

    def ask(number: int) -> bool:
        together.wait()
        right = True
        for i in range(30):
            one = np.full((1, *LARGE), 100 * number + i, np.float32)
            right &= np.array_equal(clients[number].infer("large", one, cache=False)["y"], one)
        return right

    with ThreadPoolExecutor(len(clients)) as pool:
        assert all(pool.map(ask, range(len(clients))))
    for client in clients:
        client.close()
