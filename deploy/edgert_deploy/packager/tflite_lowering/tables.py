"""A .tflite file as editable tables of TFLite's schema."""

from __future__ import annotations

from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema

from edgert_deploy.packager.tflite_lowering.writer import AlignedBuffer

SHARED_BYTES_MIN = 4096  # smaller equal tensors, such as biases of zeros, are not shared


def unpacked(content: bytes) -> Any:
    return schema.ModelT.InitFromObj(schema.Model.GetRootAs(content, 0))


def code_of(model: Any, operator: Any) -> int:
    """Return the number of a built-in operator. Old files have the number only in the deprecated field."""
    code = model.operatorCodes[operator.opcodeIndex]
    return int(max(code.builtinCode, code.deprecatedBuiltinCode))


def packed(model: Any) -> bytes:
    """Return the changed tables of a model as a file, with weights aligned for the kernels.

    The file omits codes that no operator uses, because interpreters look up every code.
    """
    operators = [operator for graph in model.subgraphs for operator in graph.operators or ()]
    used = sorted({operator.opcodeIndex for operator in operators})
    model.operatorCodes = [model.operatorCodes[index] for index in used]
    for operator in operators:
        operator.opcodeIndex = used.index(operator.opcodeIndex)
    for i, buffer in enumerate(model.buffers):
        if buffer.data is not None and len(buffer.data):
            model.buffers[i] = AlignedBuffer()
            model.buffers[i].data = np.frombuffer(bytes(buffer.data), np.uint8)
    builder = flatbuffers.Builder(sum(len(b.data) + 32 for b in model.buffers if b.data is not None) + (1 << 16))
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


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
