"""Connections whose hello is on its way: accepted, checked, read to the end of the hello and not one byte further.

Whoever sends a hello slowly waits alone, under a deadline. A client's hello is mostly there when its connection is
accepted; then it never takes a place here. Where the places are full, the oldest gives way: so a flood of
connections that say nothing keeps nobody out. How many are taken a second is bounded, so that a flood does not take
the processors from those who are connected: the rest waits in the kernel's queue, for 2 s where that is full.
"""

from __future__ import annotations

import array
import os
import selectors
import socket
import struct
from collections.abc import Callable
from typing import Any

from edgert.config import ServingConfig
from edgert.errors import EdgeRTError, NotAllowed, Overloaded, ProtocolError
from edgert.protocol import wire
from edgert.protocol.frame_buffer import FrameBuffer

HELLO_S_MAX = 5.0
GREETINGS_MAX = 256
ACCEPTS_MAX = 64  # a turn: the loop has other work too
ACCEPTS_PER_S_MAX = 2000.0
BURST_MAX = 512  # as many as a model's clients may come back at once when it moves
FLOOD_PAUSE_S = 0.01
ACCEPT_PAUSE_S = 0.1  # when descriptors or memory have run out
_SO_PEERGROUPS = 59
_GROUPS_MAX = 256  # what Python takes in one option; who is in more is judged by user and first group


class Acceptor:
    """Gives each connection and its hello to `route`, which owns the connection from then on."""

    def __init__(
        self,
        serving: ServingConfig,
        selector: selectors.BaseSelector,
        route: Callable[[socket.socket, dict[str, Any]], None],
        clock: Callable[[], float],
    ) -> None:
        self._serving, self._selector, self._route, self._clock = serving, selector, route, clock
        self._places: dict[socket.socket, _PendingHello] = {}  # oldest first
        self._frames = FrameBuffer(size_bytes=2 * wire.HELLO_BYTES_MAX)  # of one hello after the other
        self._paused: socket.socket | None = None
        self._resume_at_s = 0.0
        self._allowed, self._allowed_at_s = float(BURST_MAX), clock()

    def accept(self, listener: socket.socket) -> None:
        """Take what connections there are."""
        for _ in range(self._allowance()):
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return
            except ConnectionError:
                continue
            except OSError:  # out of descriptors or memory: the backlog waits a moment
                self._pause(listener, ACCEPT_PAUSE_S)
                return
            self._allowed -= 1
            sock.setblocking(False)
            greeting = _PendingHello(sock, self._clock() + HELLO_S_MAX)
            if not self._heard(greeting):
                self._give_place(greeting)
        if self._allowed < 1:
            self._pause(listener, FLOOD_PAUSE_S)

    def tick(self) -> None:
        """Drop whose time is up."""
        now_s = self._clock()
        while self._places and (oldest := next(iter(self._places.values()))).until_s < now_s:
            self._drop(oldest, ProtocolError(f"no hello came within {HELLO_S_MAX:.0f} s"))
        if self._paused is not None and now_s >= self._resume_at_s:
            listener, self._paused = self._paused, None
            self._selector.register(listener, selectors.EVENT_READ, lambda: self.accept(listener))

    def due_s(self) -> float | None:
        times = [next(iter(self._places.values())).until_s] if self._places else []
        times += [self._resume_at_s] if self._paused is not None else []
        return min(times, default=None)

    def _allowance(self) -> int:
        """How many connections may be taken in this turn."""
        now_s = self._clock()
        self._allowed = min(BURST_MAX, self._allowed + (now_s - self._allowed_at_s) * ACCEPTS_PER_S_MAX)
        self._allowed_at_s = now_s
        return min(ACCEPTS_MAX, int(self._allowed))

    def _pause(self, listener: socket.socket, pause_s: float) -> None:
        self._selector.unregister(listener)
        self._paused, self._resume_at_s = listener, self._clock() + pause_s

    def _give_place(self, greeting: _PendingHello) -> None:
        if len(self._places) >= GREETINGS_MAX:
            oldest = next(iter(self._places.values()))
            self._drop(oldest, Overloaded("too many connections that say nothing", retry_after_s=0.5))
        self._places[greeting.sock] = greeting
        self._selector.register(greeting.sock, selectors.EVENT_READ, lambda: self._more(greeting))

    def _more(self, greeting: _PendingHello) -> None:
        if greeting.sock not in self._places:
            return  # dropped earlier in this turn
        if self._heard(greeting, parked=True):
            self._places.pop(greeting.sock, None)

    def _heard(self, greeting: _PendingHello, *, parked: bool = False) -> bool:
        """Read what is there of the hello; whether this connection is done with, one way or another."""
        try:
            hello = greeting.read(self._frames)
        except BlockingIOError:
            return False
        except EdgeRTError as error:
            if parked:
                self._selector.unregister(greeting.sock)
            reject(greeting.sock, error)
            return True
        except OSError:
            hello = None
        if parked:
            self._selector.unregister(greeting.sock)
        if hello is None:
            greeting.sock.close()
        elif not is_allowed(greeting.sock, self._serving):
            reject(
                greeting.sock,
                NotAllowed("this user may not connect: see allow_uids and allow_gids in the device's config.toml"),
            )
        else:
            self._route(greeting.sock, hello)
        return True

    def _drop(self, greeting: _PendingHello, error: EdgeRTError) -> None:
        del self._places[greeting.sock]
        self._selector.unregister(greeting.sock)
        reject(greeting.sock, error)


