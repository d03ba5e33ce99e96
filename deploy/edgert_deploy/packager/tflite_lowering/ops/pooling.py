"""MaxPool, AveragePool, LpPool: over two axes at a time, because a pool over boxes is a pool over each axis in turn.

TFLite has no option for some windows: dilated ones, or padding that zeros do not imitate. A look-up then puts the
elements of every window side by side along its axis, and the window becomes a plain one whose stride is its length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.graph import BatchShape, Node
from edgert_deploy.packager.tflite_lowering.lowering import Layout, Lowering, Uncovered
from edgert_deploy.packager.tflite_lowering.op import Op
from edgert_deploy.packager.tflite_lowering.ops.windows import (
    NO_AXIS,
    Window,
    WindowAxis,
    pad_window,
    window_of,
    with_lengths,
)


@dataclass(frozen=True)
class Plane:
    """An intermediate channels-last tensor of rank 4 of a pooling node called `name`."""

    lowering: Lowering
    name: str
    tensor: int
    shape: BatchShape
    dtype: np.dtype[Any]

    def made(self, code: str, inputs: list[int], shape: BatchShape, step: str, **options: Any) -> Plane:
        """Return the result of an operator on this and `inputs`."""
        tensor = self.lowering.scratch(f"{self.name}_{step}", shape, self.dtype)
        self.lowering.emit(code, [self.tensor, *inputs], [tensor], **options)
        return replace(self, tensor=tensor, shape=shape)

    def reshaped(self, dims: tuple[int, ...]) -> Plane:
        """Return the plane with other axes, the first of which includes the batch."""
        if dims == self.shape.dims:
            return self
        shape = BatchShape(dims, (-1 if self.shape.signature[0] == -1 else dims[0], *dims[1:]))
        tensor = self.lowering.scratch(f"{self.name}_planes", shape, self.dtype)
        return replace(self, tensor=self.lowering.reshape(self.tensor, shape, tensor), shape=shape)

    def padded(self, window: Window, *, mirrored: bool = False) -> Plane:
        tensor = pad_window(
            self.lowering, self.tensor, self.shape, window, self.name, dtype=self.dtype, mirrored=mirrored
        )
        return replace(self, tensor=tensor, shape=window.padded(self.shape))

    def side_by_side(self, place: int, elements: NDArray[np.intp]) -> Plane:
        """Return the plane with `elements` [outputs, kernel] along the axis `place`."""
        indices = self.lowering.index_constant(elements.reshape(-1), "elements")
        shape = self.shape.with_length(place, elements.size)
        return self.made("GATHER", [indices], shape, "elements", axis=place, batchDims=0)

    def pooled(self, code: str, window: Window, padding: int = schema.Padding.VALID) -> Plane:
        height, width = window.axes
        shape = with_lengths(self.shape, [axis.outputs for axis in window.axes])
        strides = {"strideH": height.stride, "strideW": width.stride}
        kernel = {"filterHeight": height.kernel, "filterWidth": width.kernel}
        return self.made(code, [], shape, "pooled", padding=int(padding), **strides, **kernel)

    def scaled(self, factors: NDArray[Any]) -> Plane:
        """Return the plane times a factor per position, [height, width], or one for all."""
        if (factors == 1).all():
            return self
        constant = self.lowering.constant(factors[None, :, :, None], f"{self.name}_factors")
        return self.made("MUL", [constant], self.shape, "scaled")


def max_pool(lowering: Lowering, node: Node) -> None:
    if len(node.outputs) > 1 and node.outputs[1]:
        raise Uncovered("its second output, the indices, is not covered; export the model without it")
    non_negative = lowering.is_non_negative(node.inputs[0])
    _pool(lowering, node, lambda plane, window: _max(plane, window, non_negative))


def _max(plane: Plane, window: Window, non_negative: bool) -> Plane:
    """Take maxima in which padding never wins: zeros if no value is below, else elements of the same window.

    Minus infinity would work in float32, but would take up the whole INT8 range.
    """
    plane, window = _undilated_max(plane, window)
    if window.padding is not None:
        return plane.pooled("MAX_POOL_2D", window, window.padding)
    if non_negative:
        return plane.padded(window).pooled("MAX_POOL_2D", window)
    if all(_can_mirror(axis) for axis in window.axes):
        return plane.padded(window, mirrored=True).pooled("MAX_POOL_2D", window)
    plane, window = _undilated_max(plane, window, also=lambda axis: not axis.is_valid)
    return plane.pooled("MAX_POOL_2D", window)


def _can_mirror(axis: WindowAxis) -> bool:
    widest = max(axis.before, axis.after)
    return 2 * widest <= axis.kernel and widest <= axis.size


def _undilated_max(
    plane: Plane, window: Window, also: Callable[[WindowAxis], bool] = lambda axis: False
) -> tuple[Plane, Window]:
    """Put windows along dilated axes, and those of `also`, side by side; padding repeats an element of the window."""
    axes = list(window.axes)
    for i, axis in enumerate(axes):
        if axis.dilation == 1 and not also(axis):
            continue
        read = axis.elements()
        inside = (read >= 0) & (read < axis.size)
        if not inside.any(axis=1).all():
            raise Uncovered("one of its windows covers padding only; export the model with less padding")
        first = np.take_along_axis(read, inside.argmax(axis=1)[:, None], axis=1)
        plane = plane.side_by_side(i + 1, np.where(inside, read, first))
        axes[i] = axis.side_by_side()
    return plane, Window(tuple(axes))


def average_pool(lowering: Lowering, node: Node) -> None:
    """Take means. TFLite excludes padding only under SAME; elsewhere a factor per position corrects the mean."""
    counted = bool(node.attributes.get("count_include_pad", 0))

    def average(plane: Plane, window: Window) -> Plane:
        undilated = all(axis.dilation == 1 for axis in window.axes)
        if undilated and window.padding is not None and not (counted and window.padding == schema.Padding.SAME):
            return plane.pooled("AVERAGE_POOL_2D", window, window.padding)
        rows, columns = (axis.kernel / axis.counts(counted) for axis in window.axes)
        return _mean_with_zeros(plane, window).scaled(np.outer(rows, columns))

    _pool(lowering, node, average)


def _mean_with_zeros(plane: Plane, window: Window) -> Plane:
    """Return the mean over whole windows, in which padding counts as zeros."""
    if window.padding != schema.Padding.VALID:
        plane = plane.padded(window)
    axes = list(window.axes)
    for i, axis in enumerate(axes):
        if axis.dilation != 1:
            plane = plane.side_by_side(i + 1, axis.elements() + axis.before)
            axes[i] = axis.side_by_side()
    return plane.pooled("AVERAGE_POOL_2D", Window(tuple(axes)))


def lp_pool(lowering: Lowering, node: Node) -> None:
    """Take the p-th root of the sum of p-th powers: the root of their mean, times the p-th root of their number."""
    power = float(node.attributes.get("p", 2))
    area = int(np.prod(node.attributes["kernel_shape"]))
    _pool(
        lowering,
        node,
        _mean_with_zeros,
        before=lambda plane: _powers(plane, power),
        after=lambda plane: _root(plane, power, area),
    )


def global_lp_pool(lowering: Lowering, node: Node) -> None:
    source, output, power = node.inputs[0], node.outputs[0], float(node.attributes.get("p", 2))
    layout, rank = lowering.layout(source), lowering.shape(source).rank
    shape, result = (lowering.laid_out(lowering.shape(name), layout) for name in (source, output))
    axes = [lowering.axis(axis, rank, layout) for axis in range(2, rank)]
    powers = _powers(Plane(lowering, output, lowering.tensor(source, layout), shape, lowering.dtype(source)), power)
    mean = powers.made("MEAN", [lowering.index_constant(axes, "axes")], result, "mean", keepDims=True)
    area = int(np.prod(lowering.shape(source).dims[2:]))
    lowering.alias(output, layout, _root(mean, power, area).tensor)


def _powers(plane: Plane, power: float) -> Plane:
    """|x| ** power."""
    if power == 2:
        return plane.made("MUL", [plane.tensor], plane.shape, "squared")
    plane = plane.made("ABS", [], plane.shape, "absolute")
    if power == 1:
        return plane
    return plane.made("POW", [plane.lowering.constant(np.float32(power), "power")], plane.shape, "powers")


def _root(plane: Plane, power: float, count: int) -> Plane:
    """Return the root of `count` times the mean in `plane`."""
    if power == 2:
        plane = plane.made("SQRT", [], plane.shape, "root")
    elif power != 1:
        exponent = plane.lowering.constant(np.float32(1 / power), "power")
        plane = plane.made("POW", [exponent], plane.shape, "root")
    return plane.scaled(np.full((1, 1), count ** (1 / power)))


def _as_it_is(plane: Plane) -> Plane:
    return plane


def _pool(
    lowering: Lowering,
    node: Node,
    pool: Callable[[Plane, Window], Plane],
    before: Callable[[Plane], Plane] = _as_it_is,
    after: Callable[[Plane], Plane] = _as_it_is,
) -> None:
    """Apply `pool` to the last two axes and, where there are three, to the first one."""
    window = window_of(lowering, node, [int(k) for k in node.attributes["kernel_shape"]])
    source, output = node.inputs[0], node.outputs[0]
    shape = lowering.laid_out(lowering.shape(source), Layout.CHANNELS_LAST)
    plane = before(Plane(lowering, output, lowering.channels_last(source), shape, lowering.dtype(source)))
    if len(window.axes) == 2:
        plane = pool(plane, window)
    else:
        depth, height, width = window.axes
        batch, channels, area = shape.dims[0], shape.dims[-1], height.outputs * width.outputs
        plane = plane.reshaped((batch * depth.size, height.size, width.size, channels))
        plane = pool(plane, Window((height, width))).reshaped((batch, depth.size, area, channels))
        plane = pool(plane, Window((depth, replace(NO_AXIS, size=area, outputs=area))))
        plane = plane.reshaped((batch, depth.outputs, height.outputs, width.outputs, channels))
    lowering.alias(output, Layout.CHANNELS_LAST, after(plane).tensor)


OPS = {
    "AveragePool": Op(average_pool, sign="as_input"),
    "GlobalLpPool": Op(global_lp_pool),
    "LpPool": Op(lp_pool),
    "MaxPool": Op(max_pool, sign="as_input"),
}
