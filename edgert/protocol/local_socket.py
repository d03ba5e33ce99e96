"""A Unix stream socket as both ends of the local protocol use it: connected, its waits bounded, sent to whole."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from edgert.errors import DaemonUnreachable
from edgert.protocol import wire

WAIT_S_MAX = 366 * 86400.0  # of any one wait; who asks for more, or for ever, asks for this
SEND_BUFFER_BYTES = 1024**2  # a large frame then leaves in one system call


def timeval(seconds: float) -> bytes:
    """A time-out for SO_RCVTIMEO and SO_SNDTIMEO; at least a millisecond, as 0 would mean for ever."""
    microseconds = max(1000, int(min(WAIT_S_MAX, seconds) * 1e6))
    return struct.pack("ll", microseconds // 1_000_000, microseconds % 1_000_000)


def send_all(sock: socket.socket, parts: Sequence[wire.Buffer]) -> None:
    """Send every byte of `parts`, in as few system calls as the kernel takes."""
    total = sum(map(len, parts))
    sent = sock.sendmsg(parts)
    if sent == total:
        return
    rest = memoryview(b"".join(parts))[sent:]
    sock.sendall(rest)


def dial(path: Path, deadline: float, *, wait: bool = True) -> socket.socket:
    """A connected socket. Where the daemon's queue is full it waits until `deadline`, or, without `wait`, fails at
    once with a BlockingIOError as the cause. Raises DaemonUnreachable.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        # The kernel's own time-out: a socket that Python times would fail at once where the backlog is full.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval(deadline - time.monotonic()))
        sock.setblocking(wait)
        sock.connect(os.fspath(path))
        sock.setblocking(True)
        return sock
    except FileNotFoundError as error:
        sock.close()
        raise DaemonUnreachable(
            f"no daemon listens at {path}: start it with edgertd start, or give its path"
        ) from error
    except PermissionError as error:
        sock.close()
        raise DaemonUnreachable(f"no permission for {path}: run as its owner or a member of its group") from error
    except OSError as error:
        sock.close()
        raise DaemonUnreachable(
            f"cannot connect to the daemon at {path}: {error.strerror or error}; start it with edgertd start"
        ) from error