class _PendingHello:
    def __init__(self, sock: socket.socket, until_s: float) -> None:
        self.sock, self.until_s = sock, until_s
        self._data = bytearray()

    def read(self, frames: FrameBuffer) -> dict[str, Any] | None:
        """The hello's content; None when the client is gone. Raises BlockingIOError while bytes are missing.

        `frames` is empty, and is so again afterwards.
        """
        data = self._data
        while True:
            wanted = 64
            if len(data) >= 64:
                header = wire.HEADER.unpack_from(data)
                if header[0] != wire.MAGIC or header[2] != wire.HELLO or header[10] > wire.HELLO_BYTES_MAX or header[8]:
                    raise ProtocolError(
                        "a connection begins with a HELLO frame of at most 4096 bytes (docs/protocol.md)"
                    )
                wanted += header[10]
            missing = wanted - len(data)
            if not missing:
                break
            # Descriptors that a client attaches are closed by the kernel, as no room is given for them.
            more = self.sock.recv(missing)
            if not more:
                return None
            data += more
        frames.room[: len(data)] = data
        hello = frames.feed(len(data))
        assert hello is not None  # the lengths above were those of a whole frame
        return hello.json()


def reject(client: socket.socket, error: EdgeRTError) -> None:
    """Say why and close; a client that does not read is not waited for."""
    try:
        client.setblocking(False)
        client.send(wire.error_frame(error))
    except OSError:
        pass
    client.close()


def is_allowed(sock: socket.socket, serving: ServingConfig) -> bool:
    """Whether the process that connected may: by its user or one of its groups, as the kernel tells them.

    Root and the daemon's own user may always: they could read its memory as well.
    """
    if not (serving.allow_uids or serving.allow_gids):
        return True
    try:
        _, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    except OSError:
        return False
    if uid in (0, os.geteuid()) or uid in serving.allow_uids or gid in serving.allow_gids:
        return True
    return bool(serving.allow_gids) and not set(serving.allow_gids).isdisjoint(_other_groups(sock))


def _other_groups(sock: socket.socket) -> list[int]:
    groups = array.array("I")
    try:
        groups.frombytes(sock.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_MAX * groups.itemsize))
    except OSError:  # kernels before 4.13; or more groups than fit
        return []
    return groups.tolist()
