"""What is learned of a model on this device: engine threads, instances and the batch cap, by measuring it.

Theory of operation: threads are tried as 1, 2, 4, ... up to the processors there are, and more are taken only while
they gain MORE_THREADS_GAIN: a small model runs in 13 us on one thread and in 26 on two. One session is open at a
time, so that learning takes no more memory than serving. Then batches of 1, 2, 4, ... are timed on the session that
won; the cap is the largest that is still cheaper per item than the smaller ones.

All of it ends within about LEARN_S_MAX: what would not fit any more is not begun, and the figures so far decide.
What was learned is kept in the device's state, for the artifact, the engine's version, the processors and the wishes
of the configuration; loading the model again measures nothing.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.config import ServingConfig
from edgert.engines import Session
from edgert.serving.batcher import can_batch

LEARN_S_MAX = 3.0
FORMAT = 2
UNTHREADED = ("null", "fault", "tensorrt")  # engines to which `threads` says nothing

THREADS_RUNS = (3, 200)
THREADS_S_MAX = 0.25
MORE_THREADS_GAIN = 0.10
MORE_INSTANCES_GAIN = 0.10
RATE_S = 0.2

BATCH_CAP_MAX = 32
BATCH_RUNS = (2, 25)
BATCH_S_MAX = 0.2
BATCH_GAIN_MIN = 0.10  # a larger batch must be cheaper per item by at least this share
BATCH_MISSES_MAX = 2  # sizes in a row without that gain before no larger one is tried

Arrays = list[NDArray[Any]]
Clock = Callable[[], float]
Load = Callable[[int], Session]


@dataclass(frozen=True)
class Learned:
    """How to run an artifact here. `threads_us` and `run_us` say what was measured (threads, batch -> us)."""

    threads: int
    instances: int = 1
    batch_cap: int = 1
    threads_us: dict[str, float] = field(default_factory=dict)
    run_us: dict[str, float] = field(default_factory=dict)
    took_s: float = 0.0


@dataclass(frozen=True)
class Circumstances:
    """All that a measurement depends on besides the artifact; another makes it void."""

    engine: str
    engine_version: str
    cpus: int
    objective: str
    threads: int
    instances: int
    batch_max: int
    format: int = FORMAT

    @classmethod
    def of(cls, engine: str, engine_version: str, wishes: ServingConfig, cpus: int | None = None) -> Circumstances:
        cpus = cpus or len(os.sched_getaffinity(0))
        return cls(
            engine, engine_version, cpus, wishes.objective, wishes.threads, wishes.instances, wishes.batch_max
        )

    @property
    def threads_to_try(self) -> tuple[int, ...]:
        """What `threads` may be, ascending."""
        if self.threads or self.engine in UNTHREADED:
            return (self.threads or 1,)
        powers = [1 << i for i in range(self.cpus.bit_length()) if 1 << i < self.cpus]
        return (*powers, self.cpus)


class LearnedFile:
    """What was learned of one artifact; `folder` is the state's `learned/`."""

    def __init__(self, folder: Path, artifact_sha256: str) -> None:
        self._path = folder / f"{artifact_sha256[:32]}.json"

    def read(self, circumstances: Circumstances) -> Learned | None:
        """None where nothing was learned, or under other circumstances, or the file is damaged."""
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
            beside = self._path.with_suffix(f".{os.getpid()}.new")
            beside.write_text(json.dumps(value))
            beside.replace(self._path)
        except OSError:
            pass  # a full disk costs the next start some seconds, not the serving


def learn(
    load: Load,
    first: Session,
    sample: Arrays,
    circumstances: Circumstances,
    clock: Clock = time.perf_counter,
) -> tuple[list[Session], Learned]:
    """Measure, and return the sessions to serve with.

    `first` was loaded with the least of `threads_to_try`; `load` opens the artifact with a number of threads, and
    `sample` is one item. Raises what `load` and the sessions raise; no session is left open then.
    """
    began = clock()
    until = began + LEARN_S_MAX
    sessions = [first]
    try:
        threads, times_us = _choose_threads(load, sessions, sample, circumstances, until, clock)
        if circumstances.objective == "throughput" or circumstances.instances > 1:
            threads = _choose_instances(load, sessions, sample, circumstances, threads, until, clock)
        run_us: dict[int, float] = {}
        cap = circumstances.batch_max
        if not cap:
            cap, run_us = learn_batch_cap(sessions[0], sample, until, clock)
    except BaseException:
        for session in sessions:
            session.close()
        raise
    learned = Learned(
        threads=threads,
        instances=len(sessions),
        batch_cap=cap,
        threads_us={str(n): round(us, 2) for n, us in times_us.items()},
        run_us={str(n): round(us, 2) for n, us in run_us.items()},
        took_s=round(clock() - began, 3),
    )
    return sessions, learned


