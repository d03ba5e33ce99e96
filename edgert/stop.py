"""When a process that the supervisor started has to stop: on a signal, or when the supervisor has died."""

from __future__ import annotations

import os
import signal
import stat
import sys
import threading

STOP_S_MAX = 1.8
_STOP_SIGNALS = {signal.SIGTERM, signal.SIGINT}


class Stop:
    """A request to stop, which is final. `select` finds it readable from then on."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        self._set = False

    def set(self) -> None:
        """Request the stop. Any thread may."""
        self._set = True
        os.write(self._writer, b"x")

    def is_set(self) -> bool:
        return self._set

    def fileno(self) -> int:
        return self._reader


def stop_with_supervisor_or_signal(stop_s_max: float = STOP_S_MAX) -> Stop:
    """Return a `Stop` that is set by a stop signal, or when standard input ends: the supervisor holds its other end.

    The waiting is done by threads, as a name look-up may block the main thread for many seconds without running a
    signal handler. The process ends `stop_s_max` later in any case.
    """
    stop = Stop()
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)

    def end() -> None:
        stop.set()
        # An abrupt end loses nothing: the spool holds every report that was not acknowledged.
        limit = threading.Timer(stop_s_max, os._exit, (0,))
        limit.daemon = True
        limit.start()

    def wait_for_signal() -> None:
        signal.sigwait(_STOP_SIGNALS)
        end()

    def wait_for_supervisor() -> None:
        while os.read(stdin, 4096):
            pass
        end()

    stdin = sys.stdin.fileno()
    waits = [wait_for_signal]
    if stat.S_ISFIFO(os.fstat(stdin).st_mode):  # else somebody else started the process
        waits.append(wait_for_supervisor)
    for wait in waits:
        threading.Thread(target=wait, name=wait.__name__, daemon=True).start()
    return stop
