"""Messages between the daemon and its workers: JSON in single datagrams, with descriptors attached.

The daemon starts a process with `start`; the new process gets its end of the link from `inherited_end`. The daemon's
first message to a worker is a `LoadMessage`, with the run page as descriptor. All other messages have the key `op`:

    to a worker     other keys
    connection      the HelloFlags that are set; the client's socket is the descriptor
    stats           id: the number of the request, which the answer repeats
    figures         none; the worker sends the figures for the trial limits
    send_golden     count, for_s: the worker sends golden samples to itself, through the socket like an app
    stop            final: whether the daemon stops too

    from a worker   other keys
    started         pid: the process id of a fork
    progress        line: the current step of a long load
    ready           loaded: a LoadedStatus
    failed          code, message: the error that prevents the load
    alarms          names: the worker's current alarms
    stats           id, loaded: a LoadedStatus, figures: a WorkerFigures
    figures         requests, failed, p99_ms, compared, agreed
    golden_sent     count: the number of answers and refusals

`edgert.worker.fork_server` lists the messages of the fork server.
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
REPEATED_BYTES_MAX = 128  # messages up to this size often repeat, such as `connection`, so each is parsed once
# Made once, because json.dumps would make a new encoder for each message.
_encode = json.JSONEncoder(separators=(",", ":")).encode
_parse_repeated = lru_cache(64)(json.loads)
_SPACE = socket.CMSG_SPACE(DESCRIPTORS_MAX * array.array("i").itemsize)


class _ThreadBuffer(threading.local):
    """A thread's buffer for messages. A new buffer for each message would cost more than most messages."""

    def __init__(self) -> None:
        self.view = memoryview(bytearray(MESSAGE_BYTES_MAX))


_thread_buffer = _ThreadBuffer()


def failure_message(error: EdgeRTError) -> dict[str, Any]:
    """Return the message with which a worker reports why its version does not load."""
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
        # When NumPy is imported, OpenBLAS starts a thread per core. No matrix product in a worker is large enough to
        # gain from these threads.
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )


def inherited_end() -> socket.socket:
    """Return this process's end of the link, which `start` passed, and ignore SIGINT.

    Only the parent decides when this process ends. But a Ctrl-C in the parent's terminal sends SIGINT to parent and
    child.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return socket.socket(fileno=int(sys.argv[-1]))


def send(end: socket.socket, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
    """Send a message and descriptors. Raises OSError if the other end is closed."""
    data = _encode(message).encode()
    if len(data) > MESSAGE_BYTES_MAX:
        raise EdgeRTError(
            f"a message between daemon and worker has {len(data)} bytes, the limit is {MESSAGE_BYTES_MAX}"
        )
    attached = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))] if descriptors else []
    end.sendmsg([data], attached)


def receive(end: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Return the next message and its descriptors; None if the other end is closed."""
    view = _thread_buffer.view
    try:
        count, attached, _, _ = end.recvmsg_into([view], _SPACE, socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        # The other end closed before it read all data. Messages that it sent earlier can still be read.
        return receive(end)
    if not count:
        return None
    data = view[:count].tobytes()
    message = dict(_parse_repeated(data)) if count <= REPEATED_BYTES_MAX else json.loads(data)
    return message, descriptors_in(attached)
