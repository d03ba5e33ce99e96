"""Replaces a Resize that some engines compute wrongly by a product with a matrix along each axis.

OpenVINO ignores `antialias` and `exclude_outside`, and TensorRT refuses `antialias`. Both refuse the coordinates
`half_pixel_symmetric`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgert_deploy.packager.sources.onnx_graph.nodes import Array, Constants, attribute_of, refill
from edgert_deploy.packager.sources.onnx_graph.sampling import REACH, RULES, Sampling
from edgert_deploy.packager.sources.onnx_graph.structure import structure_of


def needs_matrices(node: Any) -> bool:
    """Whether `node` is a Resize that OpenVINO or TensorRT computes wrongly or refuses."""
    mode = attribute_of(node, "mode", b"nearest").decode() if node.op_type == "Resize" else ""
    return mode in REACH and bool(
        attribute_of(node, "antialias", 0)
        or (mode == "cubic" and attribute_of(node, "exclude_outside", 0))
        or attribute_of(node, "coordinate_transformation_mode") == b"half_pixel_symmetric"
    )


def multiply_resizes(proto: Any) -> bool:
    """Replace such a Resize of the last two axes if their lengths are known; return whether any changed."""
    if not any(needs_matrices(node) for node in proto.graph.node):
        return False
    constants, shapes = Constants(proto), _float_shapes(proto)
    nodes: list[Any] = []
    for node in proto.graph.node:
        matrices = _matrices(node, constants, shapes) if needs_matrices(node) else None
        nodes += [node] if matrices is None else _product(proto.graph, node, matrices)
    found = nodes != list(proto.graph.node)
    refill(proto.graph.node, nodes)
    return found


def _float_shapes(proto: Any) -> dict[str, list[int]]:
    """Return the shape of each FP32 value of known rank, with 0 for an unknown length."""
    from onnx import TensorProto, shape_inference

    graph = shape_inference.infer_shapes(structure_of(proto), data_prop=True).graph
    types = {v.name: v.type.tensor_type for v in (*graph.input, *graph.value_info, *graph.output)}
    known = {name: t for name, t in types.items() if t.elem_type == TensorProto.FLOAT and t.HasField("shape")}
    return {name: [dim.dim_value for dim in t.shape.dim] for name, t in known.items()}


def _matrices(node: Any, constants: Constants, shapes: dict[str, list[int]]) -> dict[int, Array] | None:
    """Return the weights [outputs, length] of the axes -1 and -2 that change; None if unknown."""
    before, after = shapes.get(node.input[0], []), shapes.get(node.output[0], [])
    rule = attribute_of(node, "coordinate_transformation_mode", b"half_pixel").decode()
    is_plain = attribute_of(node, "keep_aspect_ratio_policy", b"stretch") == b"stretch" and rule in RULES
    scales = constants.get(node.input[2]) if len(node.input) > 2 and node.input[2] else np.zeros(0)
    if not is_plain or scales is None or len(before) != len(after) or len(before) < 3:
        return None
    mode, coefficient = attribute_of(node, "mode").decode(), attribute_of(node, "cubic_coeff_a", -0.75)
    flags = [bool(attribute_of(node, name, 0)) for name in ("antialias", "exclude_outside")]
    matrices = {}
    axes = [axis % len(before) for axis in attribute_of(node, "axes", range(len(before)))]
    for place, axis in enumerate(axes):
        length, outputs = before[axis], after[axis]
        if scales.size:
            # ONNX Runtime multiplies in FP32. ONNX's shape inference may round the product down to one less.
            outputs = int(np.float32(length) * np.float32(scales[place]))
        stays = scales[place] == 1 if scales.size else length == outputs and (length or axis == 0)
        if stays:
            continue
        if axis < len(before) - 2 or not length or not outputs:
            return None
        scale = float(scales[place]) if scales.size else outputs / length
        matrices[axis - len(before)] = Sampling(length, outputs, scale, rule).weights(mode, coefficient, *flags)
    return matrices


def _product(graph: Any, node: Any, matrices: dict[int, Array]) -> list[Any]:
    """Return the nodes that multiply the last axis (-1) and the axis before it (-2) by `matrices`."""
    from onnx import helper, numpy_helper

    (y,), x, made = node.output, node.input[0], []
    for axis, weights in sorted(matrices.items(), reverse=True):
        constant, result = f"{y}/edgert_weights{axis}", f"{y}/edgert_axis{axis}"
        graph.initializer.append(numpy_helper.from_array(weights.T if axis == -1 else weights, constant))
        operands = [x, constant] if axis == -1 else [constant, x]
        made.append(helper.make_node("MatMul", operands, [result], f"{node.name or y}{axis}"))
        x = result
    if not made:
        return [helper.make_node("Identity", [x], [y], node.name or y)]
    made[-1].output[0] = y
    return made
