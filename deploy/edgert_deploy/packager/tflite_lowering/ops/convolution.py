"""Conv, and the convolution of channels-last values, which ConvTranspose also uses."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.graph import BatchShape, Node
from edgert_deploy.packager.tflite_lowering.lowering import Layout, Lowering
from edgert_deploy.packager.tflite_lowering.op import Op
from edgert_deploy.packager.tflite_lowering.ops.windows import NO_AXIS, Window, window_of
from edgert_deploy.packager.tflite_lowering.value import Value, activation_code

# The letters of TFLite's options for the axes of a window.
AXIS_LETTERS = {2: "HW", 3: "DHW"}


@dataclass(frozen=True)
class Kernel:
    """A convolution: `weights` in ONNX's order [out, in / groups, *window], and TFLite's options."""

    weights: NDArray[Any]
    bias: NDArray[Any]
    groups: int
    options: dict[str, Any]


def conv(lowering: Lowering, node: Node) -> None:
    weights = lowering.value(node.inputs[1], "the kernel")
    window = window_of(lowering, node, list(weights.shape[2:]))
    bias = lowering.value(node.input(2), "the bias") if node.input(2) else np.zeros(len(weights), np.float32)
    x, padding = lowering.read(node, 0, Layout.CHANNELS_LAST), window.padding
    if padding is None:
        x, padding = x.padded(window.pads()), int(schema.Padding.VALID)
    options = {**window_options(window, padding), "fusedActivationFunction": activation_code(node.activation)}
    kernel = Kernel(as_2d(weights), bias, int(node.attributes.get("group", 1)), options)
    shape = lowering.result_shape(node, Layout.CHANNELS_LAST)
    lowering.result(node, convolved(kernel, x, shape), Layout.CHANNELS_LAST)


def window_options(window: Window, padding: int) -> dict[str, int]:
    options = {"padding": padding}
    for letter, axis in zip(AXIS_LETTERS[len(window.axes)], window.axes, strict=True):
        options |= {f"stride{letter}": axis.stride, f"dilation{letter}Factor": axis.dilation}
    return options


def plain_options(spatial: int) -> dict[str, int]:
    """Return the options of a window of stride 1 without padding."""
    return window_options(Window((NO_AXIS,) * spatial), int(schema.Padding.VALID))


def convolved(kernel: Kernel, x: Value, shape: BatchShape) -> Value:
    """Convolve `x`, channels last, into a value of `shape`."""
    weights, bias, groups = kernel.weights, kernel.bias, kernel.groups
    if weights.ndim == 5:
        return _convolved_3d(kernel, x, shape)
    if groups > 1 and weights.shape[1] == 1:  # one input channel per group: depthwise
        depth = len(weights) // groups
        turned = weights.transpose(1, 2, 3, 0)
        return x.op("DEPTHWISE_CONV_2D", turned, bias, shape=shape, depthMultiplier=depth, **kernel.options)
    # CONV_2D derives the number of groups from the kernel's input channels.
    return x.op("CONV_2D", weights.transpose(0, 2, 3, 1), bias, shape=shape, **kernel.options)


def _convolved_3d(kernel: Kernel, x: Value, shape: BatchShape) -> Value:
    """Convolve each group separately, because CONV_3D has no groups, and join the results."""
    if kernel.groups == 1:
        return x.op("CONV_3D", kernel.weights.transpose(2, 3, 4, 1, 0), kernel.bias, shape=shape, **kernel.options)
    parts = zip(np.split(kernel.weights, kernel.groups), np.split(kernel.bias, kernel.groups), strict=True)
    width, slices = kernel.weights.shape[1], []
    for group, (weights, bias) in enumerate(parts):
        part = x.sliced([0, 0, 0, 0, group * width], x.shape.with_length(4, width))
        plane = replace(kernel, weights=weights, bias=bias, groups=1)
        slices.append(_convolved_3d(plane, part, shape.with_length(4, len(weights))))
    return slices[0].op("CONCATENATION", *slices[1:], shape=shape, axis=4)


def as_2d(weights: NDArray[Any]) -> NDArray[Any]:
    """Add a height of one to the kernel of a one-dimensional convolution; keep any other kernel."""
    return weights[:, :, None] if weights.ndim == 3 else weights


OPS = {"Conv": Op(conv, clamps=True)}
