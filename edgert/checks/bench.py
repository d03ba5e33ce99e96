"""Measures artifacts on this machine: directly in the engine, one sample at a time, without a daemon.

A work folder has `bench.json`, the artifacts, and one `.npy` file with one sample per input.

    {"format": 1, "inputs": [{"name", "datatype", "shape"}], "outputs": [like inputs], "samples": [path],
     "artifacts": [{"id", "engine", "path", "sha256"}], "buckets": null, or as in a manifest, "error_share_max": 0.005}

A caller may also measure other artifacts, such as the live version, together with the artifacts of a work folder.

Each artifact first runs alone on 1, 2, 4 ... threads, to find its best number of threads. Then the artifacts alternate
in rounds, so that other work of the machine affects all of them equally. A figure is the median of the rounds' medians.
With the key `error_share_max`, the rounds end early once the error of each figure is below this share of the figure.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from edgert import machine
from edgert.bundle.buckets import Buckets
from edgert.checks import golden_samples as golden
from edgert.checks.bench_answer import BenchAnswer, BenchMachine, BenchMode, BenchResult, BenchTimes, Temperatures
from edgert.engines import EngineOptions, LocalArtifact, Session, engine_by_name, threads_to_try
from edgert.engines.padding import load_session
from edgert.errors import ConfigInvalid, EdgeRTError, ErrorText
from edgert.printable import counted, file_error
from edgert.tensors import TensorSpec
from edgert.typed_json import from_json
from edgert.versions.installed import InstalledVersion, check_files

SPEC = "bench.json"
SPEC_BYTES_MAX = 1024**2
FORMAT = 1
ARTIFACTS_MAX = 64
ROUNDS_MIN = 5
EARLY_ROUNDS_MIN = 10  # with fewer rounds, the difference between rounds is not known
ROUND_RUNS_MIN = 3
ROUND_S = 0.02  # the time of one artifact in one round
TRIAL_S = 0.2  # the time in which one number of threads is tried
WARM_RUNS = 3
# For n values of a normal distribution, the median's standard error is this factor times quartile distance / sqrt(n).
ERROR_OF_MEDIAN = 0.93

Clock = Callable[[], float]
Arrays = list[NDArray[Any]]


@dataclass(frozen=True)
class BenchArtifact:
    """An artifact to measure: its name in reports, its sample, and the error below which its rounds end."""

    name: str
    artifact: LocalArtifact
    sample: Arrays
    error_share_max: float = 0.0


def read_work(folder: Path) -> list[BenchArtifact]:
    """Return the artifacts in a work folder. Raises ConfigInvalid."""
    try:
        data = (folder / SPEC).read_bytes()
        if len(data) > SPEC_BYTES_MAX:
            raise ConfigInvalid(f"{folder / SPEC} has {len(data)} bytes; at most {SPEC_BYTES_MAX} are allowed")
        value = json.loads(data)
        if value["format"] != FORMAT or not 1 <= len(value["artifacts"]) <= ARTIFACTS_MAX:
            raise ValueError(f"the file must have format {FORMAT} and 1 to {ARTIFACTS_MAX} artifacts")
        inputs, outputs = (tuple(map(TensorSpec.from_json, value[key])) for key in ("inputs", "outputs"))
        buckets = None if value.get("buckets") is None else from_json(Buckets, value["buckets"])
        artifacts = []
        for entry in value["artifacts"]:
            path = _inside(folder, entry["path"])
            local = LocalArtifact(str(entry["engine"]), path, inputs, outputs, str(entry["sha256"]), buckets)
            artifacts.append((str(entry["id"]), local))
        error_share_max = float(value.get("error_share_max", 0.0))
        sample = [np.ascontiguousarray(np.load(_inside(folder, name), allow_pickle=False)) for name in value["samples"]]
    except OSError as error:
        raise ConfigInvalid(
            f"cannot read {file_error(error, str(folder))}; give a folder of edgert bench, or "
            "measure a live version with --model NAME"
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, EOFError, BadZipFile, EdgeRTError) as error:
        if isinstance(error, ConfigInvalid):
            raise
        raise ConfigInvalid(f"{folder / SPEC} is not valid: {type(error).__name__}: {error}") from error
    return [BenchArtifact(name, local, sample, error_share_max) for name, local in artifacts]


def live_artifact(version: InstalledVersion, artifact_id: str) -> BenchArtifact:
    """Return an artifact of the live version. Raises BundleCorrupt."""
    artifact = version.manifest.artifact(artifact_id)
    check_files(version, artifact)
    name = f"live: {artifact_id} of release {version.manifest.release}"
    return BenchArtifact(name, version.local(artifact), next(golden.samples(version)))


def bench(
    work: Sequence[BenchArtifact],
    seconds: float,
    cache_dir: Path,
    progress: Callable[[str], None],
    clock: Clock = time.perf_counter,
) -> BenchAnswer:
    """Measure each artifact of `work` and return the results.

    An artifact that cannot run has an error as its result. All rounds together take about `seconds`, or longer if the
    runs are slow. Engines store the files that they compile in `cache_dir`.
    """
    results: list[BenchResult] = []
    opened: dict[int, tuple[Session, BenchArtifact]] = {}  # by the index in `results`
    before_c = machine.temp_c()
    try:
        for entry in work:
            progress(f"{entry.name}: loading, then finding the best number of threads")
            result = BenchResult(entry.name, entry.artifact.engine)
            try:
                result = replace(result, engine_version=engine_by_name(entry.artifact.engine).version())
                session, result = _opened(entry, result, cache_dir, progress, clock)
                opened[len(results)] = session, entry
            except EdgeRTError as error:
                result = replace(result, error=ErrorText.of(error))
                progress(f"{entry.name}: {error.message}")
            results.append(result)
        at_most = "up to " if all(each.error_share_max for each in work) else ""
        progress(f"measuring {counted(len(opened), 'artifact')} in turn for {at_most}{seconds:g} s")
        times = _in_turn(list(opened.values()), seconds, clock)
    finally:
        for session, _ in opened.values():
            session.close()
    for place, measured in zip(opened, times, strict=True):
        results[place] = replace(results[place], times=measured)
    return BenchAnswer(BenchMode.ENGINE, measured_on(), Temperatures(before_c, machine.temp_c()), tuple(results))


def measured_on() -> BenchMachine:
    return BenchMachine(platform.machine(), processor_name(), len(os.sched_getaffinity(0)))


def _opened(
    entry: BenchArtifact, result: BenchResult, cache_dir: Path, progress: Callable[[str], None], clock: Clock
) -> tuple[Session, BenchResult]:
    """Return a warm session on the fastest number of threads, and `result` with the measurements."""
    artifact = entry.artifact
    engine_by_name(artifact.engine).prepare(artifact, EngineOptions(cache_dir=cache_dir), progress)
    base_bytes = machine.rss_bytes() or 0  # includes the engine's libraries, which are already loaded
    times: dict[int, float] = {}
    sessions: list[Session] = []  # the fastest one, and the one that is tried; not more, because weights may be large
    load_s = 0.0
    try:
        for threads in threads_to_try(artifact.engine, len(os.sched_getaffinity(0))):
            began = clock()
            sessions.append(load_session(artifact, EngineOptions(threads=threads, cache_dir=cache_dir)))
            for _ in range(WARM_RUNS):
                sessions[-1].run(entry.sample)
            load_s = load_s if times else round(clock() - began, 4)  # of the first session, with its warm-up
            fastest_s = min(times.values(), default=math.inf)
            times[threads] = statistics.median(_runs(sessions[-1], entry.sample, TRIAL_S, clock))
            if len(sessions) > 1:
                sessions.pop(0 if times[threads] < fastest_s else 1).close()
    except BaseException:
        for session in sessions:
            session.close()
        raise
    return sessions[0], replace(
        result,
        load_s=load_s,
        memory_mb=round(max(0, (machine.rss_bytes() or 0) - base_bytes) / 1e6, 1),
        threads=min(times, key=times.__getitem__),
        threads_ms={threads: round(1e3 * s, 5) for threads, s in times.items()},
    )


def _in_turn(opened: Sequence[tuple[Session, BenchArtifact]], seconds: float, clock: Clock) -> list[BenchTimes]:
    medians: list[list[float]] = [[] for _ in opened]
    runs: list[list[float]] = [[] for _ in opened]
    until = clock() + seconds
    rounds = 0
    while opened and (rounds < ROUNDS_MIN or clock() < until):
        for i, (session, entry) in enumerate(opened):
            times = _runs(session, entry.sample, ROUND_S, clock)
            medians[i].append(statistics.median(times))
            runs[i] += times
        rounds += 1
        if all(_is_known(times, entry.error_share_max) for times, (_, entry) in zip(medians, opened, strict=True)):
            break
    return [
        times_of(runs_s, 5, p50_s=statistics.median(rounds_s)) for rounds_s, runs_s in zip(medians, runs, strict=True)
    ]


def times_of(runs_s: Sequence[float], digits: int, *, p50_s: float) -> BenchTimes:
    """Return the times of single runs; `p50_s` is their median, or the median of the rounds' medians."""
    p90_ms, p95_ms, p99_ms = (round(1e3 * float(value), digits) for value in np.percentile(runs_s, (90, 95, 99)))
    per_s = round(len(runs_s) / sum(runs_s), 2) if sum(runs_s) else 0.0
    return BenchTimes(round(1e3 * p50_s, digits), p90_ms, p95_ms, p99_ms, per_s, len(runs_s))


