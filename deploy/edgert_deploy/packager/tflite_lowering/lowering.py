"""The state of one lowering: the TFLite tensor of each ONNX value, and its layout.

ONNX's convolutions read channels first, but TFLite's read channels last. Each operator writes its result in the layout
that TFLite's operator needs. If a reader needs the other layout, the lowering converts the value once. So chains of
convolutions stay channels last, and the model's inputs and outputs keep ONNX's order. A channels-last value of rank 3
(from a 1-D convolution) is [batch, 1, width, channels].
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.graph import BatchShape, Graph, Node
from edgert_deploy.packager.tflite_lowering.op import Op
from edgert_deploy.packager.tflite_lowering.rewriting import Links
from edgert_deploy.packager.tflite_lowering.value import FLOAT32, NeedsFixedBatch, Unsupported, Value
from edgert_deploy.packager.tflite_lowering.writer import TENSOR_TYPES, Writer

AXIS_MAX = 2**31 - 1  # lengths are int32 in the file
SPATIAL_RANKS = (3, 4, 5)
TO_CHANNELS_LAST = (0, 2, 3, 1)
TO_CHANNELS_FIRST = (0, 3, 1, 2)
# The order of axes that converts a value to the other layout: rank -> order. At rank 3, the channels-last value is
# [batch, width, channels] here, without the height of 1.
CHANNELS_LAST_ORDERS = {3: (0, 2, 1), 4: TO_CHANNELS_LAST, 5: (0, 2, 3, 4, 1)}
CHANNELS_FIRST_ORDERS = {3: (0, 2, 1), 4: TO_CHANNELS_FIRST, 5: (0, 4, 1, 2, 3)}
# The position of each ONNX axis in the channels-last tensor: rank -> positions.
CHANNELS_LAST_AXES = {3: (0, 3, 2), 4: (0, 3, 1, 2), 5: (0, 4, 1, 2, 3)}


class Layout(Enum):
    NATIVE = "native"
    CHANNELS_LAST = "channels_last"


class Lowering:
    """The state of one lowering, which reads the nodes of `graph` and writes to `writer`.

    With `share_weights`, matrix products with equal weights read one tensor, as in the steps of an unrolled RNN.
    """

    def __init__(self, graph: Graph, ops: Mapping[str, Op], *, share_weights: bool = True) -> None:
        self.graph = graph
        self._share_weights = share_weights
        self.links = Links(graph)
        self._ops = ops
        self.writer = Writer()
        # The order of features in a flattened channels-last value: element i of the value is element order[i] of ONNX's
        # value. The node that reads the value permutes its own weights.
        self.feature_order: dict[str, NDArray[np.intp]] = {}
        self._inputs: dict[str, int] = {}
        self._tensors: dict[tuple[str, Layout], int] = {}
        self._layouts: dict[str, Layout] = {}
        self._named: set[int] = set()  # tensors that keep their names: those of ONNX values, and constants
        self._non_negative: set[str] = set()
        # The outputs of nodes that cannot be written. No node can be checked that reads an output of unknown shape or
        # dtype.
        self.placeholders: set[str] = set()
        self.unknown: set[str] = set()

    # --- the graph

    def shape(self, name: str) -> BatchShape:
        if name not in self.graph.shapes:
            raise Unsupported(
                f"the shape of {name!r} depends on the values of an input, or its rank depends on the batch; "
                "export the model with fixed shapes"
            )
        shape = self.graph.shapes[name]
        if max(shape.dims, default=0) > AXIS_MAX:
            raise Unsupported(f"{name!r} has an axis of {max(shape.dims)} elements; TFLite holds at most {AXIS_MAX}")
        return shape

    def result_shape(self, node: Node, layout: Layout = Layout.NATIVE) -> BatchShape:
        return self.laid_out(self.shape(node.outputs[0]), layout)

    def dtype(self, name: str) -> np.dtype[Any]:
        dtype = self.graph.dtypes.get(name, FLOAT32)
        if dtype not in TENSOR_TYPES:
            raise Unsupported(f"{name!r} has dtype {dtype}; convert the model to float32")
        return dtype

    def is_constant(self, name: str) -> bool:
        return name in self.graph.constants

    def value(self, name: str, role: str) -> NDArray[Any]:
        """Return the constant `name`. Raises Unsupported if it is not a constant, or depends on the batch.

        The error names the constant by its `role`.
        """
        if name not in self.graph.constants:
            raise Unsupported(f"{role} is not a constant; export the model so that it is a constant")
        if name in self.graph.batch_constants - self.graph.expanded_constants:
            raise NeedsFixedBatch(f"{role} depends on the batch")
        return self.graph.constants[name]

    def one_item(self, name: str, role: str) -> NDArray[Any]:
        """Return the constant `name` at batch 1, even if larger batches repeat its rows more often."""
        if name in self.graph.repeated_constants:
            return self.graph.constants[name]
        return self.value(name, role)

    def integers(self, node: Node, attribute: str, index: int) -> list[int] | None:
        """Return the integers of an attribute or (in later opsets) of input `index`; None if both are absent."""
        if attribute in node.attributes:
            return [int(v) for v in node.attributes[attribute]]
        if not node.input(index):
            return None
        return [int(v) for v in self.value(node.input(index), attribute).reshape(-1)]

    def is_read(self, name: str) -> bool:
        """Whether a node or the model's caller reads the output `name`; False for an absent output."""
        return bool(name) and (name in self.links.users or name in self.graph.outputs)

    def is_non_negative(self, name: str) -> bool:
        return name in self._non_negative

    def record_sign(self, node: Node) -> None:
        """Record whether the results of `node` can be negative."""
        sign = self._ops[node.op_type].sign
        read = node.inputs if node.op_type == "Concat" else node.inputs[:1]
        kept = sign == "as_input" and self._non_negative.issuperset(read)
        if kept or sign == "non_negative" or node.activation in ("RELU", "RELU6"):
            self._non_negative.update(node.outputs)

    # --- tensors of ONNX values

    def layout(self, name: str) -> Layout:
        """Return the layout in which the node that makes `name` wrote it."""
        return self._layouts.get(name, Layout.NATIVE)

    def read(self, node: Node, index: int = 0, layout: Layout = Layout.NATIVE, rank: int = 0) -> Value:
        """Return input `index` of `node` in `layout`.

        If `rank` is given, a constant gets the axes with which it broadcasts to a value of this rank.
        """
        name = node.inputs[index]
        if not self.is_constant(name):
            return self._value(name, layout, self.tensor(name, layout), _result_name(node))
        array = self._constant(name)
        return self.constant_of(node, name, in_layout(array, rank or array.ndim, layout))

    def constant_of(self, node: Node, name: str, array: NDArray[Any]) -> Value:
        return Value(self, _result_name(node), self.constant(array, name), BatchShape.fixed(*array.shape), array.dtype)

    def read_as_made(self, node: Node) -> tuple[Value, Layout]:
        """Return the first input of `node` in the layout that it was written in, and this layout."""
        layout = self.layout(node.inputs[0])
        return self.read(node, 0, layout), layout

    def layout_in_order(self, name: str) -> Layout:
        """Return a layout in which the elements of `name` have ONNX's order, which a reshape needs."""
        layout = self.layout(name)
        return layout if layout is Layout.NATIVE or _same_order(self.shape(name).dims) else Layout.NATIVE

    def result(self, node: Node, value: Value, layout: Layout = Layout.NATIVE, index: int = 0) -> None:
        """Make `value`, which has `layout`, the output `index` of `node`.

        ONNX Runtime folds the model at batch 1. It may then write a node that gives another shape for a larger batch.
        """
        name = node.outputs[index]
        shape = self.laid_out(self.shape(name), layout)
        if value.shape.signature != shape.signature:
            raise NeedsFixedBatch(f"{name!r} can be computed only for a batch of 1")
        if value.tensor not in self._named:
            self.writer.name_result(value.tensor, name, shape)
        self.alias(name, layout, value.tensor)

    def tensor(self, name: str, layout: Layout) -> int:
        """Return the tensor of `name` in `layout`. A value is converted at most once."""
        if (name, layout) not in self._tensors:
            if name not in self._layouts:
                raise Unsupported(
                    f"the optional output {name!r} of its node is not supported; export the model without it"
                )
            self._tensors[name, layout] = self._converted(name, layout).tensor
            self._named.add(self._tensors[name, layout])
        return self._tensors[name, layout]

    def define(self, name: str) -> int:
        """Create the tensor of the value `name` in ONNX's layout."""
        return self.alias(name, Layout.NATIVE, self.writer.tensor(name, self.shape(name), self.dtype(name)))

    def define_input(self, name: str) -> None:
        """Create the tensor of a model's input.

        In an INT8 file, some operators stay in float32. The quantizer puts a DEQUANTIZE before such an operator, but
        not if the operator reads an input of the model: the operator would get the INT8 tensor. So such an operator
        reads a copy of the input.
        """
        self._inputs[name] = self.define(name)
        if self.dtype(name) == FLOAT32 and self._stays_float(name):
            copied = self._value(name, Layout.NATIVE, self._inputs[name]).copied(self.shape(name))
            self.alias(name, Layout.NATIVE, copied.tensor)

    def _stays_float(self, name: str) -> bool:
        """Whether an operator that reads `name` may stay in float32 in an INT8 file."""
        users = [self._ops.get(user.op_type) for user in self.links.users.get(name, [])]
        return any(op is not None and op.stays_float for op in users)

    def alias(self, name: str, layout: Layout, tensor: int) -> int:
        """Make `tensor`, which exists already, the tensor of the value `name` in `layout`."""
        self._layouts[name] = layout
        self._tensors[name, layout] = tensor
        self._named.add(tensor)
        return tensor

    def define_placeholder(self, name: str) -> None:
        """Define the output `name` of a node that cannot be written, so that later nodes can be checked."""
        self.placeholders.add(name)
        try:
            self.define(name)
        except Unsupported:
            self.unknown.add(name)

    def laid_out(self, shape: BatchShape, layout: Layout) -> BatchShape:
        if layout is Layout.NATIVE:
            return shape
        turned = shape.permuted(CHANNELS_LAST_ORDERS[shape.rank])
        return turned.with_axis(1, 1) if shape.rank == 3 else turned

    def axis(self, axis: int, rank: int, layout: Layout) -> int:
        """Return the position in `layout` of the ONNX axis `axis` of a value with `rank` axes."""
        return axis % rank if layout is Layout.NATIVE else CHANNELS_LAST_AXES[rank][axis % rank]

    def common_layout(self, names: tuple[str, ...]) -> Layout:
        """Return channels last if one of `names` has this layout and all of them can have it; else native."""
        ranks = {self.shape(name).rank for name in names if not self.is_constant(name)}
        held = any(self.layout(name) is Layout.CHANNELS_LAST for name in names)
        return Layout.CHANNELS_LAST if held and len(ranks) == 1 and ranks <= set(SPATIAL_RANKS) else Layout.NATIVE

    def weights(self, array: NDArray[Any], name: str) -> int:
        """Write the weights of a FULLY_CONNECTED. Their scales do not depend on the operator that reads them."""
        return self.constant(array, name, shared=self._share_weights)

    def constant(self, array: NDArray[Any], name: str, *, shared: bool = False) -> int:
        tensor = self.writer.constant(np.ascontiguousarray(array).reshape(array.shape), name, shared=shared)
        self._named.add(tensor)
        return tensor

    def finish(self) -> bytes:
        """Return the file; its inputs and outputs have ONNX's names, order and layout."""
        outputs: dict[str, int] = {}
        for name in self.graph.outputs:
            if 0 in self.shape(name).dims:
                raise Unsupported(
                    f"output {name!r} has no elements, and TFLite holds no empty tensor; drop that output"
                )
            constant = self.is_constant(name)
            tensor = self.constant(self._constant(name), name) if constant else self.tensor(name, Layout.NATIVE)
            if constant or tensor in self._inputs.values() or tensor in outputs.values():
                tensor = self._value(name, Layout.NATIVE, tensor).copied(self.shape(name)).tensor
            outputs[name] = tensor
        for name, tensor in outputs.items():
            self.writer.rename(tensor, name)
        return self.writer.finish(self._inputs, outputs)

    def _constant(self, name: str) -> NDArray[Any]:
        """Return a constant. Raises Unsupported if TFLite lacks its dtype."""
        self.dtype(name)
        return self.value(name, f"{name!r}")

    def _value(self, name: str, layout: Layout, tensor: int, result: str = "") -> Value:
        return Value(self, result or name, tensor, self.laid_out(self.shape(name), layout), self.dtype(name))

    def _converted(self, name: str, layout: Layout) -> Value:
        """Return the value `name` converted to `layout`, which differs from the layout that it has."""
        shape, made_in = self.shape(name), self._layouts[name]
        value = self._value(name, made_in, self._tensors[name, made_in])
        if not _same_order(shape.dims):
            if made_in is Layout.NATIVE:
                value = value.transposed(CHANNELS_LAST_ORDERS[shape.rank])
            elif shape.rank == 3:
                value = value.reshaped(shape.permuted((0, 2, 1))).transposed((0, 2, 1))
            else:
                value = value.transposed(CHANNELS_FIRST_ORDERS[shape.rank])
        return value.reshaped(self.laid_out(shape, layout))


def _result_name(node: Node) -> str:
    return next(filter(None, node.outputs))


def in_layout(array: NDArray[Any], rank: int, layout: Layout) -> NDArray[Any]:
    """Return a constant with its axes in `layout`, so that it broadcasts to a value of `rank`."""
    if layout is Layout.NATIVE or (array.size == 1 and array.ndim < rank):
        return array
    array = np.moveaxis(array.reshape((1,) * (rank - array.ndim) + array.shape), 1, -1)
    return array[:, None] if rank == 3 else array


def _same_order(dims: tuple[int, ...]) -> bool:
    """Whether the elements have the same order in channels first and in channels last."""
    return dims[1] == 1 or int(np.prod(dims[2:])) == 1
