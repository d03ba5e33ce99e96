"""Threads for connections: a thread whose connection has ended waits for the next connection.

Some apps connect for each request. For a short connection, a new thread costs the worker more than all other work.
"""

from __future__ import annotations

import _thread
from collections.abc import Callable
from typing import Any

SPARE_MAX = 4
SPARE_S = 10.0  # the longest wait of a thread for its next job


class _Spare:
    """A thread that waits for a job; `gate` opens when the thread has a job."""

    __slots__ = ("gate", "job")

    def __init__(self) -> None:
        self.gate = _thread.allocate_lock()
        self.gate.acquire()
        self.job: tuple[Callable[..., object], tuple[Any, ...]] | None = None


class SpareThreads:
    """Runs each job in its own thread; up to `spare_max` threads wait `spare_s` for another job."""

    def __init__(self, spare_max: int = SPARE_MAX, spare_s: float = SPARE_S) -> None:
        self._spare_max, self._spare_s = spare_max, spare_s
        self._spare: list[_Spare] = []  # a stack: append, pop and remove are atomic

    def __len__(self) -> int:
        return len(self._spare)

    def start(self, job: Callable[..., object], *arguments: Any) -> None:
        """Call `job(*arguments)` in another thread. Raises RuntimeError at the system's limit of threads."""
        try:
            spare = self._spare.pop()
        except IndexError:
            # With threading.Thread, this thread would wait for the start of the new thread. If many clients connect at
            # once, this wait costs more than all other work here.
            _thread.start_new_thread(self._run, (job, arguments))
            return
        spare.job = job, arguments
        spare.gate.release()

    def _run(self, job: Callable[..., object], arguments: tuple[Any, ...]) -> None:
        job(*arguments)
        del job, arguments  # drop all references to the ended connection
        spare = _Spare()
        while len(self._spare) < self._spare_max:
            self._spare.append(spare)
            if not spare.gate.acquire(timeout=self._spare_s):
                try:
                    self._spare.remove(spare)
                    return
                except ValueError:  # another thread just took this spare thread and gives it a job
                    spare.gate.acquire()
            assert spare.job is not None  # the gate was opened for it
            (job, arguments), spare.job = spare.job, None
            job(*arguments)
            del job, arguments
