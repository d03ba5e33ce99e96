"""The parts of a graph that are computed before the lowering, and those that are not."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from edgert.errors import BuildFailed, OperatorUnsupported
from edgert_deploy.packager.tflite_lowering import lower
from tests.support.tflite_cases import IMAGE, Case, ints, model_of, run_tflite


def test_what_onnx_runtime_cannot_fold_is_folded_all_the_same() -> None:
    # ONNX Runtime has no Relu of int64, and so opens no such model; the shape is worked out without it.
    body = "r = Relu(i) s = Shape<start=1>(i) z = Sub(s, s) t = Concat<axis=0>(z, s) y = Reshape(r, t)"
    case = Case("int64", body, {"i": (4,)}, types={"i": "int64"}, outputs="int64 y")
    inputs = {"i": np.array([[1, -2, 3, -4]])}
    np.testing.assert_array_equal(run_tflite(lower(model_of(case)), inputs)[0], [[1, 0, 3, 0]])


def test_a_constant_out_of_all_proportion_is_not_worked_out() -> None:
    body = "h = Expand(c, s) r = Relu(i) m = Max(h, r) y = ReduceMax(m)"
    constants = {"s": ints(1, 10**12), "c": ints(1)}
    case = Case("huge", body, {"i": (1,)}, constants, types={"i": "int64"}, outputs="int64 y")
    with pytest.raises((BuildFailed, OperatorUnsupported)):
        lower(model_of(case))


def test_an_operator_outside_of_onnx_is_named() -> None:
    model = model_of(Case("foreign", "[alien] y = Relu(x)", IMAGE))
    model.graph.node[0].domain = "com.example"
    model.graph.node[0].op_type = "Alien"
    with pytest.raises(OperatorUnsupported, match=r"com\.example:Alien \(node 'alien'\)"):
        lower(model)
