"""The prediction cache: exact, bounded in bytes and age; identical inputs in flight run once.

What is cached is the future: the first request of a key computes, those that come meanwhile wait for it.
A failure is not kept: the waiters compute for themselves. Keys are seeded per process, so nobody outside
can make two inputs collide. One cache serves one version of one model; a new version starts empty.

The cache measures its own worth: over every PROBE_LOOKUPS lookups, the engine time that hits saved against the time
that lookups took. Where they took more, it empties itself and turns off; after a pause, twice as long each time, it
tries again, and stays on only where hits then save clearly more, so that it does not flap.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import xxhash
from numpy.typing import NDArray

from edgert.checks.status import CacheStatus

PROBE_LOOKUPS = 512  # lookups between two judgements of what the cache is worth
OFF_S = 30.0
OFF_S_MAX = 1920.0
WORTH_AGAIN = 1.5  # times its cost: what it must save in the first judgement after it was off
ENTRY_OVERHEAD_BYTES = 512  # key, dict slot, array headers

Arrays = list[NDArray[Any]]


class _Entry:
    __slots__ = ("born_s", "gates", "size_bytes", "value")

    def __init__(self, born_s: float) -> None:
        self.born_s = born_s
        self.value: Arrays | None = None  # None while it is computed
        self.gates: list[threading.Lock] = []
        self.size_bytes = 0


class PredictionCache:
    """Answers by input content. `max_bytes` 0 turns it off for good. Every method is thread-safe."""

    def __init__(self, max_bytes: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_bytes, self._ttl_s, self._clock = max_bytes, ttl_s, clock
        self._seed = int.from_bytes(os.urandom(8), "little")
        self._mutex = threading.Lock()
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        self._off_until_s = 0.0
        self._off_s = OFF_S
        self._on_trial = False
        self._worth: float | None = None
        self._probe_hits = self._probe_lookups = 0
        self._spent_ns = self._ran_ns = 0
        self.size_bytes = 0
        self.hits = self.misses = 0

    @property
    def on(self) -> bool:
        return self._max_bytes > 0 and (not self._off_until_s or self._clock() >= self._off_until_s)

    def key(self, inputs: Sequence[NDArray[Any]], tag: bytes) -> bytes:
        """What stands for the values of `inputs` (C-contiguous), and by their `tag` for dtypes and shapes."""
        if len(inputs) == 1:
            return xxhash.xxh3_128_digest(inputs[0].data, self._seed) + tag
        state = xxhash.xxh3_128(seed=self._seed)
        for array in inputs:
            state.update(array.data)
        return state.digest() + tag

    def get(self, key: bytes, since_ns: int) -> Arrays | None:
        """The answer of `key` if it is there: a hit, whose lookup began at `since_ns` on time.perf_counter_ns."""
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
        """The answer of `key` and whether it was there: from the cache, from a run under way, or from `run`."""
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
            # It failed for the one that ran it, or took too long: compute without the cache.
            return run(), False
        return self._compute(key, entry, run), False

    def judge(self, hit: bool, spent_ns: int, engine_ns: int) -> None:
        """Count what one lookup took and, unless it was a hit, what its answer took of the engine.

        `engine_ns` is the request's own share of its batch's run: that is all that a hit would have saved.
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
            self._conclude()

    def _conclude(self) -> None:
        """Stay on or turn off, by what the last PROBE_LOOKUPS lookups were worth."""
        runs = self._probe_lookups - self._probe_hits
        saved_ns = self._probe_hits * self._ran_ns / runs if runs else float("inf")
        self._worth = min(saved_ns / max(1, self._spent_ns), 999.0)
        if self._worth < (WORTH_AGAIN if self._on_trial else 1.0):
            self._off_until_s = self._clock() + self._off_s
            self._off_s = min(2 * self._off_s, OFF_S_MAX)
            self._on_trial = True
            self._entries = OrderedDict((k, e) for k, e in self._entries.items() if e.value is None)
            self.size_bytes = 0
        else:
            self._off_until_s, self._off_s, self._on_trial = 0.0, OFF_S, False
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
        """Why it is on or off, in words."""
        if not self._max_bytes:
            return "off: [serving] cache_mb is 0"
        if self._worth is None:
            return f"on: not judged before {PROBE_LOOKUPS} lookups"
        said = f"hits saved {self._worth:.1f} times what lookups took"
        if not self.on:
            return f"off: {said}; tried again in {self._off_until_s - self._clock():.0f} s"
        return f"on trial: {said} when it was turned off" if self._on_trial else f"on: {said}"

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
            # Copies: what ran as part of a batch must not keep the whole batch's arrays alive.
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
        """Drop the least recently used answers until the rest fits; runs under way stay."""
        for key in list(self._entries):
            if self.size_bytes <= self._max_bytes:
                return
            if self._entries[key].value is not None:
                self._drop(key)

    def _drop(self, key: bytes) -> None:
        self.size_bytes -= self._entries.pop(key).size_bytes


def tag_of(inputs: Sequence[NDArray[Any]]) -> bytes:
    """What a key says of dtypes and shapes."""
    return "".join(f"{array.shape}{array.dtype.char}" for array in inputs).encode()
