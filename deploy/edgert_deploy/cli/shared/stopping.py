"""The end of long-running commands: after the first Ctrl-C or other signal, they finish their work."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable

import click

from edgert_deploy.common.ending_signals import on_ending_signal


def stopping(for_s: float | None) -> Callable[[], bool]:
    """Return a function that returns True after a signal or after `for_s`. A second signal exits at once.

    At the end of the command, click restores the signal handlers.
    """
    signals: list[int] = []
    ends_at = None if for_s is None else time.monotonic() + for_s

    def note(number: int) -> None:
        if signals:
            sys.exit(128 + number)
        signals.append(number)

    click.get_current_context().with_resource(on_ending_signal(note, signal.SIGINT))
    return lambda: bool(signals) or (ends_at is not None and time.monotonic() >= ends_at)
