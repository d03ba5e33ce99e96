"""The monitor: the process that restarts the daemon on a device without systemd.

`edgertd start` starts the monitor. The monitor ends when the daemon ends normally (exit code 0), on SIGTERM and SIGINT,
when the state folder was removed, or when the daemon of another monitor runs. If a monitor was killed, its daemon
continues, and `edgertd start` warns that nothing restarts the daemon.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import queue
import signal
import subprocess
import sys
import time
from pathlib import Path

from edgert.backoff import STABLE_S, Backoff, doubling
from edgert.log import log

PAUSE_S_MIN, PAUSE_S_MAX = 0.5, 30.0
REFUSED_S_MAX = 2.0  # a daemon that fails this soon after its first start will fail again
NOT_STARTED = 126  # a shell's exit code for a command that it cannot run
LOG_BYTES_MAX = 5_000_000
LOG_CHECK_S = 60.0
VARIABLE = "EDGERT_MONITOR"  # the monitor's process id, in its daemon's environment


def main() -> int:
    """Entry of `python -m edgert.daemon.monitor --state DIR`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", required=True)
    return Monitor(parser.parse_args().state).keep_running()


class Monitor:
    """Keeps one daemon running. After a run longer than `stable_s`, earlier failures are forgotten."""

    def __init__(self, state: str, stable_s: float = STABLE_S) -> None:
        self._state = state
        self._backoff = Backoff(doubling(PAUSE_S_MIN, PAUSE_S_MAX), stable_s)
        # Signal handlers end the pause. They must not use a threading.Event: the interrupted code could hold its lock.
        self._ending = False
        self._ended = queue.SimpleQueue[None]()
        self._daemon: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._end())
        signal.signal(signal.SIGALRM, lambda *_: shorten_log())
        signal.setitimer(signal.ITIMER_REAL, LOG_CHECK_S, LOG_CHECK_S)

    def keep_running(self) -> int:
        """Start the daemon again and again, until a run ends normally or the first run fails at once.

        Return the exit code of the last run.
        """
        command = [sys.executable, "-m", "edgert.cli", "--state", self._state, "serve"]
        first_s = time.monotonic()
        first = True
        while True:
            self._backoff.started()
            code = self._run(command)
            refused = first and code > 0 and time.monotonic() - first_s < REFUSED_S_MAX
            if code == 0 or refused or self._other_daemon_runs():
                return code  # the daemon has logged the reason
            first = False
            pause_s = self._backoff.failed()
            log(f"edgertd ended with {code}; next start in {pause_s:.1f} s")
            with contextlib.suppress(queue.Empty):
                self._ended.get(timeout=pause_s)
            if self._ending or not os.path.isdir(self._state):
                return 0

    def _run(self, command: list[str]) -> int:
        """Start the daemon, wait for its end, and return its exit code."""
        try:
            environment = {**os.environ, VARIABLE: str(os.getpid())}
            self._daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
        except OSError as error:  # too little memory or too many processes: like a daemon that ends at once
            log(f"edgertd cannot be started: {error.strerror}")
            return NOT_STARTED
        if self._ending:  # the signal arrived before the daemon had started
            self._daemon.terminate()
        return self._daemon.wait()

    def _other_daemon_runs(self) -> bool:
        """Return whether another process has locked the pid file. It has its own monitor or service manager."""
        from edgert.durable import is_locked  # rarely needed, and half as large as all other imports of the monitor
        from edgert.state_dir import StateDir

        with contextlib.suppress(OSError):
            return is_locked(StateDir(Path(self._state)).pid)
        return False

    def _end(self) -> None:
        self._ending = True
        self._ended.put(None)
        if self._daemon is not None:
            self._daemon.terminate()


def monitor_of(state: Path) -> int | None:
    """Return the process id of the monitor of a state folder; None if no monitor runs."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        if os.fsencode(state) in (words := _words(path)) and _of_a_monitor(words):
            return int(path.parent.name)
    return None


def has_lost_its_monitor(daemon: int) -> bool:
    """Return whether a monitor started `daemon`, a process id, and has ended since."""
    variables = dict(word.partition(b"=")[::2] for word in _words(Path(f"/proc/{daemon}/environ")))
    monitor = variables.get(VARIABLE.encode(), b"").decode()
    return monitor.isdecimal() and not _of_a_monitor(_words(Path(f"/proc/{monitor}/cmdline")))


def _of_a_monitor(command: list[bytes]) -> bool:
    return any(b"edgert.daemon.monitor" in word for word in command)


def _words(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\0")
    except OSError:  # the process has ended, or belongs to another user
        return []


def shorten_log() -> None:
    """Empty the log if it is too long, so that failures and warnings do not fill the disk."""
    try:
        if os.fstat(2).st_size > LOG_BYTES_MAX:
            os.ftruncate(2, 0)  # all processes open the log for appending, so they continue at its new end
    except OSError:
        pass  # the log is a terminal or a pipe


if __name__ == "__main__":
    os._exit(main())
