"""Softmax and the normalizations. A BatchNormalization comes here only where no convolution could take it in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.tflite_lowering.graph import BatchShape, Node
from edgert_deploy.tflite_lowering.lowering import Layout, Lowering, Uncovered
from edgert_deploy.tflite_lowering.ops.elementwise import broadcast_constant

PER_AXIS_SOFTMAX_OPSET = 13  # before it, Softmax took all axes from `axis` on as one


def softmax(lowering: Lowering, node: Node) -> None:
    """TFLite's runs over the last axis: another one is moved there and back."""
    source, output = node.inputs[0], node.outputs[0]
    shape, layout = lowering.shape(source), lowering.layout(source)
    per_axis = lowering.graph.opset >= PER_AXIS_SOFTMAX_OPSET
    axis = int(node.attributes.get("axis", -1 if per_axis else 1)) % shape.rank
    if not per_axis and axis != shape.rank - 1:
        _flat_softmax(lowering, node, axis)
    elif layout is Layout.CHANNELS_LAST and axis == 1:
        _emit_softmax(lowering, node, lowering.channels_last(source), lowering.define(output, layout))
    elif axis == shape.rank - 1:
        _emit_softmax(lowering, node, lowering.native(source), lowering.define(output))
    else:
        order = (*(i for i in range(shape.rank) if i != axis), axis)
        back = tuple(int(i) for i in np.argsort(order))
        turned = [lowering.scratch(f"{output}_turned", shape.permuted(order)) for _ in range(2)]
        lowering.transpose(lowering.native(source), order, turned[0])
        _emit_softmax(lowering, node, *turned)
        lowering.transpose(turned[1], back, lowering.define(output))


def _flat_softmax(lowering: Lowering, node: Node, axis: int) -> None:
    shape, output = lowering.shape(node.inputs[0]), node.outputs[0]
    if axis != 1 or -1 in shape.signature[1:]:
        raise Uncovered(f"axis {axis} before opset {PER_AXIS_SOFTMAX_OPSET}, which joins axes, is not covered")
    features = int(np.prod(shape.dims[1:]))
    flat_shape = BatchShape((shape.dims[0], features), (shape.signature[0], features))
    flat = [lowering.scratch(f"{output}_flat", flat_shape) for _ in range(2)]
    lowering.reshape(lowering.native(node.inputs[0]), flat_shape, flat[0])
    _emit_softmax(lowering, node, *flat)
    lowering.reshape(flat[1], shape, lowering.define(output))


def _emit_softmax(lowering: Lowering, node: Node, source: int, output: int) -> None:
    if node.op_type == "LogSoftmax":
        lowering.emit("LOG_SOFTMAX", [source], [output])
    else:
        lowering.emit("SOFTMAX", [source], [output], beta=1.0)


def layer_normalization(lowering: Lowering, node: Node) -> None:
    """Over the axes from `axis` on; scale and bias have their shape."""
    if any(node.outputs[1:]):
        raise Uncovered("only the first output is covered")
    shape = lowering.shape(node.inputs[0])
    axes = list(range(int(node.attributes.get("axis", -1)) % shape.rank, shape.rank))
    normal = _normalized(lowering, node, lowering.native(node.inputs[0]), shape, axes)
    offset = lowering.native(node.inputs[2]) if node.input(2) else None
    _scale_and_shift(lowering, node, normal, lowering.native(node.inputs[1]), offset, Layout.NATIVE)


def instance_normalization(lowering: Lowering, node: Node) -> None:
    """Over the spatial axes; a scale and a bias a channel."""
    source = node.inputs[0]
    layout, rank = lowering.layout(source), lowering.shape(source).rank
    shape = lowering.laid_out(lowering.shape(source), layout)
    axes = [lowering.axis(axis, rank, layout) for axis in range(2, rank)]
    normal = _normalized(lowering, node, lowering.tensor(source, layout), shape, axes)
    scale, offset = (_per_channel(lowering, node, lowering.value(n, f"{n!r}"), n) for n in node.inputs[1:3])
    _scale_and_shift(lowering, node, normal, scale, offset, layout)


