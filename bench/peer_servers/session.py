"""The engine as each peer gets it: the same class, artifact and options as in our worker.

It needs NumPy and ONNX Runtime only, as it is imported in the peers' own environments.
"""

from __future__ import annotations

import json
from pathlib import Path

from edgert.engines import EngineOptions, LocalArtifact, Session, engine_by_name
from edgert.tensors import TensorSpec


def write_spec(path: Path, artifact: LocalArtifact, threads: int) -> None:
    """Note for `open_spec` what to load."""
    value = {
        "engine": artifact.engine,
        "path": str(artifact.path),
        "inputs": [spec.as_json() for spec in artifact.inputs],
        "outputs": [spec.as_json() for spec in artifact.outputs],
        "threads": threads,
    }
    path.write_text(json.dumps(value))


def open_spec(path: Path) -> Session:
    """The session of what `write_spec` noted."""
    value = json.loads(path.read_text())
    specs = {kind: tuple(TensorSpec.from_json(spec) for spec in value[kind]) for kind in ("inputs", "outputs")}
    artifact = LocalArtifact(value["engine"], Path(value["path"]), specs["inputs"], specs["outputs"], "")
    return engine_by_name(artifact.engine).load(artifact, EngineOptions(threads=value["threads"]))