def learn_batch_cap(
    session: Session, sample: Arrays, until_s: float, clock: Clock = time.perf_counter
) -> tuple[int, dict[int, float]]:
    """The largest batch that is still cheaper per item than every smaller one, and t(b) in us.

    Sizes are 1, 2, 4, ... up to BATCH_CAP_MAX. Each time is the shortest of up to 25 runs: on a busy device all
    other figures tell of its other work. Ends soon after `until_s` on `clock`.
    """
    if not can_batch(session.inputs, session.outputs):
        return 1, {}
    times_us: dict[int, float] = {}
    cap, best_per_item, size, misses = 1, float("inf"), 1, 0
    while size <= BATCH_CAP_MAX and misses < BATCH_MISSES_MAX:
        inputs = [np.ascontiguousarray(np.resize(array, (size, *array.shape[1:]))) for array in sample]
        began = clock()
        times_us[size] = 1e6 * min(_timed_runs(session, inputs, BATCH_RUNS, BATCH_S_MAX, clock))
        took_s = clock() - began
        per_item = times_us[size] / size
        if per_item <= best_per_item * (1 - BATCH_GAIN_MIN):
            cap, best_per_item, misses = size, per_item, 0
        else:
            misses += 1
        if clock() + min(2 * took_s, 3 * (BATCH_RUNS[0] + 1) * times_us[size] / 1e6) > until_s:
            break
        size *= 2
    return cap, times_us


def _choose_threads(
    load: Load, sessions: list[Session], sample: Arrays, circumstances: Circumstances, until_s: float, clock: Clock
) -> tuple[int, dict[int, float]]:
    """The number of threads whose answer comes fastest; `sessions` holds the session with that many afterwards."""
    candidates = circumstances.threads_to_try
    times_us: dict[int, float] = {}
    best = loaded = candidates[0]
    if len(candidates) == 1:
        return best, times_us
    load_s = 0.0
    for threads in candidates:
        # To be fair, half of the time is left for batches; a candidate may have to be loaded twice.
        expected_s = 2 * load_s + (THREADS_RUNS[0] + 1) * times_us.get(loaded, 0.0) / 1e6
        if clock() + expected_s > until_s - LEARN_S_MAX / 2:
            break
        if threads != loaded:
            began = clock()
            _replace(sessions, load, threads)
            loaded, load_s = threads, clock() - began
        runs = sorted(_timed_runs(sessions[0], sample, THREADS_RUNS, THREADS_S_MAX, clock))
        times_us[threads] = 1e6 * runs[len(runs) // 4]  # the quartile: threads that wait for a busy core show
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
) -> int:
    """Open as many sessions at once as answer the most; the threads of each. A given number is not questioned."""
    each = circumstances.threads or 1
    wanted = circumstances.instances or max(1, circumstances.cpus // each)
    if wanted == 1 or circumstances.engine in UNTHREADED and not circumstances.instances:
        return threads
    alone = 0.0
    if not circumstances.instances:
        if clock() + 4 * RATE_S > until_s:
            return threads
        alone = _rate(sessions, sample, clock)
    if threads != each:
        _replace(sessions, load, each)
    while len(sessions) < wanted:
        sessions.append(load(each))
    if circumstances.instances or _rate(sessions, sample, clock) >= (1 + MORE_INSTANCES_GAIN) * alone:
        return each
    while len(sessions) > 1:
        sessions.pop().close()
    if threads != each:
        _replace(sessions, load, threads)
    return threads


def _replace(sessions: list[Session], load: Load, threads: int) -> None:
    """One session at a time: two would need the weights twice."""
    sessions.pop().close()
    sessions.append(load(threads))


def _rate(sessions: Sequence[Session], sample: Arrays, clock: Clock) -> float:
    """Items a second that the sessions answer together."""
    counts = [0] * len(sessions)

    def work(number: int, session: Session) -> None:
        session.run(sample)
        until = clock() + RATE_S
        while clock() < until:
            session.run(sample)
            counts[number] += 1

    began = clock()
    threads = [threading.Thread(target=work, args=pair) for pair in enumerate(sessions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / max(1e-9, clock() - began)


def _timed_runs(
    session: Session, inputs: Arrays, counts: tuple[int, int], s_max: float, clock: Clock
) -> list[float]:
    """Seconds of single runs: at least counts[0], at most counts[1] and about `s_max` in all."""
    session.run(inputs)  # the first run of a size may compile it
    runs: list[float] = []
    while len(runs) < counts[0] or (len(runs) < counts[1] and sum(runs) < s_max):
        began = clock()
        session.run(inputs)
        runs.append(clock() - began)
    return runs
