"""An infinite bound of a Clip has no effect. Exporters write it for `clamp(min=...)`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.errors import SourceInvalid
from edgert_deploy.packager.accuracy.artifact_runs import artifact_outputs, reference_outputs
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models
from tests.support.builders import ENGINE_NAMES, build, samples_for


@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_an_infinite_bound_is_left_out(engine: str, tmp_path: Path) -> None:
    """The spectrogram of openWakeWord clips at 1e-10 and at infinity. The build refused it as damaged."""
    weights = {"w": models.random(4, 3), "low": np.float32(0.1), "high": np.float32(np.inf)}
    body = "a = MatMul (x, w) b = Clip (a, low, high) y = Neg (b)"
    proto = models.model("float[N,4] x) => (float[N,3] y", body, {k: np.asarray(v) for k, v in weights.items()})
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    assert [list(node.input) for node in source.proto.graph.node if node.op_type == "Clip"] == [["a", "low"]]
    samples = samples_for(source)
    artifact = build(engine, source, samples, "int8", tmp_path / engine)
    got, want = artifact_outputs(artifact, source, samples)[0], reference_outputs(source, samples)[0]
    assert np.corrcoef(got.ravel(), want.ravel())[0, 1] > 0.98


def test_an_infinite_weight_is_refused(tmp_path: Path) -> None:
    proto = models.model("float[N,4] x) => (float[N,4] y", "y = Add (x, w)", {"w": np.full(4, np.inf, np.float32)})
    with pytest.raises(SourceInvalid, match="'w' is NaN or infinite in 4 of 4 values"):
        load_source(models.write(proto, tmp_path / "m.onnx"))