def _normalized(lowering: Lowering, node: Node, x: int, shape: BatchShape, axes: list[int]) -> int:
    """(x - mean) * rsqrt(variance + epsilon) over `axes` of a tensor of `shape`."""
    output, reduced = node.outputs[0], shape
    for axis in axes:
        reduced = reduced.with_length(axis, 1)
    places = lowering.index_constant(axes, "axes")

    def mean_of(tensor: int, name: str) -> int:
        mean = lowering.scratch(f"{output}_{name}", reduced)
        lowering.emit("MEAN", [tensor, places], [mean], keepDims=True)
        return mean

    centred = lowering.scratch(f"{output}_centred", shape)
    lowering.arithmetic("SUB", [x, mean_of(x, "mean")], centred)
    squared = lowering.arithmetic("MUL", [centred, centred], lowering.scratch(f"{output}_squared", shape))
    epsilon = lowering.constant(np.float32(node.attributes.get("epsilon", 1e-5)), f"{output}_epsilon")
    variance = lowering.scratch(f"{output}_variance", reduced)
    lowering.arithmetic("ADD", [mean_of(squared, "mean_square"), epsilon], variance)
    inverse = lowering.scratch(f"{output}_inverse", reduced)
    lowering.emit("RSQRT", [variance], [inverse])
    return lowering.arithmetic("MUL", [centred, inverse], lowering.scratch(f"{output}_normal", shape))


def _scale_and_shift(
    lowering: Lowering, node: Node, normal: int, scale: int, offset: int | None, layout: Layout
) -> None:
    output = lowering.define(node.outputs[0], layout)
    if offset is None:
        lowering.arithmetic("MUL", [normal, scale], output)
        return
    shape = lowering.laid_out(lowering.shape(node.outputs[0]), layout)
    scaled = lowering.arithmetic("MUL", [normal, scale], lowering.scratch(f"{node.outputs[0]}_scaled", shape))
    lowering.arithmetic("ADD", [scaled, offset], output, node.activation)


def batch_normalization(lowering: Lowering, node: Node) -> None:
    """Two constants a channel: x * factor + offset."""
    scale, bias, mean, variance = (lowering.value(name, f"{name!r}").astype(np.float64) for name in node.inputs[1:5])
    factor = scale / np.sqrt(variance + float(node.attributes.get("epsilon", 1e-5)))
    layout = lowering.layout(node.inputs[0])
    shape = lowering.laid_out(lowering.shape(node.inputs[0]), layout)
    scaled = lowering.scratch(f"{node.outputs[0]}_scaled", shape)
    factors = _per_channel(lowering, node, factor, f"{node.outputs[0]}_factor")
    lowering.arithmetic("MUL", [lowering.tensor(node.inputs[0], layout), factors], scaled)
    offsets = _per_channel(lowering, node, bias - mean * factor, f"{node.outputs[0]}_offset")
    lowering.arithmetic("ADD", [scaled, offsets], lowering.define(node.outputs[0], layout), node.activation)


def _per_channel(lowering: Lowering, node: Node, values: NDArray[Any], name: str) -> int:
    """One value a channel, to broadcast over `node`'s input in the layout it has."""
    rank = lowering.shape(node.inputs[0]).rank
    laid = values.astype(np.float32).reshape(-1, *(1,) * (rank - 2))
    return broadcast_constant(lowering, laid, name, rank, lowering.layout(node.inputs[0]))


LOWERINGS: dict[str, Callable[[Lowering, Node], None]] = {
    "BatchNormalization": batch_normalization,
    "InstanceNormalization": instance_normalization,
    "LayerNormalization": layer_normalization,
    "LogSoftmax": softmax,
    "Softmax": softmax,
}
