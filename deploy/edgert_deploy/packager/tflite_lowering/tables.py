"""A .tflite file as editable tables of TFLite's schema."""

from __future__ import annotations

from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.writer import AlignedBuffer


def unpacked(content: bytes) -> Any:
    return schema.ModelT.InitFromObj(schema.Model.GetRootAs(content, 0))


def code_of(model: Any, operator: Any) -> int:
    """Return the number of a built-in operator. Old files have the number only in the deprecated field."""
    code = model.operatorCodes[operator.opcodeIndex]
    return int(max(code.builtinCode, code.deprecatedBuiltinCode))


def float_constant(model: Any, tensor: Any, elements_min: int) -> NDArray[np.float32] | None:
    """Return the flat values of an FP32 constant; None for any other tensor, or a smaller constant."""
    data = model.buffers[tensor.buffer].data
    if tensor.type != schema.TensorType.FLOAT32 or data is None or len(data) < 4 * elements_min:
        return None
    return np.frombuffer(bytes(data), np.float32)


def add_buffer(model: Any, values: NDArray[Any]) -> int:
    """Add the values of a constant; return the number of their buffer."""
    buffer = schema.BufferT()
    buffer.data = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    model.buffers.append(buffer)
    return len(model.buffers) - 1


def add_tensor(graph: Any, name: bytes, kind: str, shape: Any, signature: Any = None, buffer: int = 0) -> int:
    """Add a tensor of the type `kind`; return its number."""
    tensor = schema.TensorT()
    tensor.name, tensor.type, tensor.buffer = name, getattr(schema.TensorType, kind), buffer
    tensor.shape, tensor.shapeSignature = shape, signature
    graph.tensors.append(tensor)
    return len(graph.tensors) - 1


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
