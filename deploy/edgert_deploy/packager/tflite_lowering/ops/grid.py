"""GridSample: looks up the four pixels around each position, and mixes them by their distance.

The pixels are the rows of a table [batch, height * width, channels]. The coordinates need more than 8 bits, so all
operators stay in float.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from edgert_deploy.packager.tflite_lowering.graph import Node
from edgert_deploy.packager.tflite_lowering.lowering import Layout, Lowering
from edgert_deploy.packager.tflite_lowering.op import Op
from edgert_deploy.packager.tflite_lowering.value import FLOAT32, INT32, Unsupported, Value, require_fixed
from edgert_deploy.packager.tflite_lowering.writer import FLOAT_MARK


def grid_sample(lowering: Lowering, node: Node) -> None:
    mode, padding = (str(node.attributes.get(*option)) for option in (("mode", "linear"), ("padding_mode", "zeros")))
    shape = lowering.shape(node.inputs[0])
    if shape.rank != 4 or mode not in ("linear", "bilinear", "nearest") or padding not in ("zeros", "border"):
        raise Unsupported(
            f"mode {mode!r} with padding_mode {padding!r} on {shape.rank - 2} spatial axes is not supported; use images, "
            "mode 'linear' or 'nearest', and padding_mode 'zeros' or 'border'"
        )
    if lowering.dtype(node.inputs[0]) != FLOAT32:
        raise Unsupported(f"samples of {lowering.dtype(node.inputs[0])} are not supported; cast to float32 before")
    require_fixed(shape, (2, 3), "the batch is part of a spatial axis")
    image, grid = (
        replace(value, step=FLOAT_MARK)
        for value in (lowering.read(node, 0, Layout.CHANNELS_LAST), lowering.read(node, 1))
    )
    sizes = np.array([shape.dims[3], shape.dims[2]])  # in the order of the grid's coordinates
    sampled = lowering.result_shape(node, Layout.CHANNELS_LAST)
    margin = int(padding == "zeros")  # the zeros around the image
    places = grid * ((sizes - node.attributes.get("align_corners", 0)) / 2) + (sizes - 1) / 2
    places = places.op("ROUND") if mode == "nearest" else places
    places = places.op("MAXIMUM", -margin).op("MINIMUM", sizes - 1 + margin)
    corners = places.op("FLOOR")
    # One more row and column, so that the pixels after the last ones exist. Their weight is 0.
    image = image.padded([[0, 0], [margin, margin + 1], [margin, margin + 1], [0, 0]])
    height, width = image.shape.dims[1:3]
    table = image.reshaped(image.shape.reduced([1], keep=False).with_length(1, height * width))
    index = ((corners + margin).cast(INT32) * np.array([1, width])).total([3], keep=False)
    one_for_all = index.shape.signature[0] == 1  # a constant grid, which is the same for each item
    if one_for_all:
        index = index.reshaped(index.shape.reduced([0], keep=False))

    def pixels(row: int, column: int) -> Value:
        places = index + (row * width + column)
        return table.op("GATHER", places, shape=sampled, axis=1, batchDims=int(not one_for_all))

    if mode == "nearest":
        lowering.result(node, pixels(0, 0), Layout.CHANNELS_LAST)
        return
    right, down = ((places - corners).gathered(np.array([axis]), 3) for axis in (0, 1))
    upper, lower = (_mixed(pixels(row, 0), pixels(row, 1), right) for row in (0, 1))
    lowering.result(node, _mixed(upper, lower, down), Layout.CHANNELS_LAST)


def _mixed(one: Value, other: Value, share: Value) -> Value:
    return one + (other - one) * share


OPS = {"GridSample": Op(grid_sample, stays_float=True)}
