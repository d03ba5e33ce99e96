"""The prediction cache: exact, limited in bytes and age; identical inputs in flight run once.

The first request of a key computes; requests that arrive during its run wait for its answer. A failure is not kept: the
waiting requests compute for themselves. Keys are seeded per process, so no client can make two inputs collide. A cache
serves one version of one model; a new version starts with an empty cache.

The cache measures its own worth: over every PROBE_LOOKUPS lookups, it compares the engine time that hits saved with the
time of the lookups. If lookups took more time, the cache empties itself and turns off. It tries again after a pause,
which doubles each time. After a pause, it stays on only if hits save clearly more, so it does not turn on and off
repeatedly.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import xxhash
from numpy.typing import NDArray

from edgert.backoff import Backoff, doubling
from edgert.checks.status import CacheStatus

PROBE_LOOKUPS = 512  # after this number of lookups, the cache decides whether to stay on
OFF_S = 30.0
OFF_S_MAX = 1920.0
WORTH_AGAIN = 1.5  # after a pause, the cache stays on only if it saves this multiple of its cost
ENTRY_OVERHEAD_BYTES = 512  # key, dict slot, array headers

Arrays = list[NDArray[Any]]


@dataclass(slots=True)
class _Entry:
    born_s: float
    value: Arrays | None = None  # None while the answer is computed
    gates: list[threading.Lock] = field(default_factory=list)
    size_bytes: int = 0


class PredictionCache:
    """Answers by input content. With `max_bytes` 0 it is always off. Every method is thread-safe."""

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._clock = clock
        self._seed = int.from_bytes(os.urandom(8), "little")
        self._mutex = threading.Lock()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._backoff = Backoff(doubling(OFF_S, OFF_S_MAX))
        self._off_until_s = 0.0
        self._after_pause = False
        self._worth: float | None = None
        self._probe_hits = self._probe_lookups = 0
        self._spent_ns = self._ran_ns = 0
        self.size_bytes = 0
        self.hits = self.misses = 0

    @property
    def on(self) -> bool:
        return self._max_bytes > 0 and self._clock() >= self._off_until_s

    def key(self, inputs: Sequence[NDArray[Any]], tag: bytes) -> bytes:
        """Return the key of `inputs` (C-contiguous): a hash of their values, and `tag` for dtypes and shapes."""
        if len(inputs) == 1:
            return xxhash.xxh3_128_digest(inputs[0].data, self._seed) + tag
        state = xxhash.xxh3_128(seed=self._seed)
        for array in inputs:
            state.update(array.data)
        return state.digest() + tag

    def get(self, key: bytes, since_ns: int) -> Arrays | None:
        """Return the answer of `key`, or None; count a hit. The lookup began at `since_ns` (perf_counter_ns)."""
        with self._mutex:
            entry = self._fresh(key)
            if entry is None or entry.value is None:
                return None
            self._entries.move_to_end(key)
            self.hits += 1
            self._count(True, time.perf_counter_ns() - since_ns, 0)
            return entry.value

    def get_or_run(
        self, key: bytes, run: Callable[[], Arrays], wait_until_s: float | None = None
    ) -> tuple[Arrays, bool]:
        """Return the answer of `key`, and True if the cache or another request's run had it; else call `run`.

        If the other request's run does not end before `wait_until_s`, call `run` too.
        """
        while True:
            with self._mutex:
                entry = self._fresh(key)
                if entry is None:
                    entry = self._entries[key] = _Entry(self._clock())
                    self.misses += 1
                    break
                if entry.value is not None:
                    self._entries.move_to_end(key)
                    self.hits += 1
                    return entry.value, True
                gate = threading.Lock()
                gate.acquire()
                entry.gates.append(gate)
            gate.acquire(timeout=-1 if wait_until_s is None else max(0.0, wait_until_s - self._clock()))
            if entry.value is not None:
                with self._mutex:
                    self.hits += 1
                return entry.value, True
            # The run failed, or took too long: compute without the cache.
            return run(), False
        return self._compute(key, entry, run), False

    def count_lookup(self, hit: bool, spent_ns: int, engine_ns: int) -> None:
        """Count the time of one lookup; after a miss, count also the engine time of its answer.

        `engine_ns` is the request's own share of its batch's run, because a hit would have saved only this share.
        """
        with self._mutex:
            self._count(hit, spent_ns, engine_ns)

    def _count(self, hit: bool, spent_ns: int, engine_ns: int) -> None:
        self._probe_lookups += 1
        self._spent_ns += spent_ns
        if hit:
            self._probe_hits += 1
        else:
            self._ran_ns += engine_ns
        if self._probe_lookups >= PROBE_LOOKUPS:
            self._judge()

    def _judge(self) -> None:
        """Stay on or turn off: compare cost and saving of the last PROBE_LOOKUPS lookups."""
        runs = self._probe_lookups - self._probe_hits
        saved_ns = self._probe_hits * self._ran_ns / runs if runs else float("inf")
        self._worth = min(saved_ns / max(1, self._spent_ns), 999.0)
        if self._worth < (WORTH_AGAIN if self._after_pause else 1.0):
            self._off_until_s = self._clock() + self._backoff.failed()
            self._after_pause = True
            self._entries = OrderedDict((k, e) for k, e in self._entries.items() if e.value is None)
            self.size_bytes = 0
        else:
            self._backoff.reset()
            self._after_pause = False
        self._probe_lookups = self._probe_hits = self._spent_ns = self._ran_ns = 0

    def status(self) -> CacheStatus:
        return CacheStatus(
            on=self.on,
            why=self._why(),
            worth=None if self._worth is None else round(self._worth, 2),
            entries=len(self._entries),
            bytes=self.size_bytes,
            max_bytes=self._max_bytes,
            hits=self.hits,
            misses=self.misses,
        )

    def _why(self) -> str:
        """Return the reason why the cache is on or off, for messages."""
        if not self._max_bytes:
            return "off: [serving] cache_mb is 0"
        if self._worth is None:
            return f"on: its benefit is measured over {PROBE_LOOKUPS} lookups"
        worth = f"hits saved {self._worth:.1f} times the time of lookups"
        if not self.on:
            return f"off: {worth}; on again in {self._off_until_s - self._clock():.0f} s"
        return f"on again, to measure: {worth} before the pause" if self._after_pause else f"on: {worth}"

    def _fresh(self, key: bytes) -> _Entry | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.value is not None and self._clock() - entry.born_s > self._ttl_s:
            self._drop(key)
            return None
        return entry

    def _compute(self, key: bytes, entry: _Entry, run: Callable[[], Arrays]) -> Arrays:
        try:
            # Copy, because a view would keep the arrays of the whole batch alive.
            value = [array.copy() for array in run()]
        except BaseException:
            with self._mutex:
                if self._entries.get(key) is entry:
                    del self._entries[key]
            self._open(entry)
            raise
        for array in value:
            array.flags.writeable = False
        with self._mutex:
            entry.value = value
            entry.size_bytes = ENTRY_OVERHEAD_BYTES + sum(array.nbytes for array in value)
            if self._entries.get(key) is entry:
                self.size_bytes += entry.size_bytes
                self._make_room()
        self._open(entry)
        return value

    def _open(self, entry: _Entry) -> None:
        with self._mutex:
            gates, entry.gates = entry.gates, []
        for gate in gates:
            gate.release()

    def _make_room(self) -> None:
        """Drop the least recently used answers until the other answers fit; keep runs in progress."""
        while self.size_bytes > self._max_bytes:
            self._drop(next(key for key, entry in self._entries.items() if entry.value is not None))

    def _drop(self, key: bytes) -> None:
        self.size_bytes -= self._entries.pop(key).size_bytes


def tag_of(inputs: Sequence[NDArray[Any]]) -> bytes:
    """Return the part of a key that identifies dtypes and shapes."""
    return "".join(f"{array.shape}{array.dtype.char}" for array in inputs).encode()
