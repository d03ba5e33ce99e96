"""Replaces each lookup that reads every row, in order, by a Reshape.

PyTorch writes such a lookup for `mask[rows, columns]` of an attention mask. The model computes the index of the
lookup from the lengths of axes. TFLite would need the index as a constant, so the batch could not stay open. The
lookup returns all rows in their order and only gives them the shape of the index, so a Reshape has the same result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from edgert_deploy.packager.sources.onnx_graph.branches import BATCHES, folded_constants, remove_unused
from edgert_deploy.packager.sources.onnx_graph.nodes import Array, copy_of, refill

FLAT = ("Flatten", "Reshape")
LENGTHS = "/edgert_lengths"


def reshape_whole_lookups(proto: Any) -> bool:
    """Replace each Gather that reads all rows of a flattened value in order; return whether any was."""
    from onnx import helper, numpy_helper

    flat = {node.output[0] for node in proto.graph.node if node.op_type in FLAT}
    computed = {name for node in proto.graph.node for name in node.output}
    found = [
        node
        for node in proto.graph.node
        if node.op_type == "Gather" and node.input[0] in flat and node.input[1] in computed and not _axis(node)
    ]
    shapes = _shapes(proto, found) if found else {}
    if not shapes:
        return False
    nodes = []
    for node in proto.graph.node:
        if node.op_type == "Gather" and (shape := shapes.get(node.output[0])) is not None:
            name = f"{node.output[0]}/edgert_shape"
            proto.graph.initializer.append(numpy_helper.from_array(np.array(shape, np.int64), name))
            node = helper.make_node("Reshape", [node.input[0], name], list(node.output), node.name)
        nodes.append(node)
    refill(proto.graph.node, nodes)
    remove_unused(proto.graph)
    return True


def _axis(node: Any) -> int:
    return next((int(attribute.i) for attribute in node.attribute if attribute.name == "axis"), 0)


def _shapes(proto: Any, lookups: Sequence[Any]) -> dict[str, list[int]]:
    """Return the result's shape for each lookup that reads all rows in order; -1 stands for the batch."""
    from onnx import helper

    copy = copy_of(proto)
    for node in lookups:
        copy.graph.node.append(helper.make_node("Shape", [node.input[0]], [f"{node.output[0]}{LENGTHS}"]))
    names = [name for node in lookups for name in (node.input[1], f"{node.output[0]}{LENGTHS}")]
    known = [folded_constants(copy, sorted({*names}), batch, "INT64") for batch in BATCHES]
    results: dict[str, list[int]] = {}
    for node in lookups:
        each = [_whole(constants, node) for constants in known]
        open_axes = {i for shape in each if shape for i, n in enumerate(shape) if n != (each[0] or [])[i]}
        if all(each) and len(open_axes) <= 1:
            results[node.output[0]] = [-1 if i in open_axes else n for i, n in enumerate(each[0] or [])]
    return results


def _whole(constants: Mapping[str, Array], node: Any) -> list[int] | None:
    """If the index of a lookup names all rows in order, return the shape of its result; else None."""
    index, lengths = constants.get(node.input[1]), constants.get(f"{node.output[0]}{LENGTHS}")
    if index is None or lengths is None or not np.array_equal(index.ravel(), np.arange(lengths[0])):
        return None
    return [*index.shape, *map(int, lengths[1:])]
