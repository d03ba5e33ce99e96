"""Threads for connections: a thread whose connection has ended waits a moment for the next one.

Some apps connect for each request. A new thread costs the worker more than all else that a short connection needs.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable
from typing import Any

SPARE_MAX = 4
SPARE_S = 10.0  # how long a thread waits for its next job


class _Spare:
    """A thread that waits for a job; `gate` opens when it has one."""

    __slots__ = ("gate", "job")

    def __init__(self) -> None:
        self.gate = _thread.allocate_lock()
        self.gate.acquire()
        self.job: tuple[Callable[..., object], tuple[Any, ...]] | None = None


class SpareThreads:
    """Runs each job in a thread of its own; up to `spare_max` of them wait `spare_s` for another job."""

    def __init__(self, spare_max: int = SPARE_MAX, spare_s: float = SPARE_S) -> None:
        self._spare_max, self._spare_s = spare_max, spare_s
        self._spare: list[_Spare] = []  # a stack: append, pop and remove are atomic

    def __len__(self) -> int:
        return len(self._spare)

    def start(self, job: Callable[..., object], *arguments: Any) -> None:
        """Call `job(*arguments)` in another thread. Raises RuntimeError if the system gives no more threads."""
        try:
            spare = self._spare.pop()
        except IndexError:
            # threading.Thread would make this thread wait for the new one to begin, which costs more than all else here
            # when many connect at once.
            _thread.start_new_thread(self._run, (job, arguments))
            return
        spare.job = job, arguments
        spare.gate.release()

    def _run(self, job: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        job(*arguments)
        del job, arguments  # keep nothing of a connection that has ended
        spare = _Spare()
        while len(self._spare) < self._spare_max:
            self._spare.append(spare)
            if not spare.gate.acquire(timeout=self._spare_s):
                try:
                    self._spare.remove(spare)
                    return
                except ValueError:  # it was taken just now, and gets its job
                    spare.gate.acquire()
            assert spare.job is not None  # the gate was opened for it
            (job, arguments), spare.job = spare.job, None
            job(*arguments)
            del job, arguments
