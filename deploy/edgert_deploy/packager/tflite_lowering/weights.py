"""Other forms of the weights in a .tflite file: FP16, unpacked to FP32, and shared by equal tensors.

For FP16, TFLite's own converter writes the same form (post-training float16 quantization): each float constant is
FLOAT16, and a DEQUANTIZE reads it. XNNPACK converts the constant once, when it loads the file. So the file has half the
size, and the arithmetic stays FP32.

Published models often store weights in FP16, or in sparse form, which a DENSIFY reads. TFLite's quantizer crashes on
these models. The quantizer also cannot quantize weights that an operator computes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from edgert_deploy.packager.sources.tflite_model import run_on_zeros
from edgert_deploy.packager.tflite_lowering.calibrate import interpreter_with_all_tensors
from edgert_deploy.packager.tflite_lowering.tables import (
    add_buffer,
    add_tensor,
    code_of,
    float_constant,
    packed,
    unpacked,
)
from edgert_deploy.packager.tflite_lowering.writer import operator_code

# For a smaller constant in FP16, the additional tensor and operator need more bytes than FP16 saves.
HALF_ELEMENTS_MIN = 64
SHARED_BYTES_MIN = 4096  # smaller equal tensors, such as biases of zeros, are not shared
UNPACKING = frozenset((schema.BuiltinOperator.DEQUANTIZE, schema.BuiltinOperator.DENSIFY))


def with_half_weights(content: bytes) -> bytes:
    """Return the float32 file with its large constants in FP16, clipped to the range of FP16."""
    model = unpacked(content)
    graph = model.subgraphs[0]
    limit = float(np.finfo(np.float16).max)
    operators = []
    for index, tensor in enumerate(list(graph.tensors)):
        values = float_constant(model, tensor, HALF_ELEMENTS_MIN)
        if values is None:
            continue
        operators.append(schema.OperatorT())
        operators[-1].opcodeIndex = len(model.operatorCodes)
        half = add_tensor(graph, tensor.name + b"_half", "FLOAT16", tensor.shape, buffer=tensor.buffer)
        operators[-1].inputs, operators[-1].outputs = [half], [index]
        model.buffers[tensor.buffer].data = np.clip(values, -limit, limit).astype(np.float16).view(np.uint8)
        tensor.buffer = 0
    if operators:
        model.operatorCodes.append(operator_code("DEQUANTIZE"))
        model.operatorCodes[-1].version = 3  # the first version that accepts FLOAT16
        graph.operators = operators + list(graph.operators)
    return packed(model)


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
        graph.tensors[index].buffer, graph.tensors[index].sparsity = add_buffer(model, values[index]), None
    _drop_unread(model)
    return packed(model)


def with_shared_weights(content: bytes) -> bytes:
    """Return the file with one copy of equal large weights, such as weights of an unrolled LSTM's steps."""
    model = unpacked(content)
    first: dict[bytes, int] = {}
    changed = False
    for tensor in (tensor for graph in model.subgraphs for tensor in graph.tensors):
        data = model.buffers[tensor.buffer].data
        if data is None or len(data) < SHARED_BYTES_MIN:
            continue
        shared = first.setdefault(bytes(data), tensor.buffer)
        if shared != tensor.buffer:
            model.buffers[tensor.buffer] = schema.BufferT()
            tensor.buffer, changed = shared, True
    return packed(model) if changed else content


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
