"""Messages between the supervisor and its workers: JSON in single datagrams, with descriptors attached."""

from __future__ import annotations

import array
import json
import socket
import threading
from typing import Any

from edgert.errors import EdgeRTError
from edgert.protocol.sharing import descriptors_in

MESSAGE_BYTES_MAX = 160 * 1024
DESCRIPTORS_MAX = 4
_SPACE = socket.CMSG_SPACE(DESCRIPTORS_MAX * array.array("i").itemsize)


class _Kept(threading.local):
    """A thread's buffer for messages: allocating it each time costs more than most messages."""

    def __init__(self) -> None:
        self.room = memoryview(bytearray(MESSAGE_BYTES_MAX))


_kept = _Kept()


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected ends; each message arrives complete or not at all."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MESSAGE_BYTES_MAX)
    return ours, theirs


def send(end: socket.socket, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
    """Send a message and descriptors. Raises OSError if the other end is closed."""
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > MESSAGE_BYTES_MAX:
        raise EdgeRTError(f"a message of {len(data)} bytes between daemon and worker; the limit is {MESSAGE_BYTES_MAX}")
    attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    end.sendmsg([data], attached)


def receive(end: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next message and its descriptors; None if the other end is closed."""
    room = _kept.room
    try:
        count, attached, _, _ = end.recvmsg_into([room], _SPACE, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return None
    if not count:
        return None
    return json.loads(room[:count].tobytes()), descriptors_in(attached)
