"""The signals that end a command besides Ctrl-C: SIGTERM, and SIGHUP if the terminal closes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def on_ending_signal(handle: Callable[[int], None], *also: signal.Signals) -> Iterator[None]:
    """Call `handle` with the number of each SIGTERM, of the first SIGHUP, and of each signal of `also`."""

    def note(number: int, _: object) -> None:
        if number == signal.SIGHUP:  # the shell and the kernel send one each
            signal.signal(number, signal.SIG_IGN)
        handle(number)

    # After nohup, SIGHUP is ignored, and stays ignored.
    hang_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, *hang_up, *also)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is note:
                signal.signal(number, handler)
