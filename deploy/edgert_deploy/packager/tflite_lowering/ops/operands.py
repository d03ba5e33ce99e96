"""Operands in one layout that broadcast against each other, and sequences of element-wise operators."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.graph import BatchShape, Node
from edgert_deploy.packager.tflite_lowering.lowering import Layout, Lowering, Uncovered
from edgert_deploy.packager.tflite_lowering.writer import TENSOR_TYPES

BOOL = np.dtype("bool")
INT32 = np.dtype("int32")
INT64 = np.dtype("int64")


class Steps:
    """A sequence of element-wise operators in one value's shape and layout; the last one makes the node's result."""

    def __init__(self, lowering: Lowering, node: Node) -> None:
        self.lowering, self.node = lowering, node
        self.layout = lowering.layout(node.inputs[0])
        self.x = lowering.tensor(node.inputs[0], self.layout)
        self.shape = lowering.laid_out(lowering.shape(node.inputs[0]), self.layout)
        self.dtype = lowering.dtype(node.inputs[0])

    def constant(self, value: float, dtype: np.dtype[Any] | None = None) -> int:
        return self.lowering.constant(value, f"{self.node.outputs[0]}_constant", dtype or self.dtype)

    def between(
        self,
        code: str,
        *inputs: int,
        activation: str = "NONE",
        dtype: np.dtype[Any] | None = None,
        shape: BatchShape | None = None,
        **options: Any,
    ) -> int:
        """Write a step of the value's own shape and dtype, or of `shape` and `dtype`."""
        output = self.lowering.scratch(f"{self.node.outputs[0]}_step", shape or self.shape, dtype or self.dtype)
        return self._write(code, inputs, output, activation, **options)

    def last(self, code: str, *inputs: int, activation: str = "NONE", **options: Any) -> None:
        output = self.lowering.define(self.node.outputs[0], self.layout)
        self._write(code, inputs, output, activation, **options)

    def cast(self, tensor: int, before: np.dtype[Any], after: np.dtype[Any]) -> int:
        output = self.lowering.scratch(f"{self.node.outputs[0]}_step", self.shape, after)
        return self.lowering.cast(tensor, output, before, after)

    def _write(self, code: str, inputs: tuple[int, ...], output: int, activation: str, **options: Any) -> int:
        if code in ("ADD", "SUB", "MUL", "DIV"):
            return self.lowering.arithmetic(code, list(inputs), output, activation)
        self.lowering.emit(code, list(inputs), [output], **options)
        return output


class Operands:
    """A node's inputs, ready to broadcast: `tensors` in one `layout`, and each one's shape at ONNX's rank."""

    def __init__(self, lowering: Lowering, node: Node, inputs: tuple[str, ...] | None = None) -> None:
        self.lowering, self.node = lowering, node
        names = node.inputs if inputs is None else inputs
        self.rank = lowering.shape(node.outputs[0]).rank
        ranks = {lowering.shape(name).rank for name in names if not lowering.is_constant(name)}
        self.layout = lowering.common_layout(names) if ranks == {self.rank} else Layout.NATIVE
        self.tensors = [self._operand(name) for name in names]
        self.shapes = [_of_rank(lowering.shape(name), self.rank) for name in names]
        self.dtype = lowering.dtype(names[-1])

    def define(self) -> int:
        """Return the tensor of the node's result."""
        return self.lowering.define(self.node.outputs[0], self.layout)

    def scratch(self, shape: BatchShape, dtype: np.dtype[Any] | None = None) -> int:
        """Return a new tensor; `shape` is in ONNX's order."""
        laid = self.lowering.laid_out(shape, self.layout)
        return self.lowering.scratch(f"{self.node.outputs[0]}_step", laid, dtype or self.dtype)

    def last(self, code: str, **options: Any) -> None:
        self.lowering.emit(code, self.tensors, [self.define()], **options)

    def joined(self, code: str, output: int | None = None) -> int:
        """Join all operands, two at a time, by the binary operator `code`; into `output` where it is given."""
        held, shape = self.tensors[0], self.shapes[0]
        for place, (operand, other) in enumerate(zip(self.tensors[1:], self.shapes[1:], strict=True), start=2):
            shape = broadcast(shape, other)
            is_last = place == len(self.tensors)
            target = output if is_last and output is not None else self.scratch(shape)
            self.lowering.emit(code, [held, operand], [target])
            held = target
        return held

    def _operand(self, name: str) -> int:
        if not self.lowering.is_constant(name):
            return self.lowering.tensor(name, self.layout)
        return broadcast_constant(self.lowering, self.lowering.value(name, f"{name!r}"), name, self.rank, self.layout)


def broadcast(one: BatchShape, other: BatchShape) -> BatchShape:
    """Return the shape of two values of one rank that broadcast against each other."""
    pairs = list(zip(one.dims, other.dims, one.signature, other.signature, strict=True))
    dims = tuple(b if a == 1 else a for a, b, _, _ in pairs)
    signature = tuple(-1 if -1 in (s, t) else (b if a == 1 else a) for a, b, s, t in pairs)
    return BatchShape(dims, signature)


def _of_rank(shape: BatchShape, rank: int) -> BatchShape:
    ones = (1,) * (rank - shape.rank)
    return BatchShape(ones + shape.dims, ones + shape.signature)


def broadcast_constant(lowering: Lowering, array: NDArray[Any], name: str, rank: int, layout: Layout) -> int:
    """Write `array` as the operand of a value of `rank` in `layout`, with its axes in the same order."""
    if layout is Layout.CHANNELS_LAST and array.size > 1:
        array = channels_last_constant(array, rank)
    if array.dtype not in TENSOR_TYPES:
        raise Uncovered(f"{name!r} has dtype {array.dtype}; convert the model to float32")
    return lowering.constant(array, name, array.dtype)


def channels_last_constant(array: NDArray[Any], rank: int) -> NDArray[Any]:
    array = array.reshape((1,) * (rank - array.ndim) + array.shape)
    array = np.moveaxis(array, 1, -1)
    return array[:, None] if rank == 3 else array


def comparable_zero(lowering: Lowering, label: str) -> int:
    """Return a float 0 that is cut out of a constant with another element.

    The quantiser gives a constant of zeros alone a scale of 1, at which TFLite's INT8 comparisons abort.
    """
    pair = lowering.constant([0.0, 0.5], f"{label}_pair")
    return lowering.cut(pair, [0], [1], lowering.scratch(f"{label}_zero", BatchShape.fixed(1)))
