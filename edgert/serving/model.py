"""One version of one model, loaded: engine session warmed, checked on its golden inputs, batch cap learned."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.config import DeviceConfig, StateDir
from edgert.engines import Engine, EngineOptions, Session, engine_by_name
from edgert.errors import EdgeRTError
from edgert.installer import InstalledVersion, check_files
from edgert.manifest import ArtifactEntry
from edgert.serving import golden
from edgert.tensors import batchable

BATCH_CAP_MAX = 32
GAIN_MIN = 0.10  # a larger batch must be cheaper per item by at least this share
LEARN_S_MAX = 2.0
LEARN_RUNS = 25
LEARN_SIZE_S_MAX = 0.2
LEARNED_FORMAT = 1


@dataclass(frozen=True)
class LoadedModel:
    """What a worker serves. `tried` says which engines of the ladder failed before this one, and why."""

    version: InstalledVersion
    artifact: ArtifactEntry
    session: Session
    engine_version: str
    batch_cap: int
    load_s: float
    tried: tuple[str, ...]

    @property
    def degraded(self) -> bool:
        return bool(self.tried)


def load_model(
    version: InstalledVersion, state: StateDir, config: DeviceConfig, clock: Callable[[], float] = time.monotonic
) -> LoadedModel:
    """Load the first artifact of the version's ladder that loads and answers its golden inputs rightly.

    Raises the last artifact's error when none does.
    """
    began = clock()
    tried: list[str] = []
    for artifact in version.artifacts:
        try:
            session, engine = _open(version, artifact, state, config)
        except EdgeRTError as error:
            tried.append(f"{artifact.id}: {error.message}")
            failure = error
            continue
        try:
            golden.check(version, artifact, session.run)
            cap = _batch_cap(version, artifact, session, engine, state, config)
        except EdgeRTError as error:
            session.close()
            tried.append(f"{artifact.id}: {error.message}")
            failure = error
            continue
        return LoadedModel(version, artifact, session, engine.version(), cap, clock() - began, tuple(tried))
    raise failure


def _open(
    version: InstalledVersion, artifact: ArtifactEntry, state: StateDir, config: DeviceConfig
) -> tuple[Session, Engine]:
    check_files(version, artifact)
    engine = engine_by_name(artifact.engine)
    threads = config.serving.threads or (os.cpu_count() or 1)
    return engine.load(version.local(artifact), EngineOptions(threads=threads, cache_dir=state.cache)), engine


def _batch_cap(
    version: InstalledVersion,
    artifact: ArtifactEntry,
    session: Session,
    engine: Engine,
    state: StateDir,
    config: DeviceConfig,
) -> int:
    """The configured cap, else the one learned on this device before, else the one learned now."""
    if config.serving.batch_max:
        return config.serving.batch_max
    if not (batchable(session.inputs) and batchable(session.outputs)):
        return 1
    path = state.learned / f"{version.manifest.file(artifact.entry).sha256[:32]}.json"
    context = {"format": LEARNED_FORMAT, "engine": engine.version(), "threads": config.serving.threads}
    try:
        learned = json.loads(path.read_bytes())
        if learned["context"] == context:
            return int(learned["batch_cap"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # never learned here, or damaged: it is only a measurement, made again
    cap, times_us = learn_batch_cap(session, next(golden.samples(version)))
    state.learned.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(f".{os.getpid()}.new")
    beside.write_text(json.dumps({"context": context, "batch_cap": cap, "run_us": times_us}))
    beside.replace(path)
    return cap


def learn_batch_cap(
    session: Session, sample: list[NDArray[Any]], clock: Callable[[], float] = time.perf_counter
) -> tuple[int, dict[int, float]]:
    """The largest batch that is still cheaper per item than the best smaller one, and t(b) in us.

    Sizes are 1, 2, 4, ... up to BATCH_CAP_MAX. Each time is the shortest of up to LEARN_RUNS runs: on a busy
    device all other figures tell of its other work.
    """
    times_us: dict[int, float] = {}
    cap, best_per_item, size = 1, float("inf"), 1
    until = clock() + LEARN_S_MAX
    while size <= BATCH_CAP_MAX:
        inputs = [np.ascontiguousarray(np.resize(array, (size, *array.shape[1:]))) for array in sample]
        session.run(inputs)  # the first run of a size may compile it
        runs: list[float] = []
        while len(runs) < LEARN_RUNS and sum(runs) < LEARN_SIZE_S_MAX:
            began = clock()
            session.run(inputs)
            runs.append(clock() - began)
        times_us[size] = min(runs) * 1e6
        per_item = times_us[size] / size
        if per_item > best_per_item * (1 - GAIN_MIN):
            break
        cap, best_per_item = size, per_item
        if clock() > until:
            break
        size *= 2
    return cap, times_us
