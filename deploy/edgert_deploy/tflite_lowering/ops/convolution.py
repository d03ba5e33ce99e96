"""Conv, ConvTranspose and pooling: what slides a window over a channels-last tensor.

One-dimensional ones are two-dimensional with a height of one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

from edgert_deploy.tflite_lowering.graph import BatchShape, Node
from edgert_deploy.tflite_lowering.lowering import SPATIAL_RANKS, Layout, Lowering, Uncovered, activation_code

MIRROR_SYMMETRIC = 1  # schema MirrorPadMode: the edge element itself is repeated


@dataclass(frozen=True)
class WindowAxis:
    """A window along one axis. `before` and `after` are the padding that its positions truly read."""

    size: int
    outputs: int
    kernel: int
    stride: int
    dilation: int
    before: int
    after: int
    declared_after: int

    @property
    def is_same(self) -> bool:
        """Whether TFLite's SAME means this padding."""
        total = self.before + self.after
        return self.outputs == -(-self.size // self.stride) and self.before == total // 2

    @property
    def is_valid(self) -> bool:
        return self.before == self.after == 0

    def starts(self) -> NDArray[np.intp]:
        return np.arange(self.outputs) * self.stride - self.before


@dataclass(frozen=True)
class Window:
    height: WindowAxis
    width: WindowAxis

    @property
    def axes(self) -> tuple[WindowAxis, WindowAxis]:
        return self.height, self.width

    @property
    def padding(self) -> int | None:
        """TFLite's padding scheme, or None where it has none and a PAD must come first."""
        if all(axis.is_valid for axis in self.axes):
            return int(schema.Padding.VALID)
        return int(schema.Padding.SAME) if all(axis.is_same for axis in self.axes) else None

    def pads(self) -> list[list[int]]:
        return [[0, 0], *([axis.before, axis.after] for axis in self.axes), [0, 0]]

    def padded(self, shape: BatchShape) -> BatchShape:
        for place, axis in enumerate(self.axes, start=1):
            shape = shape.with_length(place, axis.size + axis.before + axis.after)
        return shape


# --- convolution


def conv(lowering: Lowering, node: Node) -> None:
    weights = lowering.value(node.inputs[1], "the kernel")
    window = _window(lowering, node, list(weights.shape[2:]))
    weights = _as_2d(weights)
    bias = lowering.value(node.input(2), "the bias") if node.input(2) else np.zeros(len(weights), np.float32)
    source, padding = _zero_padded(lowering, node, window)
    options = {
        "padding": padding,
        "strideH": window.height.stride,
        "strideW": window.width.stride,
        "dilationHFactor": window.height.dilation,
        "dilationWFactor": window.width.dilation,
        "fusedActivationFunction": activation_code(node.activation),
    }
    groups = int(node.attributes.get("group", 1))
    bias_tensor = lowering.constant(bias, f"{node.outputs[0]}_bias")
    output = lowering.define(node.outputs[0], Layout.CHANNELS_LAST)
    if groups > 1 and weights.shape[1] == 1:  # one input channel a group: depthwise
        kernel = lowering.constant(weights.transpose(1, 2, 3, 0), node.inputs[1])
        options["depthMultiplier"] = len(weights) // groups
        lowering.emit("DEPTHWISE_CONV_2D", [source, kernel, bias_tensor], [output], **options)
    else:  # CONV_2D reads the number of groups off the kernel's input channels
        kernel = lowering.constant(weights.transpose(0, 2, 3, 1), node.inputs[1])
        lowering.emit("CONV_2D", [source, kernel, bias_tensor], [output], **options)


def conv_transpose(lowering: Lowering, node: Node) -> None:
    """A convolution that makes every phase of the stride as channels, DEPTH_TO_SPACE, and a cut.

    TRANSPOSE_CONV itself takes the output's shape, batch included, as a constant. Along one axis, with
    stride s and a kernel w of up to m * s elements, output s * q + r is the sum over j < m of
    x[q - j] * w[r + s * j]: an ordinary convolution per phase r.
    """
    if int(node.attributes.get("group", 1)) != 1:
        raise Uncovered("groups are not covered")
    source, output = node.inputs[0], node.outputs[0]
    weights = lowering.value(node.inputs[1], "the kernel")
    if weights.ndim not in SPATIAL_RANKS or -1 in lowering.shape(source).signature[1:]:
        raise Uncovered(f"{weights.ndim - 2} spatial axes; one and two are covered")
    axes = _transposed_axes(lowering, node, weights.shape[2:])
    if weights.ndim == 4 and axes[0].stride != axes[1].stride:
        raise Uncovered("different strides for height and width are not covered")
    deep = _phases(lowering, node, axes, weights)
    shape = lowering.laid_out(lowering.shape(output), Layout.CHANNELS_LAST)
    for place, axis in enumerate(axes, start=1):
        shape = shape.with_length(place, axis.positions * axis.stride)
    whole = lowering.scratch(f"{output}_whole", shape)
    if weights.ndim == 3:  # along one axis, positions and their phases lie in order already
        lowering.reshape(deep, shape, whole)
    else:
        lowering.emit("DEPTH_TO_SPACE", [deep], [whole], blockSize=axes[0].stride)
    cuts = [0, *(axis.before for axis in axes), 0], [-1, *(axis.outputs for axis in axes), -1]
    inputs = [whole, *(lowering.index_constant(values, "cut") for values in cuts)]
    lowering.emit("SLICE", inputs, [lowering.define(output, Layout.CHANNELS_LAST)])


def _phases(lowering: Lowering, node: Node, axes: list[TransposedAxis], weights: NDArray[Any]) -> int:
    """Every phase of every position, phases as channels."""
    output, count = node.outputs[0], axes[0].stride * axes[1].stride
    bias = lowering.value(node.input(2), "the bias") if node.input(2) else np.zeros(weights.shape[1], np.float32)
    shape = lowering.laid_out(lowering.shape(node.inputs[0]), Layout.CHANNELS_LAST)
    for place, axis in enumerate(axes, start=1):
        shape = shape.with_length(place, axis.size + 2 * (axis.taps - 1))
    edges = [[0, 0], *([axis.taps - 1] * 2 for axis in axes), [0, 0]]
    padded = lowering.scratch(f"{output}_padded", shape)
    lowering.emit("PAD", [lowering.channels_last(node.inputs[0]), lowering.index_constant(edges, "pads")], [padded])
    for place, axis in enumerate(axes, start=1):
        shape = shape.with_length(place, axis.positions)
    deep = lowering.scratch(f"{output}_deep", shape.with_length(3, weights.shape[1] * count))
    kernel = lowering.constant(_phase_kernel(_as_2d(weights), axes), node.inputs[1])
    inputs = [padded, kernel, lowering.constant(np.tile(bias, count), f"{output}_bias")]
    ones = {"strideH": 1, "strideW": 1, "dilationHFactor": 1, "dilationWFactor": 1}
    lowering.emit("CONV_2D", inputs, [deep], padding=schema.Padding.VALID, **ones)
    return deep


@dataclass(frozen=True)
class TransposedAxis:
    """One axis of a ConvTranspose; `taps` are input elements that one output element sees at most."""

    size: int
    outputs: int
    stride: int
    dilation: int
    before: int
    taps: int

    @property
    def positions(self) -> int:
        return self.size + self.taps - 1


def _transposed_axes(lowering: Lowering, node: Node, kernel: tuple[int, ...]) -> list[TransposedAxis]:
    """The axes, height and width; the number of outputs is ONNX's own and has output_padding in it."""
    sizes, outputs = (lowering.shape(name).dims[2:] for name in (node.inputs[0], node.outputs[0]))
    rank = len(kernel)
    axes = []
    for i in range(rank):
        stride = int(node.attributes.get("strides", [1] * rank)[i])
        dilation = int(node.attributes.get("dilations", [1] * rank)[i])
        reach = (kernel[i] - 1) * dilation + 1
        before = int(node.attributes.get("pads", [0] * 2 * rank)[i])
        if node.attributes.get("auto_pad", "NOTSET").startswith("SAME") or "output_shape" in node.attributes:
            raise Uncovered("auto_pad and output_shape are not covered; export explicit pads")
        taps = max(-(-reach // stride), -(-(before + outputs[i]) // stride) - sizes[i] + 1)
        axes.append(TransposedAxis(sizes[i], outputs[i], stride, dilation, before, taps))
    return axes if rank == 2 else [TransposedAxis(1, 1, 1, 1, 0, 1), *axes]


def _phase_kernel(weights: NDArray[Any], axes: list[TransposedAxis]) -> NDArray[Any]:
    """[in, out, height, width] -> [phase * out, height taps, width taps, in]."""
    inputs, outputs, height, width = weights.shape
    whole = np.zeros((inputs, outputs, *(axis.taps * axis.stride for axis in axes)), weights.dtype)
    rows, columns = (np.arange(n) * axis.dilation for n, axis in zip((height, width), axes, strict=True))
    whole[:, :, rows[:, None], columns[None, :]] = weights
    (high, wide) = axes
    split = whole.reshape(inputs, outputs, high.taps, high.stride, wide.taps, wide.stride)[:, :, ::-1, :, ::-1, :]
    kernel: NDArray[Any] = split.transpose(3, 5, 1, 2, 4, 0).reshape(-1, high.taps, wide.taps, inputs)
    return kernel


# --- pooling


def max_pool(lowering: Lowering, node: Node) -> None:
    if len(node.outputs) > 1 and node.outputs[1]:
        raise Uncovered("the indices of MaxPool are not covered")
    window = _pool_window(lowering, node)
    source, padding = lowering.channels_last(node.inputs[0]), window.padding
    if padding is None:
        source, padding = _max_padded(lowering, node, window), int(schema.Padding.VALID)
    output = lowering.define(node.outputs[0], Layout.CHANNELS_LAST)
    lowering.emit("MAX_POOL_2D", [source], [output], **_pool_options(window, padding))


def average_pool(lowering: Lowering, node: Node) -> None:
    """TFLite leaves padding out of the mean under SAME; elsewhere a factor per position puts that right."""
    window = _pool_window(lowering, node)
    counted = bool(node.attributes.get("count_include_pad", 0))
    output = lowering.define(node.outputs[0], Layout.CHANNELS_LAST)
    if window.padding is not None and not (counted and window.padding == schema.Padding.SAME):
        options = _pool_options(window, window.padding)
        lowering.emit("AVERAGE_POOL_2D", [lowering.channels_last(node.inputs[0])], [output], **options)
        return
    options = _pool_options(window, int(schema.Padding.VALID))
    source, factors = _padded(lowering, node, window), _mean_factors(window, counted)
    if (factors == 1).all():
        lowering.emit("AVERAGE_POOL_2D", [source], [output], **options)
        return
    shape = lowering.laid_out(lowering.shape(node.outputs[0]), Layout.CHANNELS_LAST)
    mean = lowering.scratch(f"{node.outputs[0]}_mean", shape)
    lowering.emit("AVERAGE_POOL_2D", [source], [mean], **options)
    lowering.arithmetic(
        "MUL", [mean, lowering.constant(factors[None, :, :, None], f"{node.outputs[0]}_factors")], output
    )


def _pool_window(lowering: Lowering, node: Node) -> Window:
    window = _window(lowering, node, [int(k) for k in node.attributes["kernel_shape"]])
    if any(axis.dilation != 1 for axis in window.axes):
        raise Uncovered("a dilated pooling window is not covered")
    return window


def _pool_options(window: Window, padding: int) -> dict[str, Any]:
    return {
        "padding": padding,
        "strideH": window.height.stride,
        "strideW": window.width.stride,
        "filterHeight": window.height.kernel,
        "filterWidth": window.width.kernel,
    }


def _max_padded(lowering: Lowering, node: Node, window: Window) -> int:
    """The input padded with what cannot win: zeros where nothing is below, else elements of the same window.

    Minus infinity would do in float32, and take the whole INT8 range with it.
    """
    if lowering.is_non_negative(node.inputs[0]):
        return _padded(lowering, node, window)
    if any(2 * max(a.before, a.after) > a.kernel or max(a.before, a.after) > a.size for a in window.axes):
        raise Uncovered("padding wider than half the window, on values that may be negative, is not covered")
    return _padded(lowering, node, window, mirrored=True)


def _mean_factors(window: Window, counted: bool) -> NDArray[np.float32]:
    """Window area over the count of elements that ONNX divides by, per output position."""
    rows, columns = (_counts(axis, counted) for axis in window.axes)
    area = window.height.kernel * window.width.kernel
    return (area / np.outer(rows, columns)).astype(np.float32)


def _counts(axis: WindowAxis, counted: bool) -> NDArray[np.intp]:
    """How many elements each window position takes in; padding that ceil_mode added never counts."""
    first, end = (-axis.before, axis.size + axis.declared_after) if counted else (0, axis.size)
    starts = axis.starts()
    counts: NDArray[np.intp] = np.minimum(starts + axis.kernel, end) - np.maximum(starts, first)
    return counts


# --- windows and padding


def _window(lowering: Lowering, node: Node, kernel: list[int]) -> Window:
    shape = lowering.shape(node.inputs[0])
    if shape.rank not in SPATIAL_RANKS:
        raise Uncovered(f"{shape.rank - 2} spatial axes; one and two are covered")
    if -1 in shape.signature[1:]:
        raise Uncovered("the batch is part of a spatial axis")
    spatial, attributes = len(kernel), node.attributes
    pads = list(attributes.get("pads", [0] * 2 * spatial))
    axes = [
        _window_axis(
            shape.dims[2 + i],
            lowering.shape(node.outputs[0]).dims[2 + i],
            kernel[i],
            int(attributes.get("strides", [1] * spatial)[i]),
            int(attributes.get("dilations", [1] * spatial)[i]),
            (pads[i], pads[i + spatial]),
            attributes.get("auto_pad", "NOTSET"),
        )
        for i in range(spatial)
    ]
    return Window(axes[0], axes[1]) if spatial == 2 else Window(WindowAxis(1, 1, 1, 1, 1, 0, 0, 0), axes[0])


def _window_axis(
    size: int, outputs: int, kernel: int, stride: int, dilation: int, pads: tuple[int, int], auto_pad: str
) -> WindowAxis:
    """`outputs` is ONNX's own count, so that ceil_mode is in it already."""
    reach = (outputs - 1) * stride + (kernel - 1) * dilation + 1
    before, declared_after = pads
    if auto_pad.startswith("SAME"):
        total = max(reach - size, 0)
        before = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
        declared_after = total - before
    elif auto_pad == "VALID":
        before = declared_after = 0
    after = max(reach - size - before, 0)
    return WindowAxis(size, outputs, kernel, stride, dilation, before, after, declared_after)


def _zero_padded(lowering: Lowering, node: Node, window: Window) -> tuple[int, int]:
    """The input and the padding scheme to convolve it with."""
    if window.padding is not None:
        return lowering.channels_last(node.inputs[0]), window.padding
    return _padded(lowering, node, window), int(schema.Padding.VALID)


def _padded(lowering: Lowering, node: Node, window: Window, mirrored: bool = False) -> int:
    source = lowering.channels_last(node.inputs[0])
    shape = lowering.laid_out(lowering.shape(node.inputs[0]), Layout.CHANNELS_LAST)
    padded = lowering.scratch(f"{node.outputs[0]}_padded", window.padded(shape), lowering.dtype(node.inputs[0]))
    inputs = [source, lowering.index_constant(window.pads(), "pads")]
    if mirrored:
        lowering.emit("MIRROR_PAD", inputs, [padded], mode=MIRROR_SYMMETRIC)
    else:
        lowering.emit("PAD", inputs, [padded])
    return padded


def _as_2d(weights: NDArray[Any]) -> NDArray[Any]:
    return weights[:, :, None] if weights.ndim == 3 else weights


LOWERINGS = {
    "AveragePool": average_pool,
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "MaxPool": max_pool,
}
