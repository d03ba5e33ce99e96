"""A process that the supervisor keeps up beside the workers: the telemetry forwarder, the HTTP server.

Nothing on the local socket waits for one, so it is started again after a pause that grows while it keeps ending
soon. Its standard input is a pipe whose other end the supervisor alone holds: it closes when the supervisor dies.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Callable, Sequence

PAUSE_S_MIN = 5.0
PAUSE_S_MAX = 300.0
STABLE_S = 60.0  # a process that lived this long makes its predecessors' ends forgotten
LOOK_S = 5.0  # between two looks where the kernel has no pidfd (before 5.3)
STOP_S_MAX = 5.0


class SideProcess:
    """Runs `command` until `stop`. `say` logs a line; `clock` is monotonic seconds.

    All methods run on the supervisor's thread, which hears of an end through `selector` or, without a pidfd, `tick`.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        selector: selectors.BaseSelector,
        say: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._name, self._command, self._selector, self._say, self._clock = name, command, selector, say, clock
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._began_s = 0.0
        self._pause_s = PAUSE_S_MIN
        self._due_s: float | None = None

    @property
    def pid(self) -> int | None:
        """Its process id; None between two lives."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it; where that fails, try again later."""
        self._due_s, self._began_s = None, self._clock()
        try:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE)
        except OSError as error:  # no memory, no process
            self._plan_restart(f"cannot be started: {error.strerror}")
            return
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
            self._selector.register(self._pidfd, selectors.EVENT_READ, self._look)
        except (AttributeError, OSError):
            self._due_s = self._clock() + LOOK_S

    def due_s(self) -> float | None:
        """When `tick` has something to do, on `clock`; None for not before it ends."""
        return self._due_s

    def tick(self, now_s: float) -> None:
        if self._due_s is None or now_s < self._due_s:
            return
        if self._process is None:
            self.start()
        else:
            self._look()

    def stop(self) -> None:
        """Ask it to end, and see that it does."""
        process, self._due_s = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        self._forget()

    def _look(self) -> None:
        assert self._process is not None  # a process that is gone is not looked at
        code = self._process.poll()
        if code is None:
            self._due_s = self._clock() + LOOK_S
            return
        self._forget()
        self._plan_restart(f"ended with {code}")

    def _plan_restart(self, what: str) -> None:
        now_s = self._clock()
        if now_s - self._began_s > STABLE_S:
            self._pause_s = PAUSE_S_MIN
        self._say(f"{self._name} {what}; it is started again in {self._pause_s:.0f} s")
        self._due_s = now_s + self._pause_s
        self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)

    def _forget(self) -> None:
        assert self._process is not None  # the callers have looked
        if self._pidfd >= 0:
            self._selector.unregister(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process = None
