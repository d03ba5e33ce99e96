"""The windows that convolution and pooling slide over a channels-last tensor: sizes, strides, padding.

A one-dimensional window is a two-dimensional window with a height of one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.graph import Node
from edgert_deploy.packager.tflite_lowering.lowering import SPATIAL_RANKS, Lowering
from edgert_deploy.packager.tflite_lowering.value import Unsupported, require_fixed


@dataclass(frozen=True)
class WindowAxis:
    """A window along one axis.

    Attributes:
        size: The number of input elements.
        outputs: The number of positions of the window.
        kernel: The number of elements that one position reads.
        before: The number of padding elements that positions read before the first element.
        after: The number of padding elements that positions read after the last element.
        declared_after: The number of padding elements that the ONNX node declares after the last element.
    """

    size: int
    outputs: int
    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0
    declared_after: int = 0

    @property
    def is_same(self) -> bool:
        """Whether TFLite's scheme SAME gives the same padding."""
        total = self.before + self.after
        return self.outputs == -(-self.size // self.stride) and self.before == total // 2

    @property
    def is_valid(self) -> bool:
        return self.before == self.after == 0

    def elements(self) -> NDArray[np.intp]:
        """Return the index of each element that a position reads, [outputs, kernel].

        An index below 0, or of `size` and more, is padding.
        """
        starts = np.arange(self.outputs) * self.stride - self.before
        read: NDArray[np.intp] = starts[:, None] + np.arange(self.kernel) * self.dilation
        return read

    def counts(self, with_padding: bool) -> NDArray[np.intp]:
        """Return, for each position, the number of elements over which its mean is computed.

        This number never includes padding that ceil_mode adds.
        """
        first, end = (-self.before, self.size + self.declared_after) if with_padding else (0, self.size)
        read = self.elements()
        counts: NDArray[np.intp] = ((read >= first) & (read < end)).sum(axis=1)
        return counts

    def side_by_side(self) -> WindowAxis:
        """Return this window for a tensor that holds the elements of each position side by side."""
        length = self.outputs * self.kernel
        return WindowAxis(length, self.outputs, self.kernel, stride=self.kernel)


# The missing axis of a one-dimensional window.
NO_AXIS = WindowAxis(size=1, outputs=1, kernel=1)


@dataclass(frozen=True)
class Window:
    """The axes in the tensor's order: height and width, or depth, height and width."""

    axes: tuple[WindowAxis, ...]

    @property
    def padding(self) -> int | None:
        """TFLite's padding scheme; None if the input needs a PAD before the window."""
        if all(axis.is_valid for axis in self.axes):
            return int(schema.Padding.VALID)
        return int(schema.Padding.SAME) if all(axis.is_same for axis in self.axes) else None

    def pads(self) -> list[list[int]]:
        return [[0, 0], *([axis.before, axis.after] for axis in self.axes), [0, 0]]


def window_of(lowering: Lowering, node: Node, kernel: list[int]) -> Window:
    shape = lowering.shape(node.inputs[0])
    if shape.rank not in SPATIAL_RANKS:
        raise Unsupported(
            f"the input has {shape.rank - 2} spatial axes, but only one to three are supported; reshape the input before"
        )
    require_fixed(shape, range(1, shape.rank), "the batch is part of a spatial axis")
    spatial, attributes, axes = len(kernel), node.attributes, []
    pads = attributes.get("pads", [0] * 2 * spatial)
    for i, (size, outputs) in enumerate(zip(shape.dims[2:], lowering.shape(node.outputs[0]).dims[2:], strict=True)):
        stride, dilation = (int(attributes.get(name, [1] * spatial)[i]) for name in ("strides", "dilations"))
        axis = WindowAxis(size, outputs, kernel[i], stride, dilation)
        axes.append(_with_padding(axis, pads[i], pads[i + spatial], attributes.get("auto_pad", "NOTSET")))
        # Before opset 22, ONNX's shape inference counts such a window, but no runtime does.
        if attributes.get("ceil_mode", 0) and (outputs - 1) * stride >= size + axes[-1].before:
            raise Unsupported(
                "its last window begins in the padding after the last element; export the model without ceil_mode"
            )
    return Window(tuple(axes) if spatial > 1 else (NO_AXIS, *axes))


def _with_padding(axis: WindowAxis, before: int, after: int, auto_pad: str) -> WindowAxis:
    """Return `axis` with the padding that its positions read.

    Args:
        axis: The axis without padding. Its number of outputs is ONNX's own, which includes ceil_mode.
        before: The padding that the node declares before the first element. Only the scheme NOTSET uses it.
        after: The padding that the node declares after the last element. Only the scheme NOTSET uses it.
        auto_pad: ONNX's padding scheme.
    """
    reach = (axis.outputs - 1) * axis.stride + (axis.kernel - 1) * axis.dilation + 1
    if auto_pad.startswith("SAME"):
        total = max(reach - axis.size, 0)
        before = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
        after = total - before
    elif auto_pad == "VALID":
        before = after = 0
    return replace(axis, before=before, after=max(reach - axis.size - before, 0), declared_after=after)
