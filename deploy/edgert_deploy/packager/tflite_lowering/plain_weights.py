"""Unpacks FP16 and sparse weights of a .tflite file to plain FP32 weights.

Published models often store weights in FP16, which a DEQUANTIZE reads, or in sparse form, which a DENSIFY reads.
TFLite's quantizer crashes on these models. The quantizer also cannot quantize weights that an operator computes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from edgert_deploy.packager.sources.tflite_model import run_on_zeros
from edgert_deploy.packager.tflite_lowering.calibrate import interpreter_with_all_tensors
from edgert_deploy.packager.tflite_lowering.tables import code_of, packed, unpacked

UNPACKING = frozenset((schema.BuiltinOperator.DEQUANTIZE, schema.BuiltinOperator.DENSIFY))


def with_plain_weights(content: bytes) -> bytes:
    """Replace each DEQUANTIZE and DENSIFY that reads a constant by its result; return the file."""
    model = unpacked(content)
    graph = model.subgraphs[0]
    known = {i for i, tensor in enumerate(graph.tensors) if _has_data(model, tensor)}
    kept, results = [], []
    for operator in graph.operators:
        if code_of(model, operator) in UNPACKING and operator.inputs[0] in known:
            known.add(operator.outputs[0])
            results.append(int(operator.outputs[0]))
        else:
            kept.append(operator)
    if not results:
        return content
    values = _values(content, results)
    graph.operators = kept
    for index in results:
        tensor, buffer = graph.tensors[index], schema.BufferT()
        buffer.data = np.ascontiguousarray(values[index]).reshape(-1).view(np.uint8)
        tensor.buffer, tensor.sparsity = len(model.buffers), None
        model.buffers.append(buffer)
    _drop_unread(model)
    return packed(model)


def _values(content: bytes, tensors: list[int]) -> dict[int, Any]:
    """Run the model once on zeros; return the values of `tensors`."""
    interpreter = interpreter_with_all_tensors(content)
    run_on_zeros(interpreter)
    return {index: interpreter.get_tensor(index).astype(np.float32) for index in tensors}


def _drop_unread(model: Any) -> None:
    """Empty the buffers and lists of nonzeros that no operator reads any more. Tensors keep their indices."""
    graph = model.subgraphs[0]
    read = {int(i) for operator in graph.operators for i in operator.inputs} | {int(i) for i in graph.outputs}
    read_buffers = {graph.tensors[i].buffer for i in read if i >= 0}
    for i, buffer in enumerate(model.buffers):
        if i not in read_buffers:
            buffer.data = None
    for tensor in graph.tensors:
        if tensor.buffer not in read_buffers:
            tensor.buffer, tensor.sparsity = 0, None


def _has_data(model: Any, tensor: Any) -> bool:
    data = model.buffers[tensor.buffer].data
    return data is not None and len(data) > 0
