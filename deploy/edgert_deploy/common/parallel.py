"""Work on many devices at a time. The first Ctrl-C stops at the next step, the second stops at once.

Python cannot end a thread from outside. So the first Ctrl-C only sets `asked`, which the work reads between its steps.
After the second Ctrl-C, `for_each` returns without the items in progress: their daemon threads end with the process.
"""

from __future__ import annotations

import contextlib
import os
import queue
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from edgert_deploy.common.ending_signals import on_ending_signal

AT_ONCE_DEFAULT = 8
# A deployment mostly waits for its device: 16 deployments at a time use about a sixth of a core (bench/rollout.py).
AT_ONCE_PER_CORE = 16
AT_ONCE_MAX = 128
FILES_EACH = 8  # one connection has at most this many open files: its socket, its pipes and the bundle
POLL_S = 0.1  # a second Ctrl-C takes effect within this time

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class UserStop:
    """Counts the user's requests to stop. A signal handler may call `press`: it takes no lock."""

    def __init__(self) -> None:
        self._presses = 0

    @property
    def asked(self) -> bool:
        return self._presses >= 1

    @property
    def abandoned(self) -> bool:
        return self._presses >= 2

    def press(self) -> None:
        self._presses += 1

    @contextmanager
    def on_interrupt(self, first: str, second: str) -> Iterator[None]:
        """Count each Ctrl-C, each SIGTERM and the first SIGHUP as a press.

        At the first press, print `first` on stderr; at each later press, print `second`. "" prints nothing.
        """
        if threading.current_thread() is not threading.main_thread():  # only the main thread handles signals
            yield
            return

        def pressed(_: int) -> None:
            self.press()
            # The interrupted code may hold the locks of Python's own buffers, so this code writes without them.
            if text := second if self.abandoned else first:
                with contextlib.suppress(OSError):  # the terminal is closed
                    os.write(2, f"\n{text}\n".encode())

        with on_ending_signal(pressed, signal.SIGINT):
            yield


def at_once_here(cores: int | None = None, files_max: int | None = None) -> int:
    """Return how many deployments this host can run at a time, by its cores and its limit of open files."""
    cores = cores or len(os.sched_getaffinity(0))
    if files_max is None:
        files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    by_files = AT_ONCE_MAX if files_max == resource.RLIM_INFINITY else files_max // FILES_EACH // 2
    return max(1, min(AT_ONCE_PER_CORE * cores, AT_ONCE_MAX, by_files))


def for_each(
    items: Sequence[Item], work: Callable[[Item], Answer], stop: UserStop, at_once: int = AT_ONCE_DEFAULT
) -> list[Answer | None]:
    """Run `work(item)` for each item, `at_once` at a time; return the answers in the order of `items`.

    After a second press of Ctrl-C, the items that are not done have the answer None. If `work` raises an exception, no
    further item starts. `for_each` raises the exception again when the items in progress are done.
    """
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    # Not a SimpleQueue: before Python 3.13, its `get` never returns if a signal handler runs longer than the timeout.
    done: queue.Queue[tuple[int, Answer | None, BaseException | None]] = queue.Queue()
    for i in range(len(items)):
        todo.put(i)

    def worker() -> None:
        while True:
            try:
                i = todo.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((i, work(items[i]), None))
            except BaseException as error:  # noqa: BLE001 - the waiting thread raises it again
                done.put((i, None, error))
                with contextlib.suppress(queue.Empty):  # no further item starts
                    while True:
                        done.put((todo.get_nowait(), None, None))

    for _ in range(min(at_once, len(items))):
        threading.Thread(target=worker, daemon=True).start()
    answers: list[Answer | None] = [None] * len(items)
    left = len(items)
    failure: BaseException | None = None
    while left:
        abandoned = stop.abandoned
        try:
            i, answer, error = done.get(timeout=0 if abandoned else POLL_S)
        except queue.Empty:
            if abandoned:
                break
            continue
        failure = failure or error
        answers[i] = answer
        left -= 1
    if failure is not None:
        raise failure
    return answers
