"""The state of one lowering: the TFLite tensor of each ONNX value, and its layout.

ONNX convolves channels first, TFLite channels last. An operator makes its value in the layout that suits it. The
value is converted, once, where a reader needs the other layout: chains of convolutions stay channels last, and the
model's inputs and outputs keep ONNX's order. A channels-last value of rank 3 (from a 1-D convolution) is [batch, 1,
width, channels].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import ArrayLike, NDArray

from edgert_deploy.packager.tflite_lowering.graph import BatchShape, Graph, Node
from edgert_deploy.packager.tflite_lowering.op import Op
from edgert_deploy.packager.tflite_lowering.writer import TENSOR_TYPES, Writer

FLOAT32 = np.dtype("float32")
AXIS_MAX = 2**31 - 1  # lengths are int32 in the file
SPATIAL_RANKS = (3, 4, 5)
TO_CHANNELS_LAST = (0, 2, 3, 1)
TO_CHANNELS_FIRST = (0, 3, 1, 2)
# The same by rank. At rank 3 the other layout is [batch, width, channels].
CHANNELS_LAST_ORDERS = {3: (0, 2, 1), 4: TO_CHANNELS_LAST, 5: (0, 2, 3, 4, 1)}
CHANNELS_FIRST_ORDERS = {3: (0, 2, 1), 4: TO_CHANNELS_FIRST, 5: (0, 4, 1, 2, 3)}
# The position of each ONNX axis in the channels-last tensor, by rank.
CHANNELS_LAST_AXES = {3: (0, 3, 2), 4: (0, 3, 1, 2), 5: (0, 4, 1, 2, 3)}


class Uncovered(Exception):
    """A node that cannot be lowered: the text names the part of it, and a way round where there is one."""


class Layout(Enum):
    NATIVE = "native"
    CHANNELS_LAST = "channels_last"


class Lowering:
    """The graph that operators are read from, and the file that they are written to."""

    def __init__(self, graph: Graph, ops: Mapping[str, Op]) -> None:
        self.graph, self._ops = graph, ops
        self.writer = Writer()
        # The order of features in a flattened channels-last value: element i of it is element order[i] of ONNX's
        # value. The reader of the value permutes its weights.
        self.feature_order: dict[str, NDArray[np.intp]] = {}
        self._inputs: dict[str, int] = {}
        self._tensors: dict[tuple[str, Layout], int] = {}
        self._layouts: dict[str, Layout] = {}
        self._non_negative: set[str] = set()
        self._unknown: set[str] = set()
        self._users: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for name in dict.fromkeys(node.inputs):
                self._users.setdefault(name, []).append(node)

    # --- the graph

    def shape(self, name: str) -> BatchShape:
        if name not in self.graph.shapes:
            raise Uncovered(
                f"the shape of {name!r} depends on the values of an input, or its rank on the batch; "
                "export the model with fixed shapes"
            )
        shape = self.graph.shapes[name]
        if max(shape.dims, default=0) > AXIS_MAX:
            raise Uncovered(f"{name!r} has an axis of {max(shape.dims)} elements; TFLite holds at most {AXIS_MAX}")
        return shape

    def dtype(self, name: str) -> np.dtype[Any]:
        dtype = self.graph.dtypes.get(name, FLOAT32)
        if dtype not in TENSOR_TYPES:
            raise Uncovered(f"{name!r} has dtype {dtype}; convert the model to float32")
        return dtype

    def is_constant(self, name: str) -> bool:
        return name in self.graph.constants

    def value(self, name: str, role: str) -> NDArray[Any]:
        """Return the constant `name`. Raises Uncovered, naming its `role`, if it is computed or depends on the batch."""
        if name not in self.graph.constants:
            raise Uncovered(f"{role} is not a constant; export the model with a constant one")
        if name in self.graph.batch_constants - self.graph.expanded_constants:
            raise Uncovered(f"{role} depends on the batch; export the model with its batch fixed to 1")
        return self.graph.constants[name]

    def one_item(self, name: str, role: str) -> NDArray[Any]:
        """Return the constant `name` at batch 1 where a larger batch only repeats it: it then broadcasts."""
        if name in self.graph.repeated_constants:
            return self.graph.constants[name]
        return self.value(name, role)

    def integers(self, node: Node, attribute: str, index: int) -> list[int] | None:
        """Return an attribute of earlier opsets that is input `index` in later ones; None where absent."""
        if attribute in node.attributes:
            return [int(v) for v in node.attributes[attribute]]
        if not node.input(index):
            return None
        return [int(v) for v in self.value(node.input(index), attribute).reshape(-1)]

    def only_user(self, name: str) -> Node | None:
        users = self._users.get(name, [])
        return users[0] if len(users) == 1 and name not in self.graph.outputs else None

    def is_read(self, name: str) -> bool:
        """Whether anything reads `name`, an output of a node that may be absent."""
        return bool(name) and (name in self._users or name in self.graph.outputs)

    def is_non_negative(self, name: str) -> bool:
        return name in self._non_negative

    def note_sign(self, node: Node) -> None:
        """Remember whether the results of `node` can be negative."""
        sign = self._ops[node.op_type].sign
        read = node.inputs if node.op_type == "Concat" else node.inputs[:1]
        kept = sign == "as_input" and self._non_negative.issuperset(read)
        if kept or sign == "non_negative" or node.activation in ("RELU", "RELU6"):
            self._non_negative.update(node.outputs)

    # --- tensors of ONNX values

    def layout(self, name: str) -> Layout:
        """Return the layout that `name` was made in."""
        return self._layouts.get(name, Layout.NATIVE)

    def native(self, name: str) -> int:
        return self.tensor(name, Layout.NATIVE)

    def channels_last(self, name: str) -> int:
        return self.tensor(name, Layout.CHANNELS_LAST)

    def tensor(self, name: str, layout: Layout) -> int:
        """Return the tensor of `name` in `layout`, converted at most once."""
        if self.is_constant(name):
            return self._constant_operand(name, layout)
        if (name, layout) not in self._tensors:
            if name not in self._layouts:
                raise Uncovered(f"nothing here computes {name!r}, an optional output of its node")
            convert = self._to_native if layout is Layout.NATIVE else self._to_channels_last
            self._tensors[name, layout] = convert(name)
        return self._tensors[name, layout]

    def in_native_order(self, name: str) -> int:
        """Return a tensor with its elements in ONNX's order, for a reader that only reshapes it."""
        if self.layout(name) is Layout.CHANNELS_LAST and _same_order(self.shape(name).dims):
            return self.channels_last(name)
        return self.native(name)

    def define(self, name: str, layout: Layout = Layout.NATIVE) -> int:
        """Return a new tensor for the value `name`, made in `layout`."""
        shape = self.laid_out(self.shape(name), layout)
        return self.alias(name, layout, self.writer.tensor(name, shape, self.dtype(name)))

    def define_input(self, name: str) -> None:
        """Make the tensor of a model's input.

        An operator that may stay in float32 beside INT8 reads a copy: the quantiser puts a DEQUANTIZE before such a
        reader of any other tensor, but gives it the INT8 tensor of an input as it is.
        """
        self._inputs[name] = self.define(name)
        if self.dtype(name) == FLOAT32 and self._stays_float(name):
            copied = self.scratch(f"{name}_copy", self.shape(name))
            self.alias(name, Layout.NATIVE, self.reshape(self._inputs[name], self.shape(name), copied))

    def _stays_float(self, name: str) -> bool:
        """Whether a reader of `name` may stay in float32 beside INT8."""
        users = [self._ops.get(user.op_type) for user in self._users.get(name, [])]
        return any(op is not None and op.stays_float for op in users)

    def alias(self, name: str, layout: Layout, tensor: int) -> int:
        """Make the existing `tensor` that of the value `name`."""
        self._layouts[name] = layout
        self._tensors[name, layout] = tensor
        return tensor

    def stand_in(self, name: str) -> None:
        """Continue without the node that makes `name`, to find what else is not covered."""
        try:
            self.define(name)
        except Uncovered:
            self._unknown.add(name)

    def is_unknown(self, name: str) -> bool:
        """Whether nothing is known of `name` that its readers could be checked with."""
        return name in self._unknown

    def laid_out(self, shape: BatchShape, layout: Layout) -> BatchShape:
        if layout is Layout.NATIVE:
            return shape
        turned = shape.permuted(CHANNELS_LAST_ORDERS[shape.rank])
        return turned.with_axis(1, 1) if shape.rank == 3 else turned

    def axis(self, axis: int, rank: int, layout: Layout) -> int:
        """Return the position in `layout` of ONNX's `axis` of a value of `rank`."""
        return axis % rank if layout is Layout.NATIVE else CHANNELS_LAST_AXES[rank][axis % rank]

    def common_layout(self, names: tuple[str, ...]) -> Layout:
        """Return channels last where one of `names` has it and all can have it; else native."""
        ranks = {self.shape(name).rank for name in names if not self.is_constant(name)}
        held = any(self.layout(name) is Layout.CHANNELS_LAST for name in names)
        return Layout.CHANNELS_LAST if held and len(ranks) == 1 and ranks <= set(SPATIAL_RANKS) else Layout.NATIVE

    # --- writing

    def constant(self, values: ArrayLike, name: str, dtype: Any = np.float32) -> int:
        return self.writer.constant(np.ascontiguousarray(np.asarray(values, dtype)).reshape(np.shape(values)), name)

    def index_constant(self, values: ArrayLike, name: str) -> int:
        """Write axes, a shape or a permutation, as int32."""
        return self.constant(values, name, np.int32)

    def scratch(self, name: str, shape: BatchShape, dtype: np.dtype[Any] = FLOAT32) -> int:
        """Return a tensor between two operators of one ONNX node."""
        return self.writer.tensor(name, shape, dtype)

    def emit(self, code: str, inputs: list[int], outputs: list[int], **options: Any) -> None:
        self.writer.operator(code, inputs, outputs, **options)

    def arithmetic(self, code: str, inputs: list[int], output: int, activation: str = "NONE") -> int:
        """Write ADD, SUB, MUL or DIV, and return `output`."""
        self.emit(code, inputs, [output], fusedActivationFunction=activation_code(activation))
        return output

    def total(
        self, tensor: int, shape: BatchShape, axes: list[int], output: int, result: BatchShape, *, keep: bool
    ) -> int:
        """Write the sum over `axes` of a float tensor of `shape` into `output`, of shape `result`.

        The sum is the mean times the number of elements: the quantiser gives the result of SUM the scale of its input,
        which clips it.
        """
        places = self.index_constant(axes, "axes")
        if any(shape.signature[axis] == -1 for axis in axes):
            self.emit("SUM", [tensor, places], [output], keepDims=keep)
            return output
        mean = self.scratch("mean", result)
        self.emit("MEAN", [tensor, places], [mean], keepDims=keep)
        count = self.constant(np.float32(np.prod([shape.dims[axis] for axis in axes])), "count")
        return self.arithmetic("MUL", [mean, count], output)

    def reshape(self, tensor: int, shape: BatchShape, output: int) -> int:
        if shape.signature.count(-1) > 1:
            raise Uncovered(
                f"the batch is part of more than one axis of {list(shape.signature)}; "
                "export the model with its batch fixed to 1"
            )
        self.emit(
            "RESHAPE", [tensor, self.index_constant(shape.signature, "shape")], [output], newShape=list(shape.signature)
        )
        return output

    def cast(self, tensor: int, output: int, before: np.dtype[Any], after: np.dtype[Any]) -> int:
        self.emit("CAST", [tensor], [output], inDataType=TENSOR_TYPES[before], outDataType=TENSOR_TYPES[after])
        return output

    def pick(self, tensor: int, elements: ArrayLike, axis: int, output: int) -> int:
        """Write the `elements` of `tensor` along `axis`, in their order."""
        self.emit("GATHER", [tensor, self.index_constant(elements, "elements")], [output], axis=axis, batchDims=0)
        return output

    def cut(self, tensor: int, begin: ArrayLike, size: ArrayLike, output: int) -> int:
        """Write a part of `tensor`; a size of -1 reads to the end."""
        inputs = [tensor, self.index_constant(begin, "begin"), self.index_constant(size, "size")]
        self.emit("SLICE", inputs, [output])
        return output

    def transpose(self, tensor: int, order: tuple[int, ...], output: int) -> int:
        self.emit("TRANSPOSE", [tensor, self.index_constant(order, "order")], [output])
        return output

    def along_last(self, axis: int, source: str, output: str, write: Callable[[int, int], None]) -> None:
        """Call `write` with tensors of `source` and `output`, of one shape, with ONNX's `axis` moved to the end."""
        shape = self.shape(source)
        if axis == shape.rank - 1:
            write(self.native(source), self.define(output))
            return
        order = (*(i for i in range(shape.rank) if i != axis), axis)
        turned = [self.scratch(f"{output}_turned", shape.permuted(order)) for _ in range(2)]
        self.transpose(self.native(source), order, turned[0])
        write(*turned)
        self.transpose(turned[1], tuple(int(i) for i in np.argsort(order)), self.define(output))

    def finish(self) -> bytes:
        """Return the file; its inputs and outputs have ONNX's names, order and layout."""
        outputs: dict[str, int] = {}
        for name in self.graph.outputs:
            if 0 in self.shape(name).dims:
                raise Uncovered(f"output {name!r} has no elements, and TFLite holds no empty tensor; drop that output")
            tensor = self.native(name)
            taken = self.is_constant(name) or tensor in self._inputs.values() or tensor in outputs.values()
            outputs[name] = self._copied(name, tensor) if taken else tensor
        for name, tensor in outputs.items():
            self.writer.rename(tensor, name)
        return self.writer.finish(self._inputs, outputs)

    # --- conversions

    def _to_native(self, name: str) -> int:
        held = self._tensors[name, Layout.CHANNELS_LAST]
        shape, dtype = self.shape(name), self.dtype(name)
        if _same_order(shape.dims):
            return self.reshape(held, shape, self.scratch(f"{name}_native", shape, dtype))
        if shape.rank == 3:
            between = shape.permuted((0, 2, 1))
            held = self.reshape(held, between, self.scratch(f"{name}_width_channels", between, dtype))
        return self.transpose(held, CHANNELS_FIRST_ORDERS[shape.rank], self.scratch(f"{name}_native", shape, dtype))

    def _to_channels_last(self, name: str) -> int:
        held = self._tensors[name, Layout.NATIVE]
        shape, dtype = self.shape(name), self.dtype(name)
        wanted = self.laid_out(shape, Layout.CHANNELS_LAST)
        if _same_order(shape.dims):
            return self.reshape(held, wanted, self.scratch(f"{name}_channels_last", wanted, dtype))
        order = CHANNELS_LAST_ORDERS[shape.rank]
        turned = self.transpose(held, order, self.scratch(f"{name}_turned", shape.permuted(order), dtype))
        if shape.rank != 3:
            return turned
        return self.reshape(turned, wanted, self.scratch(f"{name}_channels_last", wanted, dtype))

    def _constant_operand(self, name: str, layout: Layout) -> int:
        array = self.value(name, f"{name!r}")
        if array.dtype not in TENSOR_TYPES:
            raise Uncovered(f"{name!r} has dtype {array.dtype}; convert the model to float32")
        if layout is Layout.CHANNELS_LAST:
            array = np.moveaxis(array, 1, -1)
            array = array[:, None] if array.ndim == 3 else array
        return self.constant(array, name, array.dtype)

    def _copied(self, name: str, tensor: int) -> int:
        """Return a copy: in TFLite each input and output is a tensor of its own."""
        shape = self.shape(name)
        return self.reshape(tensor, shape, self.scratch(name, shape, self.dtype(name)))


def activation_code(activation: str) -> int:
    return int(getattr(schema.ActivationFunctionType, activation))


def _same_order(dims: tuple[int, ...]) -> bool:
    """Whether channels first and channels last put the elements in the same order."""
    return dims[1] == 1 or int(np.prod(dims[2:])) == 1
