"""Weights in FP16, unpacked to FP32, and shared by equal tensors: the answers stay the same, or nearly so."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from edgert_deploy.packager.tflite_lowering import lower
from edgert_deploy.packager.tflite_lowering.dynamic_range import with_int8_weights
from edgert_deploy.packager.tflite_lowering.quantize import quantize_int8
from edgert_deploy.packager.tflite_lowering.tables import code_of, packed, unpacked
from edgert_deploy.packager.tflite_lowering.weights import (
    HALF_ELEMENTS_MIN,
    with_half_weights,
    with_plain_weights,
    with_shared_weights,
)
from edgert_deploy.packager.tflite_lowering.writer import operator_code
from tests.support.models.tflite_cases import Case, inputs_of, model_of, random, run_tflite, sqnr_db

DENSE = Case("dense", "y = MatMul(x, w)", {"x": (64,)}, {"w": random(64, 256)})


def test_fp16_weights_become_fp32_with_the_same_answers_and_then_int8() -> None:
    half, inputs = with_half_weights(lower(model_of(DENSE))), inputs_of(DENSE, 3)
    plain = with_plain_weights(half)
    want = run_tflite(half, inputs)[0]
    np.testing.assert_allclose(run_tflite(plain, inputs)[0], want, rtol=1e-5, atol=1e-5)
    assert len(plain) > 1.8 * len(half)  # and the FP16 weights are gone
    assert len(plain) < 2.2 * len(half)
    samples = [[random(1, 64, seed=seed)] for seed in range(20)]
    assert sqnr_db(want, run_tflite(quantize_int8(plain, samples), inputs)[0]) > 25


def test_sparse_weights_become_plain_weights_and_their_lists_of_nonzeros_are_gone() -> None:
    full, inputs = lower(model_of(DENSE)), inputs_of(DENSE, 3)
    sparse, want = with_sparse_weights(full)
    plain = with_plain_weights(sparse)
    np.testing.assert_allclose(inputs["x"] @ want.T, run_tflite(plain, inputs)[0], rtol=1e-4, atol=1e-4)
    assert len(plain) < len(full) + 1024  # the lists alone have four times as many bytes


def with_sparse_weights(content: bytes) -> tuple[bytes, Any]:
    """Return the file with half of its weights set to zero and stored as sparse, and these weights."""
    from ai_edge_litert import schema_py_generated as schema

    model = unpacked(content)
    graph = model.subgraphs[0]
    dense = next(one for one in graph.operators if code_of(model, one) == schema.BuiltinOperator.FULLY_CONNECTED)
    tensor = graph.tensors[dense.inputs[1]]
    weights = np.frombuffer(bytes(model.buffers[tensor.buffer].data), np.float32).reshape(tensor.shape).copy()
    weights[:, ::2] = 0
    rows, columns = (axis.astype(np.int32) for axis in np.nonzero(weights))
    model.buffers[tensor.buffer].data = weights[rows, columns].view(np.uint8)
    outer, inner = schema.DimensionMetadataT(), schema.DimensionMetadataT()
    outer.format, outer.denseSize = schema.DimensionType.DENSE, len(weights)
    inner.format = schema.DimensionType.SPARSE_CSR
    ends, numbers = schema.Int32VectorT(), schema.Int32VectorT()
    ends.values, numbers.values = np.searchsorted(rows, np.arange(len(weights) + 1)).astype(np.int32), columns
    inner.arraySegmentsType = inner.arrayIndicesType = schema.SparseIndexVector.Int32Vector
    inner.arraySegments, inner.arrayIndices = ends, numbers
    tensor.sparsity = schema.SparsityParametersT()
    tensor.sparsity.traversalOrder, tensor.sparsity.dimMetadata = [0, 1], [outer, inner]
    code, unpack, result = schema.OperatorCodeT(), schema.OperatorT(), schema.TensorT()
    code.builtinCode, code.deprecatedBuiltinCode, code.version = schema.BuiltinOperator.DENSIFY, 124, 1
    result.name, result.shape, result.type = b"dense", tensor.shape, tensor.type
    model.buffers.append(schema.BufferT())
    result.buffer = len(model.buffers) - 1
    unpack.opcodeIndex, unpack.inputs, unpack.outputs = (
        len(model.operatorCodes),
        [int(dense.inputs[1])],
        [len(graph.tensors)],
    )
    model.operatorCodes.append(code)
    graph.tensors.append(result)
    dense.inputs = [dense.inputs[0], unpack.outputs[0], *dense.inputs[2:]]
    graph.operators.insert(0, unpack)
    return packed(model), weights


def test_a_model_with_plain_weights_stays_unchanged() -> None:
    full = lower(model_of(DENSE))
    assert with_plain_weights(full) is full


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
    assert HALF_ELEMENTS_MIN > 4
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


WEIGHTS: dict[str, NDArray[np.float32]] = {"w": random(64, 64) / np.float32(8), "v": random(64, 64, seed=1)}
# Each step reads the same weights, as in an LSTM that an exporter unrolls.
STEPS = Case("steps", "a = MatMul(x, w)  b = MatMul(a, w)  c = MatMul(b, w)  y = MatMul(c, v)", {"x": (64,)}, WEIGHTS)
SAMPLES = [list(inputs_of(STEPS, 1, seed).values()) for seed in range(10)]
FORMS: dict[str, Callable[[bytes], bytes]] = {
    "fp32": bytes,
    "fp16": with_half_weights,
    "dynamic-range": with_int8_weights,
    "int8": lambda content: quantize_int8(content, SAMPLES),
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_that_several_operators_read_are_written_once(form: str) -> None:
    model, inputs = model_of(STEPS), inputs_of(STEPS, 2)
    whole = FORMS[form](lower(model, share_weights=False))  # as for a search that leaves one of the steps in float
    shared, shared_first = with_shared_weights(whole), FORMS[form](lower(model))
    weight_bytes = WEIGHTS["w"].size * {"fp32": 4, "fp16": 2}.get(form, 1)
    assert 0 <= len(whole) - len(shared) - 2 * weight_bytes < 1024
    assert len(shared_first) <= len(shared)
    for content in (shared, shared_first):
        np.testing.assert_array_equal(run_tflite(content, inputs)[0], run_tflite(whole, inputs)[0])


def test_a_file_without_equal_weights_stays_unchanged() -> None:
    case = Case("two", "h = MatMul(x, w)  y = MatMul(h, v)", {"x": (64,)}, WEIGHTS)
    whole = lower(model_of(case))
    assert with_shared_weights(whole) is whole
