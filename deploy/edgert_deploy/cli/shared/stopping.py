"""The end of long-running commands. They finish their current work after the first Ctrl-C or SIGTERM."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from types import FrameType

import click


def stopping(for_s: float | None) -> Callable[[], bool]:
    """Return a function that returns True after a signal or after `for_s`. A second signal exits at once.

    At the end of the command, click restores the signal handlers.
    """
    signals: list[int] = []
    ends_at = None if for_s is None else time.monotonic() + for_s

    def note(number: int, _frame: FrameType | None) -> None:
        if signals:
            sys.exit(128 + number)
        signals.append(number)

    for number in (signal.SIGINT, signal.SIGTERM):
        before = signal.signal(number, note)
        click.get_current_context().call_on_close(partial(signal.signal, number, before))
    return lambda: bool(signals) or (ends_at is not None and time.monotonic() >= ends_at)
