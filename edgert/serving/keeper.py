"""The keeper: where no service manager runs, the process that starts the daemon again when it dies.

`edgertd start` leaves one behind. It ends when the daemon ends in order (exit code 0), or when it is told to.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time

from edgert.log import log

PAUSE_S_MIN, PAUSE_S_MAX = 0.5, 30.0
STABLE_S = 60.0


def main() -> int:
    """Entry of `python -m edgert.serving.keeper --state DIR`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--state", required=True)
    state = parser.parse_args().state
    command = [sys.executable, "-m", "edgert.cli", "--state", state, "serve"]
    pause_s = PAUSE_S_MIN
    while True:
        began = time.monotonic()
        daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        _pass_on_signals(daemon)
        code = daemon.wait()
        lived_s = time.monotonic() - began
        if code == 0 or (code > 0 and lived_s < PAUSE_S_MIN * 4 and pause_s == PAUSE_S_MIN):
            return code  # it ended in order, or refused to start at all: it said why
        pause_s = PAUSE_S_MIN if lived_s > STABLE_S else min(pause_s * 2, PAUSE_S_MAX)
        log(f"edgertd ended with {code}; starting it again in {pause_s:.1f} s")
        time.sleep(pause_s)


def _pass_on_signals(daemon: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: daemon.terminate())


if __name__ == "__main__":
    os._exit(main())
