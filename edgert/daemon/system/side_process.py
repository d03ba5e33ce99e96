"""A process beside the workers: the forwarder, the HTTP server, or a round of the follower.

No request on the local socket waits for this process, so the supervisor restarts the process after a pause that
grows. The standard input of the process is a pipe that closes when the supervisor dies. The process then also ends.
"""

from __future__ import annotations

import os
import selectors
import subprocess
import time
from collections.abc import Callable, Sequence

from edgert.backoff import STABLE_S, Backoff, doubling
from edgert.checks.channel_status import AGAIN
from edgert.log import log

PAUSE_S_MIN = 5.0
PAUSE_S_MAX = 300.0
CHECK_S = 5.0  # the time between two checks on a kernel without pidfd (before 5.3)
STOP_S_MAX = 5.0


class SideProcess:
    """Keeps `command` running until `stop`. All methods run on the supervisor's thread.

    Args:
        selector: Reports the end of the process. On a kernel without pidfd, `tick` checks the process instead.
        round_pause_s: If given, each run of the command is a round whose output is dropped. After a round without an
            error, the next round starts in `round_pause_s()` seconds.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        selector: selectors.BaseSelector,
        clock: Callable[[], float] = time.monotonic,
        *,
        pause_s_max: float = PAUSE_S_MAX,
        round_pause_s: Callable[[], float] | None = None,
    ) -> None:
        self._round_pause_s = round_pause_s
        self._name = name
        self._command = command
        self._selector = selector
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._backoff = Backoff(doubling(min(PAUSE_S_MIN, pause_s_max), pause_s_max), STABLE_S, clock)
        self._due_s: float | None = None
        self._start_in_s: float | None = None

    @property
    def pid(self) -> int | None:
        """The process id; None while no process runs."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process, or try again later if that fails."""
        self._due_s = None
        self._backoff.started()
        try:
            out = None if self._round_pause_s is None else subprocess.DEVNULL
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=out)
        except OSError as error:  # too little memory or too many processes
            self._plan_restart(f"cannot be started: {error.strerror}")
            return
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
            self._selector.register(self._pidfd, selectors.EVENT_READ, self._check)
        except (AttributeError, OSError):
            self._due_s = self._clock() + CHECK_S

    def start_in(self, pause_s: float) -> None:
        """Start the process after a pause. If the process still runs, the pause starts when the process ends."""
        if self._process is None:
            self._due_s = self._clock() + pause_s
        else:
            self._start_in_s = pause_s

    def due_s(self) -> float | None:
        """Return the time when `tick` is due, on `clock`; None if nothing is due."""
        return self._due_s

    def tick(self) -> None:
        if self._due_s is None or self._clock() < self._due_s:
            return
        if self._process is None:
            self.start()
        else:
            self._check()

    def stop(self) -> None:
        """End the process and do not restart it."""
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

    def _check(self) -> None:
        assert self._process is not None  # the callers check a running process only
        code = self._process.poll()
        if code is None:
            self._due_s = self._clock() + CHECK_S
            return
        self._forget()
        if self._start_in_s is not None:
            self._due_s, self._start_in_s = self._clock() + self._start_in_s, None
        elif self._round_pause_s is not None and code == 0:
            self._backoff.reset()
            self._due_s = self._clock() + self._round_pause_s()
        else:
            self._plan_restart(f"ended with {code}", quiet=code == AGAIN)

    def _plan_restart(self, ending: str, *, quiet: bool = False) -> None:
        pause_s = self._backoff.failed()
        if not quiet:
            log(f"{self._name} {ending}; next start in {pause_s:.0f} s")
        self._due_s = self._clock() + pause_s

    def _forget(self) -> None:
        assert self._process is not None  # the callers check a running process only
        if self._pidfd >= 0:
            self._selector.unregister(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process = None
