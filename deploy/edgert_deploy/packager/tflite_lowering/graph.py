"""The ONNX graph that the lowering reads: folded, with the shapes of its values.

The module folds the model (folding.py) at batch 1 and at batch 2. If the length of an axis differs between the two
results, the axis grows with the batch. `BatchShape.signature` has -1 for this axis, so the batch of the lowered model
stays open.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper

from edgert_deploy.packager.sources.onnx_graph.axes import open_batch_axes
from edgert_deploy.packager.sources.onnx_graph.structure import opset_of
from edgert_deploy.packager.tflite_lowering.folding import folded, static_shapes


@dataclass(frozen=True)
class BatchShape:
    """The lengths of a value's axes.

    `dims` are the lengths at batch 1. `signature` is the same, but with -1 for each axis that grows with the batch.
    """

    dims: tuple[int, ...]
    signature: tuple[int, ...]

    @property
    def rank(self) -> int:
        return len(self.dims)

    @classmethod
    def fixed(cls, *dims: int) -> BatchShape:
        return cls(dims, dims)

    def permuted(self, order: Sequence[int]) -> BatchShape:
        return BatchShape(tuple(self.dims[i] for i in order), tuple(self.signature[i] for i in order))

    def with_lengths(self, lengths: Mapping[int, int]) -> BatchShape:
        """Return the shape with new `lengths` (axis -> elements), which do not grow with the batch."""
        dims, signature = list(self.dims), list(self.signature)
        for axis, length in lengths.items():
            dims[axis] = signature[axis] = length
        return BatchShape(tuple(dims), tuple(signature))

    def with_length(self, axis: int, length: int) -> BatchShape:
        return self.with_lengths({axis: length})

    def padded(self, amounts: Sequence[Sequence[int]]) -> BatchShape:
        """Return the shape after padding by `amounts`, (before, after) for each axis. Negative amounts cut."""
        return self.with_lengths({i: n + sum(amounts[i]) for i, n in enumerate(self.dims) if any(amounts[i])})

    def reduced(self, axes: Sequence[int], *, keep: bool = True) -> BatchShape:
        """Return the shape with `axes` of length 1, or without them."""
        if keep:
            return self.with_lengths(dict.fromkeys(axes, 1))
        return self.permuted([i for i in range(self.rank) if i not in axes])

    def of_rank(self, rank: int) -> BatchShape:
        """Return this shape with `rank` axes: axes of length 1 are added in front."""
        ones = (1,) * (rank - self.rank)
        return BatchShape(ones + self.dims, ones + self.signature)

    def with_axis(self, axis: int, length: int) -> BatchShape:
        """Return the shape with one more axis, inserted before `axis`."""
        dims, signature = list(self.dims), list(self.signature)
        dims.insert(axis, length)
        signature.insert(axis, length)
        return BatchShape(tuple(dims), tuple(signature))


@dataclass(frozen=True)
class Node:
    """One ONNX operator. `activation` is TFLite's name of the activation that is fused into this node."""

    op_type: str
    domain: str
    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: dict[str, Any] = field(default_factory=dict)
    activation: str = "NONE"

    def input(self, index: int) -> str:
        """Return the name of an input; "" for an absent optional input."""
        return self.inputs[index] if index < len(self.inputs) else ""

    def axis(self, rank: int, default: int = -1) -> int:
        """Return the attribute `axis`. A negative axis is counted from the end of `rank` axes."""
        return int(self.attributes.get("axis", default)) % rank


