"""The folding computes some parts of a graph before the lowering and leaves the other parts."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from edgert.errors import OperatorUnsupported
from edgert_deploy.packager.tflite_lowering import lower
from tests.support.models.tflite_cases import IMAGE, Case, ints, model_of, run_tflite


def test_the_number_of_elements_is_computed_from_the_shape() -> None:
    case = Case("size", "s = Size(x) f = Cast<to=1>(s) y = Mul(x, f)", {"x": (2, 3)})
    outputs = run_tflite(lower(model_of(case, "1")), {"x": np.ones((1, 2, 3), np.float32)})
    np.testing.assert_array_equal(outputs[0], np.full((1, 2, 3), 6))


def test_the_error_names_an_operator_that_is_not_part_of_onnx() -> None:
    model = model_of(Case("foreign", "[alien] y = Relu(x)", IMAGE))
    model.graph.node[0].domain = "com.example"
    model.graph.node[0].op_type = "Alien"
    with pytest.raises(OperatorUnsupported, match=r"com\.example:Alien \(1 node, such as 'alien'\); export"):
        lower(model)
    model.graph.node.append(model.graph.node[0])
    for i, node in enumerate(model.graph.node):
        node.domain, node.op_type, node.name = "com.microsoft", "MatMulNBits", f"q{i}"
    with pytest.raises(OperatorUnsupported, match=r"MatMulNBits \(2 nodes, such as 'q0'\); .*give the float model"):
        lower(model)


def test_the_error_names_an_operator_whose_definition_the_runtime_cannot_fold() -> None:
    """As in a spatial transformer: ONNX Runtime computes AffineGrid, but not the nodes by which ONNX defines it."""
    case = Case(
        "warp", "[grid] g = AffineGrid(x, size) y = Relu(g)", {"x": (2, 3)}, {"size": ints(1, 1, 4, 4)}, opset=20
    )
    with pytest.raises(OperatorUnsupported, match=r"1 part of this model .*AffineGrid \(node 'grid'\)"):
        lower(model_of(case))
