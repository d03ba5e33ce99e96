"""The functions of a model become part of its graph."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgert.errors import SourceInvalid
from edgert_deploy.packager.accuracy.artifact_runs import artifact_outputs, reference_outputs
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.onnx_graph.rewrites.functions import inline_functions
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models
from tests.support.builders import build

onnx: Any = pytest.importorskip("onnx")


def with_functions() -> Any:
    """Return a network whose activation is a function that calls another function twice."""
    helper, opset = onnx.helper, [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("own", 1)]
    half = helper.make_function("own", "Half", ["a"], ["b"], [helper.make_node("Sigmoid", ["a"], ["b"])], opset)
    calls = [helper.make_node("Half", ["a"], ["h"], domain="own"), helper.make_node("Mul", ["a", "h"], ["b"])]
    gate = helper.make_function("own", "Gate", ["a"], ["b"], calls, opset)
    weights = [
        onnx.numpy_helper.from_array(models.random(4, 8), "w"),
        onnx.numpy_helper.from_array(models.random(8, 3), "v"),
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node("Gate", ["h"], ["g"], domain="own"),
        helper.make_node("MatMul", ["g", "v"], ["l"]),
        helper.make_node("Gate", ["l"], ["y"], domain="own"),
    ]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [value("x", 1, ["N", 4])], [value("y", 1, ["N", 3])], weights)
    return helper.make_model(graph, opset_imports=opset, ir_version=8, functions=[half, gate])


def with_function_of_opset(opset: int, operator: str) -> Any:
    """Return a model of opset 17 whose only node calls a function of another opset."""
    helper, value = onnx.helper, onnx.helper.make_tensor_value_info
    imports, own = helper.make_opsetid("", opset), helper.make_opsetid("own", 1)
    function = helper.make_function("own", "Own", ["a"], ["b"], [helper.make_node(operator, ["a"], ["b"])], [imports])
    call = helper.make_node("Own", ["x"], ["y"], domain="own")
    graph = helper.make_graph([call], "g", [value("x", 1, ["N", 2, 3])], [value("y", 1, ["N", 2, 3])])
    return helper.make_model(
        graph, opset_imports=[helper.make_opsetid("", 17), own], ir_version=8, functions=[function]
    )


def test_a_function_keeps_the_meaning_that_it_has_in_its_own_opset(tmp_path: Path) -> None:
    """Softmax of opset 11 has the sum 1 over all axes after the batch; ONNX Runtime takes only the last axis."""
    source = load_source(models.write(with_function_of_opset(11, "Softmax"), tmp_path / "m.onnx"))
    assert not source.proto.functions
    samples = CalibrationSet({"x": models.random(4, 2, 3)}, None)
    np.testing.assert_allclose(reference_outputs(source, samples)[0].sum(axis=(1, 2)), 1.0, atol=1e-5)


def test_a_function_that_cannot_have_the_opset_of_the_model_is_refused() -> None:
    """Opset 17 has no Gelu."""
    with pytest.raises(SourceInvalid, match=r"'Own' has opset 20, and the model has opset 17; .*with the same opset"):
        inline_functions(with_function_of_opset(20, "Gelu"))


def test_a_model_without_functions_stays_unchanged() -> None:
    assert not inline_functions(models.mlp())


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime", "tflite"])
def test_a_model_with_functions_builds_for_every_engine(tmp_path: Path, engine: str) -> None:
    source = load_source(models.write(with_functions(), tmp_path / "m.onnx"))
    assert not source.proto.functions
    assert [node.op_type for node in source.proto.graph.node] == ["MatMul", "Sigmoid", "Mul"] * 2
    samples = CalibrationSet({"x": models.random(24, 4)}, None)
    artifact = build(engine, source, samples, "fp32", tmp_path)
    np.testing.assert_allclose(
        artifact_outputs(artifact, source, samples)[0], reference_outputs(source, samples)[0], atol=1e-5
    )
