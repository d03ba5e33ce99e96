"""MaxPool and AveragePool. A pool over three axes runs over two axes, then over the third.

TFLite has no option for dilated windows, and none for padding that zeros cannot replace. For such windows, a lookup
puts the elements of every window side by side along an axis. The stride of the new window is equal to its length.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from edgert_deploy.packager.tflite_lowering.graph import BatchShape, Node
from edgert_deploy.packager.tflite_lowering.lowering import Layout, Lowering
from edgert_deploy.packager.tflite_lowering.op import Op
from edgert_deploy.packager.tflite_lowering.ops.windows import NO_AXIS, Window, WindowAxis, window_of
from edgert_deploy.packager.tflite_lowering.value import Unsupported, Value


def max_pool(lowering: Lowering, node: Node) -> None:
    if len(node.outputs) > 1 and node.outputs[1]:
        raise Unsupported("its second output, the indices, is not supported; export the model without it")
    non_negative = lowering.is_non_negative(node.inputs[0])
    _pool(lowering, node, lambda plane, window: _max(plane, window, non_negative))


def _max(plane: Value, window: Window, non_negative: bool) -> Value:
    """Compute maxima that ignore padding.

    The padding is 0 if no value is negative. Otherwise it is elements of the window. Padding with minus infinity would
    work in float32, but would use up the whole INT8 range.
    """
    plane, window = _undilated_max(plane, window)
    if window.padding is not None:
        return _pooled(plane, "MAX_POOL_2D", window, window.padding)
    if non_negative:
        return _pooled(plane.padded(window.pads()), "MAX_POOL_2D", window)
    if all(_can_mirror(axis) for axis in window.axes):
        return _pooled(plane.padded(window.pads(), "SYMMETRIC"), "MAX_POOL_2D", window)
    plane, window = _undilated_max(plane, window, also=lambda axis: not axis.is_valid)
    return _pooled(plane, "MAX_POOL_2D", window)


def _pooled(plane: Value, code: str, window: Window, padding: int = schema.Padding.VALID) -> Value:
    height, width = window.axes
    shape = plane.shape.with_lengths({1: height.outputs, 2: width.outputs})
    options: dict[str, Any] = {"strideH": height.stride, "strideW": width.stride}
    options |= {"filterHeight": height.kernel, "filterWidth": width.kernel}
    return plane.op(code, shape=shape, padding=int(padding), **options)


def _can_mirror(axis: WindowAxis) -> bool:
    widest = max(axis.before, axis.after)
    return 2 * widest <= axis.kernel and widest <= axis.size


def _undilated_max(
    plane: Value, window: Window, also: Callable[[WindowAxis], bool] = lambda axis: False
) -> tuple[Value, Window]:
    """Put window elements side by side along dilated axes and along axes for which `also` is true.

    In each window, the padding becomes copies of an element of this window.
    """
    axes = list(window.axes)
    for i, axis in enumerate(axes):
        if axis.dilation == 1 and not also(axis):
            continue
        read = axis.elements()
        inside = (read >= 0) & (read < axis.size)
        if not inside.any(axis=1).all():
            raise Unsupported("one of its windows covers padding only; export the model with less padding")
        first = np.take_along_axis(read, inside.argmax(axis=1)[:, None], axis=1)
        plane = plane.gathered(np.where(inside, read, first), i + 1)
        axes[i] = axis.side_by_side()
    return plane, Window(tuple(axes))


def average_pool(lowering: Lowering, node: Node) -> None:
    """Compute means. A factor per position corrects a mean over padding; TFLite's SAME needs no factor."""
    counted = bool(node.attributes.get("count_include_pad", 0))

    def average(plane: Value, window: Window) -> Value:
        undilated = all(axis.dilation == 1 for axis in window.axes)
        if undilated and window.padding is not None and not (counted and window.padding == schema.Padding.SAME):
            return _pooled(plane, "AVERAGE_POOL_2D", window, window.padding)
        rows, columns = (axis.kernel / axis.counts(counted) for axis in window.axes)
        factors = np.outer(rows, columns)
        mean = _mean_with_zeros(plane, window)
        return mean if (factors == 1).all() else mean * factors[None, :, :, None]

    _pool(lowering, node, average)


def _mean_with_zeros(plane: Value, window: Window) -> Value:
    """Return the mean over whole windows. Padding counts as zeros."""
    if window.padding != schema.Padding.VALID:
        plane = plane.padded(window.pads())
    axes = list(window.axes)
    for i, axis in enumerate(axes):
        if axis.dilation != 1:
            plane = plane.gathered(axis.elements() + axis.before, i + 1)
            axes[i] = axis.side_by_side()
    return _pooled(plane, "AVERAGE_POOL_2D", Window(tuple(axes)))


def _pool(lowering: Lowering, node: Node, pool: Callable[[Value, Window], Value]) -> None:
    """Apply `pool` to the last two spatial axes, then to the first if there are three."""
    window = window_of(lowering, node, [int(k) for k in node.attributes["kernel_shape"]])
    plane = lowering.read(node, 0, Layout.CHANNELS_LAST)
    if len(window.axes) == 2:
        plane = pool(plane, window)
    else:
        depth, height, width = window.axes
        batch, channels, area = plane.shape.dims[0], plane.shape.dims[-1], height.outputs * width.outputs
        plane = _joined(plane, (batch * depth.size, height.size, width.size, channels))
        plane = _joined(pool(plane, Window((height, width))), (batch, depth.size, area, channels))
        plane = pool(plane, Window((depth, replace(NO_AXIS, size=area, outputs=area))))
        plane = _joined(plane, (batch, depth.outputs, height.outputs, width.outputs, channels))
    lowering.result(node, plane, Layout.CHANNELS_LAST)


def _joined(plane: Value, dims: tuple[int, ...]) -> Value:
    """Return the plane with the axes `dims`. The first of these axes includes the batch."""
    return plane.reshaped(BatchShape(dims, (-1 if plane.shape.signature[0] == -1 else dims[0], *dims[1:])))


OPS = {
    "AveragePool": Op(average_pool, sign="as_input"),
    "MaxPool": Op(max_pool, sign="as_input"),
}
