"""Writes a .tflite file: tensors, operators and buffers, in the terms of the TFLite schema.

Source of the format: tensorflow/compiler/mlir/lite/schema/schema.fbs (file identifier `TFL3`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.graph import BatchShape

DESCRIPTION = "EdgeRT"
SIGNATURE_KEY = "serving_default"
# The kernels read weights with vector loads straight from the mapped file.
BUFFER_ALIGNMENT = 16
# The codes up to LAST_DEPRECATED_CODE are also in a one-byte field, which runtimes older than 2020 read.
LAST_DEPRECATED_CODE = 127

TENSOR_TYPES = {
    np.dtype(name): getattr(schema.TensorType, name.upper())
    for name in ("float32", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "bool")
}

# The text between the name and the step, in the name of a tensor that exists once for each step of a sequence.
STEP_MARK = "@step"
# The end of the name of each tensor whose operator stays in float in an INT8 file.
FLOAT_MARK = "@float"

# The tables of options whose names do not follow from their operators' names.
SHARED_OPTIONS = {
    "L2_NORMALIZATION": "L2NormOptions",
    **dict.fromkeys(("AVERAGE_POOL_2D", "MAX_POOL_2D"), "Pool2DOptions"),
    **dict.fromkeys(
        ("MEAN", "SUM", *(f"REDUCE_{kind}" for kind in ("ALL", "ANY", "MAX", "MIN", "PROD"))), "ReducerOptions"
    ),
}
# Operators whose kernels read their options even if all of them are defaults.
WITH_OPTIONS = frozenset(
    ("ADD", "BATCH_MATMUL", "DIV", "FULLY_CONNECTED", "L2_NORMALIZATION", "MUL", "SUB", "TRANSPOSE")
)


class Writer:
    """Collects tensors and operators. An index identifies a tensor."""

    def __init__(self) -> None:
        self._tensors: list[Any] = []
        self._operators: list[Any] = []
        self._buffers: list[Any] = [schema.BufferT()]  # in the schema, buffer 0 is always empty
        self._codes: dict[str, int] = {}
        self._names: dict[str, int] = {}
        self._shared: dict[tuple[bytes, tuple[int, ...], str], int] = {}

    def tensor(self, name: str, shape: BatchShape, dtype: np.dtype[Any], buffer: int = 0) -> int:
        """Add a tensor. If its name exists already, append a number to the name."""
        tensor = schema.TensorT()
        tensor.name = self._unique(name)
        tensor.type = TENSOR_TYPES[dtype]
        tensor.buffer = buffer
        _shape(tensor, shape)
        self._tensors.append(tensor)
        return len(self._tensors) - 1

    def name_result(self, tensor: int, name: str, shape: BatchShape) -> None:
        """Give `tensor` the name and the shape of its ONNX value."""
        self._tensors[tensor].name = self._unique(name)
        _shape(self._tensors[tensor], shape)

    def constant(self, array: NDArray[Any], name: str, *, shared: bool = False) -> int:
        """Add a tensor with a value.

        Equal constants of integers (axes, shapes, permutations) share one tensor. Equal constants of floats do so only
        with `shared`, because the quantizer rewrites each of them in place, with a scale for its reader.
        """
        key = (array.tobytes(), array.shape, array.dtype.str)
        shared |= array.dtype.kind != "f"
        if shared and key in self._shared:
            return self._shared[key]
        buffer = AlignedBuffer()
        buffer.data = np.frombuffer(key[0], np.uint8)
        self._buffers.append(buffer)
        index = self.tensor(name, BatchShape.fixed(*array.shape), array.dtype, len(self._buffers) - 1)
        if shared:
            self._shared[key] = index
        return index

    def operator(self, code: str, inputs: Sequence[int], outputs: Sequence[int], **options: Any) -> None:
        operator = schema.OperatorT()
        operator.opcodeIndex = self._codes.setdefault(code, len(self._codes))
        operator.inputs, operator.outputs = list(inputs), list(outputs)
        if options or code in WITH_OPTIONS:
            table = _options_of(code)
            operator.builtinOptionsType = getattr(schema.BuiltinOptions, table)
            operator.builtinOptions = getattr(schema, f"{table}T")()
            for name, value in options.items():
                assert hasattr(operator.builtinOptions, name), f"{table} has no {name}"
                setattr(operator.builtinOptions, name, value)
        self._operators.append(operator)

    def rename(self, tensor: int, name: str) -> None:
        """Give `tensor` the name of an input or output of the model; rename any other tensor with this name."""
        for other in self._tensors:
            if other.name == name:
                other.name = self._unique(f"{name}_inner")
        self._tensors[tensor].name = name

    def finish(self, inputs: dict[str, int], outputs: dict[str, int]) -> bytes:
        """Return the file, with `inputs` and `outputs` (name -> tensor) as its one signature."""
        graph = schema.SubGraphT()
        graph.name = "main"
        graph.tensors, graph.operators = self._tensors, self._operators
        graph.inputs, graph.outputs = list(inputs.values()), list(outputs.values())
        model = schema.ModelT()
        model.version = 3
        model.description = DESCRIPTION
        model.subgraphs, model.buffers = [graph], self._buffers
        model.operatorCodes = [operator_code(code) for code in self._codes]
        model.signatureDefs = [_signature(inputs, outputs)]
        builder = flatbuffers.Builder(sum(b.size_bytes for b in self._buffers[1:]) + (1 << 16))
        builder.Finish(model.Pack(builder), b"TFL3")
        return bytes(builder.Output())

    def _unique(self, name: str) -> str:
        count = self._names.get(name, 0)
        self._names[name] = count + 1
        return self._unique(f"{name}__{count}") if count else name


class AlignedBuffer(schema.BufferT):  # type: ignore[misc]  # the generated schema has no types
    """A buffer whose data starts at a multiple of BUFFER_ALIGNMENT. The schema's own class does not align."""

    @property
    def size_bytes(self) -> int:
        return len(self.data) + BUFFER_ALIGNMENT

    def Pack(self, builder: Any) -> Any:
        builder.StartVector(1, len(self.data), BUFFER_ALIGNMENT)
        builder.head -= len(self.data)
        builder.Bytes[builder.head : builder.head + len(self.data)] = self.data.tobytes()
        data = builder.EndVector()
        schema.BufferStart(builder)
        schema.BufferAddData(builder, data)
        return schema.BufferEnd(builder)


