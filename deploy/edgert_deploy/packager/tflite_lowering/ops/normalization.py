"""The normalizations. Only a BatchNormalization that no convolution could absorb gets here."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.graph import BatchShape, Node
from edgert_deploy.packager.tflite_lowering.lowering import Layout, Lowering, Uncovered
from edgert_deploy.packager.tflite_lowering.op import Op

SMALLEST_NORM = 1e-6  # tflite/kernels/internal/reference/l2normalization.h
SMALLEST_DEVIATION = 1e-9


def layer_normalization(lowering: Lowering, node: Node) -> None:
    """Normalize over the axes from `axis` on; scale and bias have their shape."""
    shape = lowering.shape(node.inputs[0])
    normal = _normalized(lowering, node, lowering.native(node.inputs[0]), shape, _axes_from(node, shape.rank))
    for name, tensor in zip(node.outputs[1:], (normal.mean, normal.inverse), strict=False):
        if name:
            lowering.alias(name, Layout.NATIVE, tensor)
    offset = lowering.native(node.inputs[2]) if node.input(2) else None
    _scale_and_shift(lowering, node, normal.result, lowering.native(node.inputs[1]), offset)


def rms_normalization(lowering: Lowering, node: Node) -> None:
    """x * rsqrt(mean of squares + epsilon) * scale, over the axes from `axis` on."""
    shape, output, x = lowering.shape(node.inputs[0]), node.outputs[0], lowering.native(node.inputs[0])
    inverse = _inverse_deviation(lowering, node, x, shape, _axes_from(node, shape.rank), _epsilon(node))
    normal = lowering.arithmetic("MUL", [x, inverse], lowering.scratch(f"{output}_normal", shape))
    _scale_and_shift(lowering, node, normal, lowering.native(node.inputs[1]), None)


def _axes_from(node: Node, rank: int) -> list[int]:
    return list(range(int(node.attributes.get("axis", -1)) % rank, rank))


def _epsilon(node: Node) -> float:
    return float(node.attributes.get("epsilon", 1e-5))


def instance_normalization(lowering: Lowering, node: Node) -> None:
    """Normalize over the spatial axes, with a scale and a bias per channel."""
    image = _Image.of(lowering, node)
    axes = [axis for axis in range(1, image.shape.rank) if axis != image.channel]
    normal = _normalized(lowering, node, image.tensor, image.shape, axes).result
    scale, offset = (lowering.value(name, f"{name!r}") for name in node.inputs[1:3])
    image.scale_and_shift(node, normal, scale, offset)


def mean_variance_normalization(lowering: Lowering, node: Node) -> None:
    """(x - mean) / deviation. ONNX adds 1e-9 to the deviation, so that a deviation of 0 gives 0."""
    source, output = node.inputs[0], node.outputs[0]
    layout, rank = lowering.layout(source), lowering.shape(source).rank
    shape = lowering.laid_out(lowering.shape(source), layout)
    axes = [lowering.axis(int(axis), rank, layout) for axis in node.attributes.get("axes", (0, 2, 3))]
    named = replace(node, attributes={"epsilon": SMALLEST_DEVIATION**2})
    normal = _normalized(lowering, named, lowering.tensor(source, layout), shape, axes)
    lowering.alias(output, layout, normal.result)


@dataclass(frozen=True)
class _Normal:
    """The tensors of a normalized value, its mean and its inverse deviation."""

    result: int
    mean: int
    inverse: int


def _normalized(lowering: Lowering, node: Node, x: int, shape: BatchShape, axes: list[int]) -> _Normal:
    """(x - mean) * rsqrt(variance + epsilon) over `axes` of a tensor of `shape`."""
    output = node.outputs[0]
    mean = _mean_over(lowering, x, shape, axes, f"{output}_mean")
    centred = lowering.arithmetic("SUB", [x, mean], lowering.scratch(f"{output}_centred", shape))
    inverse = _inverse_deviation(lowering, node, centred, shape, axes, _epsilon(node))
    result = lowering.arithmetic("MUL", [centred, inverse], lowering.scratch(f"{output}_normal", shape))
    return _Normal(result, mean, inverse)


def _inverse_deviation(
    lowering: Lowering, node: Node, centred: int, shape: BatchShape, axes: list[int], epsilon: float
) -> int:
    """rsqrt(mean of squares + epsilon)."""
    output, reduced = node.outputs[0], _reduced(shape, axes)
    squared = lowering.arithmetic("MUL", [centred, centred], lowering.scratch(f"{output}_squared", shape))
    mean = _mean_over(lowering, squared, shape, axes, f"{output}_mean_square")
    constant = lowering.constant(np.float32(epsilon), f"{output}_epsilon")
    variance = lowering.arithmetic("ADD", [mean, constant], lowering.scratch(f"{output}_variance", reduced))
    inverse = lowering.scratch(f"{output}_inverse", reduced)
    lowering.emit("RSQRT", [variance], [inverse])
    return inverse


def _mean_over(lowering: Lowering, tensor: int, shape: BatchShape, axes: list[int], name: str) -> int:
    mean = lowering.scratch(name, _reduced(shape, axes))
    lowering.emit("MEAN", [tensor, lowering.index_constant(axes, "axes")], [mean], keepDims=True)
    return mean


def _reduced(shape: BatchShape, axes: list[int]) -> BatchShape:
    for axis in axes:
        shape = shape.with_length(axis, 1)
    return shape


def _scale_and_shift(lowering: Lowering, node: Node, normal: int, scale: int, offset: int | None) -> None:
    output = lowering.define(node.outputs[0])
    if offset is None:
        lowering.arithmetic("MUL", [normal, scale], output)
        return
    scaled = lowering.scratch(f"{node.outputs[0]}_scaled", lowering.shape(node.outputs[0]))
    lowering.arithmetic("ADD", [lowering.arithmetic("MUL", [normal, scale], scaled), offset], output)


def batch_normalization(lowering: Lowering, node: Node) -> None:
    """x * factor + offset, with two constants per channel."""
    if node.attributes.get("training_mode", 0) or any(node.outputs[1:]):
        raise Uncovered("it is in training mode; export the model for inference")
    scale, bias, mean, variance = (lowering.value(name, f"{name!r}").astype(np.float64) for name in node.inputs[1:5])
    factor = scale / np.sqrt(variance + _epsilon(node))
    image = _Image.of(lowering, node)
    image.scale_and_shift(node, image.tensor, factor, bias - mean * factor)


@dataclass(frozen=True)
class _Image:
    """A node's input with its channels along the axis `channel`, of rank 4 at most.

    TFLite's older INT8 kernels broadcast up to rank 4, so that the depth and the height of a volume become one axis.
    """

    lowering: Lowering
    tensor: int
    shape: BatchShape
    channel: int
    layout: Layout

    @classmethod
    def of(cls, lowering: Lowering, node: Node) -> _Image:
        source, layout = node.inputs[0], lowering.layout(node.inputs[0])
        rank, tensor = lowering.shape(source).rank, lowering.tensor(source, layout)
        shape, channel = lowering.laid_out(lowering.shape(source), layout), lowering.axis(1, rank, layout)
        if rank == 5:
            depth = lowering.axis(2, rank, layout)
            shape = shape.with_length(depth, shape.dims[depth] * shape.dims[depth + 1]).without_axis(depth + 1)
            tensor = lowering.reshape(tensor, shape, lowering.scratch(f"{node.outputs[0]}_image", shape))
            channel = min(channel, shape.rank - 1)
        return cls(lowering, tensor, shape, channel, layout)

    def scale_and_shift(self, node: Node, tensor: int, scale: NDArray[Any], offset: NDArray[Any]) -> None:
        """Make `node`'s result: `tensor`, of this shape, times one constant per channel plus another."""
        output = node.outputs[0]
        dims = [-1 if axis == self.channel else 1 for axis in range(self.shape.rank)]
        for code, values in (("MUL", scale), ("ADD", offset)):
            constant = self.lowering.constant(values.reshape(dims), f"{output}_{code.lower()}")
            made = self.lowering.scratch(f"{output}_channels", self.shape)
            tensor = self.lowering.arithmetic(code, [tensor, constant], made)
        wanted = self.lowering.laid_out(self.lowering.shape(output), self.layout)
        if wanted != self.shape:
            tensor = self.lowering.reshape(tensor, wanted, self.lowering.scratch(f"{output}_volume", wanted))
        self.lowering.alias(output, self.layout, tensor)


