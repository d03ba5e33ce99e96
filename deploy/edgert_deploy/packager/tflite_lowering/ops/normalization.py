"""The normalizations. The folding has merged most BatchNormalizations into a convolution before."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.graph import Node
from edgert_deploy.packager.tflite_lowering.lowering import Layout, Lowering
from edgert_deploy.packager.tflite_lowering.op import Op
from edgert_deploy.packager.tflite_lowering.value import Unsupported, Value

SMALLEST_NORM = 1e-6  # tflite/kernels/internal/reference/l2normalization.h


def layer_normalization(lowering: Lowering, node: Node) -> None:
    """Normalize over the axes from `axis` on. Scale and bias have the shape of these axes."""
    x = lowering.read(node)
    axes = _axes_from(node, x.shape.rank)
    mean = x.mean(axes)
    centred = x - mean
    inverse = _inverse_deviation(centred, axes, _epsilon(node))
    scaled = centred * inverse * lowering.read(node, 1)
    lowering.result(node, scaled + lowering.read(node, 2) if node.input(2) else scaled)
    for index, value in ((1, mean), (2, inverse)):
        if index < len(node.outputs) and node.outputs[index]:
            lowering.result(node, value, index=index)


def rms_normalization(lowering: Lowering, node: Node) -> None:
    """Compute x * rsqrt(mean of squares + epsilon) * scale, over the axes from `axis` on."""
    x = lowering.read(node)
    inverse = _inverse_deviation(x, _axes_from(node, x.shape.rank), _epsilon(node))
    lowering.result(node, x * inverse * lowering.read(node, 1))


def _axes_from(node: Node, rank: int) -> list[int]:
    return list(range(node.axis(rank), rank))


def _epsilon(node: Node) -> float:
    return float(node.attributes.get("epsilon", 1e-5))


def instance_normalization(lowering: Lowering, node: Node) -> None:
    """Normalize over the spatial axes, with a scale and a bias per channel."""
    image = _image(lowering, node)
    axes = [axis for axis in range(1, image.value.shape.rank) if axis != image.channel]
    scale, offset = (lowering.value(name, f"{name!r}") for name in node.inputs[1:3])
    centred = image.value - image.value.mean(axes)
    normal = centred * _inverse_deviation(centred, axes, _epsilon(node))
    _write_scaled(lowering, node, replace(image, value=normal), scale, offset)


def _inverse_deviation(centred: Value, axes: list[int], epsilon: float) -> Value:
    return ((centred * centred).mean(axes) + epsilon).op("RSQRT")


def batch_normalization(lowering: Lowering, node: Node) -> None:
    """Compute x * factor + offset, with two constants per channel."""
    if node.attributes.get("training_mode", 0) or any(node.outputs[1:]):
        raise Unsupported("it is in training mode; export the model for inference")
    scale, bias, mean, variance = (lowering.value(name, f"{name!r}").astype(np.float64) for name in node.inputs[1:5])
    factor = scale / np.sqrt(variance + _epsilon(node))
    _write_scaled(lowering, node, _image(lowering, node), factor, bias - mean * factor)


@dataclass(frozen=True)
class _Image:
    """A value with a rank of 4 at most, its layout, and the axis of its channels."""

    value: Value
    layout: Layout
    channel: int


def _image(lowering: Lowering, node: Node) -> _Image:
    """Return the input of `node` as an image.

    TFLite's older INT8 kernels broadcast only up to rank 4, so the depth and the height of a volume become one axis.
    """
    x, layout = lowering.read_as_made(node)
    rank = lowering.shape(node.inputs[0]).rank
    channel = lowering.axis(1, rank, layout)
    if rank == 5:
        depth = lowering.axis(2, rank, layout)
        shape = x.shape.with_length(depth, x.shape.dims[depth] * x.shape.dims[depth + 1])
        x, channel = x.reshaped(shape.reduced([depth + 1], keep=False)), min(channel, 3)
    return _Image(x, layout, channel)


def _write_scaled(lowering: Lowering, node: Node, image: _Image, scale: NDArray[Any], offset: NDArray[Any]) -> None:
    """Write the result of `node`: each channel of `image` times its `scale`, plus its `offset`."""
    dims = [-1 if axis == image.channel else 1 for axis in range(image.value.shape.rank)]
    y = image.value * scale.reshape(dims) + offset.reshape(dims)
    lowering.result(node, y.reshaped(lowering.result_shape(node, image.layout)), image.layout)


def lp_normalization(lowering: Lowering, node: Node) -> None:
    """Divide x by its p-norm along one axis. TFLite has an operator for p = 2 along the last axis.

    A norm below 1e-6 counts as 1e-6, as in TFLite's operator, so zeros stay zeros.
    """
    x = lowering.read(node)
    axis = node.axis(x.shape.rank)
    if int(node.attributes.get("p", 2)) == 1:
        lowering.result(node, x / x.op("ABS").total([axis]).op("MAXIMUM", SMALLEST_NORM))
    else:
        lowering.result(node, x.along_last(axis, lambda turned: turned.op("L2_NORMALIZATION")))


def local_response_normalization(lowering: Lowering, node: Node) -> None:
    """Write LRN: TFLite needs the number of channels on each side, and alpha per channel."""
    rank, size = lowering.shape(node.inputs[0]).rank, int(node.attributes["size"])
    if rank not in (3, 4):
        raise Unsupported(
            f"the input has {rank - 2} spatial axes, but only one or two are supported; reshape the input before"
        )
    y = lowering.read(node, 0, Layout.CHANNELS_LAST).op(
        "LOCAL_RESPONSE_NORMALIZATION",
        radius=size // 2,
        bias=float(node.attributes.get("bias", 1.0)),
        alpha=float(node.attributes.get("alpha", 1e-4)) / size,
        beta=float(node.attributes.get("beta", 0.75)),
    )
    lowering.result(node, y, Layout.CHANNELS_LAST)


OPS = {
    "BatchNormalization": Op(batch_normalization),
    "InstanceNormalization": Op(instance_normalization),
    "LRN": Op(local_response_normalization, stays_float=True),
    "LayerNormalization": Op(layer_normalization),
    "LpNormalization": Op(lp_normalization, stays_float=True),
    "RMSNormalization": Op(rms_normalization),
}
