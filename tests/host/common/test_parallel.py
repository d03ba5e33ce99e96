"""Work on many devices at a time, and the effects of one and two presses of Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from edgert_deploy.common.parallel import AT_ONCE_MAX, POLL_S, UserStop, at_once_here, for_each
from tests.support.devices import WAIT_S_MAX, wait_until


def test_answers_come_in_the_order_of_the_items() -> None:
    later = threading.Event()

    def work(item: int) -> int:
        if item == 0:
            assert later.wait(WAIT_S_MAX)
        later.set()
        return item * 10

    assert for_each([0, 1, 2], work, UserStop(), at_once=2) == [0, 10, 20]
    assert for_each([], work, UserStop()) == []


def test_an_error_is_raised_where_the_answers_are_awaited() -> None:
    def work(item: int) -> int:
        raise ValueError(item)

    with pytest.raises(ValueError, match="1"):
        for_each([1], work, UserStop())


def test_after_an_error_no_further_item_starts_and_those_in_progress_end() -> None:
    failed, started, ended = threading.Event(), list[int](), list[int]()

    def work(item: int) -> int:
        started.append(item)
        if item == 0:
            wait_until(lambda: started == [0, 1], "the other item is in progress")
            failed.set()
            raise ValueError("the disk is full")
        assert failed.wait(WAIT_S_MAX)
        time.sleep(2 * POLL_S)
        ended.append(item)
        return item

    with pytest.raises(ValueError, match="the disk is full"):
        for_each([0, 1, 2, 3], work, UserStop(), at_once=2)
    assert (started, ended) == ([0, 1], [1]), "no device is left in the middle of its deployment"


def test_a_second_ctrl_c_returns_the_finished_items_without_those_in_progress() -> None:
    stop, never, done = UserStop(), threading.Event(), threading.Event()

    def work(item: str) -> str:
        if item == "hangs":
            assert done.wait(WAIT_S_MAX)
            wait_until(lambda: threading.active_count() == threads + 1, "the thread of the quick one has ended")
            stop.press()
            stop.press()
            never.wait(60)
        done.set()
        return item

    threads = threading.active_count()
    assert for_each(["quick", "hangs"], work, stop, at_once=2) == ["quick", None]
    assert threading.active_count() <= threads + 2
    never.set()


def test_a_slow_terminal_does_not_delay_a_second_ctrl_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal handlers take longer than one wait for an answer."""
    monkeypatch.setattr(os, "write", lambda *_: time.sleep(2 * POLL_S))
    stop, done = UserStop(), threading.Event()

    def work(item: int) -> int:
        time.sleep(POLL_S / 2)  # until the main thread waits for the answer
        os.kill(os.getpid(), signal.SIGINT)
        wait_until(lambda: stop.asked, "the first press was counted")
        os.kill(os.getpid(), signal.SIGINT)
        done.wait(WAIT_S_MAX)
        return item

    with stop.on_interrupt("stopping", "detached"):
        assert for_each([1], work, stop) == [None]
    done.set()


def test_each_ctrl_c_and_each_sigterm_is_counted_and_gets_a_message(capfd: pytest.CaptureFixture[str]) -> None:
    stop = UserStop()
    with stop.on_interrupt("stopping", "detached"):
        for number, abandoned in ((signal.SIGINT, False), (signal.SIGTERM, True)):
            os.kill(os.getpid(), number)
            assert (stop.asked, stop.abandoned) == (True, abandoned)
    assert capfd.readouterr().err.split() == ["stopping", "detached"]


def test_the_number_of_simultaneous_items_follows_the_cores_and_the_limit_of_open_files() -> None:
    assert at_once_here(cores=2, files_max=1024) == 32
    assert at_once_here(cores=64, files_max=65_536) == AT_ONCE_MAX
    assert at_once_here(cores=64, files_max=256) == 16
    assert at_once_here(cores=1, files_max=8) == 1
    assert 1 <= at_once_here() <= AT_ONCE_MAX
