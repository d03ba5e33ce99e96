"""The run page: where a worker notes which engine runs are under way, for the supervisor to look at.

Theory of operation: it is one page of memory that both processes map. Each session has two words on it: when its
last run began and, once that run is over, the same number again; they differ while a run is under way. So a run
costs the worker two stores and a look at the clock, no system call and no thread, and a worker that is stuck,
even with Python's lock in hand, cannot keep the supervisor from seeing it. CLOCK_MONOTONIC is the same in all
processes. A 32-bit processor may show a word half written, so nobody acts on one look alone.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from edgert.engines import Session
from edgert.tensors import TensorSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray

PAGE_BYTES = 4096
SESSIONS_MAX = PAGE_BYTES // 16


class RunPage:
    """One worker's page. The supervisor makes it with `create` and hands `descriptor` on; the worker maps that."""

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

    def watch(self, session: Session) -> Session:
        """`session`, its runs noted on this page."""
        assert self._sessions < SESSIONS_MAX, "one page holds no more sessions"
        watched = _WatchedSession(session, self._words, 2 * self._sessions, self._clock_ns)
        self._sessions += 1
        return watched

    def running_since_s(self) -> float | None:
        """When the longest of the runs under way began, in seconds of the monotonic clock; None where none is."""
        words = self._words.tolist()
        began = [began for began, ended in zip(words[::2], words[1::2], strict=True) if began != ended]
        return min(began) / 1e9 if began else None

    def last_run_s(self) -> float:
        """When the last run began, in seconds of the monotonic clock; 0 before the first."""
        return float(max(self._words[::2].tolist())) / 1e9

    def close(self) -> None:
        """Give map and descriptor back; the page is not used again."""
        self._words.release()
        self._map.close()
        os.close(self.descriptor)


class _WatchedSession:
    def __init__(self, session: Session, words: memoryview, at: int, clock_ns: Callable[[], int]) -> None:
        self.inputs: tuple[TensorSpec, ...] = session.inputs
        self.outputs: tuple[TensorSpec, ...] = session.outputs
        self.close = session.close
        run, ended_at = session.run, at + 1

        def watched(tensors: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
            words[at] = began = clock_ns()
            try:
                return run(tensors)
            finally:
                words[ended_at] = began

        # A closure: what it needs is found faster than on `self`, and every request comes by here.
        self.run = watched
