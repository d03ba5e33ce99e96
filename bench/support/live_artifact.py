"""The lower bound: the live artifact of a state folder, opened in this process as the worker opens it."""

from __future__ import annotations

from pathlib import Path

from edgert.config import read_config
from edgert.engines import EngineOptions, LocalArtifact, Session, engine_by_name
from edgert.state_dir import StateDir
from edgert.versions.installed import load_live
from edgert.versions.slot_store import SlotStore


def open_session(state_folder: Path, threads: int, model: str = "digits") -> Session:
    """Open `model`'s live version on as many threads as the worker uses (`edgertd status`)."""
    artifact = live_artifact(state_folder, model)
    return engine_by_name(artifact.engine).load(artifact, EngineOptions(threads=threads))


def live_artifact(state_folder: Path, model: str = "digits") -> LocalArtifact:
    """Return the first artifact of `model`'s live version."""
    state = StateDir(state_folder)
    config = read_config(state)
    version = load_live(SlotStore(state.models / model), config)
    return version.local(version.artifacts[0])
