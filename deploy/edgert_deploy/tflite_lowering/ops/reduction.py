"""Reductions over axes, global pooling among them, and the index of the largest."""

from __future__ import annotations

from collections.abc import Callable

from edgert_deploy.tflite_lowering.graph import Node
from edgert_deploy.tflite_lowering.lowering import Layout, Lowering, Uncovered
from edgert_deploy.tflite_lowering.writer import TENSOR_TYPES

REDUCTIONS = {
    "ReduceMax": "REDUCE_MAX",
    "ReduceMean": "MEAN",
    "ReduceMin": "REDUCE_MIN",
    "ReduceProd": "REDUCE_PROD",
    "ReduceSum": "SUM",
}
GLOBAL_POOLS = {"GlobalAveragePool": "MEAN", "GlobalMaxPool": "REDUCE_MAX"}


def reduce(lowering: Lowering, node: Node) -> None:
    rank = lowering.shape(node.inputs[0]).rank
    axes = lowering.integers(node, "axes", 1)
    if not axes and node.attributes.get("noop_with_empty_axes", 0):
        raise Uncovered("noop_with_empty_axes is not covered; leave the node out")
    wanted = sorted({axis % rank for axis in axes or range(rank)})
    write_reduction(lowering, node, REDUCTIONS[node.op_type], wanted, bool(node.attributes.get("keepdims", 1)))


def global_pool(lowering: Lowering, node: Node) -> None:
    axes = list(range(2, lowering.shape(node.inputs[0]).rank))
    write_reduction(lowering, node, GLOBAL_POOLS[node.op_type], axes, True)


def write_reduction(lowering: Lowering, node: Node, code: str, axes: list[int], keep: bool) -> None:
    source = node.inputs[0]
    rank, held = lowering.shape(source).rank, lowering.layout(source)
    if held is Layout.CHANNELS_LAST and not keep and axes != list(range(2, rank)):
        held = Layout.NATIVE  # what is left would lie in neither order
    places = [lowering.axis(axis, rank, held) for axis in axes]
    if held is Layout.CHANNELS_LAST and rank == 3 and not keep:
        places.append(1)  # the height that a value of rank 3 is given
    result = held if keep else Layout.NATIVE
    inputs = [lowering.tensor(source, held), lowering.index_constant(places, "axes")]
    lowering.emit(code, inputs, [lowering.define(node.outputs[0], result)], keepDims=keep)


def reduce_l2(lowering: Lowering, node: Node) -> None:
    """The square root of the sum of squares."""
    source, output = node.inputs[0], node.outputs[0]
    rank, keep = lowering.shape(source).rank, bool(node.attributes.get("keepdims", 1))
    axes = sorted({axis % rank for axis in lowering.integers(node, "axes", 1) or range(rank)})
    x = lowering.native(source)
    squared = lowering.arithmetic("MUL", [x, x], lowering.scratch(f"{output}_squared", lowering.shape(source)))
    total = lowering.scratch(f"{output}_sum", lowering.shape(output))
    lowering.emit("SUM", [squared, lowering.index_constant(axes, "axes")], [total], keepDims=keep)
    lowering.emit("SQRT", [total], [lowering.define(output)])


def arg_max(lowering: Lowering, node: Node) -> None:
    if node.attributes.get("select_last_index", 0):
        raise Uncovered("select_last_index is not covered")
    source, output = node.inputs[0], node.outputs[0]
    shape, kept = lowering.shape(source), bool(node.attributes.get("keepdims", 1))
    axis = int(node.attributes.get("axis", 0)) % shape.rank
    dtype = lowering.dtype(output)
    place = lowering.index_constant([axis], "axis")
    inputs = [lowering.native(source), place]
    target = lowering.define(output)
    code = {"ArgMax": "ARG_MAX", "ArgMin": "ARG_MIN"}[node.op_type]
    reduced = lowering.scratch(f"{output}_reduced", shape.without_axis(axis), dtype) if kept else target
    lowering.emit(code, inputs, [reduced], outputType=TENSOR_TYPES[dtype])
    if kept:
        lowering.reshape(reduced, lowering.shape(output), target)


LOWERINGS: dict[str, Callable[[Lowering, Node], None]] = {
    **dict.fromkeys(REDUCTIONS, reduce),
    **dict.fromkeys(GLOBAL_POOLS, global_pool),
    "ReduceL2": reduce_l2,
    "ArgMax": arg_max,
    "ArgMin": arg_max,
}
