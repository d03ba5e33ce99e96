"""FP16 and sparse weights of published files become plain weights, which TFLite's quantizer accepts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from edgert_deploy.packager.tflite_lowering import lower
from edgert_deploy.packager.tflite_lowering.half import with_half_weights
from edgert_deploy.packager.tflite_lowering.plain_weights import with_plain_weights
from edgert_deploy.packager.tflite_lowering.quantize import quantize_int8
from edgert_deploy.packager.tflite_lowering.tables import code_of, packed, unpacked
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