def _shape(tensor: Any, shape: BatchShape) -> None:
    tensor.shape = list(shape.dims)
    tensor.shapeSignature = None if shape.signature == shape.dims else list(shape.signature)


def _options_of(code: str) -> str:
    """Return the name of an operator's options table, such as `BatchMatMulOptions` for BATCH_MATMUL."""
    plain = f"{code.replace('_', '')}OPTIONS"
    return SHARED_OPTIONS.get(code) or next(name for name in vars(schema.BuiltinOptions) if name.upper() == plain)


def operator_code(code: str) -> Any:
    builtin = getattr(schema.BuiltinOperator, code)
    table = schema.OperatorCodeT()
    table.builtinCode = builtin
    table.deprecatedBuiltinCode = min(builtin, LAST_DEPRECATED_CODE)
    table.version = 1
    return table


def _signature(inputs: dict[str, int], outputs: dict[str, int]) -> Any:
    signature = schema.SignatureDefT()
    signature.signatureKey = SIGNATURE_KEY
    signature.subgraphIndex = 0
    signature.inputs = [_tensor_map(name, tensor) for name, tensor in inputs.items()]
    signature.outputs = [_tensor_map(name, tensor) for name, tensor in outputs.items()]
    return signature


def _tensor_map(name: str, tensor: int) -> Any:
    table = schema.TensorMapT()
    table.name, table.tensorIndex = name, tensor
    return table
