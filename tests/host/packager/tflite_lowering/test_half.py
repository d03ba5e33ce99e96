"""FP16 weights give half the file and nearly the same answers."""

from __future__ import annotations

from copy import copy
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from edgert_deploy.packager.tflite_lowering import lower
from edgert_deploy.packager.tflite_lowering.half import ELEMENTS_MIN, with_half_weights
from edgert_deploy.packager.tflite_lowering.tables import packed, unpacked
from edgert_deploy.packager.tflite_lowering.writer import operator_code
from tests.support.models.tflite_cases import Case, inputs_of, model_of, random, run_tflite


def test_large_weights_are_stored_in_fp16() -> None:
    weights = random(64, 256)
    weights[0, 0] = 1e6  # outside of the range of FP16, so it is clipped
    case = Case("half", "y = MatMul(x, w)", {"x": (64,)}, {"w": weights})
    full, inputs = lower(model_of(case)), inputs_of(case, 2)
    half = with_half_weights(full)
    assert len(half) < 0.6 * len(full)
    inputs["x"][:, 0] = 0
    np.testing.assert_allclose(run_tflite(half, inputs)[0], run_tflite(full, inputs)[0], atol=0.05)


def test_a_model_of_small_weights_stays_unchanged() -> None:
    case = Case("small", "y = Mul(x, w)", {"x": (4,)}, {"w": random(4)})
    assert ELEMENTS_MIN > 4
    inputs, full = inputs_of(case, 1), lower(model_of(case))
    np.testing.assert_array_equal(run_tflite(with_half_weights(full), inputs)[0], run_tflite(full, inputs)[0])


def test_the_branches_of_a_model_keep_their_operators() -> None:
    case = Case("branches", "y = MatMul(x, w)", {"x": (64,)}, {"w": random(64, 64)})
    full, inputs = _with_branches(lower(model_of(case))), inputs_of(case, 1)
    (wanted,) = run_tflite(full, inputs)
    assert (wanted >= 0).all()
    np.testing.assert_allclose(run_tflite(with_half_weights(full), inputs)[0], wanted, atol=0.05)


def _with_branches(content: bytes) -> bytes:
    """Return the model with its output behind an IF, whose branches compute ABS and NEG."""
    from ai_edge_litert import schema_py_generated as schema

    model = unpacked(content)
    main = model.subgraphs[0]
    first = len(model.operatorCodes)
    model.operatorCodes += [operator_code(code) for code in ("IF", "ABS", "NEG")]
    made = main.tensors[main.outputs[0]]
    for code in (first + 1, first + 2):
        branch, before, after = schema.SubGraphT(), copy(made), copy(made)
        branch.tensors, branch.inputs, branch.outputs = [before, after], [0], [1]
        branch.operators = [_operator(code, [0], [1])]
        model.subgraphs.append(branch)
    condition, data = schema.TensorT(), schema.BufferT()
    data.data = np.ones(1, np.uint8)
    condition.name, condition.type, condition.shape = b"condition", schema.TensorType.BOOL, []
    condition.buffer = len(model.buffers)
    model.buffers.append(data)
    result = copy(made)
    result.name = b"result"
    main.tensors += [condition, result]
    either = _operator(first, [len(main.tensors) - 2, main.outputs[0]], [len(main.tensors) - 1])
    either.builtinOptionsType, either.builtinOptions = schema.BuiltinOptions.IfOptions, schema.IfOptionsT()
    either.builtinOptions.thenSubgraphIndex, either.builtinOptions.elseSubgraphIndex = 1, 2
    main.operators.append(either)
    main.outputs = [len(main.tensors) - 1]
    model.signatureDefs[0].outputs[0].tensorIndex = main.outputs[0]
    return packed(model)


def _operator(code: int, inputs: list[int], outputs: list[int]) -> Any:
    from ai_edge_litert import schema_py_generated as schema

    operator = schema.OperatorT()
    operator.opcodeIndex, operator.inputs, operator.outputs = code, inputs, outputs
    return operator
