"""A loaded version of a model: its sessions are warm and checked, its threads and batch cap learned."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from edgert.bundle.manifest import ArtifactEntry, Manifest
from edgert.checks import golden_samples as golden
from edgert.config import DeviceConfig
from edgert.engines import ENGINES, EngineOptions, Session, engine_by_name
from edgert.engines.padding import load_session
from edgert.machine import return_free_memory
from edgert.state_dir import StateDir
from edgert.versions.installed import InstalledVersion, check_files, first_working
from edgert.worker.loading.learned import Circumstances, Learned, LearnedFile
from edgert.worker.loading.learning import learn


@dataclass(frozen=True)
class LoadedModel:
    """The artifact that a worker serves.

    Attributes:
        more_sessions: Sessions that run at the same time as `session`; they are the same session if threads may share
            it.
        reactor_sessions: Sessions for requests of the reactor, with one thread each; empty if the reactor uses the
            other sessions.
        tried: The preferred artifacts that failed, each with its reason.
    """

    version: InstalledVersion
    artifact: ArtifactEntry
    session: Session
    more_sessions: tuple[Session, ...]
    reactor_sessions: tuple[Session, ...]
    engine_version: str
    learned: Learned
    load_s: float
    tried: tuple[str, ...]

    @property
    def degraded(self) -> bool:
        return bool(self.tried)


def load_model(
    version: InstalledVersion,
    state: StateDir,
    config: DeviceConfig,
    progress: Callable[[str], None] = lambda line: None,
) -> LoadedModel:
    """Load the first artifact, in order of preference, that answers its golden inputs correctly.

    If no artifact loads, raises the error of the last artifact; with `strict`, the error of the first artifact. An
    engine reports work that takes minutes to `progress`.
    """
    began = time.monotonic()
    working = first_working(
        version, lambda artifact: _open(version, artifact, state, config, progress), strict=config.serving.strict
    )
    engine_version, (session, *more), reactor_sessions, learned = working.value
    return_free_memory()
    return LoadedModel(
        version,
        working.artifact,
        session,
        tuple(more),
        tuple(reactor_sessions),
        engine_version,
        learned,
        time.monotonic() - began,
        working.tried,
    )


def _open(
    version: InstalledVersion,
    artifact: ArtifactEntry,
    state: StateDir,
    config: DeviceConfig,
    progress: Callable[[str], None],
) -> tuple[str, list[Session], list[Session], Learned]:
    """Return the engine's version, the checked sessions, the reactor's sessions, and their settings."""
    check_files(version, artifact)
    engine_version = engine_by_name(artifact.engine).version()
    concurrent = ENGINES[artifact.engine].concurrent
    reactor = may_have_reactor(version.manifest, config)
    circumstances = Circumstances.of(artifact.engine, engine_version, config.serving, reactor=reactor)
    learned_file = LearnedFile(state.learned, version.manifest.file(artifact.entry).sha256)

    def load(threads: int) -> Session:
        options = EngineOptions(threads=threads, cache_dir=state.cache, progress=progress)
        session = load_session(version.local(artifact), options)
        return_free_memory()  # releases the engine's copies of the file before measurements take memory
        return session

    kept = learned_file.read(circumstances)
    learned = None if kept is None or kept.doubtful else kept
    sessions = [load(learned.threads if learned else circumstances.threads_to_try[0])]
    try:
        checked = sessions[0]
        golden.check(version, artifact, checked.run)
        if learned is None:
            sessions = []  # `learn` closes the sessions that it does not return
            sessions, measured = learn(load, checked, next(golden.samples(version)), circumstances)
            learned = measured if kept is None else kept.less_disturbed(measured)
            if learned.threads != measured.threads:
                _close_beyond(sessions, 0)
        _open_others(sessions, load, learned, count=1 if concurrent else learned.instances)
        for session in sessions:
            if session is not checked:
                golden.check(version, artifact, session.run)
    except BaseException:
        _close_beyond(sessions, 0)
        raise
    if learned != kept:
        learned_file.write(circumstances, learned)
    reactor_sessions = [sessions.pop()] * learned.instances if learned.reactor_session else []
    if concurrent:
        sessions *= learned.instances  # the same session several times
    return engine_version, sessions, reactor_sessions, learned


def _open_others(sessions: list[Session], load: Callable[[int], Session], learned: Learned, *, count: int) -> None:
    """Close and open sessions until there are `count`, and one more if the reactor has its own session."""
    _close_beyond(sessions, count)
    while len(sessions) < count:
        sessions.append(load(learned.threads))
    if learned.reactor_session:
        sessions.append(load(1))


def may_have_reactor(manifest: Manifest, config: DeviceConfig) -> bool:
    """Return whether the reactor may serve the model, if its engine is quick enough.

    No step beside the engine may be slow: decoding an image takes milliseconds. The reactor runs independent requests
    of one shape. A model with a latency target has no reactor, because the batcher must see every waiting request.
    """
    is_open = any(-1 in spec.item_shape for spec in manifest.inputs)
    plain = not is_open and not manifest.state and manifest.input_rule is None
    return plain and not config.model(manifest.model).p95_ms


def _close_beyond(sessions: list[Session], count: int) -> None:
    """Close all sessions but the first `count`."""
    while len(sessions) > count:
        sessions.pop().close()
