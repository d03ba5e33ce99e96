"""Whether this very runtime can serve what the device serves: each model's artifacts, loaded here and asked its golden inputs.

No daemon is asked and none is disturbed: it is how a new runtime is tried beside the one that serves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgert.checks import golden_samples as golden
from edgert.config import DeviceConfig, StateDir
from edgert.engines import EngineOptions, engine_by_name
from edgert.errors import EdgeRTError
from edgert.versions.installed import check_files, load_live
from edgert.versions.slot_store import SlotStore


def self_test(model: str, state: StateDir, config: DeviceConfig, progress: Callable[[str], None]) -> dict[str, Any]:
    """Load the active version of `model` on the first engine of its ladder that can, and compare its golden answers.

    Raises ModelNotFound, and the last engine's error where none answers rightly.
    """
    store = SlotStore(state.models / model)
    version = load_live(store, config)
    tried: list[str] = []
    failure: EdgeRTError | None = None
    for artifact in version.artifacts:
        try:
            check_files(version, artifact)
            engine = engine_by_name(artifact.engine)
            engine_version = engine.version()
            options = EngineOptions(cache_dir=state.cache, progress=progress)
            session = engine.load(version.local(artifact), options)
            try:
                worst = golden.check(version, artifact, session.run)
            finally:
                session.close()
        except EdgeRTError as error:
            tried.append(f"{artifact.id}: {error.message}")
            failure = error
            if config.serving.strict:
                break
            continue
        return {
            "model": model,
            "release": version.manifest.release,
            "engine": artifact.engine,
            "engine_version": engine_version,
            "worst": worst,
            "tried": tried,
        }
    assert failure is not None, "a version has an artifact at least"
    raise failure
