"""Starts workers as forks of one fork server, or as separate programs if forks fail or save no memory.

The parent of the workers is the fork server (edgert.worker.fork_server), not the daemon. So the daemon holds a pidfd of
each worker, to kill the worker and to detect its end. The daemon requests the exit code from the fork server. If the
fork server is killed, its workers continue, and the next worker gets a new fork server.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from typing import Protocol

from edgert.log import log
from edgert.worker_link import link

ANSWER_S_MAX = 5.0  # the longest wait for an exit code; a fork needs milliseconds
FORK_S_MAX = 150.0  # a fork, and before the first fork the imports (IMPORT_S_MAX); less than LOAD_S_MAX


class Process(Protocol):
    """A worker's process. `wait` returns the exit code (None: unknown), or raises TimeoutExpired."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...

    def wait(self, timeout: float | None = None) -> int | None: ...


class WorkerStarter:
    """Starts workers, on the supervisor's thread. `saves_memory` tells whether a fork server saves memory."""

    def __init__(self, saves_memory: Callable[[], bool] = lambda: True) -> None:
        self._saves_memory = saves_memory
        self._forks = _has_pidfd()
        self._server: ForkServer | None = None

    def __call__(self, end: socket.socket) -> Process:
        """Start a worker with `end` as its link. Raises OSError."""
        if self.forks:
            try:
                return self._running().fork(end)
            except (ValueError, OSError) as error:
                log(f"no fork server ({error}): this worker starts as a separate program")
        return start_alone(end)

    @property
    def forks(self) -> bool:
        """Whether the next worker is a fork."""
        return self._forks and self._saves_memory()

    def kill_unused_server(self) -> None:
        """Kill a fork server that has started no worker yet, so that the links of waiting workers close."""
        if self._server is not None and not self._server.forked:
            self._server.process.kill()

    def close(self) -> None:
        """End the server. All its workers have ended."""
        if self._server is not None:
            self._server.close()
            self._server = None

    @property
    def pid(self) -> int | None:
        """The server's process id; None while no server runs."""
        return None if self._server is None else self._server.process.pid

    def _running(self) -> ForkServer:
        """Return a running server. Raises ValueError if none can ever run here, OSError if none can now."""
        if self._server is not None and (code := self._server.process.poll()) is not None:
            served = self._server.forked
            self.close()
            if not served:
                self._forks = False
                raise ValueError(f"it ended with {code}")
        if self._server is None:
            self._server = ForkServer()
        return self._server


class ForkServer:
    """One run of the fork server. `forked` tells whether this run has started a worker."""

    def __init__(self) -> None:
        self.forked = False
        self.link, theirs = link.pair()
        self.link.settimeout(ANSWER_S_MAX)
        with theirs:
            try:
                self.process = link.start("edgert.worker.fork_server", theirs)
            except OSError:
                self.link.close()
                raise

    def fork(self, end: socket.socket) -> ForkedProcess:
        """Request a worker with `end` as its link. Raises OSError."""
        link.send(self.link, {"op": "fork"}, (end.fileno(),))
        return ForkedProcess(self)

    def exit_code(self, pid: int) -> int | None:
        """Return the exit code of a worker that has ended; None if the server was killed."""
        try:
            link.send(self.link, {"op": "reap", "pid": pid})
            received = link.receive(self.link)
        except OSError:
            self.process.kill()  # the server may be stuck; the next worker gets a new server
            return None
        return None if received is None else int(received[0]["code"])

    def close(self) -> None:
        """End the server."""
        self.link.close()
        try:
            self.process.wait(ANSWER_S_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


class ForkedProcess:
    """A worker that the fork server starts. `pid` is 0 until the worker reports its start."""

    def __init__(self, server: ForkServer) -> None:
        self.pid = 0
        self._server = server
        self._pidfd = -1
        self._killed = False
        self._requested_s = time.monotonic()

    def started(self, pid: int) -> None:
        """Set the process id. Raises ValueError for a second call, OSError if the process has ended."""
        if self.pid:
            raise ValueError("a worker starts once")
        self._pidfd = os.pidfd_open(pid)
        self.pid, self._server.forked = pid, True
        if self._killed:
            self.kill()

    def kill(self) -> None:
        self._killed = True
        if self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        elif not self.pid and time.monotonic() - self._requested_s > FORK_S_MAX:
            self._server.process.kill()  # it hangs or was stopped; the links of the workers that wait for it close

    def wait(self, timeout: float | None = None) -> int | None:
        if self._pidfd < 0:  # the worker never started
            return None
        ended = select.poll()  # select() accepts no descriptor above 1023
        ended.register(self._pidfd, select.POLLIN)
        if not ended.poll(None if timeout is None else 1000 * timeout):
            raise subprocess.TimeoutExpired("worker", timeout or 0.0)
        os.close(self._pidfd)
        self._pidfd = -1
        return self._server.exit_code(self.pid)


def start_alone(end: socket.socket) -> Process:
    """Start a worker as a separate program. Raises OSError."""
    return link.start("edgert.worker.worker", end)


def _has_pidfd() -> bool:
    """Return whether this system has pidfds: Linux 5.3 or newer, unless a sandbox refuses them."""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):
        return False
    return True
