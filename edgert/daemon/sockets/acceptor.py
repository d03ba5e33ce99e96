"""The acceptor: accepts new connections and reads exactly the hello of each.

Usually the hello arrives before the acceptor accepts the connection. Otherwise the connection is pending until the
hello arrives or a deadline passes. If too many connections are pending, the acceptor drops the oldest pending
connection. So a flood of silent connections excludes no client. The rate of accepts is limited, so a flood does not
take the processors from connected clients. Further connections wait in the kernel's queue, which has at most BACKLOG
places (`edgert/protocol/listening.py`). At this rate, the last connection of a full queue waits for about 2 s.
"""

from __future__ import annotations

import array
import contextlib
import os
import resource
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
PENDING_MAX = 256
PENDING_SHARE = 4  # pending connections take at most one in four of the process's descriptors
ACCEPTS_MAX = 64  # accepts per turn of the loop
ACCEPTS_PER_S_MAX = 2000.0
BURST_MAX = 512  # accepts at once without the rate limit, because a model's clients reconnect together after a switch
FLOOD_PAUSE_S = 0.01
ACCEPT_PAUSE_S = 0.1  # the pause if the process is out of descriptors or memory
PASSED_ON = "passed on"  # the callbacks of the acceptor return this: no other part of the daemon is due
# Apps often send the same hello. The acceptor parses a hello of at most this size once, and keeps its content.
KEPT_HELLO_BYTES = wire.HEADER_BYTES + wire.ALIGNMENT
KEPT_HELLOS_MAX = 64
_SO_PEERGROUPS = 59
_GROUPS_MAX = 256  # Python's limit for one option; if a user has more groups, only the primary group is checked


