"""Resize and Upsample: TFLite's operator if it uses the same samples, else an exact composition.

The mode "nearest" is a lookup along each axis. Every other mode is a product with a matrix along each axis, because
the weights of such a mode are products of one factor per axis. TFLite's samples are those of
tflite/kernels/internal/reference/{resize_bilinear.h,resize_nearest_neighbor.h}.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.packager.sources.onnx_graph.sampling import RULES, Sampling
from edgert_deploy.packager.tflite_lowering.graph import Node
from edgert_deploy.packager.tflite_lowering.lowering import CHANNELS_LAST_ORDERS, Layout, Lowering
from edgert_deploy.packager.tflite_lowering.op import Op
from edgert_deploy.packager.tflite_lowering.value import FLOAT32, Unsupported, require_fixed

# Two computations of a weight in float32 differ by at most this, on an axis of a few thousand elements.
WEIGHT_TOLERANCE = 1e-4
# TFLite's options (alignCorners, halfPixelCenters).
BILINEAR_RULES = ((False, True), (True, False), (False, False))
# The ranks that TFLite's operators accept: images, and signals with a height of one.
TFLITE_RANKS = (3, 4)


def resize(lowering: Lowering, node: Node) -> None:
    samplings = _samplings(lowering, node)
    require_fixed(lowering.shape(node.inputs[0]), samplings, "it resizes the batch")
    mode = str(node.attributes.get("mode", "nearest"))
    if mode == "nearest":
        _nearest(lowering, node, samplings)
        return
    if lowering.dtype(node.inputs[0]) != FLOAT32:
        raise Unsupported(f"mode {mode!r} on {lowering.dtype(node.inputs[0])} is not supported; cast to float32 before")
    coefficient = float(node.attributes.get("cubic_coeff_a", -0.75))
    antialias, exclude = (bool(node.attributes.get(name, 0)) for name in ("antialias", "exclude_outside"))
    weights = {axis: s.weights(mode, coefficient, antialias, exclude) for axis, s in samplings.items()}
    rule = _bilinear_rule(lowering, node, weights)
    if rule is None:
        _by_matrices(lowering, node, weights)
    else:
        _emit_tflite(lowering, node, "RESIZE_BILINEAR", *rule)


def _samplings(lowering: Lowering, node: Node) -> dict[int, Sampling]:
    """Return the samplings of the axes that change: position in ONNX's order -> sampling."""
    before, after = (lowering.shape(name).dims for name in (node.inputs[0], node.outputs[0]))
    axes = [int(axis) % len(before) for axis in node.attributes.get("axes", range(len(before)))]
    scales = _scales(lowering, node, axes)
    rule = _coordinate_rule(node)
    if rule not in RULES:
        raise Unsupported(
            f"coordinates {rule!r} are not supported, only {', '.join(RULES)}; cut with Slice, then resize"
        )
    samplings = {axis: Sampling(before[axis], after[axis], n, rule) for axis, n in zip(axes, scales, strict=True)}
    return {axis: s for axis, s in samplings.items() if (s.length, s.scale) != (s.outputs, 1)}


def _coordinate_rule(node: Node) -> str:
    """Return the name of ONNX's rule for coordinates.

    Upsample, and Resize of opset 10, are asymmetric and have no attribute for the rule.
    """
    if "coordinate_transformation_mode" in node.attributes:
        return str(node.attributes["coordinate_transformation_mode"])
    return "half_pixel" if _is_modern(node) else "asymmetric"


def _is_modern(node: Node) -> bool:
    return node.op_type == "Resize" and len(node.inputs) > 2


def _scales(lowering: Lowering, node: Node, axes: list[int]) -> list[float]:
    """Return the factor for each of `axes`: from the node, or the quotient of the axis's lengths."""
    if "scales" in node.attributes:
        return [float(s) for s in node.attributes["scales"]]
    name = node.input(2 if _is_modern(node) else 1)
    if name and lowering.shape(name).dims != (0,):
        return [float(s) for s in lowering.value(name, "the scales")]
    if (policy := node.attributes.get("keep_aspect_ratio_policy", "stretch")) != "stretch":
        raise Unsupported(
            f"keep_aspect_ratio_policy {policy!r} is not supported; export the model with the resulting sizes"
        )
    before, after = (lowering.shape(name).dims for name in (node.inputs[0], node.outputs[0]))
    return [after[axis] / before[axis] for axis in axes]


# --- TFLite's operators


