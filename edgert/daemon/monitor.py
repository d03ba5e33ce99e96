"""The monitor: where no service manager runs, the process that starts the daemon again when it dies.

`edgertd start` leaves one behind. It ends when the daemon ends in order (exit code 0), when it is told to
(SIGTERM, SIGINT), or when the state folder is gone.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from edgert.log import log

PAUSE_S_MIN, PAUSE_S_MAX = 0.5, 30.0
STABLE_S = 60.0
REFUSED_S_MAX = 2.0  # a daemon that ends so soon after its very first start will not come up by trying again
NOT_STARTED = 126  # as a shell says of what it cannot run
LOG_BYTES_MAX = 5_000_000
VARIABLE = "EDGERT_KEEPER"  # the monitor's process id, in its daemon's environment


def main() -> int:
    """Entry of `python -m edgert.daemon.monitor --state DIR`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", required=True)
    return Monitor(parser.parse_args().state).keep()


class Monitor:
    """Keeps one daemon running on the state folder `state`. One that lived for `stable_s` is a fresh beginning."""

    def __init__(self, state: str, stable_s: float = STABLE_S) -> None:
        self._state, self._stable_s = state, stable_s
        self._told_to_end = threading.Event()
        self._daemon: subprocess.Popen[bytes] | None = None
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._end())

    def keep(self) -> int:
        """Start the daemon, and start it again, until it is to end; the exit code."""
        command = [sys.executable, "-m", "edgert.cli", "--state", self._state, "serve"]
        pause_s, first = PAUSE_S_MIN, True
        while True:
            began = time.monotonic()
            code = self._run(command)
            lived_s = time.monotonic() - began
            if code == 0 or (first and code > 0 and lived_s < REFUSED_S_MAX):
                return code  # it ended in order, or refused to start at all: it said why
            first = False
            pause_s = PAUSE_S_MIN if lived_s > self._stable_s else min(pause_s * 2, PAUSE_S_MAX)
            log(f"edgertd ended with {code}; starting it again in {pause_s:.1f} s")
            if self._told_to_end.wait(pause_s) or not os.path.isdir(self._state):
                return 0
            shorten_log()

    def _run(self, command: list[str]) -> int:
        """Start the daemon and wait for its end; its exit code."""
        try:
            environment = {**os.environ, VARIABLE: str(os.getpid())}
            self._daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment)
        except OSError as error:  # no memory, no process: as a daemon that ended at once
            log(f"edgertd cannot be started: {error.strerror}")
            return NOT_STARTED
        if self._told_to_end.is_set():  # told while it was being started
            self._daemon.terminate()
        return self._daemon.wait()

    def _end(self) -> None:
        self._told_to_end.set()
        if self._daemon is not None:
            self._daemon.terminate()


def has_lost_its_monitor(daemon: int) -> bool:
    """Whether the process `daemon` was started by a monitor that is gone; False where something else looks after it."""
    try:
        named = [word for word in _words(daemon, "environ") if word.startswith(f"{VARIABLE}=".encode())]
        return bool(named) and not any(b"edgert.daemon.monitor" in word for word in _words(_parent(daemon), "cmdline"))
    except (OSError, ValueError, IndexError):
        return False


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def _words(pid: int, name: str) -> list[bytes]:
    return Path(f"/proc/{pid}/{name}").read_bytes().split(b"\0")


def shorten_log() -> None:
    """Begin the log anew where it has grown too long: a model that keeps failing must not fill the disk."""
    try:
        if os.fstat(2).st_size > LOG_BYTES_MAX:
            os.ftruncate(2, 0)  # it is written by appending, so every process goes on at the new end
    except OSError:
        pass  # a terminal, or a pipe


if __name__ == "__main__":
    os._exit(main())
