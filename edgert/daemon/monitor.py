"""The monitor: the process that restarts the daemon on a device without systemd.

`edgertd start` starts the monitor. The monitor ends when the daemon ends normally (exit code 0), on SIGTERM and SIGINT,
when the state folder was removed, or when the daemon of another monitor runs. SIGCONT ends its pause before the next
start.

The daemon's loop also sends SIGCONT regularly. The monitor kills a daemon that has stopped sending it, because the
daemon hangs.

If a monitor was killed, the next `edgertd start` starts a new monitor that adopts the daemon. The exit code of an
adopted daemon is unknown. The monitor assumes a normal end if the daemon removed its control socket. An adopted daemon
sends no SIGCONT.
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
REFUSED_S_MAX = 20.0  # a first daemon that fails this soon will fail again; a slow device needs seconds for the imports
NOT_STARTED = 126  # a shell's exit code for a command that it cannot run
LOG_BYTES_MAX = 5_000_000
CHECK_S = 60.0  # the time between two checks of the log and of the daemon
SILENT_CHECKS_MAX = 2  # checks in a row; the time in which a container is paused counts as one check
REPORT_S = 20.0  # the time between two reports of the daemon
VARIABLE = "EDGERT_MONITOR"  # the monitor's process id, in its daemon's environment
ADOPTED_S = 1.0  # the pause between two checks of an adopted daemon


def main() -> int:
    """Entry of `python -m edgert.daemon.monitor --state DIR`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", required=True)
    parser.add_argument("--adopt", type=int, metavar="PID", help="the process id of a daemon whose monitor was killed")
    arguments = parser.parse_args()
    return Monitor(arguments.state).keep_running(arguments.adopt)


class Monitor:
    """Keeps one daemon running. After a run longer than `stable_s`, earlier failures are forgotten."""

    def __init__(self, state: str, stable_s: float = STABLE_S) -> None:
        self._state = state
        self._backoff = Backoff(doubling(PAUSE_S_MIN, PAUSE_S_MAX), stable_s)
        # Signal handlers end the pause. They must not use a threading.Event: the interrupted code could hold its lock.
        self._ending = False
        self._awake = queue.SimpleQueue[None]()
        self._daemon: subprocess.Popen[bytes] | None = None
        self._adopted: int | None = None
        self._silent_checks = 0
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._end())
        signal.signal(signal.SIGCONT, lambda *_: self._continue())
        signal.signal(signal.SIGALRM, lambda *_: self._check())
        signal.setitimer(signal.ITIMER_REAL, CHECK_S, CHECK_S)

    def keep_running(self, adopted: int | None = None) -> int:
        """Start the daemon again and again, until a run ends normally or the first run fails at once.

        If `adopted`, the process id of a running daemon, is given, wait for the end of this daemon first. Return the
        exit code of the last run.
        """
        if adopted is not None and self._adopted_ended_normally(adopted):
            return 0
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
            self._pause(pause_s)
            if self._ending or not os.path.isdir(self._state):
                return 0

    def _pause(self, pause_s: float) -> None:
        """Wait for `pause_s` or a signal. Ignore an earlier SIGCONT; do not wait after an earlier SIGTERM."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._awake.get_nowait()
        if not self._ending:
            with contextlib.suppress(queue.Empty):
                self._awake.get(timeout=pause_s)

    def _run(self, command: list[str]) -> int:
        """Start the daemon, wait for its end, and return its exit code."""
        self._silent_checks = 0
        try:
            environment = {**os.environ, VARIABLE: str(os.getpid())}
            self._daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
        except OSError as error:  # too little memory or too many processes: like a daemon that ends at once
            log(f"edgertd cannot be started: {error.strerror}")
            return NOT_STARTED
        if self._ending:  # the signal arrived before the daemon had started
            self._daemon.terminate()
        return self._daemon.wait()

    def _adopted_ended_normally(self, daemon: int) -> bool:
        """Wait for the end of a daemon that another monitor started; return whether the daemon ended normally."""
        self._adopted = daemon
        if self._ending:  # the signal arrived before the daemon was known
            self._end()
        while _was_monitored(daemon):
            time.sleep(ADOPTED_S)
        self._adopted = None
        from edgert.state_dir import StateDir  # rarely needed, and half as large as all other imports of the monitor

        return self._ending or not StateDir(Path(self._state)).control_socket.exists()

    def _other_daemon_runs(self) -> bool:
        """Return whether another process has locked the pid file. It has its own monitor or service manager."""
        from edgert.durable import is_locked  # rarely needed, like StateDir
        from edgert.state_dir import StateDir

        with contextlib.suppress(OSError):
            return is_locked(StateDir(Path(self._state)).pid)
        return False

    def _continue(self) -> None:
        """Handle SIGCONT: a report of the daemon, or the end of a pause."""
        self._silent_checks = 0
        if self._awake.empty():
            self._awake.put(None)

    def _check(self) -> None:
        """Shorten the log, and kill the daemon if it hangs."""
        shorten_log()
        self._silent_checks += 1
        if self._silent_checks > SILENT_CHECKS_MAX and self._daemon is not None and self._daemon.poll() is None:
            log(f"edgertd has not reported for {self._silent_checks * CHECK_S:.0f} s: it hangs and is killed")
            self._daemon.kill()

    def _end(self) -> None:
        self._ending = True
        self._awake.put(None)
        if self._daemon is not None:
            self._daemon.terminate()
        elif self._adopted is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._adopted, signal.SIGTERM)


def monitor_of(state: Path) -> int | None:
    """Return the process id of the monitor of a state folder; None if no monitor runs."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = _words(path)
        if os.fsencode(state) in words and any(b"edgert.daemon.monitor" in word for word in words):
            return int(path.parent.name)
    return None


def signal_monitor(monitor: int, number: signal.Signals) -> None:
    """Tell a monitor to end (SIGTERM) or to start its daemon now (SIGCONT, harmless at any time)."""
    with contextlib.suppress(OSError):  # the monitor has ended, or belongs to another user
        os.kill(monitor, number)


def report_to_monitor() -> None:
    """Tell the monitor that started this daemon, if it still runs, that the daemon's loop runs."""
    parent = os.getppid()
    if os.environ.get(VARIABLE) == str(parent):
        signal_monitor(parent, signal.SIGCONT)


def has_lost_its_monitor(daemon: int) -> bool:
    """Return whether the monitor of `daemon`, a process id, has ended and no other monitor adopted it."""
    if not _was_monitored(daemon):
        return False
    try:
        parent = int(Path(f"/proc/{daemon}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return False
    words = _words(Path(f"/proc/{parent}/cmdline"))
    if not words or any(b"edgert.daemon.monitor" in word for word in words):
        return False
    adopts = [b"--adopt", str(daemon).encode()]
    return not any(adopts == _words(path)[-3:-1] for path in Path("/proc").glob("[0-9]*/cmdline"))


def _was_monitored(daemon: int) -> bool:
    """Return whether the process `daemon` runs, and a monitor started it."""
    return any(word.startswith(f"{VARIABLE}=".encode()) for word in _words(Path(f"/proc/{daemon}/environ")))


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
