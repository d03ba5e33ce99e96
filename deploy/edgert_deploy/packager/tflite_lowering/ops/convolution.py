"""Conv, and the convolution of a channels-last tensor, which ConvTranspose uses too."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.graph import BatchShape, Node
from edgert_deploy.packager.tflite_lowering.lowering import Layout, Lowering, activation_code
from edgert_deploy.packager.tflite_lowering.op import Op
from edgert_deploy.packager.tflite_lowering.ops.windows import NO_AXIS, Window, pad_window, window_of

# The letters of TFLite's options for the axes of a window.
AXIS_LETTERS = {2: "HW", 3: "DHW"}


@dataclass(frozen=True)
class Kernel:
    """A convolution: `weights` in ONNX's order [out, in / groups, *window], and TFLite's options."""

    weights: NDArray[Any]
    bias: NDArray[Any]
    groups: int
    options: dict[str, int]


def conv(lowering: Lowering, node: Node) -> None:
    weights = lowering.value(node.inputs[1], "the kernel")
    window = window_of(lowering, node, list(weights.shape[2:]))
    bias = lowering.value(node.input(2), "the bias") if node.input(2) else np.zeros(len(weights), np.float32)
    name, padding = node.outputs[0], window.padding
    source = lowering.channels_last(node.inputs[0])
    shape, result = (lowering.laid_out(lowering.shape(n), Layout.CHANNELS_LAST) for n in (node.inputs[0], name))
    if padding is None:
        source = pad_window(lowering, source, shape, window, name)
        shape, padding = window.padded(shape), int(schema.Padding.VALID)
    options = {**window_options(window, padding), "fusedActivationFunction": activation_code(node.activation)}
    kernel = Kernel(as_2d(weights), bias, int(node.attributes.get("group", 1)), options)
    convolve(lowering, kernel, source, shape, lowering.define(name, Layout.CHANNELS_LAST), result, name)


def window_options(window: Window, padding: int) -> dict[str, int]:
    options = {"padding": padding}
    for letter, axis in zip(AXIS_LETTERS[len(window.axes)], window.axes, strict=True):
        options |= {f"stride{letter}": axis.stride, f"dilation{letter}Factor": axis.dilation}
    return options


def plain_options(spatial: int) -> dict[str, int]:
    """Return the options of a window of stride 1 over a tensor that is padded already."""
    return window_options(Window((NO_AXIS,) * spatial), int(schema.Padding.VALID))


def convolve(
    lowering: Lowering, kernel: Kernel, source: int, shape: BatchShape, output: int, result: BatchShape, name: str
) -> None:
    """Convolve `source`, channels last and of `shape`, into `output`, of shape `result`."""
    if kernel.weights.ndim == 5:
        _convolve_3d(lowering, kernel, source, shape, output, result, name)
        return
    weights, bias = kernel.weights, lowering.constant(kernel.bias, f"{name}_bias")
    if kernel.groups > 1 and weights.shape[1] == 1:  # one input channel a group: depthwise
        tensor = lowering.constant(weights.transpose(1, 2, 3, 0), f"{name}_kernel")
        multiplier = len(weights) // kernel.groups
        lowering.emit(
            "DEPTHWISE_CONV_2D", [source, tensor, bias], [output], depthMultiplier=multiplier, **kernel.options
        )
    else:  # CONV_2D derives the number of groups from the kernel's input channels
        tensor = lowering.constant(weights.transpose(0, 2, 3, 1), f"{name}_kernel")
        lowering.emit("CONV_2D", [source, tensor, bias], [output], **kernel.options)


def _convolve_3d(
    lowering: Lowering, kernel: Kernel, source: int, shape: BatchShape, output: int, result: BatchShape, name: str
) -> None:
    """Convolve each group by itself, since CONV_3D has no groups, and join the results."""
    if kernel.groups == 1:
        tensor = lowering.constant(kernel.weights.transpose(2, 3, 4, 1, 0), f"{name}_kernel")
        inputs = [source, tensor, lowering.constant(kernel.bias, f"{name}_bias")]
        lowering.emit("CONV_3D", inputs, [output], **kernel.options)
        return
    parts = zip(np.split(kernel.weights, kernel.groups), np.split(kernel.bias, kernel.groups), strict=True)
    width, made = kernel.weights.shape[1], []
    for group, (weights, bias) in enumerate(parts):
        part, part_shape = lowering.scratch(f"{name}_group", shape.with_length(4, width)), shape.with_length(4, width)
        lowering.cut(source, [0, 0, 0, 0, group * width], [-1, -1, -1, -1, width], part)
        part_result = result.with_length(4, len(weights))
        made.append(lowering.scratch(f"{name}_group_result", part_result))
        _convolve_3d(
            lowering,
            replace(kernel, weights=weights, bias=bias, groups=1),
            part,
            part_shape,
            made[-1],
            part_result,
            name,
        )
    lowering.emit("CONCATENATION", made, [output], axis=4)


def as_2d(weights: NDArray[Any]) -> NDArray[Any]:
    """Return a kernel with a height of one where it is one-dimensional."""
    return weights[:, :, None] if weights.ndim == 3 else weights


OPS = {"Conv": Op(conv, clamps=True)}
