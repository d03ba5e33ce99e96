"""A tensor of the new file, with Python operators, so that the lowering writes nodes as formulas.

`(x - mean) * inverse` writes a SUB and a MUL. If one operand is a number or an array, it becomes a constant with the
dtype of the other operand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import ArrayLike, NDArray

from edgert_deploy.packager.tflite_lowering.graph import BatchShape
from edgert_deploy.packager.tflite_lowering.writer import TENSOR_TYPES

if TYPE_CHECKING:
    from edgert_deploy.packager.tflite_lowering.lowering import Lowering

FLOAT32, BOOL, INT32, INT64 = map(np.dtype, ("float32", "bool", "int32", "int64"))


class Unsupported(Exception):
    """A node cannot be lowered. The text names the unsupported part, and a workaround if there is one."""


class NeedsFixedBatch(Unsupported):
    """A node can be lowered only for a fixed batch. `reason` says how the node depends on the batch."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"{reason}; export the model with its batch fixed to 1")


def require_fixed(shape: BatchShape, axes: Iterable[int], reason: str) -> None:
    """Raise NeedsFixedBatch for `reason` if one of `axes` grows with the batch."""
    if any(shape.signature[axis] == -1 for axis in axes):
        raise NeedsFixedBatch(reason)


@dataclass(frozen=True)
class Value:
    """A tensor, its shape in the file's order of axes, and its dtype.

    An operator makes a new value. The name of the new value's tensor starts with `name`, the name of the current ONNX
    node's result, and ends with `step` (recurrent.py). From `name`, the quantizer recognizes the layers that stay in
    float.
    """

    lowering: Lowering
    name: str
    tensor: int
    shape: BatchShape
    dtype: np.dtype[Any]
    step: str = ""

    def op(
        self,
        code: str,
        *operands: Value | ArrayLike,
        shape: BatchShape | None = None,
        dtype: np.dtype[Any] | None = None,
        activation: str = "NONE",
        **options: Any,
    ) -> Value:
        """Write an operator of this value and `operands`. The result has this shape and dtype by default."""
        if activation != "NONE":
            options["fusedActivationFunction"] = activation_code(activation)
        (made,) = self.op_of_many(code, [(shape or self.shape, dtype or self.dtype)], *operands, **options)
        return made

    def op_of_many(
        self,
        code: str,
        results: Sequence[tuple[BatchShape, np.dtype[Any]]],
        *operands: Value | ArrayLike,
        **options: Any,
    ) -> list[Value]:
        """Write an operator with several results, each with its own shape and dtype."""
        writer, name = self.lowering.writer, f"{self.name}_{code.lower()}{self.step}"
        made = [replace(self, tensor=writer.tensor(name, *one), shape=one[0], dtype=one[1]) for one in results]
        inputs = [self.tensor, *(self.operand(one).tensor for one in operands)]
        writer.operator(code, inputs, [one.tensor for one in made], **options)
        return made

    def operand(self, given: Value | ArrayLike) -> Value:
        return given if isinstance(given, Value) else self.constant(given)

    def constant(self, values: ArrayLike, dtype: Any = None) -> Value:
        array = np.asarray(values, dtype or self.dtype)
        tensor = self.lowering.constant(array, f"{self.name}_constant")
        return replace(self, tensor=tensor, shape=BatchShape.fixed(*array.shape), dtype=array.dtype)

    def indices(self, values: ArrayLike) -> Value:
        """Write axes, lengths, amounts or a permutation as a constant in int32."""
        return self.constant(values, INT32)

    # --- element by element

    def binary(self, code: str, other: Value | ArrayLike, **options: Any) -> Value:
        """Write an operator of two operands that broadcast against each other."""
        operand = self.operand(other)
        return self.op(code, operand, shape=broadcast(self.shape, operand.shape), **options)

    def __add__(self, other: Value | ArrayLike) -> Value:
        return self.binary("ADD", other)

    def __sub__(self, other: Value | ArrayLike) -> Value:
        return self.binary("SUB", other)

    def __rsub__(self, number: float) -> Value:
        return self.constant(number) - self

    def __mul__(self, other: Value | ArrayLike) -> Value:
        return self.binary("MUL", other)

    def __truediv__(self, other: Value | ArrayLike) -> Value:
        return self.binary("DIV", other)

    def cast(self, dtype: np.dtype[Any]) -> Value:
        types = {"inDataType": TENSOR_TYPES[self.dtype], "outDataType": TENSOR_TYPES[dtype]}
        return self.op("CAST", dtype=dtype, **types)

    # --- over axes

    def reduced(self, code: str, axes: Sequence[int], *, keep: bool = True) -> Value:
        return self.op(code, self.indices(axes), shape=self.shape.reduced(axes, keep=keep), keepDims=keep)

    def mean(self, axes: Sequence[int]) -> Value:
        return self.reduced("MEAN", axes)

    def total(self, axes: Sequence[int], *, keep: bool = True) -> Value:
        """Write the sum over `axes`; for floats, write the mean times the number of elements.

        The quantizer gives the result of SUM the scale of its elements, so a large sum would be clipped.
        """
        counts = [self.shape.signature[axis] for axis in axes]
        if self.dtype != FLOAT32 or min(counts, default=0) < 1:
            return self.reduced("SUM", axes, keep=keep)
        return self.reduced("MEAN", axes, keep=keep) * np.prod(counts)

    def along_last(self, axis: int, compute: Callable[[Value], Value]) -> Value:
        """Apply `compute` to this value with `axis` moved to the end, then move the axis back."""
        order = (*(i for i in range(self.shape.rank) if i != axis), axis)
        return compute(self.transposed(order)).transposed(np.argsort(order).tolist())

    def times_weights(self, weights: NDArray[Any], bias: ArrayLike | None = None, activation: str = "NONE") -> Value:
        """Multiply the last axis by the transposed `weights`, [outputs, inputs], and add `bias`."""
        shape = self.shape.with_length(self.shape.rank - 1, len(weights))
        bias = np.zeros(len(weights), np.float32) if bias is None else bias
        keep = self.shape.rank > 2
        tensor = self.lowering.weights(np.asarray(weights, self.dtype), f"{self.name}_constant")
        operand = replace(self, tensor=tensor, shape=BatchShape.fixed(*weights.shape))
        return self.op("FULLY_CONNECTED", operand, bias, shape=shape, activation=activation, keepNumDims=keep)

    # --- moving elements

    def reshaped(self, shape: BatchShape) -> Value:
        return self if shape == self.shape else self.copied(shape)

    def copied(self, shape: BatchShape) -> Value:
        """Return the value in a separate tensor, with `shape`."""
        if shape.signature.count(-1) > 1:
            raise NeedsFixedBatch(f"the batch is part of more than one axis of {list(shape.signature)}")
        return self.op("RESHAPE", self.indices(shape.signature), shape=shape, newShape=list(shape.signature))

    def transposed(self, order: Sequence[int]) -> Value:
        if list(order) == list(range(self.shape.rank)):
            return self
        return self.op("TRANSPOSE", self.indices(order), shape=self.shape.permuted(order))

    def gathered(self, elements: NDArray[Any], axis: int) -> Value:
        """Write the elements with the indices `elements` along `axis`, in this order."""
        shape = self.shape.with_length(axis, elements.size)
        return self.op("GATHER", self.indices(elements.reshape(-1)), shape=shape, axis=axis, batchDims=0)

    def sliced(self, begin: Sequence[int], shape: BatchShape) -> Value:
        """Write the part that begins at `begin` and has `shape`."""
        return self.op("SLICE", self.indices(begin), self.indices(shape.signature), shape=shape)

    def padded(self, amounts: Sequence[Sequence[int]], mirror: str = "") -> Value:
        """Write zeros around the value; with `mirror` REFLECT or SYMMETRIC, write mirrored elements instead."""
        places, shape = self.indices(amounts), self.shape.padded(amounts)
        if not mirror:
            return self.op("PAD", places, shape=shape)
        return self.op("MIRROR_PAD", places, shape=shape, mode=int(getattr(schema.MirrorPadMode, mirror)))


def activation_code(activation: str) -> int:
    return int(getattr(schema.ActivationFunctionType, activation))


def broadcast(one: BatchShape, other: BatchShape) -> BatchShape:
    """Return the shape of the result of two values that broadcast against each other."""
    a, b = (shape.of_rank(max(one.rank, other.rank)) for shape in (one, other))
    dims = tuple(m if n == 1 else n for n, m in zip(a.dims, b.dims, strict=True))
    lengths = zip(a.dims, a.signature, b.signature, strict=True)
    return BatchShape(dims, tuple(-1 if -1 in (s, t) else t if n == 1 else s for n, s, t in lengths))
