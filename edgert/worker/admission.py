"""Who holds a worker's connections, and who gives way to a newcomer when all are taken.

Shares are those of users first, and within a user those of processes, as the kernel named them when they connected
(SO_PEERCRED). A newcomer whose user holds at least two fewer than the greediest user takes one of that user's; else
one whose process holds at least two fewer than the greediest process of the same user takes one of that process's;
else it is refused. So an app that keeps all connections to itself keeps nobody out, nobody falls below an equal
share, and two that hold equally many do not push each other out in turn.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections import Counter
from dataclasses import dataclass

LEAD_MIN = 2  # with 1, taking and losing a connection would alternate
LEAVING_MAX = 64  # connections told to go that are not gone yet: what their engine runs and slow readers may hold


@dataclass(frozen=True)
class Peer:
    """Who connected. Processes of another PID namespace are all 0 here, and so one."""

    uid: int
    pid: int

    @classmethod
    def of(cls, sock: socket.socket) -> Peer:
        try:
            pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        except OSError:  # those of whom the kernel tells nothing are one
            pid, uid = 0, -1
        return cls(uid, pid)


class Admission:
    """At most `seats_max` connections. Not thread-safe: the worker calls it under its lock."""

    def __init__(self, seats_max: int) -> None:
        self.seats_max = seats_max
        self._holders: dict[socket.socket, Peer] = {}  # oldest first
        self._leaving: set[socket.socket] = set()
        self._by_user: Counter[int] = Counter()
        self._by_process: Counter[Peer] = Counter()

    def __len__(self) -> int:
        """How many are taken."""
        return len(self._holders)

    @property
    def empty(self) -> bool:
        """Whether nobody is here any more, those who leave included."""
        return not self._holders and not self._leaving

    def everybody(self) -> list[socket.socket]:
        return [*self._holders, *self._leaving]

    def take(self, sock: socket.socket, peer: Peer) -> bool:
        """Seat `sock` for `peer`; where all are taken, tell the one that must give way for it to go. False: there is no seat.

        Who goes is read no further, but what it sent before is answered; `leaves` is then true of it.
        """
        if len(self._holders) >= self.seats_max:
            loser = self._loser_to(peer)
            if loser is None or len(self._leaving) >= LEAVING_MAX:
                return False
            self._forget(loser)
            self._leaving.add(loser)
            with contextlib.suppress(OSError):  # it is gone already
                loser.shutdown(socket.SHUT_RD)
        self._holders[sock] = peer
        self._by_user[peer.uid] += 1
        self._by_process[peer] += 1
        return True

    def leaves(self, sock: socket.socket) -> bool:
        """Whether `sock` was told to give way."""
        return sock in self._leaving

    def give_back(self, sock: socket.socket) -> None:
        """`sock` has ended."""
        self._leaving.discard(sock)
        if sock in self._holders:
            self._forget(sock)

    def _loser_to(self, newcomer: Peer) -> socket.socket | None:
        """The oldest connection of the greediest, or None where `newcomer` has its share."""
        uid, most = self._by_user.most_common(1)[0]
        if most - self._by_user[newcomer.uid] < LEAD_MIN:
            uid = newcomer.uid
        greediest = max((p for p in self._by_process if p.uid == uid), key=self._by_process.__getitem__, default=None)
        if greediest is None:
            return None
        if uid == newcomer.uid and self._by_process[greediest] - self._by_process[newcomer] < LEAD_MIN:
            return None
        return next(sock for sock, peer in self._holders.items() if peer == greediest)

    def _forget(self, sock: socket.socket) -> None:
        peer = self._holders.pop(sock)
        self._by_user[peer.uid] -= 1
        self._by_process[peer] -= 1
        if not self._by_process[peer]:
            del self._by_process[peer]
        if not self._by_user[peer.uid]:
            del self._by_user[peer.uid]
