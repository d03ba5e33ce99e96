"""Learning: measures on this device how many threads, instances and batch items a model needs.

Theory of operation:

1. Threads are tried as 1, 2, 4, ... up to the number of processors. A larger number is taken only if it gains
   MORE_THREADS_GAIN: a small model runs in 13 µs on one thread and in 26 µs on two threads. One session is open at a
   time, so learning takes no more memory than serving.
2. Batches of 1, 2, 4, ... are timed on the fastest session. The cap is the largest batch that is still cheaper per item
   than the smaller batches. A size that would take more than LEARN_MB_MAX is not tried, because its activations would
   stay in memory while the worker serves. Engines keep the memory of their largest batch, so a session that grew by
   more than KEPT_MB_MAX is opened again.
3. If threads may share the engine's session, a model that gains little from batches gets several parallel runs. While
   one run waits for its client or its slowest thread, another run works. If the reactor may serve the model, and runs
   of one thread answer more requests than runs of several threads, the reactor gets a session of its own, with one
   thread.

Learning ends within about LEARN_S_MAX: a measurement that would take longer is not started, and the earlier figures
decide. The result is kept in the device's state, so the next load measures nothing. It is valid for the same artifact,
engine version, processors and configuration. If other work took much of the processors, the next MEASUREMENTS_MAX - 1
loads measure again, and the least disturbed result is used.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.engines import ENGINES, Session
from edgert.machine import rss_bytes
from edgert.tensors import batchable
from edgert.worker.loading.learned import Circumstances, Learned
from edgert.worker_link.run_page import SESSIONS_MAX

LEARN_S_MAX = 3.0

THREADS_RUNS = (3, 200)
THREADS_S_MAX = 0.25
MORE_THREADS_GAIN = 0.10
# With more gain from batches than this, runs do not overlap, because several parallel runs would make batches smaller.
BATCH_GAIN_MAX = 1.5
QUICK_US_MAX = 100.0  # a slower item would delay the answers of other clients too long
REACTOR_US_MAX = 1000.0  # the reactor runs requests one by one only if the run of an item takes at most this time
MORE_RUNS_GAIN = 0.10  # if runs of one thread gain less than this, the reactor gets no session of its own
MORE_INSTANCES_GAIN = 0.10
RATE_S = 0.2

BATCH_CAP_MAX = 32
BATCH_RUNS = (2, 12)
ITEM_RUNS = (1, 12)
BATCH_S_MAX = 0.06
BATCH_ROUNDS = 3
# A larger batch, which also saves wake-ups, must be cheaper per item by at least this share. With 0.10, the throughput
# of 64 clients with the learned cap was 0.81 times the throughput with the best fixed cap for a fully connected model,
# and 0.94 times for INT8 convolutions.
BATCH_GAIN_MIN = 0.05
LEARN_MB_MAX = 64.0
KEPT_MB_MAX = 8.0
BATCH_MISSES_MAX = 2  # after this number of sizes in a row without BATCH_GAIN_MIN, no larger size is tried

Arrays = list[NDArray[Any]]
Clock = Callable[[], float]
Load = Callable[[int], Session]


def learn(
    load: Load,
    first: Session,
    sample: Arrays,
    circumstances: Circumstances,
    clock: Clock = time.perf_counter,
    busy: Callable[[], tuple[float, float]] = lambda: processor_times(),
    memory_mb: Callable[[], float] = lambda: (rss_bytes() or 0) / 1e6,
) -> tuple[list[Session], Learned]:
    """Measure, and return the sessions to serve with.

    Raises the errors of `load` and of the sessions; then no session stays open. `first` was loaded with the smallest of
    `threads_to_try`. `busy` returns the processor seconds so far, and the seconds that other processes used.
    """
    all_before_s, others_before_s = busy()
    learner = _Learner(load, first, sample, circumstances, clock, memory_mb)
    try:
        learned = learner.learn()
    except BaseException:
        for session in learner.sessions:
            session.close()
        raise
    all_s, others_s = busy()
    others = round(max(0.0, others_s - others_before_s) / max(1e-9, all_s - all_before_s), 3)
    return learner.sessions, replace(learned, others=others)


def processor_times() -> tuple[float, float]:
    """Return the processor seconds since the machine started, and the seconds that other processes used."""
    try:
        first = Path("/proc/stat").read_text().split("\n", 1)[0]
        ticks = [int(word) / os.sysconf("SC_CLK_TCK") for word in first.split()[1:9]]  # user ... steal
    except (OSError, ValueError):
        return 0.0, 0.0
    idle_s = ticks[3] + ticks[4]
    return sum(ticks), sum(ticks) - idle_s - time.process_time()


class _Learner:
    """One measurement. `sessions` are open; at the end, they are the sessions to serve with."""

    def __init__(
        self,
        load: Load,
        first: Session,
        sample: Arrays,
        circumstances: Circumstances,
        clock: Clock,
        memory_mb: Callable[[], float],
    ) -> None:
        self.sessions = [first]
        self._load = load
        self._sample = sample
        self._circumstances = circumstances
        self._clock = clock
        self._memory_mb = memory_mb
        self._engine = ENGINES[circumstances.engine]
        # The run page has space for the parallel runs, and for as many runs of the reactor.
        self._cpus = min(circumstances.cpus, SESSIONS_MAX // 2)
        self._began_s = clock()
        self._until_s = self._began_s + LEARN_S_MAX
        self._threads_us: dict[int, float] = {}  # the times of one item, by the number of threads
        self._run_us: dict[int, float] = {}  # the times of a batch, by its size

    def learn(self) -> Learned:
        circumstances = self._circumstances
        threads, instances, together = self._choose_threads(), 1, 1
        if circumstances.optimize_for == "throughput" or circumstances.instances > 1:
            threads, instances = self._choose_instances(threads)
        before_mb = self._memory_mb()
        if instances == 1 and not circumstances.instances and self._engine.concurrent:
            together = self._runs_at_once(threads)
        cap = circumstances.batch_max or self._learn_batch_cap()
        if self._memory_mb() - before_mb > KEPT_MB_MAX:
            self._replace(threads)
        self._item_us(threads)  # measured even if everything is configured: the use of the reactor depends on this time
        reactor_session = False
        if together > 1 and _batch_gain(cap, self._run_us) <= BATCH_GAIN_MAX:
            instances = together
            if circumstances.reactor and self._one_thread_is_faster(threads) and self._second_session_fits():
                reactor_session, instances = True, self._cpus
        return Learned(
            threads=threads,
            instances=instances,
            batch_cap=cap,
            reactor_session=reactor_session,
            threads_us={str(n): round(us, 2) for n, us in self._threads_us.items()},
            run_us={str(n): round(us, 2) for n, us in self._run_us.items()},
            took_s=round(self._clock() - self._began_s, 3),
        )

    def _choose_threads(self) -> int:
        """Return the number of threads with the fastest answer; the open session then has this number."""
        candidates = self._circumstances.threads_to_try
        best = loaded = candidates[0]
        if len(candidates) == 1:
            return best
        load_s, times_us = 0.0, self._threads_us
        for threads in candidates:
            # Half of the time is reserved for batches. A candidate may be loaded twice.
            expected_s = 2 * load_s + (THREADS_RUNS[0] + 1) * times_us.get(loaded, 0.0) / 1e6
            if self._left_s() < expected_s + LEARN_S_MAX / 2:
                break
            if threads != loaded:
                began = self._clock()
                self._replace(threads)
                loaded, load_s = threads, self._clock() - began
            times_us[threads] = self._fastest_us(self._sample, THREADS_RUNS, THREADS_S_MAX)
            if threads != best and times_us[threads] > (1 - MORE_THREADS_GAIN) * times_us[best]:
                break
            best = threads
        if best != loaded:
            self._replace(best)
        return best

    def _choose_instances(self, threads: int) -> tuple[int, int]:
        """Return the threads of each session, and the number of parallel runs with the highest throughput.

        Afterwards, the sessions for these runs are open. A configured number of runs is not measured.
        """
        configured, threads_each = self._circumstances.instances, self._circumstances.threads or 1
        count = configured or max(1, self._cpus // threads_each)
        if count == 1 or not (self._engine.threaded or configured):
            return threads, 1
        alone = 0.0
        if not configured:
            if self._left_s() < 4 * RATE_S:
                return threads, 1
            alone = self._rate(self.sessions)
        if threads != threads_each:
            self._replace(threads_each)
        while len(self.sessions) < count and not self._engine.concurrent:
            self.sessions.append(self._load(threads_each))
        together = self.sessions * count if self._engine.concurrent else self.sessions
        if configured or self._rate_at_once(together) >= (1 + MORE_INSTANCES_GAIN) * alone:
            return threads_each, count
        while len(self.sessions) > 1:
            self.sessions.pop().close()
        if threads != threads_each:
            self._replace(threads)
        return threads, 1

    def _runs_at_once(self, threads: int) -> int:
        """Return how many parallel runs use all processors; 1 for a quick model, which has a reactor.

        Also returns 1 if several runs would take more than LEARN_MB_MAX, or if no time is left to measure their memory.
        """
        count, item_us = max(2, self._cpus // threads), self._item_us(threads)
        if self._cpus == 1 or item_us <= QUICK_US_MAX or self._left_s() < RATE_S + 2 * count * item_us / 1e6:
            return 1
        before_mb = self._memory_mb()
        fits = self._rate_at_once(self.sessions[:1] * count) > 0 and self._memory_mb() - before_mb <= LEARN_MB_MAX
        return count if fits else 1

    def _one_thread_is_faster(self, threads: int) -> bool:
        """Return whether one-thread runs on all processors answer more requests than runs of `threads`.

        Runs of one thread answer more if the threads of a larger run wait for each other. Batches may be as good, but
        clients rarely fill a batch. A measurement of both rates would not help: on a machine with other work, they
        differ by less than the noise.
        """
        times_us = self._threads_us
        if threads == 1 or 1 not in times_us or times_us[threads] > REACTOR_US_MAX:
            return False
        one_us, at_once = times_us[1] / self._cpus, self._cpus // threads
        batch_us = min((us / items for items, us in self._run_us.items()), default=times_us[threads]) / at_once
        return one_us * (1 + MORE_RUNS_GAIN) < times_us[threads] / at_once and one_us < batch_us * (1 + MORE_RUNS_GAIN)

    def _second_session_fits(self) -> bool:
        """Return whether a second session, with one thread, and its runs take little memory.

        Returns False if no time is left to measure the memory.
        """
        if self._left_s() <= RATE_S:
            return False
        before_mb = self._memory_mb()
        session = self._load(1)
        try:
            return self._rate_at_once([session] * self._cpus) > 0 and self._memory_mb() - before_mb <= LEARN_MB_MAX
        finally:
            session.close()

    def _learn_batch_cap(self) -> int:
        """Return the largest batch that is cheaper per item than all smaller batches.

        Sizes are 1, 2, 4, ... up to BATCH_CAP_MAX, in BATCH_ROUNDS rounds. The shortest run of each size is used,
        because longer runs measure the device's other work. The measurement ends soon after its time is up. It omits
        sizes that are expected to need over LEARN_MB_MAX more memory than the first size.
        """
        session = self.sessions[-1]
        if not batchable((*session.inputs, *session.outputs)):
            return 1
        times_us: dict[int, float] = {}
        largest, first_mb = BATCH_CAP_MAX, 0.0
        for _ in range(BATCH_ROUNDS):
            size, misses = 1, 0
            while size <= largest and misses < BATCH_MISSES_MAX:
                known_s = times_us.get(size, 2 * times_us.get(size // 2, 0.0)) / 1e6
                if times_us and self._left_s() < (BATCH_RUNS[0] + 1) * 1.5 * known_s:
                    break  # a smaller size may still have time in the next round
                inputs = [np.ascontiguousarray(np.resize(array, (size, *array.shape[1:]))) for array in self._sample]
                time_us = self._fastest_us(inputs, BATCH_RUNS, BATCH_S_MAX)
                if size not in times_us:
                    first_mb = first_mb or self._memory_mb()
                    if 2 * (self._memory_mb() - first_mb) > LEARN_MB_MAX:  # activations grow with the batch
                        largest = size
                times_us[size] = min(time_us, times_us.get(size, float("inf")))
                misses = 0 if _cap_of(times_us) >= size else misses + 1
                size *= 2
        self._run_us |= times_us
        return _cap_of(times_us)

    def _left_s(self) -> float:
        return self._until_s - self._clock()

    def _replace(self, threads: int) -> None:
        """Replace the last session.

        The old session closes before the new session opens: two sessions would need the weights twice.
        """
        self.sessions.pop().close()
        self.sessions.append(self._load(threads))

    def _item_us(self, threads: int) -> float:
        """Return the time of one item in the last session, which has `threads`; measure an unknown time."""
        if threads in self._threads_us:
            return self._threads_us[threads]
        if 1 not in self._run_us:
            self._run_us[1] = self._fastest_us(self._sample, ITEM_RUNS, BATCH_S_MAX)
        return self._run_us[1]

    def _fastest_us(self, inputs: Arrays, counts: tuple[int, int], s_max: float) -> float:
        """Return the time of the shortest run of `inputs`.

        There are at least counts[0] runs and at most counts[1], which take about `s_max` in total.
        """
        session = self.sessions[-1]
        session.run(inputs)  # the first run of a size may compile it
        runs: list[float] = []
        while len(runs) < counts[0] or (len(runs) < counts[1] and sum(runs) < s_max):
            began = self._clock()
            session.run(inputs)
            runs.append(self._clock() - began)
        return 1e6 * min(runs)

    def _rate_at_once(self, sessions: Sequence[Session]) -> float:
        """Return the rate of `sessions`; 0 if a run fails, because several runs may need too much memory."""
        try:
            return self._rate(sessions)
        except Exception:  # noqa: BLE001  # if one run at a time fails too, a later measurement raises the error
            return 0.0

    def _rate(self, sessions: Sequence[Session]) -> float:
        """Return the items per second that all sessions answer in total. Raises the error of a session."""
        counts, clock = [0] * len(sessions), self._clock
        errors: list[Exception] = []

        def work(number: int, session: Session) -> None:
            try:
                session.run(self._sample)
                until = clock() + RATE_S
                while clock() < until:
                    session.run(self._sample)
                    counts[number] += 1
            except Exception as error:  # noqa: BLE001  # raised below, in the caller's thread
                errors.append(error)

        began = clock()
        threads = []
        for pair in enumerate(sessions):
            thread = threading.Thread(target=work, args=pair)
            try:
                thread.start()
            except RuntimeError:  # the system allows no more threads, so the rate of fewer sessions is measured
                break
            threads.append(thread)
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return sum(counts) / max(1e-9, clock() - began)


def _batch_gain(cap: int, run_us: Mapping[int, float]) -> float:
    """Return how many times cheaper an item is in a batch of `cap`; `cap` if this batch was not measured."""
    return cap * run_us[1] / run_us[cap] if cap in run_us else float(cap)


def _cap_of(times_us: Mapping[int, float]) -> int:
    """Return the largest size that is cheaper per item, by BATCH_GAIN_MIN, than smaller accepted sizes."""
    cap, best_per_item = 1, float("inf")
    for size, time_us in sorted(times_us.items()):
        if time_us / size <= best_per_item * (1 - BATCH_GAIN_MIN):
            cap, best_per_item = size, time_us / size
    return cap
