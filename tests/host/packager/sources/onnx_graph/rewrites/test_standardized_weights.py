"""PyTorch standardizes the weights of a convolution by a BatchNormalization in training mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgert.errors import SourceInvalid
from edgert_deploy.packager.accuracy.artifact_runs import reference_outputs
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models

pytest.importorskip("onnx")
ort: Any = pytest.importorskip("onnxruntime")
NORM = "s, mean, variance = BatchNormalization<training_mode=1, epsilon=0.01>(w, gain, bias, zeros, zeros) "


def standardized(more: str = "") -> Any:
    """Return a model with a convolution with standardized weights, as in timm's NFNet."""
    weights = {
        "w": models.random(1, 4, 27),
        "scale": models.random(4) + 0.5,
        "bias": models.random(4),
        "zeros": np.zeros(4, np.float32),
        "shape": np.array([4, 3, 3, 3]),
    }
    body = f"gain = Identity(scale) {NORM} v = Reshape(s, shape) y = Conv(x, v) {more}"
    outputs = "float[N,4,6,6] y" + (", float[4] z" if more else "")
    return models.model(f"float[N,3,8,8] x) => ({outputs}", body, weights)


def test_weights_that_are_standardized_become_constants(tmp_path: Path) -> None:
    proto = standardized()
    samples = CalibrationSet({"x": models.random(8, 3, 8, 8)}, None)
    (want,) = ort.InferenceSession(proto.SerializeToString()).run(None, samples.inputs)
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    assert [node.op_type for node in source.proto.graph.node] == ["Reshape", "Conv"]
    np.testing.assert_allclose(reference_outputs(source, samples)[0], want, atol=1e-5)


def test_a_training_mode_whose_mean_is_read_is_refused(tmp_path: Path) -> None:
    proto = standardized(more="z = Identity(mean)")
    with pytest.raises(SourceInvalid, match="training mode"):
        load_source(models.write(proto, tmp_path / "m.onnx"))
