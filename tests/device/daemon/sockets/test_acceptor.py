"""The acceptor passes connections on when their hello has arrived, and limits all other connections."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import selectors
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgert.config import ServingConfig
from edgert.daemon.sockets.acceptor import (
    ACCEPTS_MAX,
    ACCEPTS_PER_S_MAX,
    BURST_MAX,
    FLOOD_PAUSE_S,
    HELLO_S_MAX,
    KEPT_HELLOS_MAX,
    PENDING_MAX,
    PENDING_SHARE,
    Acceptor,
)
from edgert.protocol import wire
from edgert.protocol.listening import listening
from tests.support.devices import WAIT_S_MAX

HELLO = {"model": "echo"}


class World:
    """An acceptor, its listener and its loop."""

    def __init__(self, listener: socket.socket, path: Path) -> None:
        self.now_s = 100.0
        self.routed: list[dict[str, Any]] = []
        self.followed: list[bytes] = []  # the bytes that clients sent after their hellos
        self.clients: list[socket.socket] = []
        self._path = path
        self._selector = selectors.DefaultSelector()
        self.acceptor = Acceptor(ServingConfig(), self._selector, self._route, lambda: self.now_s)
        self._selector.register(listener, selectors.EVENT_READ, lambda: self.acceptor.accept(listener))

    def _route(self, sock: socket.socket, hello: dict[str, Any]) -> None:
        self.routed.append(hello)
        with contextlib.suppress(BlockingIOError):
            self.followed.append(sock.recv(4096, socket.MSG_DONTWAIT))
        sock.close()

    def connect(self, data: bytes = b"") -> socket.socket:
        """Return a client that has sent `data`."""
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(WAIT_S_MAX)
        client.connect(str(self._path))
        client.sendall(data)
        self.clients.append(client)
        return client

    def turn(self) -> None:
        for key, _ in self._selector.select(0):
            key.data()
        self.acceptor.tick()

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self._selector.close()


def error_of(client: socket.socket) -> str:
    """Return the text of the error that the client receives before its connection closes."""
    return client.recv(4096)[wire.HEADER.size :].decode(errors="replace")


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    path = tmp_path / "edgert.sock"
    with listening(path, 0o600) as listener:
        made = World(listener, path)
        yield made
        made.close()


def hello() -> bytes:
    return bytes(wire.json_frame(wire.HELLO, HELLO))


def test_a_hello_is_routed_as_soon_as_it_is_complete(world: World) -> None:
    world.connect(hello())
    slow = world.connect(hello()[:70])
    world.turn()
    assert world.routed == [HELLO]
    slow.sendall(hello()[70:])
    world.turn()
    assert world.routed == [HELLO, HELLO]
    assert world.acceptor.due_s() is None


def test_a_repeated_hello_is_read_to_its_end_and_not_further(world: World) -> None:
    others = [bytes(wire.json_frame(wire.HELLO, {"model": f"m{i}"})) for i in range(KEPT_HELLOS_MAX + 2)]
    longer = bytes(wire.json_frame(wire.HELLO, {"model": "m" * 200}))
    sent = [hello(), hello(), longer, longer, *others, *others, hello()]
    for i, each in enumerate(sent):
        world.connect(each + b"request %d" % i)
        world.turn()
    assert world.routed == [json.loads(each[wire.HEADER_BYTES :].rstrip(b"\0")) for each in sent]
    assert world.followed == [b"request %d" % i for i in range(len(sent))]
    for refused in (hello()[:100], bytes(wire.json_frame(wire.PING, {"model": "echo"}))):
        world.connect(refused).shutdown(socket.SHUT_WR)
        world.turn()
        assert len(world.routed) == len(sent)


def test_a_connection_without_a_hello_gets_an_error_at_the_deadline(world: World) -> None:
    client = world.connect()
    world.turn()
    assert world.acceptor.due_s() == world.now_s + HELLO_S_MAX
    world.now_s += HELLO_S_MAX + 0.1
    world.acceptor.tick()
    assert "no hello arrived within 5 s" in error_of(client)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"GET / HTTP/1.1\r\n" + b"x" * 64, "this is not the EdgeRT protocol"),
        (bytes(64), "this is not the EdgeRT protocol"),
        (bytes(wire.json_frame(wire.PING, {})), "a connection starts with a HELLO frame"),
        (bytes(wire.json_frame(wire.HELLO, {"model": "x" * 5000}))[:64], "too large; at most 4160 are allowed"),
    ],
)
def test_a_first_frame_that_is_not_a_hello_is_refused(world: World, data: bytes, says: str) -> None:
    client = world.connect(data)
    world.turn()
    assert says in error_of(client)
    world.connect(hello())
    world.turn()
    assert world.routed == [HELLO]


def test_a_client_that_leaves_in_the_middle_of_its_hello_does_not_affect_others(world: World) -> None:
    world.connect(hello()[:70]).close()
    world.turn()
    world.connect(hello())
    world.turn()
    assert world.routed == [HELLO]


def test_the_oldest_of_too_many_silent_connections_is_dropped(world: World) -> None:
    oldest = world.connect()
    world.turn()
    while len(world.clients) <= PENDING_MAX:
        world.connect()
        world.turn()
    assert "connections, the limit, have sent no hello" in error_of(oldest)
    world.clients[1].sendall(hello())
    world.turn()
    assert world.routed == [HELLO]


def test_a_flood_is_accepted_at_a_limited_rate(world: World) -> None:
    for _ in range(BURST_MAX // ACCEPTS_MAX):
        for _ in range(ACCEPTS_MAX):
            world.connect(hello())
        world.turn()
    assert len(world.routed) == BURST_MAX
    world.connect(hello())
    world.turn()
    assert len(world.routed) == BURST_MAX
    assert world.acceptor.due_s() == world.now_s + FLOOD_PAUSE_S
    world.now_s += max(FLOOD_PAUSE_S, 1 / ACCEPTS_PER_S_MAX)
    world.turn()
    world.turn()
    assert len(world.routed) == BURST_MAX + 1


def test_silent_connections_leave_descriptors_for_the_daemon(world: World) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = PENDING_SHARE * (len(os.listdir("/proc/self/fd")) + 1)
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
    try:
        clients = [world.connect() for _ in range(few // PENDING_SHARE + 1)]
        for _ in range(len(clients) // ACCEPTS_MAX + 1):
            world.turn()
        assert b"have sent no hello" in clients[0].recv(4096)
        world.connect(wire.json_frame(wire.HELLO, HELLO)).close()
        world.turn()
        assert world.routed == [HELLO]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
