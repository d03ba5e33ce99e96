"""A Unix stream socket, for both ends: connect, limit the waits, send everything."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from edgert.errors import DaemonUnreachable
from edgert.protocol import wire

WAIT_S_MAX = 24 * 86400.0  # the longest time-out of `poll`; longer waits are reduced to it
SEND_BUFFER_BYTES = 1024**2  # with this size, a large frame is sent in one system call
# A 32-bit Python with 64-bit times (Debian 13) uses the newer of two socket options, which needs two 64-bit numbers.
_TIMEVAL = "qq" if socket.SO_RCVTIMEO == 66 else "ll"


def timeval(seconds: float) -> bytes:
    """Return `seconds` for SO_RCVTIMEO and SO_SNDTIMEO, at least a millisecond, because 0 means no limit."""
    microseconds = max(1000, int(min(WAIT_S_MAX, seconds) * 1e6))
    return struct.pack(_TIMEVAL, microseconds // 1_000_000, microseconds % 1_000_000)


def send_all(sock: socket.socket, parts: Sequence[wire.Buffer]) -> None:
    """Send every byte of `parts`, in one system call if the kernel accepts them."""
    sent = sock.sendmsg(parts)
    if sent < sum(map(len, parts)):
        sock.sendall(memoryview(b"".join(parts))[sent:])


def dial(path: Path, deadline: float, *, wait: bool = True) -> socket.socket:
    """Return a connected socket. Raises DaemonUnreachable.

    If the daemon's queue is full, the call waits until `deadline`. Without `wait`, the call fails at once, with a
    BlockingIOError as the cause.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # Use the kernel's time-out, because a socket with Python's time-out fails at once if the queue is full.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(deadline - time.monotonic()))
        sock.setblocking(wait)
        sock.connect(os.fspath(path))
        sock.setblocking(True)
        return sock
    except OSError as error:
        sock.close()
        raise _unreachable(path, error) from error


def _unreachable(path: Path, error: OSError) -> DaemonUnreachable:
    if isinstance(error, BlockingIOError):
        return DaemonUnreachable(
            f"the daemon at {path} has too many new connections and did not accept this one in time: try again later"
        )
    if isinstance(error, FileNotFoundError):
        return DaemonUnreachable(f"no daemon listens at {path}: start it with edgertd start, or give its socket's path")
    if isinstance(error, PermissionError):
        return DaemonUnreachable(f"no permission for {path}: run as its owner or a member of its group")
    return DaemonUnreachable(
        f"cannot connect to the daemon at {path}: {error.strerror or error}; start it with edgertd start"
    )
