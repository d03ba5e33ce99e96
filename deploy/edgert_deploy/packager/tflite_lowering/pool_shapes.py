"""Shape inference that is also correct for pools that round up the number of their windows.

Before opset 22, ONNX's shape inference counts windows that start in the padding after the last element. The later
specification and all runtimes do not count these windows.
"""

from __future__ import annotations

import onnx
from onnx import helper, shape_inference

from edgert_deploy.packager.sources.onnx_graph.nodes import copy_of, refill

POOLS = ("AveragePool", "LpPool", "MaxPool")


def infer_shapes(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return `model` with the shapes of its values."""
    inferred = shape_inference.infer_shapes(model, data_prop=True)
    originals: dict[int, onnx.NodeProto] = {}
    while (index := _first_overlong(inferred)) is not None:
        originals[index] = copy_of(inferred.graph.node[index])
        guess = copy_of(model)
        for other in originals:
            guess.graph.node[other].CopyFrom(inferred.graph.node[other])
        _round_down(guess.graph.node[index], _dims(inferred)[guess.graph.node[index].input[0]])
        inferred = shape_inference.infer_shapes(guess, data_prop=True)
    for index, original in originals.items():
        inferred.graph.node[index].CopyFrom(original)
    return inferred


def _first_overlong(model: onnx.ModelProto) -> int | None:
    """Return the index of the first pool whose inferred shape counts such windows; None if no pool does."""
    dims = _dims(model)
    for index, node in enumerate(model.graph.node):
        if node.op_type not in POOLS or not _attributes(node).get("ceil_mode", 0):
            continue
        before, after = dims.get(node.input[0]), dims.get(node.output[0])
        if before and after and after[2:] != [count for count, _ in _windows(node, before[2:])]:
            return index
    return None


def _round_down(node: onnx.NodeProto, dims: list[int]) -> None:
    """Make `node` round down, with more padding for the same windows. This is for the inference only."""
    windows, attributes = _windows(node, dims[2:]), _attributes(node)
    begins = attributes.get("pads", [0] * 2 * len(windows))[: len(windows)]
    pads = helper.make_attribute("pads", [*begins, *(behind for _, behind in windows)])
    refill(node.attribute, [*(a for a in node.attribute if a.name not in ("ceil_mode", "pads")), pads])


def _windows(node: onnx.NodeProto, sizes: list[int]) -> list[tuple[int, int]]:
    """Return, for each axis, the number of windows and the padding at the end that gives this number."""
    attributes, rank, windows = _attributes(node), len(sizes), []
    ones, pads = [1] * rank, attributes.get("pads", [0] * 2 * rank)
    strides, dilations = attributes.get("strides", ones), attributes.get("dilations", ones)
    for i, size in enumerate(sizes):
        reach = (attributes["kernel_shape"][i] - 1) * dilations[i] + 1
        count = -(-(size + pads[i] + pads[i + rank] - reach) // strides[i]) + 1
        count -= (count - 1) * strides[i] >= size + pads[i]
        behind = (count - 1) * strides[i] + reach - size - pads[i]
        windows.append((count, max(behind, 0)))
    return windows


def _attributes(node: onnx.NodeProto) -> dict[str, list[int]]:
    return {a.name: helper.get_attribute_value(a) for a in node.attribute}


def _dims(model: onnx.ModelProto) -> dict[str, list[int]]:
    values = [*model.graph.value_info, *model.graph.input, *model.graph.output]
    return {v.name: [d.dim_value for d in v.type.tensor_type.shape.dim] for v in values}