@dataclass(frozen=True)
class Graph:
    """A folded model.

    Attributes:
        constants: The constants at batch 1.
        batch_constants: The constants that differ between batch 1 and batch 2.
        expanded_constants: The batch constants that repeat their one row of batch 1 along axis 0. This row can be
            broadcast to every batch.
        repeated_constants: The batch constants that repeat their values along exactly one axis, which grows with the
            batch. It may be any axis.
        item_steps: For each integer constant with a row for each item of the batch, the amount by which the next item's
            row is larger. The constants at batch 1 have the row of the first item. Exporters write such indices to
            read each item's own values: [item, place], or item * places + place.
    """

    opset: int
    nodes: tuple[Node, ...]
    constants: dict[str, NDArray[Any]]
    batch_constants: frozenset[str]
    expanded_constants: frozenset[str]
    repeated_constants: frozenset[str]
    item_steps: dict[str, NDArray[Any]]
    shapes: dict[str, BatchShape]
    dtypes: dict[str, np.dtype[Any]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    def extended(
        self,
        nodes: Iterable[Node],
        constants: Mapping[str, NDArray[Any]],
        shapes: Mapping[str, BatchShape],
        dtypes: Mapping[str, np.dtype[Any]],
        copies: Mapping[str, str],
    ) -> Graph:
        """Return the graph with `nodes` instead of its own nodes, and with more values.

        `copies` maps each new constant to the constant that it was computed from.
        """

        def also(names: frozenset[str]) -> frozenset[str]:
            return names | {name for name, original in copies.items() if original in names}

        return replace(
            self,
            nodes=tuple(nodes),
            constants={**self.constants, **constants},
            shapes={**self.shapes, **{n: BatchShape.fixed(*a.shape) for n, a in constants.items()}, **shapes},
            dtypes={**self.dtypes, **{name: array.dtype for name, array in constants.items()}, **dtypes},
            batch_constants=also(self.batch_constants),
            expanded_constants=also(self.expanded_constants),
        )


def read_graph(model: onnx.ModelProto, lowered: Collection[str]) -> Graph:
    """Fold `model`; inline the functions not in `lowered`. Raises OperatorUnsupported or BuildFailed."""
    at_one = folded(model, 1, lowered)
    two = folded(model, 2, lowered) if any(open_batch_axes(model)) else at_one
    constants, other = _constants(at_one), _constants(two)
    shapes_one, shapes_two = static_shapes(at_one), static_shapes(two)
    pairs = {name: (dims, shapes_two.get(name, dims)) for name, dims in shapes_one.items()}
    shapes = {name: _batch_shape(*pair) for name, pair in pairs.items() if len(pair[0]) == len(pair[1])}
    shapes |= {name: BatchShape.fixed(*array.shape) for name, array in constants.items()}
    return Graph(
        opset=opset_of(at_one),
        nodes=tuple(_node(proto) for proto in at_one.graph.node),
        constants=constants,
        batch_constants=frozenset(n for n, array in constants.items() if n in other and _differs(array, other[n])),
        expanded_constants=frozenset(n for n, array in constants.items() if n in other and _expands(array, other[n])),
        repeated_constants=frozenset(n for n, array in constants.items() if n in other and _repeats(array, other[n])),
        item_steps={
            n: other[n][1] - other[n][0] for n, array in constants.items() if _steps(array, other.get(n, array))
        },
        shapes=shapes,
        dtypes=_dtypes(at_one) | {name: array.dtype for name, array in constants.items()},
        inputs=tuple(v.name for v in at_one.graph.input if v.name not in constants),
        outputs=tuple(v.name for v in at_one.graph.output),
    )


def _node(proto: onnx.NodeProto) -> Node:
    attributes = {a.name: _attribute(a) for a in proto.attribute}
    return Node(proto.op_type, proto.domain, proto.name, tuple(proto.input), tuple(proto.output), attributes)


def _attribute(proto: onnx.AttributeProto) -> Any:
    value = helper.get_attribute_value(proto)
    return value.decode() if isinstance(value, bytes) else value


def _constants(model: onnx.ModelProto) -> dict[str, NDArray[Any]]:
    return {i.name: numpy_helper.to_array(i) for i in model.graph.initializer}


def _dtypes(model: onnx.ModelProto) -> dict[str, np.dtype[Any]]:
    values = [*model.graph.value_info, *model.graph.input, *model.graph.output]
    elements = {v.name: v.type.tensor_type.elem_type for v in values}
    return {name: np.dtype(helper.tensor_dtype_to_np_dtype(e)) for name, e in elements.items() if e}


def _batch_shape(one: tuple[int, ...], two: tuple[int, ...]) -> BatchShape:
    return BatchShape(one, tuple(a if a == b else -1 for a, b in zip(one, two, strict=True)))


def _differs(one: NDArray[Any], two: NDArray[Any]) -> bool:
    return one.shape != two.shape or not np.array_equal(one, two, equal_nan=one.dtype.kind == "f")


def _expands(one: NDArray[Any], two: NDArray[Any]) -> bool:
    """Whether `one` has length 1 on axis 0, and `two` is `one` repeated twice along axis 0."""
    return one.ndim > 0 and one.shape[0] == 1 and two.shape == (2, *one.shape[1:]) and bool((one == two).all())


def _repeats(one: NDArray[Any], two: NDArray[Any]) -> bool:
    """Whether `one` and `two` differ only in the length of one axis, along which all values are equal."""
    axes = [i for i, n in enumerate(one.shape) if one.ndim == two.ndim and n != two.shape[i]]
    return len(axes) == 1 and one.size > 0 and all(bool((one.take([0], axes[0]) == each).all()) for each in (one, two))


def _steps(one: NDArray[Any], two: NDArray[Any]) -> bool:
    """Whether the integers of `two` are a row for each of two items, and the first row is that of `one`."""
    is_row = one.dtype.kind == "i" and one.ndim > 0 and one.shape[0] == 1 and two.shape == (2, *one.shape[1:])
    return is_row and np.array_equal(one[0], two[0])
