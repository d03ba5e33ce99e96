"""The end of a process beside the daemon: it stops at a signal, or when the supervisor dies."""

from __future__ import annotations

import os
import select
import signal
import stat
import sys
import threading
import time

STOP_S_MAX = 1.8


class Stop:
    """A request to stop, which cannot be cancelled. After `set`, `select` reports the Stop as readable."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        self._set = False

    def set(self) -> None:
        """Request the stop. Every thread may call this method."""
        self._set = True
        os.write(self._writer, b"x")

    def is_set(self) -> bool:
        return self._set

    def fileno(self) -> int:
        return self._reader


def stop_with_supervisor_or_signal(stop_s_max: float = STOP_S_MAX) -> Stop:
    """Return a `Stop` that SIGTERM, SIGINT or the end of standard input sets.

    The supervisor holds the other end of standard input. A thread waits for these events, because a name lookup in the
    main thread may delay a signal handler for many seconds. The wakeup pipe has no such delay. The process always ends
    within `stop_s_max` after the event.
    """
    stop, stdin = Stop(), sys.stdin.fileno()
    signals, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    # If the input is a terminal or a file, the supervisor did not start this process.
    watched = [signals, stdin] if stat.S_ISFIFO(os.fstat(stdin).st_mode) else [signals]

    def wait() -> None:
        while signals not in (ready := select.select(watched, [], [])[0]):
            if stdin in ready and not os.read(stdin, 4096):
                break
        stop.set()
        time.sleep(stop_s_max)
        os._exit(0)  # an abrupt end loses nothing, because the spool has every report that was not acknowledged

    threading.Thread(target=wait, name="stop", daemon=True).start()
    return stop
