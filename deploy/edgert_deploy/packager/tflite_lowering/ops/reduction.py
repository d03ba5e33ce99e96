"""Reductions over axes, with operators on the elements before and on the result after; global pooling."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from edgert_deploy.packager.tflite_lowering.graph import BatchShape, Node
from edgert_deploy.packager.tflite_lowering.lowering import FLOAT32, Layout, Lowering
from edgert_deploy.packager.tflite_lowering.op import NARROW, Op, Write
from edgert_deploy.packager.tflite_lowering.ops.operands import BOOL

# The reductions of booleans.
OF_BOOLEANS = {"REDUCE_MAX": "REDUCE_ANY", "REDUCE_MIN": "REDUCE_ALL"}


@dataclass(frozen=True)
class Axes:
    """The reduced axes: `places` in a tensor of `layout`, and the layout of the result."""

    places: list[int]
    keep: bool
    layout: Layout
    result_layout: Layout


def reduction(code: str, before: str = "", after: str = "") -> Write:
    """Return a writer of after(reduce(before(x))); the outer two are unary operators of TFLite, or SQUARE, a MUL."""

    def write(lowering: Lowering, node: Node) -> None:
        axes = _axes(lowering, node)
        reduce = OF_BOOLEANS[code] if lowering.dtype(node.inputs[0]) == BOOL else code
        x = lowering.tensor(node.inputs[0], axes.layout)
        if before:
            shape = lowering.laid_out(lowering.shape(node.inputs[0]), axes.layout)
            x = _apply(lowering, before, x, _scratch(lowering, node, shape))
        if after:
            reduced = _reduced(lowering, node, reduce, x, axes, None)
            _apply(lowering, after, reduced, lowering.define(node.outputs[0], axes.result_layout))
        else:
            _reduced(lowering, node, reduce, x, axes, lowering.define(node.outputs[0], axes.result_layout))

    return write


def log_sum_exp(lowering: Lowering, node: Node) -> None:
    """Subtract the largest element before the exponentials, so that they cannot overflow."""
    axes = _axes(lowering, node)
    output, x = node.outputs[0], lowering.tensor(node.inputs[0], axes.layout)
    shape = lowering.laid_out(lowering.shape(node.inputs[0]), axes.layout)
    kept = shape
    for place in axes.places:
        kept = kept.with_length(place, 1)
    largest = _scratch(lowering, node, kept)
    lowering.emit("REDUCE_MAX", [x, lowering.index_constant(axes.places, "axes")], [largest], keepDims=True)
    centred = lowering.arithmetic("SUB", [x, largest], _scratch(lowering, node, shape))
    powers = _apply(lowering, "EXP", centred, _scratch(lowering, node, shape))
    whole = replace(axes, keep=True, result_layout=axes.layout)
    total = _summed(lowering, node, powers, whole, _scratch(lowering, node, kept), kept)
    logarithm = _apply(lowering, "LOG", total, _scratch(lowering, node, kept))
    if axes.keep:
        lowering.arithmetic("ADD", [logarithm, largest], lowering.define(output, axes.result_layout))
        return
    added = lowering.arithmetic("ADD", [logarithm, largest], _scratch(lowering, node, kept))
    lowering.reshape(added, lowering.shape(output), lowering.define(output, axes.result_layout))


def global_pool(code: str) -> Write:
    def write(lowering: Lowering, node: Node) -> None:
        axes = _laid_axes(lowering, node, list(range(2, lowering.shape(node.inputs[0]).rank)), True)
        x = lowering.tensor(node.inputs[0], axes.layout)
        _reduced(lowering, node, code, x, axes, lowering.define(node.outputs[0], axes.result_layout))

    return write


def cumulative_sum(lowering: Lowering, node: Node) -> None:
    axis = int(lowering.value(node.inputs[1], "the axis").reshape(()))
    axis %= lowering.shape(node.inputs[0]).rank
    inputs = [lowering.native(node.inputs[0]), lowering.constant(axis, "axis", np.int32)]
    options = {name: bool(node.attributes.get(name, 0)) for name in ("exclusive", "reverse")}
    lowering.emit("CUMSUM", inputs, [lowering.define(node.outputs[0])], **options)


def _axes(lowering: Lowering, node: Node) -> Axes:
    """Return the axes to reduce: without any given, all of them, or none with `noop_with_empty_axes`."""
    rank = lowering.shape(node.inputs[0]).rank
    given = lowering.integers(node, "axes", 1)
    if not given:
        given = [] if node.attributes.get("noop_with_empty_axes", 0) else list(range(rank))
    wanted = sorted({axis % rank for axis in given})
    return _laid_axes(lowering, node, wanted, bool(node.attributes.get("keepdims", 1)))


def _laid_axes(lowering: Lowering, node: Node, axes: list[int], keep: bool) -> Axes:
    rank, held = lowering.shape(node.inputs[0]).rank, lowering.layout(node.inputs[0])
    keep = keep or not axes
    if held is Layout.CHANNELS_LAST and not keep and axes != list(range(2, rank)):
        held = Layout.NATIVE  # the rest would be in neither order
    places = [lowering.axis(axis, rank, held) for axis in axes]
    if held is Layout.CHANNELS_LAST and rank == 3 and not keep:
        places.append(1)  # the added height of a value of rank 3
    return Axes(places, keep, held, held if keep else Layout.NATIVE)


def _reduced(lowering: Lowering, node: Node, code: str, x: int, axes: Axes, output: int | None) -> int:
    """Reduce `x`, into `output` where there is one."""
    shape = lowering.laid_out(lowering.shape(node.outputs[0]), axes.result_layout)
    if not axes.places:
        return x if output is None else lowering.reshape(x, shape, output)
    target = _scratch(lowering, node, shape) if output is None else output
    if code == "SUM":
        return _summed(lowering, node, x, axes, target, shape)
    lowering.emit(code, [x, lowering.index_constant(axes.places, "axes")], [target], keepDims=axes.keep)
    return target


def _summed(lowering: Lowering, node: Node, x: int, axes: Axes, target: int, shape: BatchShape) -> int:
    """Sum. Floats take mean times count: the quantiser would clip the result of SUM to the scale of its elements."""
    source = lowering.laid_out(lowering.shape(node.inputs[0]), axes.layout)
    counts, places = [source.signature[place] for place in axes.places], lowering.index_constant(axes.places, "axes")
    if lowering.dtype(node.inputs[0]) != FLOAT32 or min(counts) < 1:
        lowering.emit("SUM", [x, places], [target], keepDims=axes.keep)
        return target
    mean = _scratch(lowering, node, shape)
    lowering.emit("MEAN", [x, places], [mean], keepDims=axes.keep)
    count = lowering.constant(math.prod(counts), f"{node.outputs[0]}_count")
    return lowering.arithmetic("MUL", [mean, count], target)


def _apply(lowering: Lowering, code: str, x: int, output: int) -> int:
    if code == "SQUARE":
        return lowering.arithmetic("MUL", [x, x], output)
    lowering.emit(code, [x], [output])
    return output


def _scratch(lowering: Lowering, node: Node, shape: BatchShape) -> int:
    return lowering.scratch(f"{node.outputs[0]}_step", shape, lowering.dtype(node.inputs[0]))


OPS = {
    "CumSum": Op(cumulative_sum, widens=NARROW, stays_float=True),
    "GlobalAveragePool": Op(global_pool("MEAN")),
    "GlobalMaxPool": Op(global_pool("REDUCE_MAX")),
    "ReduceL1": Op(reduction("SUM", before="ABS"), widens=NARROW),
    "ReduceL2": Op(reduction("SUM", before="SQUARE", after="SQRT"), widens=NARROW),
    "ReduceLogSum": Op(reduction("SUM", after="LOG"), widens=NARROW),
    "ReduceLogSumExp": Op(log_sum_exp, widens=NARROW),
    "ReduceMax": Op(reduction("REDUCE_MAX"), widens=NARROW),
    "ReduceMean": Op(reduction("MEAN"), widens=NARROW),
    "ReduceMin": Op(reduction("REDUCE_MIN"), widens=NARROW),
    "ReduceProd": Op(reduction("REDUCE_PROD"), widens=NARROW),
    "ReduceSum": Op(reduction("SUM"), widens=NARROW),
    "ReduceSumSquare": Op(reduction("SUM", before="SQUARE"), widens=NARROW),
}
