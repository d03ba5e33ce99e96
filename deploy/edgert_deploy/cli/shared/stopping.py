"""The end of long-running commands: after the first Ctrl-C or SIGTERM they finish their current work."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from types import FrameType


def stopping(for_s: float | None) -> Callable[[], bool]:
    """Return whether a signal came or `for_s` passed, as a function; a second signal ends at once."""
    signals: list[int] = []
    ends_at = None if for_s is None else time.monotonic() + for_s

    def note(number: int, _frame: FrameType | None) -> None:
        if signals:
            sys.exit(128 + number)
        signals.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, note)
    return lambda: bool(signals) or (ends_at is not None and time.monotonic() >= ends_at)
