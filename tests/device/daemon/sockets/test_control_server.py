"""The control server answers each command once, and drops a connection that sends no command."""

from __future__ import annotations

import errno
import json
import selectors
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edgert.daemon.sockets.control_server import CONTROL_S_MAX, ControlClient, ControlServer
from edgert.errors import ModelNotFound
from edgert.protocol.listening import listening
from tests.support.devices import WAIT_S_MAX


class World:
    """A control server, its listener and its loop."""

    def __init__(self, listener: socket.socket, path: Path) -> None:
        self.now_s = 100.0
        self._path, self._selector = path, selectors.DefaultSelector()
        self.server = ControlServer(self._selector, self._obey, lambda: self.now_s)
        self._selector.register(listener, selectors.EVENT_READ, lambda: self.server.accept(listener))

    def _obey(self, client: ControlClient, request: dict[str, Any]) -> None:
        if request["op"] == "refuse":
            raise ModelNotFound("there is none")
        if request["op"] == "list":
            raise OSError(errno.EMFILE, "Too many open files", "/state/models")
        client.reply({"ok": request})

    def turn(self) -> None:
        for key, _ in self._selector.select(0):
            key.data()
        self.server.tick()

    def sent(self, data: bytes) -> socket.socket:
        client = socket.socket(socket.AF_UNIX)
        client.settimeout(WAIT_S_MAX)
        client.connect(str(self._path))
        client.sendall(data)
        self.turn()  # accepted
        self.turn()  # read
        return client


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    path = tmp_path / "control.sock"
    with listening(path, 0o600) as listener:
        yield World(listener, path)


def test_a_request_of_one_line_is_answered_with_one_line(world: World) -> None:
    with world.sent(b'{"op": "status"}\n') as client:
        assert json.loads(client.recv(4096)) == {"ok": {"op": "status"}}
        assert client.recv(10) == b""


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"op": "refuse"}\n', "there is none"),
        (b"{}\n", "not a control request: KeyError"),
        (b"5\n", "not a control request: TypeError"),
        (b"nonsense\n", "not a control request: JSONDecodeError"),
        (b"[" * 100_000 + b"\n", "not a control request: RecursionError"),
    ],
)
def test_an_invalid_request_is_answered_with_an_error(world: World, line: bytes, words: str) -> None:
    with world.sent(line) as client:
        assert words in json.loads(client.recv(4096))["error"]["message"]


def test_the_server_waits_for_the_rest_of_a_line_until_a_deadline(world: World) -> None:
    with world.sent(b'{"op": ') as client:
        assert world.server.due_s() == world.now_s + CONTROL_S_MAX
        client.sendall(b'"status"}\n')
        world.turn()
        assert json.loads(client.recv(4096)) == {"ok": {"op": "status"}}
    with world.sent(b'{"op": ') as client:
        world.now_s += CONTROL_S_MAX + 0.1
        world.turn()
        assert client.recv(10) == b""
        assert world.server.due_s() is None


def test_a_command_that_finds_no_free_descriptor_is_refused_and_the_daemon_continues(world: World) -> None:
    with world.sent(b'{"op": "list"}\n') as client:
        error = json.loads(client.recv(4096))["error"]
    assert error["message"] == "/state/models: Too many open files; try again"
    with world.sent(b'{"op": "status"}\n') as client:
        assert json.loads(client.recv(4096)) == {"ok": {"op": "status"}}