def lp_normalization(lowering: Lowering, node: Node) -> None:
    """Divide x by its p-norm along one axis; TFLite has an operator for p = 2 along the last one.

    A norm below 1e-6 counts as 1e-6, like in that operator: zeros stay zeros.
    """
    source, output, power = node.inputs[0], node.outputs[0], int(node.attributes.get("p", 2))
    shape = lowering.shape(source)
    axis = int(node.attributes.get("axis", -1)) % shape.rank
    if power == 1:
        x = lowering.native(source)
        absolute = lowering.scratch(f"{output}_absolute", shape)
        lowering.emit("ABS", [x], [absolute])
        mean = _mean_over(lowering, absolute, shape, [axis], f"{output}_mean")
        count = lowering.constant(np.float32(shape.dims[axis]), f"{output}_count")
        total = lowering.arithmetic("MUL", [mean, count], lowering.scratch(f"{output}_sum", _reduced(shape, [axis])))
        norm = lowering.scratch(f"{output}_norm", _reduced(shape, [axis]))
        lowering.emit("MAXIMUM", [total, lowering.constant(np.float32(SMALLEST_NORM), f"{output}_smallest")], [norm])
        lowering.arithmetic("DIV", [x, norm], lowering.define(output))
    else:
        lowering.along_last(axis, source, output, lambda x, y: lowering.emit("L2_NORMALIZATION", [x], [y]))


def local_response_normalization(lowering: Lowering, node: Node) -> None:
    """TFLite takes the number of channels on each side, and alpha per channel."""
    rank, size = lowering.shape(node.inputs[0]).rank, int(node.attributes["size"])
    if rank not in (3, 4):
        raise Uncovered(f"the input has {rank - 2} spatial axes, and one or two are covered; reshape it before")
    lowering.emit(
        "LOCAL_RESPONSE_NORMALIZATION",
        [lowering.channels_last(node.inputs[0])],
        [lowering.define(node.outputs[0], Layout.CHANNELS_LAST)],
        radius=size // 2,
        bias=float(node.attributes.get("bias", 1.0)),
        alpha=float(node.attributes.get("alpha", 1e-4)) / size,
        beta=float(node.attributes.get("beta", 0.75)),
    )


OPS = {
    "BatchNormalization": Op(batch_normalization),
    "InstanceNormalization": Op(instance_normalization),
    "LRN": Op(local_response_normalization, stays_float=True),
    "LayerNormalization": Op(layer_normalization),
    "LpNormalization": Op(lp_normalization, stays_float=True),
    "MeanVarianceNormalization": Op(mean_variance_normalization),
    "RMSNormalization": Op(rms_normalization),
}