def _bilinear_rule(lowering: Lowering, node: Node, weights: dict[int, NDArray[Any]]) -> tuple[bool, bool] | None:
    """Return the options with which RESIZE_BILINEAR has these weights; None if no options give them."""
    for rule in BILINEAR_RULES:
        if _has_operator(lowering, node, weights) and all(
            np.allclose(matrix, _weights_of_tflite(matrix.shape[1], len(matrix), *rule), atol=WEIGHT_TOLERANCE)
            for matrix in weights.values()
        ):
            return rule
    return None


def _has_operator(lowering: Lowering, node: Node, axes: Sequence[int] | dict[int, Any]) -> bool:
    return lowering.shape(node.inputs[0]).rank in TFLITE_RANKS and all(axis >= 2 for axis in axes)


def _emit_tflite(lowering: Lowering, node: Node, code: str, align_corners: bool, half_pixel: bool) -> None:
    shape = lowering.result_shape(node, Layout.CHANNELS_LAST)
    x = lowering.read(node, 0, Layout.CHANNELS_LAST)
    options: dict[str, Any] = {"alignCorners": align_corners, "halfPixelCenters": half_pixel}
    lowering.result(node, x.op(code, x.indices(shape.dims[1:3]), shape=shape, **options), Layout.CHANNELS_LAST)


# --- compositions


def _nearest(lowering: Lowering, node: Node, samplings: dict[int, Sampling]) -> None:
    rounding = str(node.attributes.get("nearest_mode", "round_prefer_floor" if _is_modern(node) else "floor"))
    picked = {axis: sampling.nearest(rounding) for axis, sampling in samplings.items()}
    for half in (False, True):
        theirs = (_nearest_of_tflite(s.length, s.outputs, half) for s in samplings.values())
        if _has_operator(lowering, node, picked) and all(map(np.array_equal, picked.values(), theirs)):
            _emit_tflite(lowering, node, "RESIZE_NEAREST_NEIGHBOR", False, half)
            return
    x, layout = lowering.read_as_made(node)
    rank = lowering.shape(node.inputs[0]).rank
    for axis, indices in picked.items():
        x = x.gathered(indices, lowering.axis(axis, rank, layout))
    lowering.result(node, x, layout)


def _by_matrices(lowering: Lowering, node: Node, weights: dict[int, NDArray[Any]]) -> None:
    """Move each axis to the end and multiply it by its matrix; FULLY_CONNECTED is exact in INT8."""
    rank = lowering.shape(node.inputs[0]).rank
    layout = lowering.layout(node.inputs[0]) if rank > 3 else Layout.NATIVE
    x = lowering.read(node, 0, layout)
    order = result_order = CHANNELS_LAST_ORDERS[rank] if layout is Layout.CHANNELS_LAST else tuple(range(rank))
    # Begin with the axis at the end, because it needs no transposition while the order is unchanged.
    for axis in sorted(weights, key=order.index, reverse=True):
        turned = (*(a for a in order if a != axis), axis)
        x, order = x.transposed([order.index(a) for a in turned]).times_weights(weights[axis]), turned
    lowering.result(node, x.transposed([order.index(a) for a in result_order]), layout)


def _nearest_of_tflite(length: int, outputs: int, half_pixel: bool) -> NDArray[np.intp]:
    """Return the index of the element that RESIZE_NEAREST_NEIGHBOR copies to each output."""
    x = (np.arange(outputs, dtype=np.float32) + np.float32(0.5 if half_pixel else 0)) * np.float32(length / outputs)
    picked: NDArray[np.intp] = np.clip(np.floor(x), 0, length - 1).astype(np.intp)
    return picked


def _weights_of_tflite(length: int, outputs: int, align_corners: bool, half_pixel: bool) -> NDArray[np.float32]:
    """Return the weight of each element in RESIZE_BILINEAR, [outputs, length]."""
    aligned = align_corners and outputs > 1
    scale = np.float32((length - 1) / (outputs - 1) if aligned else length / outputs)
    x: NDArray[np.floating[Any]] = np.arange(outputs, dtype=np.float32)
    x = (x + np.float32(0.5)) * scale - np.float32(0.5) if half_pixel else x * scale
    low = np.maximum(np.floor(x), 0).astype(np.intp)
    high = np.minimum(np.ceil(x), length - 1).astype(np.intp).clip(0)
    matrix, rows = np.zeros((outputs, length), np.float32), np.arange(outputs)
    np.add.at(matrix, (rows, low.clip(max=length - 1)), 1 - (x - low))
    np.add.at(matrix, (rows, high), x - low)
    return matrix


OPS = {"Resize": Op(resize, sign="as_input"), "Upsample": Op(resize)}
