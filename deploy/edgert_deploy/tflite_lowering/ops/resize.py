"""Resize and Upsample. Nearest is exact for any variant of ONNX's (by look-up); linear has three coordinate rules."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.tflite_lowering.graph import Node
from edgert_deploy.tflite_lowering.lowering import Layout, Lowering, Uncovered

LINEAR_RULES = {
    "half_pixel": {"alignCorners": False, "halfPixelCenters": True},
    "pytorch_half_pixel": {"alignCorners": False, "halfPixelCenters": True},
    "align_corners": {"alignCorners": True, "halfPixelCenters": False},
    "asymmetric": {"alignCorners": False, "halfPixelCenters": False},
}


def resize(lowering: Lowering, node: Node) -> None:
    source, output = node.inputs[0], node.outputs[0]
    before, after = lowering.shape(source), lowering.shape(output)
    if before.rank != 4 or before.dims[:2] != after.dims[:2]:
        raise Uncovered("only the last two axes of a value of rank 4 are covered")
    mode, rule = node.attributes.get("mode", "nearest"), _coordinate_rule(node)
    if mode == "nearest":
        _nearest(lowering, node, rule)
        return
    if mode != "linear" or rule not in LINEAR_RULES or node.attributes.get("antialias", 0):
        raise Uncovered(f"mode {mode!r} with {rule!r}, antialias or a crop is not covered")
    scales = _scales(lowering, node)
    if any(out != int(n) * s for out, n, s in zip(after.dims[2:], before.dims[2:], scales, strict=True)):
        raise Uncovered(f"scales {scales} that do not give whole lengths are not covered for linear")
    if rule == "pytorch_half_pixel" and 1 in after.dims[2:]:
        raise Uncovered("pytorch_half_pixel to a length of 1 is not covered")
    inputs = [lowering.channels_last(source), lowering.index_constant(after.dims[2:], "size")]
    lowering.emit("RESIZE_BILINEAR", inputs, [lowering.define(output, Layout.CHANNELS_LAST)], **LINEAR_RULES[rule])


def _coordinate_rule(node: Node) -> str:
    """Resize of opset 10 and Upsample are asymmetric, and have no attribute to say so."""
    if "coordinate_transformation_mode" in node.attributes:
        return str(node.attributes["coordinate_transformation_mode"])
    return "half_pixel" if node.op_type == "Resize" and len(node.inputs) > 2 else "asymmetric"


def _scales(lowering: Lowering, node: Node) -> list[float]:
    """ONNX's own factors for height and width, or the ratio of the lengths where it gives lengths."""
    before, after = (lowering.shape(name).dims[2:] for name in (node.inputs[0], node.outputs[0]))
    given = node.input(2) if node.op_type == "Resize" and len(node.inputs) > 2 else node.input(1)
    if "scales" in node.attributes:
        return [float(s) for s in node.attributes["scales"]][-2:]
    if given and lowering.value(given, "the scales").size:
        return [float(s) for s in lowering.value(given, "the scales")][-2:]
    return [out / n for n, out in zip(before, after, strict=True)]


def _nearest(lowering: Lowering, node: Node, rule: str) -> None:
    """RESIZE_NEAREST_NEIGHBOR where it picks the same elements, else a look-up along each axis."""
    source, output = node.inputs[0], node.outputs[0]
    before, after = (lowering.shape(name).dims[2:] for name in (source, output))
    scales = _scales(lowering, node)
    rounding = str(node.attributes.get("nearest_mode", "round_prefer_floor" if len(node.inputs) > 2 else "floor"))
    picked = [_picked(n, out, s, rule, rounding) for n, out, s in zip(before, after, scales, strict=True)]
    held = lowering.channels_last(source)
    for half in (False, True):
        theirs = [_picked_by_tflite(n, out, half) for n, out in zip(before, after, strict=True)]
        if all(map(np.array_equal, picked, theirs)):
            inputs = [held, lowering.index_constant(after, "size")]
            target = lowering.define(output, Layout.CHANNELS_LAST)
            lowering.emit("RESIZE_NEAREST_NEIGHBOR", inputs, [target], alignCorners=False, halfPixelCenters=half)
            return
    shape = lowering.laid_out(lowering.shape(source), Layout.CHANNELS_LAST).with_length(1, after[0])
    rows = lowering.scratch(f"{output}_rows", shape, lowering.dtype(source))
    lowering.emit("GATHER", [held, lowering.index_constant(picked[0], "rows")], [rows], axis=1, batchDims=0)
    target = lowering.define(output, Layout.CHANNELS_LAST)
    lowering.emit("GATHER", [rows, lowering.index_constant(picked[1], "columns")], [target], axis=2, batchDims=0)


def _picked(length: int, outputs: int, scale: float, rule: str, rounding: str) -> NDArray[np.intp]:
    """Which element ONNX takes for each output position (the Resize operator's specification)."""
    x: NDArray[np.float64] = np.arange(outputs, dtype=np.float64)
    if rule == "asymmetric":
        x = x / scale
    elif rule == "half_pixel" or (rule == "pytorch_half_pixel" and outputs > 1):
        x = (x + 0.5) / scale - 0.5
    elif rule == "align_corners":
        x = x * (length - 1) / max(outputs - 1, 1)
    elif rule == "pytorch_half_pixel":
        x = np.zeros(1)
    else:
        raise Uncovered(f"nearest with {rule!r} is not covered")
    rounded = {
        "floor": np.floor(x),
        "ceil": np.ceil(x),
        "round_prefer_floor": np.ceil(x - 0.5),
        "round_prefer_ceil": np.floor(x + 0.5),
    }[rounding]
    picked: NDArray[np.intp] = np.clip(rounded, 0, length - 1).astype(np.intp)
    return picked


def _picked_by_tflite(length: int, outputs: int, half_pixel: bool) -> NDArray[np.intp]:
    """The same of RESIZE_NEAREST_NEIGHBOR (tflite/kernels/internal/reference/resize_nearest_neighbor.h)."""
    x = (np.arange(outputs, dtype=np.float32) + np.float32(0.5 if half_pixel else 0)) * np.float32(length / outputs)
    picked: NDArray[np.intp] = np.clip(np.floor(x), 0, length - 1).astype(np.intp)
    return picked


LOWERINGS: dict[str, Callable[[Lowering, Node], None]] = {
    "Resize": resize,
    "Upsample": resize,
}
