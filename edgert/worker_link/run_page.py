"""The run page: the worker notes its current engine runs on it, and the supervisor reads the page.

The run page is one page of memory that both processes map. Each session has two machine words. The first word is the
start time of the session's last run; the second gets the same value when that run ends. So the words differ while a run
is in progress. A run costs the worker two stores and one read of the clock, without a system call or a thread. The
worker need not answer, so the supervisor detects a stuck worker even while an engine holds Python's lock.
CLOCK_MONOTONIC is the same in all processes. On a 32-bit processor the supervisor may read an incomplete word, so it
reads the word twice before it acts.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from edgert.engines import Session
from edgert.tensors import TensorSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

PAGE_BYTES = 4096
SESSIONS_MAX = PAGE_BYTES // 16
T = TypeVar("T")


class RunPage:
    """One worker's page. The supervisor creates it and sends `descriptor` to the worker, which maps it."""

    def __init__(self, descriptor: int, clock_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self.descriptor = descriptor
        self._clock_ns = clock_ns
        self._map = mmap.mmap(descriptor, PAGE_BYTES)
        self._words = memoryview(self._map).cast("Q")
        self._sessions = 0

    @classmethod
    def create(cls, clock_ns: Callable[[], int] = time.monotonic_ns) -> RunPage:
        descriptor = os.memfd_create("edgert-runs", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, PAGE_BYTES)
        return cls(descriptor, clock_ns)

    def track(self, session: Session) -> Session:
        """Return a session like `session` that notes its runs on this page."""
        assert self._sessions < SESSIONS_MAX, "the page has no space for another session"
        tracked = _TrackedSession(session, self._words, 2 * self._sessions, self._clock_ns)
        self._sessions += 1
        return tracked

    def running_since_s(self) -> float | None:
        """Return the start time of the longest run in progress, in monotonic seconds; None without a run."""
        words = self._words.tolist()
        began = [began for began, ended in zip(words[::2], words[1::2], strict=True) if began != ended]
        return min(began) / 1e9 if began else None

    def last_run_s(self) -> float:
        """Return the start time of the last run, on the monotonic clock; 0 before the first run."""
        return float(max(self._words[::2].tolist())) / 1e9

    def close(self) -> None:
        self._words.release()
        self._map.close()
        os.close(self.descriptor)


class _TrackedSession:
    def __init__(self, session: Session, words: memoryview, at: int, clock_ns: Callable[[], int]) -> None:
        self.inputs: tuple[TensorSpec, ...] = session.inputs
        self.outputs: tuple[TensorSpec, ...] = session.outputs
        self.close = session.close
        ended_at = at + 1

        def tracked(run: Callable[[Sequence[NDArray[Any]]], T]) -> Callable[[Sequence[NDArray[Any]]], T]:
            def tracked_run(tensors: Sequence[NDArray[Any]]) -> T:
                words[at] = began = clock_ns()
                try:
                    return run(tensors)
                finally:
                    words[ended_at] = began

            return tracked_run

        # Every request runs this code, and a closure is faster than attributes of `self`.
        self.run = tracked(session.run)
        self.release_memory = tracked(session.release_memory)
