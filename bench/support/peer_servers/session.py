"""The engine for each peer: the same class, artifacts and options as in our worker.

It needs NumPy and ONNX Runtime only, because the peers' own environments import it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgert.engines import EngineOptions, LocalArtifact, Session, engine_by_name
from edgert.tensors import TensorSpec


def write_spec(path: Path, artifacts: Mapping[str, tuple[LocalArtifact, int]]) -> None:
    """Write what `open_spec` will load: each model's artifact and number of engine threads, by name."""
    value = {
        name: {
            "engine": artifact.engine,
            "path": str(artifact.path),
            "inputs": [spec.as_json() for spec in artifact.inputs],
            "outputs": [spec.as_json() for spec in artifact.outputs],
            "threads": threads,
        }
        for name, (artifact, threads) in artifacts.items()
    }
    path.write_text(json.dumps(value))


def open_spec(path: Path) -> dict[str, Session]:
    """Open the sessions that `write_spec` described, by name of the model."""
    return {name: _open(value) for name, value in json.loads(path.read_text()).items()}


def open_first(path: Path) -> Session:
    """Open the first session that `write_spec` described, for a server of one model."""
    return _open(next(iter(json.loads(path.read_text()).values())))


def _open(value: Any) -> Session:
    specs = {kind: tuple(TensorSpec.from_json(spec) for spec in value[kind]) for kind in ("inputs", "outputs")}
    artifact = LocalArtifact(value["engine"], Path(value["path"]), specs["inputs"], specs["outputs"], "")
    return engine_by_name(artifact.engine).load(artifact, EngineOptions(threads=value["threads"]))
