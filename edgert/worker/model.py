"""One version of one model, loaded: engine sessions warmed, checked on their golden inputs, threads and batch cap learned."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from edgert.bundle.manifest import ArtifactEntry
from edgert.checks import golden_samples as golden
from edgert.config import DeviceConfig, StateDir
from edgert.engines import EngineOptions, Session, engine_by_name
from edgert.errors import EdgeRTError
from edgert.versions.installed import InstalledVersion, check_files
from edgert.worker.learning import Circumstances, Learned, LearnedFile, learn


@dataclass(frozen=True)
class LoadedModel:
    """What a worker serves. `tried` says which engines of the ladder failed before this one, and why.

    `more_sessions` are open beside `session` where several instances answer more.
    """

    version: InstalledVersion
    artifact: ArtifactEntry
    session: Session
    more_sessions: tuple[Session, ...]
    engine_version: str
    learned: Learned
    load_s: float
    tried: tuple[str, ...]

    @property
    def batch_cap(self) -> int:
        return self.learned.batch_cap

    @property
    def degraded(self) -> bool:
        return bool(self.tried)


def load_model(
    version: InstalledVersion,
    state: StateDir,
    config: DeviceConfig,
    progress: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
) -> LoadedModel:
    """Load the first artifact of the version's ladder that loads and answers its golden inputs rightly.

    `progress` hears what an engine does that takes minutes.

    Raises the last artifact's error when none does, and with `strict` the first one's.
    """
    began = clock()
    tried: list[str] = []
    for artifact in version.artifacts:
        try:
            check_files(version, artifact)
            engine_version = engine_by_name(artifact.engine).version()
            (session, *more), learned = _open(version, artifact, engine_version, state, config, progress)
        except EdgeRTError as error:
            tried.append(f"{artifact.id}: {error.message}")
            failure = error
            if config.serving.strict:
                break
            continue
        return LoadedModel(
            version, artifact, session, tuple(more), engine_version, learned, clock() - began, tuple(tried)
        )
    raise failure


def _open(
    version: InstalledVersion,
    artifact: ArtifactEntry,
    engine_version: str,
    state: StateDir,
    config: DeviceConfig,
    progress: Callable[[str], None],
) -> tuple[list[Session], Learned]:
    """The artifact's sessions, as learned on this device before or now, each checked on the golden inputs."""
    circumstances = Circumstances.of(artifact.engine, engine_version, config.serving)
    kept = LearnedFile(state.learned, version.manifest.file(artifact.entry).sha256)

    def load(threads: int) -> Session:
        options = EngineOptions(threads=threads, cache_dir=state.cache, progress=progress)
        return engine_by_name(artifact.engine).load(version.local(artifact), options)

    known = kept.read(circumstances)
    learned = None if known is None or known.doubtful else known
    sessions = [load(learned.threads if learned else circumstances.threads_to_try[0])]
    try:
        checked = sessions[0]
        golden.check(version, artifact, checked.run)
        if learned is None:
            sessions = []  # learn closes what it does not return
            sessions, measured = learn(load, checked, next(golden.samples(version)), circumstances)
            learned = measured if known is None else known.better(measured)
            if learned.threads != measured.threads:
                _close_to(sessions, 0)
        _close_to(sessions, learned.instances)
        while len(sessions) < learned.instances:
            sessions.append(load(learned.threads))
        for session in sessions:
            if session is not checked:
                golden.check(version, artifact, session.run)
    except BaseException:
        _close_to(sessions, 0)
        raise
    if learned != known:
        kept.write(circumstances, learned)
    return sessions, learned


def _close_to(sessions: list[Session], count: int) -> None:
    """Close all but the first `count`."""
    while len(sessions) > count:
        sessions.pop().close()
