"""The windows that convolution and pooling slide over a channels-last tensor: sizes, strides, padding.

One-dimensional windows are two-dimensional with a height of one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.graph import Node
from edgert_deploy.packager.tflite_lowering.lowering import SPATIAL_RANKS, Lowering
from edgert_deploy.packager.tflite_lowering.value import Unsupported


@dataclass(frozen=True)
class WindowAxis:
    """A window along one axis. `before` and `after` are the padding that its positions read."""

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
        """Whether this is the padding of TFLite's SAME."""
        total = self.before + self.after
        return self.outputs == -(-self.size // self.stride) and self.before == total // 2

    @property
    def is_valid(self) -> bool:
        return self.before == self.after == 0

    def elements(self) -> NDArray[np.intp]:
        """Return the elements that each position reads, [outputs, kernel]; outside 0 to `size` is padding."""
        starts = np.arange(self.outputs) * self.stride - self.before
        read: NDArray[np.intp] = starts[:, None] + np.arange(self.kernel) * self.dilation
        return read

    def counts(self, with_padding: bool) -> NDArray[np.intp]:
        """Return the number of elements that each position counts; padding that ceil_mode added never counts."""
        first, end = (-self.before, self.size + self.declared_after) if with_padding else (0, self.size)
        read = self.elements()
        counts: NDArray[np.intp] = ((read >= first) & (read < end)).sum(axis=1)
        return counts

    def side_by_side(self) -> WindowAxis:
        """Return this window for a tensor in which each position has separate elements."""
        length = self.outputs * self.kernel
        return WindowAxis(length, self.outputs, self.kernel, self.kernel, 1, 0, 0, 0)


# The missing axis of a one-dimensional window.
NO_AXIS = WindowAxis(1, 1, 1, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Window:
    """The axes in the tensor's order: height and width, or depth, height and width."""

    axes: tuple[WindowAxis, ...]

    @property
    def padding(self) -> int | None:
        """TFLite's padding scheme, or None if a PAD must come first."""
        if all(axis.is_valid for axis in self.axes):
            return int(schema.Padding.VALID)
        return int(schema.Padding.SAME) if all(axis.is_same for axis in self.axes) else None

    def pads(self) -> list[list[int]]:
        return [[0, 0], *([axis.before, axis.after] for axis in self.axes), [0, 0]]


def window_of(lowering: Lowering, node: Node, kernel: list[int]) -> Window:
    """Return the window of a Conv or a pooling node."""
    shape = lowering.shape(node.inputs[0])
    if shape.rank not in SPATIAL_RANKS:
        raise Unsupported(
            f"the input has {shape.rank - 2} spatial axes, and one to three are supported; reshape it before"
        )
    if -1 in shape.signature[1:]:
        raise Unsupported("the batch is part of a spatial axis; export the model with its batch fixed to 1")
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
    return Window(tuple(axes) if spatial > 1 else (NO_AXIS, *axes))


def _window_axis(
    size: int, outputs: int, kernel: int, stride: int, dilation: int, pads: tuple[int, int], auto_pad: str
) -> WindowAxis:
    """Return the axis of a window; `outputs` is ONNX's own count, which includes ceil_mode."""
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
