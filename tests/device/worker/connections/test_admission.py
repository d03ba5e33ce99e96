"""A worker's connections are divided between users, then between processes."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from edgert.worker.connections.admission import LEAVING_MAX, Admission, Peer
from tests.support.clients import ITEM
from tests.support.devices import WAIT_S_MAX, a_device
from tests.support.paths import ROOT

GREEDY, OTHER_PROCESS, OTHER_USER = Peer(1000, 7), Peer(1000, 8), Peer(1001, 9)


class Clients:
    """An admission, and the connections that tried to enter."""

    def __init__(self, connections_max: int) -> None:
        self.admission = Admission(connections_max)
        self._ends: list[tuple[socket.socket, socket.socket, Peer]] = []

    def connect(self, peer: Peer, times: int = 1) -> list[bool]:
        taken = []
        for _ in range(times):
            ours, theirs = socket.socketpair()
            self._ends.append((ours, theirs, peer))
            taken.append(self.admission.admit(ours, peer))
        return taken

    def leave(self) -> None:
        """End the connections that were told to end."""
        for ours, _, _ in self._ends:
            if self.admission.is_leaving(ours):
                self.admission.release(ours)

    def admitted(self) -> Counter[Peer]:
        here = set(self.admission.sockets())
        return Counter(peer for ours, _, peer in self._ends if ours in here and not self.admission.is_leaving(ours))

    def close(self) -> None:
        for ours, theirs, _ in self._ends:
            ours.close()
            theirs.close()


@pytest.fixture
def clients() -> Iterator[Clients]:
    clients = Clients(8)
    yield clients
    clients.close()


@pytest.mark.parametrize("newcomer", [OTHER_PROCESS, OTHER_USER])
def test_the_app_with_the_most_connections_loses_some_until_shares_are_equal(clients: Clients, newcomer: Peer) -> None:
    assert all(clients.connect(GREEDY, 8))
    assert clients.connect(newcomer, 8) == [True] * 4 + [False] * 4
    assert clients.connect(GREEDY, 8) == [False] * 8
    assert clients.admitted() == {GREEDY: 4, newcomer: 4}
    clients.leave()
    assert len(clients.admission) == 8


def test_all_processes_of_one_user_share_the_part_of_this_user(clients: Clients) -> None:
    for pid in range(8):
        clients.connect(Peer(1000, pid))
    assert clients.connect(OTHER_USER, 8) == [True] * 4 + [False] * 4
    assert sum(count for peer, count in clients.admitted().items() if peer.uid == 1000) == 4


def test_a_client_told_to_go_is_still_answered_but_not_read(clients: Clients) -> None:
    clients.connect(GREEDY, 8)
    ours, theirs, _ = clients._ends[0]
    theirs.send(b"sent before")
    clients.connect(OTHER_USER)
    assert clients.admission.is_leaving(ours)
    assert (ours.recv(64), ours.recv(64)) == (b"sent before", b"")
    ours.send(b"an answer")
    assert theirs.recv(64) == b"an answer"


def test_the_number_of_clients_that_are_told_to_go_and_stay_is_limited() -> None:
    clients = Clients(4 * LEAVING_MAX)
    clients.connect(GREEDY, 4 * LEAVING_MAX)
    assert sum(clients.connect(OTHER_USER, 2 * LEAVING_MAX)) == LEAVING_MAX
    assert len(clients.admission.sockets()) == 5 * LEAVING_MAX
    clients.leave()
    assert clients.connect(OTHER_USER) == [True]
    clients.close()


HOLD_ALL = """
import os, select, socket, sys
from edgert.protocol import wire
socks = []
for _ in range(int(sys.argv[2])):
    sock = socket.socket(socket.AF_UNIX); sock.settimeout(120); sock.connect(sys.argv[1])
    sock.sendall(wire.json_frame(wire.HELLO, {"model": "echo"}))
    assert wire.HEADER.unpack_from(sock.recv(65536))[2] == wire.WELCOME
    socks.append(sock)
print("held", flush=True)
sys.stdin.read()
select.select(socks, [], [], 120)
last = []
for sock in socks:
    sock.setblocking(False)
    try: last.append(wire.HEADER.unpack_from(sock.recv(65536))[2] == wire.MOVED)
    except BlockingIOError: pass
print(last)
"""


def test_an_app_that_holds_all_connections_does_not_keep_other_apps_out() -> None:
    with a_device("[serving]\nconnections_max = 16\n") as device, contextlib.ExitStack() as stack:
        device.put()
        greedy = stack.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", HOLD_ALL, os.fspath(device.socket), "16"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
        )
        assert greedy.stdout is not None
        assert greedy.stdout.readline() == "held\n"
        with device.client(WAIT_S_MAX) as client:
            assert client.infer("echo", ITEM, cache=False)["y"].tolist() == ITEM.tolist()
        said, _ = greedy.communicate("", timeout=WAIT_S_MAX)
        assert said == "[True]\n"  # one connection was told to connect again, and the others stayed
