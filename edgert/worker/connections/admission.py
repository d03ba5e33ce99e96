"""Admission: the clients that hold connections, and which connection ends when all are taken.

Users share the connections equally, and the processes of one user share that user's part. The kernel names the user and
the process of each connection (SO_PEERCRED).

A new client first competes with other users. If its own user has at least two connections fewer than the user with the
most connections, the client replaces the oldest connection of the other user. Otherwise the client competes with the
processes of its own user. If its own process has at least two connections fewer than the process with the most
connections, the client replaces the oldest connection of the other process. Otherwise the client is refused.

So an app that takes all connections excludes no other app, and no client gets less than an equal share. Two clients
with equally many connections do not replace each other repeatedly.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import Counter
from dataclasses import dataclass

LEAD_MIN = 2  # with 1, two clients would replace each other repeatedly
LEAVING_MAX = 64  # connections that must end, but still wait for an engine run or a slow client


@dataclass(frozen=True)
class Peer:
    """The user and the process that connected. All processes of another PID namespace have the id 0."""

    uid: int
    pid: int

    @classmethod
    def of(cls, sock: socket.socket) -> Peer:
        try:
            pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        except OSError:  # all peers that the kernel does not name are seen as one peer
            pid, uid = 0, -1
        return cls(uid, pid)


class Admission:
    """At most `connections_max` connections. Not thread-safe: the worker calls it under its lock."""

    def __init__(self, connections_max: int) -> None:
        self.connections_max = connections_max
        self._holders: dict[socket.socket, Peer] = {}  # oldest first
        self._leaving: set[socket.socket] = set()
        self._by_user: Counter[int] = Counter()
        self._by_process: Counter[Peer] = Counter()

    def __len__(self) -> int:
        return len(self._holders)

    @property
    def empty(self) -> bool:
        """Whether no connection is left, including the connections that must end."""
        return not self._holders and not self._leaving

    def sockets(self) -> list[socket.socket]:
        return [*self._holders, *self._leaving]

    def admit(self, sock: socket.socket, peer: Peer) -> bool:
        """Admit `sock` for `peer`; return False if `sock` is refused.

        If all connections are taken, another connection is told to end: the worker answers its earlier requests, but
        reads no more. Then `is_leaving` is true for the other connection.
        """
        if len(self._holders) >= self.connections_max:
            replaced = self._replaced_by(peer)
            if replaced is None or len(self._leaving) >= LEAVING_MAX:
                return False
            self._forget(replaced)
            self._leaving.add(replaced)
            with contextlib.suppress(OSError):  # the client has already gone
                replaced.shutdown(socket.SHUT_RD)
        self._holders[sock] = peer
        self._by_user[peer.uid] += 1
        self._by_process[peer] += 1
        return True

    def is_leaving(self, sock: socket.socket) -> bool:
        """Return whether `sock` was told to end."""
        return sock in self._leaving

    def release(self, sock: socket.socket) -> None:
        """Remove `sock`, which has ended."""
        self._leaving.discard(sock)
        if sock in self._holders:
            self._forget(sock)

    def _replaced_by(self, newcomer: Peer) -> socket.socket | None:
        """Return the oldest connection of the largest peer; None if `newcomer` already has its share."""
        uid, most = self._by_user.most_common(1)[0]
        if most - self._by_user[newcomer.uid] < LEAD_MIN:
            uid = newcomer.uid
        largest = max((p for p in self._by_process if p.uid == uid), key=self._by_process.__getitem__, default=None)
        if largest is None:
            return None
        if uid == newcomer.uid and self._by_process[largest] - self._by_process[newcomer] < LEAD_MIN:
            return None
        return next(sock for sock, peer in self._holders.items() if peer == largest)

    def _forget(self, sock: socket.socket) -> None:
        peer = self._holders.pop(sock)
        self._by_user[peer.uid] -= 1
        self._by_process[peer] -= 1
        if not self._by_process[peer]:
            del self._by_process[peer]
        if not self._by_user[peer.uid]:
            del self._by_user[peer.uid]
