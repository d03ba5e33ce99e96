"""The engine for each peer: the same class, artifact and options as in our worker.

It needs NumPy and ONNX Runtime only, because the peers' own environments import it.
"""

from __future__ import annotations

import json
from pathlib import Path

from edgert.engines import EngineOptions, LocalArtifact, Session, engine_by_name
from edgert.tensors import TensorSpec


def write_spec(path: Path, artifact: LocalArtifact, threads: int) -> None:
    """Write what `open_spec` will load."""
    value = {
        "engine": artifact.engine,
        "path": str(artifact.path),
        "inputs": [spec.as_json() for spec in artifact.inputs],
        "outputs": [spec.as_json() for spec in artifact.outputs],
        "threads": threads,
    }
    path.write_text(json.dumps(value))


def open_spec(path: Path) -> Session:
    """Open the session that `write_spec` described."""
    value = json.loads(path.read_text())
    specs = {kind: tuple(TensorSpec.from_json(spec) for spec in value[kind]) for kind in ("inputs", "outputs")}
    artifact = LocalArtifact(value["engine"], Path(value["path"]), specs["inputs"], specs["outputs"], "")
    return engine_by_name(artifact.engine).load(artifact, EngineOptions(threads=value["threads"]))
