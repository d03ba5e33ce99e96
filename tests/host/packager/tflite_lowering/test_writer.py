"""The written file fulfills the requirements of TFLite's kernels."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from onnx import TensorProto, helper, numpy_helper

from edgert_deploy.packager.tflite_lowering import lower
from edgert_deploy.packager.tflite_lowering.dynamic_range import with_int8_weights
from edgert_deploy.packager.tflite_lowering.half import with_half_weights
from edgert_deploy.packager.tflite_lowering.quantize import quantize_int8
from tests.support.models.lowering_cases import case_named
from tests.support.models.tflite_cases import model_of, run_tflite


def test_weights_are_aligned_in_the_file() -> None:
    case = case_named("conv 3x3 padded")
    content = lower(model_of(case))
    kernel = np.ascontiguousarray(np.asarray(case.constants["w"]).transpose(0, 2, 3, 1)).tobytes()
    assert content.index(kernel) % 16 == 0


def test_matrix_products_with_equal_weights_share_them_before_the_file_is_written() -> None:
    weights = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32) / 8
    steps = [("x" if i == 0 else f"t{i - 1}", f"m{i}", f"t{i}") for i in range(8)]
    nodes = [
        node
        for read, product, result in steps
        for node in (helper.make_node("MatMul", [read, "w"], [product]), helper.make_node("Tanh", [product], [result]))
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 64]) for name in ("x", "t7")]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], [numpy_helper.from_array(weights, "w")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)])
    shared, separate = lower(model), lower(model, share_weights=False)
    assert len(shared) < 2 * weights.nbytes < 8 * weights.nbytes < len(separate)
    sample = {"x": np.linspace(-1, 1, 64, dtype=np.float32)[None]}
    for change in (bytes, with_half_weights, with_int8_weights, lambda file: quantize_int8(file, [[sample["x"]]])):
        (one,), (other,) = run_tflite(change(shared), sample), run_tflite(change(separate), sample)
        assert np.array_equal(one, other)
