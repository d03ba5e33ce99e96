"""The self-test of a runtime: loads each live model in this process and checks its golden answers.

The self-test needs no daemon and does not disturb a running daemon. So it can test a new runtime while the current
runtime serves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from edgert.checks.golden_samples import load_checked
from edgert.config import DeviceConfig
from edgert.engines import EngineOptions, engine_by_name
from edgert.processing.preprocessors import preprocessor
from edgert.state_dir import StateDir
from edgert.versions.installed import first_working, load_live, read_file
from edgert.versions.slot_store import SlotStore


def self_test(model: str, state: StateDir, config: DeviceConfig, progress: Callable[[str], None]) -> dict[str, Any]:
    """Load `model`'s live version on the first engine that works, and check its golden answers.

    Raises ModelNotFound; also EngineMissing if a package for the model's input is missing. If no engine answers
    correctly, raises the error of the last engine.
    """
    version = load_live(SlotStore(state.models / model), config)
    if (rule := version.manifest.input_rule) is not None:
        preprocessor(rule, version.manifest.app_inputs, lambda path: read_file(version, path))
    options = EngineOptions(cache_dir=state.cache, progress=progress)
    working = first_working(
        version, lambda artifact: load_checked(version, artifact, options), strict=config.serving.strict
    )
    session, worst = working.value
    session.close()
    return {
        "model": model,
        "release": version.manifest.release,
        "engine": working.artifact.engine,
        "engine_version": engine_by_name(working.artifact.engine).version(),
        "worst": worst,
        "tried": working.tried,
    }
