"""SIGHUP ends a command as SIGTERM does, except after nohup."""

from __future__ import annotations

import os
import signal

import pytest

from edgert_deploy.common.ending_signals import on_ending_signal

pytestmark = pytest.mark.usefixtures("hang_ups_end")


def test_the_signals_of_one_closed_terminal_count_once() -> None:
    """A second signal would detach a deployment, and end the work that the first signal began."""
    outer: list[int] = []
    inner: list[int] = []
    with on_ending_signal(outer.append):
        with on_ending_signal(inner.append, signal.SIGINT):
            for number in (signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
                os.kill(os.getpid(), number)
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)
    assert inner == [signal.SIGHUP, signal.SIGTERM, signal.SIGINT]
    assert outer == [signal.SIGTERM]


def test_after_nohup_a_closed_terminal_changes_nothing() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    seen: list[int] = []
    with on_ending_signal(seen.append):
        os.kill(os.getpid(), signal.SIGHUP)
    assert (seen, signal.getsignal(signal.SIGHUP)) == ([], signal.SIG_IGN)
