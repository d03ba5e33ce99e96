"""Stores the weights of a .tflite file in FP16: half the size, the same FP32 arithmetic.

TFLite's own converter writes the same form (post-training float16 quantization): each float constant is FLOAT16, and a
DEQUANTIZE reads it. XNNPACK converts the constant once, when it loads the file.
"""

from __future__ import annotations

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from edgert_deploy.packager.tflite_lowering.tables import packed, unpacked
from edgert_deploy.packager.tflite_lowering.writer import operator_code

# For a smaller constant, the additional tensor and operator need more bytes than FP16 saves.
ELEMENTS_MIN = 64


def with_half_weights(content: bytes) -> bytes:
    """Return the float32 file with its large constants in FP16, clipped to the range of FP16."""
    model = unpacked(content)
    graph = model.subgraphs[0]
    code = len(model.operatorCodes)
    limit = float(np.finfo(np.float16).max)
    operators = []
    for index, tensor in enumerate(list(graph.tensors)):
        data = model.buffers[tensor.buffer].data
        if tensor.type != schema.TensorType.FLOAT32 or data is None or len(data) < 4 * ELEMENTS_MIN:
            continue
        values = np.frombuffer(bytes(data), np.float32)
        half = schema.TensorT()
        half.name, half.type, half.shape = tensor.name + b"_half", schema.TensorType.FLOAT16, tensor.shape
        half.buffer, tensor.buffer = tensor.buffer, 0
        model.buffers[half.buffer].data = np.clip(values, -limit, limit).astype(np.float16).view(np.uint8)
        graph.tensors.append(half)
        operators.append(schema.OperatorT())
        operators[-1].opcodeIndex = code
        operators[-1].inputs, operators[-1].outputs = [len(graph.tensors) - 1], [index]
    if operators:
        model.operatorCodes.append(operator_code("DEQUANTIZE"))
        model.operatorCodes[-1].version = 3  # the first version that accepts FLOAT16
        graph.operators = operators + list(graph.operators)
    return packed(model)
