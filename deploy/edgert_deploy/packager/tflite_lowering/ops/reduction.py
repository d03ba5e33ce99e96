"""Reductions over axes, with an operator before or after the reduction, and global pooling."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from edgert_deploy.packager.tflite_lowering.graph import Node
from edgert_deploy.packager.tflite_lowering.lowering import Layout, Lowering
from edgert_deploy.packager.tflite_lowering.op import NARROW, Op, Write
from edgert_deploy.packager.tflite_lowering.value import BOOL, Value

# A reduction of numbers -> the same reduction of booleans.
OF_BOOLEANS = {"REDUCE_MAX": "REDUCE_ANY", "REDUCE_MIN": "REDUCE_ALL"}


@dataclass(frozen=True)
class Axes:
    """The reduced axes: `positions` in a tensor of `layout`, and the layout of the result."""

    positions: list[int]
    keep: bool
    layout: Layout
    result_layout: Layout


def reduction(code: str, before: str = "", after: str = "") -> Write:
    """Return a writer of after(reduce(before(x))).

    `before` and `after` are codes of unary operators; `before` may also be SQUARE, which is written as a MUL.
    """

    def compute(x: Value, axes: Axes) -> Value:
        x = x * x if before == "SQUARE" else x.op(before) if before else x
        x = _reduced(x, code, axes)
        return x.op(after) if after else x

    return _writer(compute)


def log_sum_exp(x: Value, axes: Axes) -> Value:
    """Subtract the largest element before the exponentials, so that they cannot overflow."""
    largest = x.reduced("REDUCE_MAX", axes.positions)
    result = (x - largest).op("EXP").total(axes.positions).op("LOG") + largest
    return result.reshaped(result.shape.reduced(axes.positions, keep=axes.keep))


def global_pool(code: str) -> Write:
    def write(lowering: Lowering, node: Node) -> None:
        axes = _laid_axes(lowering, node, list(range(2, lowering.shape(node.inputs[0]).rank)), True)
        lowering.result(node, _reduced(lowering.read(node, 0, axes.layout), code, axes), axes.result_layout)

    return write


def cumulative_sum(lowering: Lowering, node: Node) -> None:
    x = lowering.read(node)
    axis = int(lowering.value(node.inputs[1], "the axis").reshape(())) % x.shape.rank
    options: dict[str, Any] = {name: bool(node.attributes.get(name, 0)) for name in ("exclusive", "reverse")}
    lowering.result(node, x.op("CUMSUM", x.indices(axis), **options))


def _writer(compute: Callable[[Value, Axes], Value]) -> Write:
    def write(lowering: Lowering, node: Node) -> None:
        axes = _axes(lowering, node)
        lowering.result(node, compute(lowering.read(node, 0, axes.layout), axes), axes.result_layout)

    return write


def _axes(lowering: Lowering, node: Node) -> Axes:
    """Return the axes to reduce. By default these are all axes, or none with `noop_with_empty_axes`."""
    rank = lowering.shape(node.inputs[0]).rank
    axes = lowering.integers(node, "axes", 1)
    if not axes:
        axes = [] if node.attributes.get("noop_with_empty_axes", 0) else list(range(rank))
    sorted_axes = sorted({axis % rank for axis in axes})
    return _laid_axes(lowering, node, sorted_axes, bool(node.attributes.get("keepdims", 1)))


def _laid_axes(lowering: Lowering, node: Node, axes: list[int], keep: bool) -> Axes:
    rank, held = lowering.shape(node.inputs[0]).rank, lowering.layout(node.inputs[0])
    keep = keep or not axes
    if held is Layout.CHANNELS_LAST and not keep and axes != list(range(2, rank)):
        held = Layout.NATIVE  # else the axes of the result would be in neither layout
    positions = [lowering.axis(axis, rank, held) for axis in axes]
    if held is Layout.CHANNELS_LAST and rank == 3 and not keep:
        positions.append(1)  # also drop the added height of a value of rank 3
    return Axes(positions, keep, held, held if keep else Layout.NATIVE)


def _reduced(x: Value, code: str, axes: Axes) -> Value:
    if not axes.positions:
        return x
    if code == "SUM":
        return x.total(axes.positions, keep=axes.keep)
    return x.reduced(OF_BOOLEANS[code] if x.dtype == BOOL else code, axes.positions, keep=axes.keep)


OPS = {
    "CumSum": Op(cumulative_sum, widens=NARROW, stays_float=True),
    "GlobalAveragePool": Op(global_pool("MEAN")),
    "GlobalMaxPool": Op(global_pool("REDUCE_MAX")),
    "ReduceL1": Op(reduction("SUM", before="ABS"), widens=NARROW),
    "ReduceL2": Op(reduction("SUM", before="SQUARE", after="SQRT"), widens=NARROW),
    "ReduceLogSum": Op(reduction("SUM", after="LOG"), widens=NARROW),
    "ReduceLogSumExp": Op(_writer(log_sum_exp), widens=NARROW),
    "ReduceMax": Op(reduction("REDUCE_MAX"), widens=NARROW),
    "ReduceMean": Op(reduction("MEAN"), widens=NARROW),
    "ReduceMin": Op(reduction("REDUCE_MIN"), widens=NARROW),
    "ReduceProd": Op(reduction("REDUCE_PROD"), widens=NARROW),
    "ReduceSum": Op(reduction("SUM"), widens=NARROW),
    "ReduceSumSquare": Op(reduction("SUM", before="SQUARE"), widens=NARROW),
}
