"""The tables of a .tflite file: what is added can be read back, and an unused operator code is gone."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("ai_edge_litert")

from edgert_deploy.packager.tflite_lowering import lower
from edgert_deploy.packager.tflite_lowering.tables import add_buffer, add_tensor, float_constant, packed, unpacked
from edgert_deploy.packager.tflite_lowering.writer import operator_code
from tests.support.models.tflite_cases import Case, model_of, random

DENSE = lower(model_of(Case("dense", "y = MatMul(x, w)", {"x": (8,)}, {"w": random(8, 4)})))


def test_an_added_constant_is_read_back_and_other_tensors_are_no_float_constants() -> None:
    model = unpacked(DENSE)
    graph, values = model.subgraphs[0], random(3, 2)
    add_tensor(graph, b"floats", "FLOAT32", [3, 2], buffer=add_buffer(model, values))
    add_tensor(graph, b"integers", "INT8", [4], buffer=add_buffer(model, np.arange(4, dtype=np.int8)))
    add_tensor(graph, b"computed", "FLOAT32", [1, 2], [-1, 2])
    model = unpacked(packed(model))
    floats, integers, computed = model.subgraphs[0].tensors[-3:]
    np.testing.assert_array_equal(float_constant(model, floats, 6), values.reshape(-1))
    assert float_constant(model, floats, 7) is None
    assert float_constant(model, integers, 1) is None
    assert float_constant(model, computed, 1) is None
    assert list(computed.shapeSignature) == [-1, 2]


def test_an_operator_code_without_an_operator_is_left_out() -> None:
    model = unpacked(DENSE)
    codes = len(model.operatorCodes)
    model.operatorCodes.insert(0, operator_code("ABS"))
    for operator in model.subgraphs[0].operators:
        operator.opcodeIndex += 1
    assert len(unpacked(packed(model)).operatorCodes) == codes
