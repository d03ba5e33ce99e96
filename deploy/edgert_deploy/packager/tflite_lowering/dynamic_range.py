"""Quantizes only the weights of a .tflite file to INT8 ("dynamic range"); activations stay in float.

The kernels of FULLY_CONNECTED and CONV_2D accept float data with INT8 weights. In each run, a kernel computes the range
of its data, quantizes the data, and multiplies in INT8. So the range fits every sample, without calibration. This suits
transformers, because their activations have outliers. Weights have a scale for each output channel. A table of
embeddings has a scale for each row: the file casts the rows that it reads to float, and multiplies each by its scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

from edgert.errors import BuildFailed
from edgert_deploy.packager.tflite_lowering.tables import (
    add_buffer,
    add_tensor,
    code_of,
    float_constant,
    packed,
    unpacked,
)
from edgert_deploy.packager.tflite_lowering.writer import operator_code

# For smaller weights, the quantization of the data in each run costs more time than INT8 saves.
ELEMENTS_MIN = 1024
LEVELS = 127
# An operator whose kernel accepts float data with INT8 weights -> the first version of this operator that accepts a
# scale per channel.
VERSIONS = {"FULLY_CONNECTED": 12, "CONV_2D": 5}


def with_int8_weights(content: bytes, is_float: Callable[[str], bool] = lambda name: False) -> bytes:
    """Return the model with its large weights in INT8. Raises BuildFailed if no weight is large.

    An operator stays in float if `is_float` is true for the name of its first output.
    """
    return packed(_Rewriting(unpacked(content), is_float).done())


class _Rewriting:
    """Replaces the operators of a model. If several operators read a weight, it is quantized once."""

    def __init__(self, model: Any, is_float: Callable[[str], bool]) -> None:
        self._model = model
        self._graph = model.subgraphs[0]
        self._is_float = is_float
        self._codes: dict[tuple[str, int], int] = {}
        self._scales: dict[int, NDArray[np.float32]] = {}  # tensor -> its scales

    def done(self) -> Any:
        operators: list[Any] = []
        for operator in list(self._graph.operators):
            operators += self._rewritten(operator)
        if not self._scales:
            raise BuildFailed(
                f"no convolution, matrix product or table of the model has {ELEMENTS_MIN} weights or more. To quantize "
                "smaller weights would save nothing: choose another recipe or --precision fp16"
            )
        self._graph.operators = operators
        return self._model

    def _rewritten(self, operator: Any) -> list[Any]:
        code = code_of(self._model, operator)
        kind = next((name for name in (*VERSIONS, "GATHER") if getattr(schema.BuiltinOperator, name) == code), "")
        if not kind or self._is_float(self._graph.tensors[operator.outputs[0]].name.decode()):
            return [operator]
        if kind == "GATHER":
            by_row = not operator.builtinOptions.axis and not operator.builtinOptions.batchDims
            return self._gathered(operator) if by_row and self._quantized(operator.inputs[0]) else [operator]
        if self._quantized(operator.inputs[1]):
            tensor, scales = self._graph.tensors[operator.inputs[1]], self._scales[operator.inputs[1]]
            tensor.quantization = schema.QuantizationParametersT()
            tensor.quantization.scale, tensor.quantization.zeroPoint = scales, np.zeros(len(scales), np.int64)
            operator.opcodeIndex = self._code(kind, VERSIONS[kind])
            if kind == "FULLY_CONNECTED":
                operator.builtinOptions.asymmetricQuantizeInputs = True
        return [operator]

    def _quantized(self, index: int) -> bool:
        """Quantize a constant in place, symmetrically along axis 0; return whether it is in INT8 now."""
        tensor = self._graph.tensors[index]
        if index in self._scales:
            return True
        flat = float_constant(self._model, tensor, ELEMENTS_MIN)
        if flat is None:
            return False
        values = flat.reshape([int(length) for length in tensor.shape])
        largest = np.abs(values.reshape(len(values), -1)).max(axis=1)
        self._scales[index] = scales = np.where(largest > 0, largest / LEVELS, 1.0).astype(np.float32)
        steps = np.rint(values / scales.reshape(-1, *[1] * (values.ndim - 1)))
        self._model.buffers[tensor.buffer].data = np.clip(steps, -LEVELS, LEVELS).astype(np.int8).view(np.uint8)
        tensor.type = schema.TensorType.INT8
        return True

    def _gathered(self, gather: Any) -> list[Any]:
        """Return the operators that read INT8 rows, and multiply each row by its scale."""
        table, result = gather.inputs[0], self._graph.tensors[gather.outputs[0]]
        signature = result.shape if result.shapeSignature is None else result.shapeSignature
        name, shape = result.name, (list(result.shape), list(signature))
        of_row = [1] * (len(self._graph.tensors[table].shape) - 1)
        before, before_open = (lengths[: len(lengths) - len(of_row)] for lengths in shape)
        each, buffer = [len(self._scales[table]), *of_row], add_buffer(self._model, self._scales[table])
        graph = self._graph
        scales = add_tensor(graph, name + b"_scales", "FLOAT32", each, each, buffer)
        rows = add_tensor(graph, name + b"_int8", "INT8", *shape)
        wide = add_tensor(graph, name + b"_steps", "FLOAT32", *shape)
        factor = add_tensor(graph, name + b"_scale", "FLOAT32", [*before, *of_row], [*before_open, *of_row])
        options = gather.builtinOptions
        output, gather.outputs, gather.opcodeIndex = gather.outputs[0], [rows], self._code("GATHER", 2)
        return [
            gather,
            self._operator("GATHER", [scales, gather.inputs[1]], factor, options, "GatherOptions"),
            self._operator("CAST", [rows], wide, schema.CastOptionsT(), "CastOptions"),
            self._operator("MUL", [wide, factor], output, schema.MulOptionsT(), "MulOptions"),
        ]

    def _operator(self, kind: str, inputs: list[int], output: int, options: Any, options_type: str) -> Any:
        operator = schema.OperatorT()
        operator.opcodeIndex, operator.inputs, operator.outputs = self._code(kind, 1), inputs, [output]
        operator.builtinOptionsType, operator.builtinOptions = getattr(schema.BuiltinOptions, options_type), options
        return operator

    def _code(self, kind: str, version: int) -> int:
        if (kind, version) not in self._codes:
            self._codes[kind, version] = len(self._model.operatorCodes)
            code = operator_code(kind)
            code.version = version
            self._model.operatorCodes.append(code)
        return self._codes[kind, version]
