"""Messages between supervisor and workers: JSON in single datagrams, with descriptors attached.

The other end of a link belongs to a process that `start` started. This process gets its end from `inherited`.
"""

from __future__ import annotations

import array
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from functools import lru_cache
from typing import Any

from edgert.errors import EdgeRTError
from edgert.protocol.sharing import descriptors_in

MESSAGE_BYTES_MAX = 160 * 1024
DESCRIPTORS_MAX = 4
ERROR_CHARS_MAX = 2000
REPEATED_BYTES_MAX = 128  # up to this size, messages often repeat, such as messages that pass a connection on
_encoded = json.JSONEncoder(separators=(",", ":")).encode  # made once: json.dumps makes one for each message
_repeated = lru_cache(64)(json.loads)
_SPACE = socket.CMSG_SPACE(DESCRIPTORS_MAX * array.array("i").itemsize)


class _Kept(threading.local):
    """A thread's buffer for messages. A new buffer for each message costs more than most messages."""

    def __init__(self) -> None:
        self.room = memoryview(bytearray(MESSAGE_BYTES_MAX))


_kept = _Kept()


def failed(error: EdgeRTError) -> dict[str, Any]:
    """Return the message with which a worker reports why it does not load."""
    return {"op": "failed", "code": error.code, "message": error.message[:ERROR_CHARS_MAX]}


def pair() -> tuple[socket.socket, socket.socket]:
    """Return two connected ends; each message arrives complete or not at all."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (ours, theirs):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * MESSAGE_BYTES_MAX)
    return ours, theirs


def start(module: str, end: socket.socket) -> subprocess.Popen[bytes]:
    """Start `python -m module` with `end` as its link. Raises OSError."""
    return subprocess.Popen(
        [sys.executable, "-m", module, "--link", str(end.fileno())],
        stdin=subprocess.DEVNULL,
        pass_fds=[end.fileno()],
        # When NumPy is imported, OpenBLAS starts a thread per core. No product of matrices in a worker is large enough
        # for that.
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )


def inherited() -> socket.socket:
    """Return this process's end, which `start` passed, and ignore SIGINT.

    Only the parent decides when the process ends, but a Ctrl-C in the parent's terminal reaches the whole group.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return socket.socket(fileno=int(sys.argv[-1]))


def send(end: socket.socket, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
    """Send a message and descriptors. Raises OSError if the other end is closed."""
    data = _encoded(message).encode()
    if len(data) > MESSAGE_BYTES_MAX:
        raise EdgeRTError(f"a message of {len(data)} bytes between daemon and worker; the limit is {MESSAGE_BYTES_MAX}")
    attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    end.sendmsg([data], attached)


def receive(end: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next message and its descriptors; None if the other end is closed."""
    room = _kept.room
    try:
        count, attached, _, _ = end.recvmsg_into([room], _SPACE, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:  # the other end closed with unread data; its own earlier messages follow
        return receive(end)
    if not count:
        return None
    data = room[:count].tobytes()
    message = dict(_repeated(data)) if count <= REPEATED_BYTES_MAX else json.loads(data)
    return message, descriptors_in(attached)