class Acceptor:
    """Passes each connection and its hello to `route`, which then owns the connection."""

    def __init__(
        self,
        serving: ServingConfig,
        selector: selectors.BaseSelector,
        route: Callable[[socket.socket, dict[str, Any]], None],
        clock: Callable[[], float],
    ) -> None:
        self._serving = serving
        self._selector = selector
        self._route = route
        self._clock = clock
        self._pending: dict[socket.socket, _PendingHello] = {}  # oldest first
        self._spare_buffer: FrameBuffer | None = None  # the buffer of the last hello, because a new buffer costs 9 µs
        self._kept_hellos: dict[bytes, dict[str, Any]] = {}  # bytes -> content, which must not be changed
        self._paused_listener: socket.socket | None = None
        self._resume_at_s = 0.0
        self._allowed = float(BURST_MAX)
        self._allowed_at_s = clock()

    def accept(self, listener: socket.socket) -> str:
        """Accept the connections in the queue; return PASSED_ON."""
        for _ in range(self._allowance()):
            try:
                sock, _ = listener.accept()
            except BlockingIOError:
                return PASSED_ON
            except ConnectionError:
                continue
            except OSError:  # the process is out of descriptors or memory: the queue waits
                self._pause(listener, ACCEPT_PAUSE_S)
                return PASSED_ON
            self._allowed -= 1
            frames = self._spare_buffer or FrameBuffer(wire.HEADER_BYTES + wire.HELLO_BYTES_MAX)
            self._spare_buffer = None
            pending = _PendingHello(sock, self._clock() + HELLO_S_MAX, frames, self._kept_hellos)
            if not self._read(pending):
                self._add(pending)
        if self._allowed < 1:
            self._pause(listener, FLOOD_PAUSE_S)
        return PASSED_ON

    def tick(self) -> None:
        """Drop pending connections whose deadline has passed, and end a pause that is over."""
        now_s = self._clock()
        while self._pending and (oldest := next(iter(self._pending.values()))).until_s < now_s:
            self._drop(oldest, ProtocolError(f"no hello arrived within {HELLO_S_MAX:.0f} s: send a HELLO frame first"))
        if self._paused_listener is not None and now_s >= self._resume_at_s:
            listener, self._paused_listener = self._paused_listener, None
            self._selector.register(listener, selectors.EVENT_READ, lambda: self.accept(listener))

    def due_s(self) -> float | None:
        times = [next(iter(self._pending.values())).until_s] if self._pending else []
        times += [self._resume_at_s] if self._paused_listener is not None else []
        return min(times, default=None)

    def _allowance(self) -> int:
        """Return the number of connections that this turn may accept."""
        now_s = self._clock()
        self._allowed = min(BURST_MAX, self._allowed + (now_s - self._allowed_at_s) * ACCEPTS_PER_S_MAX)
        self._allowed_at_s = now_s
        return min(ACCEPTS_MAX, int(self._allowed))

    def _pause(self, listener: socket.socket, pause_s: float) -> None:
        self._selector.unregister(listener)
        self._paused_listener, self._resume_at_s = listener, self._clock() + pause_s

    def _add(self, pending: _PendingHello) -> None:
        most = min(PENDING_MAX, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // PENDING_SHARE)
        if len(self._pending) >= most:
            oldest = next(iter(self._pending.values()))
            message = f"{most} connections, the limit, have sent no hello: connect again"
            self._drop(oldest, Overloaded(message, retry_after_s=0.5))
        self._pending[pending.sock] = pending
        self._selector.register(pending.sock, selectors.EVENT_READ, lambda: self._receive_more(pending))

    def _receive_more(self, pending: _PendingHello) -> str:
        if pending.sock in self._pending:  # it may have been dropped earlier in this turn
            self._read(pending)
        return PASSED_ON

    def _read(self, pending: _PendingHello) -> bool:
        """Read the bytes that have arrived; return whether the connection was passed on or closed."""
        hello: dict[str, Any] | EdgeRTError | None
        try:
            hello = pending.read()
        except BlockingIOError:
            return False
        except EdgeRTError as error:
            hello = error
        except OSError:
            hello = None
        self._forget(pending)
        if hello is None:
            pending.sock.close()
        elif isinstance(hello, EdgeRTError):
            reject(pending.sock, hello)
        elif not is_allowed(pending.sock, self._serving):
            reject(
                pending.sock,
                NotAllowed("this user may not connect: add it to allow_uids or allow_gids in the device's config.toml"),
            )
        else:
            self._spare_buffer = pending.frames
            self._route(pending.sock, hello)
        return True

    def _drop(self, pending: _PendingHello, error: EdgeRTError) -> None:
        self._forget(pending)
        reject(pending.sock, error)

    def _forget(self, pending: _PendingHello) -> None:
        if self._pending.pop(pending.sock, None) is not None:
            self._selector.unregister(pending.sock)


class _PendingHello:
    """A connection whose hello is being read."""

    def __init__(
        self, sock: socket.socket, until_s: float, frames: FrameBuffer, kept_hellos: dict[bytes, dict[str, Any]]
    ) -> None:
        self.sock = sock
        self.until_s = until_s
        self.frames = frames
        self._kept_hellos = kept_hellos
        self._first_bytes = b""  # at most KEPT_HELLO_BYTES

    def read(self) -> dict[str, Any] | None:
        """Return the hello, or None if the client closed. Raises BlockingIOError while bytes are missing."""
        frames, hello = self.frames, None
        if not self._first_bytes:
            self._first_bytes = self.sock.recv(KEPT_HELLO_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
            if (content := self._kept_hellos.get(self._first_bytes)) is not None:
                self.sock.recv(KEPT_HELLO_BYTES, socket.MSG_DONTWAIT)
                return content
        while hello is None:
            # The kernel closes descriptors that a client attaches, because `recv_into` accepts none.
            room = frames.room[: frames.missing() or wire.HEADER_BYTES]
            count = self.sock.recv_into(room, 0, socket.MSG_DONTWAIT)
            if not count:
                return None
            hello = frames.feed(count)
        if hello.kind != wire.HELLO or hello.tensors:
            raise ProtocolError(
                f"a connection starts with a HELLO frame of at most {wire.HELLO_BYTES_MAX} bytes (docs/protocol.md)"
            )
        content = hello.json()
        if len(self._first_bytes) == KEPT_HELLO_BYTES == wire.HEADER_BYTES + wire.aligned(len(hello.meta)):
            if len(self._kept_hellos) >= KEPT_HELLOS_MAX:
                self._kept_hellos.clear()
            self._kept_hellos[self._first_bytes] = content
        return content


def reject(client: socket.socket, error: EdgeRTError) -> None:
    """Send the error and close, without waiting for the client."""
    with contextlib.suppress(OSError):
        client.send(wire.error_frame(error), socket.MSG_DONTWAIT)
    client.close()


def is_allowed(sock: socket.socket, serving: ServingConfig) -> bool:
    """Return whether the user of the connected process, or a group of this user, is allowed.

    The kernel reports user and groups. Root and the daemon's own user are always allowed, because they can read the
    daemon's memory anyway.
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
    except OSError:  # the kernel is older than 4.13, or the user has too many groups
        return []
    return groups.tolist()
