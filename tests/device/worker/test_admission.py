"""A worker's connections are shared between users, then between processes, and whoever has too many gives way."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator

import pytest

from edgert.worker.admission import LEAVING_MAX, Admission, Peer
from tests.support.clients import ITEM
from tests.support.devices import a_device
from tests.support.paths import ROOT

GREEDY, OTHER_PROCESS, OTHER_USER = Peer(1000, 7), Peer(1000, 8), Peer(1001, 9)


class Hall:
    """Admission, and those who hold one or were told to go."""

    def __init__(self, connections_max: int) -> None:
        self.seats = Admission(connections_max)
        self._ends: list[tuple[socket.socket, socket.socket, Peer]] = []

    def come(self, peer: Peer, times: int = 1) -> list[bool]:
        taken = []
        for _ in range(times):
            ours, theirs = socket.socketpair()
            self._ends.append((ours, theirs, peer))
            taken.append(self.seats.admit(ours, peer))
        return taken

    def leave(self) -> None:
        """All who were told to go, go."""
        for ours, _, _ in self._ends:
            if self.seats.is_leaving(ours):
                self.seats.release(ours)

    def seated(self) -> Counter[Peer]:
        here = set(self.seats.sockets())
        return Counter(peer for ours, _, peer in self._ends if ours in here and not self.seats.is_leaving(ours))

    def close(self) -> None:
        for ours, theirs, _ in self._ends:
            ours.close()
            theirs.close()


@pytest.fixture
def hall() -> Iterator[Hall]:
    hall = Hall(8)
    yield hall
    hall.close()


@pytest.mark.parametrize("newcomer", [OTHER_PROCESS, OTHER_USER])
def test_who_holds_all_gives_way_until_shares_are_equal(hall: Hall, newcomer: Peer) -> None:
    assert all(hall.come(GREEDY, 8))
    assert hall.come(newcomer, 8) == [True] * 4 + [False] * 4
    assert hall.come(GREEDY, 8) == [False] * 8
    assert hall.seated() == {GREEDY: 4, newcomer: 4}
    hall.leave()
    assert len(hall.seats) == 8


def test_many_processes_of_one_user_have_one_users_share(hall: Hall) -> None:
    for pid in range(8):
        hall.come(Peer(1000, pid))
    assert hall.come(OTHER_USER, 8) == [True] * 4 + [False] * 4
    assert sum(count for peer, count in hall.seated().items() if peer.uid == 1000) == 4


def test_who_is_told_to_go_may_still_be_answered_but_is_not_read(hall: Hall) -> None:
    hall.come(GREEDY, 8)
    ours, theirs, _ = hall._ends[0]
    theirs.send(b"sent before")
    hall.come(OTHER_USER)
    assert hall.seats.is_leaving(ours)
    assert (ours.recv(64), ours.recv(64)) == (b"sent before", b"")
    ours.send(b"an answer")
    assert theirs.recv(64) == b"an answer"


def test_those_who_do_not_go_are_bounded() -> None:
    hall = Hall(4 * LEAVING_MAX)
    hall.come(GREEDY, 4 * LEAVING_MAX)
    assert sum(hall.come(OTHER_USER, 2 * LEAVING_MAX)) == LEAVING_MAX
    assert len(hall.seats.sockets()) == 5 * LEAVING_MAX
    hall.leave()
    assert hall.come(OTHER_USER) == [True]
    hall.close()


HOLD_ALL = """
import os, select, socket, sys
from edgert.protocol import wire
socks = []
for _ in range(int(sys.argv[2])):
    sock = socket.socket(socket.AF_UNIX); sock.settimeout(20); sock.connect(sys.argv[1])
    sock.sendall(wire.json_frame(wire.HELLO, {"model": "echo"}))
    assert wire.HEADER.unpack_from(sock.recv(65536))[2] == wire.WELCOME
    socks.append(sock)
print("held", flush=True)
sys.stdin.read()
select.select(socks, [], [], 20)
last = []
for sock in socks:
    sock.setblocking(False)
    try: last.append(wire.HEADER.unpack_from(sock.recv(65536))[2] == wire.MOVED)
    except BlockingIOError: pass
print(last)
"""


def test_an_app_that_holds_all_connections_keeps_no_other_out() -> None:
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
        with device.client(timeout_s=5.0) as client:
            assert client.infer("echo", ITEM, cache=False)["y"].tolist() == ITEM.tolist()
        said, _ = greedy.communicate("", timeout=20)
        assert said == "[True]\n"  # one was told to connect again, the others were left alone
