"""What Ctrl-C means to work on many devices: once, stop at the next step; twice, let go at once.

Threads cannot be ended from outside. So the first Ctrl-C only sets `asked`, which the work looks at between its
steps, and the second has `for_each` return without those that are not done: they are daemon threads and end
with the process.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

AT_ONCE_MAX = 8
LOOK_S = 0.1  # how soon a second Ctrl-C is seen

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Stop:
    """How often the user has asked for an end. A signal handler may call `press`: it takes no lock."""

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
        """Take Ctrl-C as a press, and say on stderr what it does."""
        if threading.current_thread() is not threading.main_thread():  # only there can signals be handled
            yield
            return

        def pressed(*_: Any) -> None:
            self.press()
            # Not through Python's own buffers, whose locks the interrupted code may hold.
            os.write(2, f"\n{second if self.abandoned else first}\n".encode())

        before = signal.signal(signal.SIGINT, pressed)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def for_each(
    items: Sequence[Item],
    work: Callable[[Item], Answer],
    stop: Stop,
    at_once: int = AT_ONCE_MAX,
) -> list[Answer | None]:
    """`work(item)` for each, `at_once` at a time, the answers in the order of `items`.

    None for those that were not done when `stop` was pressed twice. What `work` raises is raised here.
    """
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, Answer | None, BaseException | None]] = queue.SimpleQueue()
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
            except BaseException as error:  # noqa: BLE001 - it is raised again in the thread that waits
                done.put((i, None, error))

    for _ in range(min(at_once, len(items))):
        threading.Thread(target=worker, daemon=True).start()
    answers: list[Answer | None] = [None] * len(items)
    left = len(items)
    while left and not stop.abandoned:
        try:
            i, answer, error = done.get(timeout=LOOK_S)
        except queue.Empty:
            continue
        if error is not None:
            raise error
        answers[i] = answer
        left -= 1
    return answers
