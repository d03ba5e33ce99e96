"""Models with numbers of 16 bits are built from the same numbers in FP32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgert_deploy.packager.accuracy.artifact_runs import artifact_outputs
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models
from tests.support.builders import build

onnx: Any = pytest.importorskip("onnx")


def with_weights_in(kind: str, weights: Any) -> Any:
    """Return a network that widens its weights itself, as exporters of language models write it."""
    helper, element = onnx.helper, getattr(onnx.TensorProto, kind)
    stored = helper.make_tensor("stored", element, weights.shape, weights.ravel().tolist())
    nodes = [helper.make_node("Cast", ["stored"], ["w"], to=1), helper.make_node("MatMul", ["x", "w"], ["y"])]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [value("x", 1, ["N", 4])], [value("y", 1, ["N", 8])], [stored])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime", "tflite"])
@pytest.mark.parametrize(("kind", "name"), [("FLOAT16", "FP16"), ("BFLOAT16", "BF16")])
def test_weights_of_16_bits_are_the_same_in_every_engine(tmp_path: Path, engine: str, kind: str, name: str) -> None:
    weights = np.round(8 * models.random(4, 8)) / 8  # exact in both
    source = load_source(models.write(with_weights_in(kind, weights), tmp_path / "m.onnx"))
    assert source.remarks[0].startswith(f"the model computes in {name};")
    samples = CalibrationSet({"x": models.random(24, 4)}, None)
    answers = artifact_outputs(build(engine, source, samples, "fp32", tmp_path), source, samples)
    want = samples.inputs["x"] @ weights
    np.testing.assert_allclose(answers[0], want, atol=1e-5)
    quantized = artifact_outputs(build(engine, source, samples, "int8", tmp_path / "int8"), source, samples)
    assert np.abs(quantized[0] - want).max() < 0.05 * np.abs(want).max()
