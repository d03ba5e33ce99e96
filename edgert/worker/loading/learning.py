"""Learning: measures on this device how many threads, instances and batch items a model needs.

Theory of operation: threads are tried as 1, 2, 4, ... up to the number of processors, and more are taken only while
they gain MORE_THREADS_GAIN: a small model runs in 13 µs on one thread and in 26 µs on two. One session is open at a
time, so learning takes no more memory than serving. Then batches of 1, 2, 4, ... are timed on the session that won; the
cap is the largest batch that is still cheaper per item than the smaller ones. A size that would take the process more
than LEARN_MB_MAX is not tried: its activations would stay in memory while it serves. Engines keep the memory of their
largest batch, so a session that grew by more than KEPT_MB_MAX is opened anew. Where threads may share the engine's
session, a model that gains little from batches gets several runs at once: while one waits for its client or its slowest
thread, another works. If the reactor may serve the model, and runs of one thread answer more requests than runs of
several, the reactor gets a session of its own, of one thread.

All of it ends within about LEARN_S_MAX: a measurement that would not fit is not begun, and the figures so far decide.
The result is kept in the device's state, for the artifact, the engine's version, the processors and the configuration,
so the next load measures nothing. If other work took much of the processors, the next MEASURED_MAX - 1 loads measure
again, and the least disturbed result counts.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.config import ServingConfig
from edgert.durable import replace_file
from edgert.engines import ENGINES, Session
from edgert.machine import rss_bytes
from edgert.tensors import batchable

LEARN_S_MAX = 3.0
FORMAT = 6
OTHERS_MAX = 0.25  # share of the processors that other work may take before the figures are doubted
MEASURED_MAX = 3

THREADS_RUNS = (3, 200)
THREADS_S_MAX = 0.25
MORE_THREADS_GAIN = 0.10
BATCH_GAIN_MAX = 1.5  # the most that the learned batch may gain for several runs at once: they share the requests, so batches are smaller
QUICK_US_MAX = 100.0  # the longest run for one item during which answers to others may wait
REACTOR_US_MAX = 1000.0  # the longest run for one item of a model that the reactor serves one request at a time
MORE_RUNS_GAIN = 0.10  # the least gain of runs of one thread for which the reactor gets a session of its own
MORE_INSTANCES_GAIN = 0.10
RATE_S = 0.2

BATCH_CAP_MAX = 32
BATCH_RUNS = (2, 12)
ITEM_RUNS = (1, 12)
BATCH_S_MAX = 0.06
BATCH_ROUNDS = 3
# A larger batch must be cheaper per item by at least this share; it also saves wake-ups. With 0.10, the learned cap
# reached 0.81 of the best fixed cap at 64 clients on a fully connected model, and 0.94 on INT8 convolutions.
BATCH_GAIN_MIN = 0.05
LEARN_MB_MAX = 64.0
KEPT_MB_MAX = 8.0
BATCH_MISSES_MAX = 2  # sizes in a row without that gain before no larger one is tried

Arrays = list[NDArray[Any]]
Clock = Callable[[], float]
Load = Callable[[int], Session]


@dataclass(frozen=True)
class Learned:
    """The measured settings for an artifact on this device.

    `threads_us` and `run_us` are the measured times (threads, batch -> us). `instances` is how many runs there are at
    once: of one session if the engine is `concurrent`, else each of its own. With `reactor_session`, requests of the
    reactor run on a session of their own, of one thread. `others` is the share of the processors that other work took
    meanwhile, `measured` the number of measurements.
    """

    threads: int
    instances: int = 1
    batch_cap: int = 1
    reactor_session: bool = False
    threads_us: dict[str, float] = field(default_factory=dict)
    run_us: dict[str, float] = field(default_factory=dict)
    took_s: float = 0.0
    others: float = 0.0
    measured: int = 1

    @property
    def doubtful(self) -> bool:
        """Whether to measure again when the model is loaded next."""
        return self.others > OTHERS_MAX and self.measured < MEASURED_MAX

    def better(self, again: Learned) -> Learned:
        """Return the less disturbed of this result and another one."""
        return replace(min(self, again, key=lambda one: one.others), measured=self.measured + 1)


@dataclass(frozen=True)
class Circumstances:
    """All that a measurement depends on besides the artifact; it is valid only for equal circumstances.

    `reactor` is whether the reactor may serve the model.
    """

    engine: str
    engine_version: str
    cpus: int
    objective: str
    threads: int
    instances: int
    batch_max: int
    reactor: bool = False
    format: int = FORMAT

    @classmethod
    def of(
        cls,
        engine: str,
        engine_version: str,
        settings: ServingConfig,
        cpus: int | None = None,
        *,
        reactor: bool = False,
    ) -> Circumstances:
        cpus = cpus or len(os.sched_getaffinity(0))
        given = (settings.objective, settings.threads, settings.instances, settings.batch_max)
        return cls(engine, engine_version, cpus, *given, reactor)

    @property
    def threads_to_try(self) -> tuple[int, ...]:
        """The numbers of threads to measure, ascending."""
        if self.threads or not ENGINES[self.engine].threaded:
            return (self.threads or 1,)
        powers = [1 << i for i in range(self.cpus.bit_length()) if 1 << i < self.cpus]
        return (*powers, self.cpus)


class LearnedFile:
    """The file with what was learned of one artifact; `folder` is the state's `learned/`."""

    def __init__(self, folder: Path, artifact_sha256: str) -> None:
        self._path = folder / f"{artifact_sha256[:32]}.json"

    def read(self, circumstances: Circumstances) -> Learned | None:
        """Return what was learned under these circumstances; None if there is nothing, or the file is damaged."""
        try:
            value = json.loads(self._path.read_bytes())
            if value["circumstances"] != asdict(circumstances):
                return None
            learned = Learned(**value["learned"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        whole = (learned.threads, learned.instances, learned.batch_cap)
        return learned if all(type(n) is int and 1 <= n <= 4096 for n in whole) else None

    def write(self, circumstances: Circumstances, learned: Learned) -> None:
        value = {"circumstances": asdict(circumstances), "learned": asdict(learned)}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, json.dumps(value).encode(), durable=False, shared=True)
        except OSError:
            pass  # with a full disk, the next load measures again


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

    `first` was loaded with the least of `threads_to_try`; `load` opens the artifact with a number of threads, and
    `sample` is one item. `busy` returns the seconds that all processors had so far, and those that other processes
    used; `memory_mb` returns this process's memory. Raises the errors of `load` and of the sessions; then no session is
    left open.
    """
    began, (all_before_s, others_before_s) = clock(), busy()
    until = began + LEARN_S_MAX
    sessions = [first]
    try:
        threads, times_us = _choose_threads(load, sessions, sample, circumstances, until, clock)
        instances = 1
        if circumstances.objective == "throughput" or circumstances.instances > 1:
            threads, instances = _choose_instances(load, sessions, sample, circumstances, threads, until, clock)
        before_mb, together = memory_mb(), 1
        run_us: dict[int, float] = {}
        if instances == 1 and not circumstances.instances and ENGINES[circumstances.engine].concurrent:
            if threads not in times_us:
                run_us = {1: _item_us(sessions[0], sample, clock)}
            item_us = times_us.get(threads) or run_us[1]
            together = _runs_at_once(sessions[0], sample, circumstances.cpus, threads, item_us, until, clock, memory_mb)
        cap = circumstances.batch_max
        if not cap:
            cap, measured_us = _learn_batch_cap(sessions[-1], sample, until, clock, memory_mb)
            run_us |= measured_us
        if memory_mb() - before_mb > KEPT_MB_MAX:
            _replace(sessions, load, threads)
        if not run_us and threads not in times_us:  # all is configured; the reactor's use depends on this time
            run_us = {1: _item_us(sessions[-1], sample, clock)}
        reactor_session = False
        if together > 1 and _batch_gain(cap, run_us) <= BATCH_GAIN_MAX:
            instances, cpus = together, circumstances.cpus
            pays = circumstances.reactor and _one_thread_pays(threads, cpus, times_us, run_us)
            if pays and clock() + RATE_S < until and _fits_beside(load, sample, cpus, clock, memory_mb):
                reactor_session, instances = True, cpus
    except BaseException:
        for session in sessions:
            session.close()
        raise
    all_s, others_s = busy()
    learned = Learned(
        threads=threads,
        instances=instances,
        batch_cap=cap,
        reactor_session=reactor_session,
        threads_us={str(n): round(us, 2) for n, us in times_us.items()},
        run_us={str(n): round(us, 2) for n, us in run_us.items()},
        took_s=round(clock() - began, 3),
        others=round(max(0.0, others_s - others_before_s) / max(1e-9, all_s - all_before_s), 3),
    )
    return sessions, learned


def processor_times() -> tuple[float, float]:
    """Return the seconds of all processors since the machine started, and those that other processes used."""
    try:
        first = Path("/proc/stat").read_text().split("\n", 1)[0]
        ticks = [int(word) / os.sysconf("SC_CLK_TCK") for word in first.split()[1:9]]  # user ... steal
    except (OSError, ValueError):
        return 0.0, 0.0
    idle_s = ticks[3] + ticks[4]
    return sum(ticks), sum(ticks) - idle_s - time.process_time()


def _choose_threads(
    load: Load, sessions: list[Session], sample: Arrays, circumstances: Circumstances, until_s: float, clock: Clock
) -> tuple[int, dict[int, float]]:
    """Return the number of threads with the fastest answer; leave that session in `sessions`."""
    candidates = circumstances.threads_to_try
    times_us: dict[int, float] = {}
    best = loaded = candidates[0]
    if len(candidates) == 1:
        return best, times_us
    load_s = 0.0
    for threads in candidates:
        # Half of the time is left for batches; a candidate may have to be loaded twice.
        expected_s = 2 * load_s + (THREADS_RUNS[0] + 1) * times_us.get(loaded, 0.0) / 1e6
        if clock() + expected_s > until_s - LEARN_S_MAX / 2:
            break
        if threads != loaded:
            began = clock()
            _replace(sessions, load, threads)
            loaded, load_s = threads, clock() - began
        times_us[threads] = 1e6 * min(_timed_runs(sessions[0], sample, THREADS_RUNS, THREADS_S_MAX, clock))
        if threads != best and times_us[threads] > (1 - MORE_THREADS_GAIN) * times_us[best]:
            break
        best = threads
    if best != loaded:
        _replace(sessions, load, best)
    return best, times_us


def _choose_instances(
    load: Load,
    sessions: list[Session],
    sample: Arrays,
    circumstances: Circumstances,
    threads: int,
    until_s: float,
    clock: Clock,
) -> tuple[int, int]:
    """Return the threads of each session, and how many runs at once answer the most items.

    `sessions` holds the sessions for them then. A configured number is not measured.
    """
    kind, threads_each = ENGINES[circumstances.engine], circumstances.threads or 1
    count = circumstances.instances or max(1, circumstances.cpus // threads_each)
    if count == 1 or not (kind.threaded or circumstances.instances):
        return threads, 1
    alone = 0.0
    if not circumstances.instances:
        if clock() + 4 * RATE_S > until_s:
            return threads, 1
        alone = _rate(sessions, sample, clock)
    if threads != threads_each:
        _replace(sessions, load, threads_each)
    while len(sessions) < count and not kind.concurrent:
        sessions.append(load(threads_each))
    together = sessions * count if kind.concurrent else sessions
    if circumstances.instances or _rate(together, sample, clock) >= (1 + MORE_INSTANCES_GAIN) * alone:
        return threads_each, count
    while len(sessions) > 1:
        sessions.pop().close()
    if threads != threads_each:
        _replace(sessions, load, threads)
    return threads, 1


def _runs_at_once(
    session: Session,
    sample: Arrays,
    cpus: int,
    threads: int,
    item_us: float,
    until_s: float,
    clock: Clock,
    memory_mb: Callable[[], float],
) -> int:
    """Return how many runs at once keep the processors busy; one for a quick model, which has a reactor.

    The result is also one if they would take more than LEARN_MB_MAX, or there is no time to find out.
    """
    count = max(2, cpus // threads)
    if cpus == 1 or item_us <= QUICK_US_MAX or clock() + RATE_S + 2 * count * item_us / 1e6 > until_s:
        return 1
    before_mb = memory_mb()
    _rate([session] * count, sample, clock)
    return count if memory_mb() - before_mb <= LEARN_MB_MAX else 1


def _one_thread_pays(threads: int, cpus: int, times_us: Mapping[int, float], run_us: Mapping[int, float]) -> bool:
    """Return whether runs of one thread, one for each processor, answer more than runs of `threads`.

    They do if the threads of one run wait for each other. Batches may be as good, but many clients seldom fill one.
    Measuring both rates would not help: on a machine with other work, they differ by less than the noise.
    """
    if threads == 1 or 1 not in times_us or times_us[threads] > REACTOR_US_MAX:
        return False
    one_us, at_once = times_us[1] / cpus, cpus // threads
    batch_us = min((us / items for items, us in run_us.items()), default=times_us[threads]) / at_once
    return one_us * (1 + MORE_RUNS_GAIN) < times_us[threads] / at_once and one_us < batch_us * (1 + MORE_RUNS_GAIN)


def _fits_beside(load: Load, sample: Arrays, cpus: int, clock: Clock, memory_mb: Callable[[], float]) -> bool:
    """Return whether a second session, of one thread, and its runs take little memory."""
    before_mb = memory_mb()
    session = load(1)
    try:
        _rate([session] * cpus, sample, clock)
        return memory_mb() - before_mb <= LEARN_MB_MAX
    finally:
        session.close()


def _batch_gain(cap: int, run_us: Mapping[int, float]) -> float:
    """Return how many times cheaper an item is in a batch of `cap`; `cap` if it was not measured."""
    return cap * run_us[1] / run_us[cap] if cap in run_us else float(cap)


def _learn_batch_cap(
    session: Session,
    sample: Arrays,
    until_s: float,
    clock: Clock,
    memory_mb: Callable[[], float],
) -> tuple[int, dict[int, float]]:
    """Return the largest batch that is cheaper per item than every smaller one, and each one's time in us.

    Sizes are 1, 2, 4, ... up to BATCH_CAP_MAX, in BATCH_ROUNDS rounds. The shortest of all runs of a size counts:
    longer ones measure the device's other work. Ends soon after `until_s` on `clock`, and before a size that is
    expected to take LEARN_MB_MAX more than the first.
    """
    if not batchable((*session.inputs, *session.outputs)):
        return 1, {}
    times_us: dict[int, float] = {}
    largest, first_mb = BATCH_CAP_MAX, 0.0
    for _ in range(BATCH_ROUNDS):
        size, misses = 1, 0
        while size <= largest and misses < BATCH_MISSES_MAX:
            known_s = times_us.get(size, 2 * times_us.get(size // 2, 0.0)) / 1e6
            if times_us and clock() + (BATCH_RUNS[0] + 1) * 1.5 * known_s > until_s:
                return _cap_of(times_us), times_us
            inputs = [np.ascontiguousarray(np.resize(array, (size, *array.shape[1:]))) for array in sample]
            time_us = 1e6 * min(_timed_runs(session, inputs, BATCH_RUNS, BATCH_S_MAX, clock))
            if size not in times_us:
                first_mb = first_mb or memory_mb()
                if 2 * (memory_mb() - first_mb) > LEARN_MB_MAX:  # activations grow with the batch
                    largest = size
            times_us[size] = min(time_us, times_us.get(size, float("inf")))
            misses = 0 if _cap_of(times_us) >= size else misses + 1
            size *= 2
    return _cap_of(times_us), times_us


def _cap_of(times_us: Mapping[int, float]) -> int:
    """Return the largest size that is cheaper per item, by BATCH_GAIN_MIN, than the accepted smaller ones."""
    cap, best_per_item = 1, float("inf")
    for size, time_us in sorted(times_us.items()):
        if time_us / size <= best_per_item * (1 - BATCH_GAIN_MIN):
            cap, best_per_item = size, time_us / size
    return cap


def _replace(sessions: list[Session], load: Load, threads: int) -> None:
    """Replace the last session; two at once would need the weights twice."""
    sessions.pop().close()
    sessions.append(load(threads))


def _rate(sessions: Sequence[Session], sample: Arrays, clock: Clock) -> float:
    """Return the items per second that the sessions answer together."""
    counts = [0] * len(sessions)

    def work(number: int, session: Session) -> None:
        session.run(sample)
        until = clock() + RATE_S
        while clock() < until:
            session.run(sample)
            counts[number] += 1

    began = clock()
    threads = []
    for pair in enumerate(sessions):
        thread = threading.Thread(target=work, args=pair)
        try:
            thread.start()
        except RuntimeError:  # the system gives no more threads: fewer sessions answer, which is what is measured
            break
        threads.append(thread)
    for thread in threads:
        thread.join()
    return sum(counts) / max(1e-9, clock() - began)


def _item_us(session: Session, sample: Arrays, clock: Clock) -> float:
    """Return the microseconds of a run of one item."""
    return 1e6 * min(_timed_runs(session, sample, ITEM_RUNS, BATCH_S_MAX, clock))


def _timed_runs(session: Session, inputs: Arrays, counts: tuple[int, int], s_max: float, clock: Clock) -> list[float]:
    """Return the seconds of single runs: at least counts[0], at most counts[1] and about `s_max` in total."""
    session.run(inputs)  # the first run of a size may compile it
    runs: list[float] = []
    while len(runs) < counts[0] or (len(runs) < counts[1] and sum(runs) < s_max):
        began = clock()
        session.run(inputs)
        runs.append(clock() - began)
    return runs