def _is_known(rounds_s: Sequence[float], error_share_max: float) -> bool:
    """Return whether the standard error of the median is below the share `error_share_max` of the median.

    The standard error is computed from the quartiles, which a few slow rounds do not change.
    """
    if len(rounds_s) < EARLY_ROUNDS_MIN:
        return False
    low, median, high = np.percentile(rounds_s, (25, 50, 75))
    return bool(ERROR_OF_MEDIAN * (high - low) / len(rounds_s) ** 0.5 < error_share_max * median)


def _runs(session: Session, sample: Arrays, s_max: float, clock: Clock) -> list[float]:
    """Return the seconds of single runs: at least ROUND_RUNS_MIN, for about `s_max`."""
    times: list[float] = []
    spent_s = 0.0
    while len(times) < ROUND_RUNS_MIN or spent_s < s_max:
        began = clock()
        session.run(sample)
        times.append(clock() - began)
        spent_s += times[-1]
    return times


def _inside(folder: Path, name: Any) -> Path:
    path = folder / str(name)
    if Path(str(name)).is_absolute() or ".." in Path(str(name)).parts:
        raise ValueError(f"{str(name)[:80]!r} is outside the folder")
    return path


def processor_name() -> str:
    """Return the name of the processor, or of the board on ARM machines that report no processor name."""
    with contextlib.suppress(OSError):
        pairs = [line.partition(":") for line in Path("/proc/cpuinfo").read_text().splitlines()]
        processor = {key.strip(): value.strip() for key, _, value in pairs}
        if name := processor.get("model name") or processor.get("Model"):
            return name
    with contextlib.suppress(OSError):
        return Path("/proc/device-tree/model").read_text().strip("\0 \n")
    return ""
