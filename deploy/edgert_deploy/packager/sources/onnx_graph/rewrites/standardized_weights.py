"""Computes the weights that PyTorch standardizes by a BatchNormalization in training mode.

In NFNet and BiT, the input of this operator is the weights of a layer, so its result is a constant.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from edgert_deploy.packager.sources.onnx_graph.branches import remove_unused
from edgert_deploy.packager.sources.onnx_graph.nodes import Array, Constants, attribute_of, nodes_of, refill


def standardize_weights(proto: Any) -> bool:
    """Replace each BatchNormalization of constants in training mode; return whether any changed."""
    if not any(_trains(node) for node in proto.graph.node):
        return False
    constants = Constants(proto)
    # PyTorch writes equal weights once, and an Identity for each further use.
    origin = {node.output[0]: node.input[0] for node in proto.graph.node if node.op_type == "Identity"}
    read = {name for node in nodes_of(proto.graph) for name in node.input} | {v.name for v in proto.graph.output}
    results = {
        node.output[0]: result
        for node in proto.graph.node
        if _trains(node)
        and read.isdisjoint(node.output[1:])
        and (result := _standardized(node, constants, origin)) is not None
    }
    _replace(proto.graph, results)
    return bool(results)


def _trains(node: Any) -> bool:
    return node.op_type == "BatchNormalization" and bool(attribute_of(node, "training_mode", 0))


def _standardized(node: Any, constants: Constants, origin: dict[str, str]) -> Array | None:
    """Return the result of `node`; None if it is not a constant."""
    x, scale, bias = (constants.get(origin.get(name, name)) for name in node.input[:3])
    if x is None or scale is None or bias is None:
        return None
    axes = tuple(axis for axis in range(x.ndim) if axis != 1)
    per_channel = [-1 if axis == 1 else 1 for axis in range(x.ndim)]
    wide = x.astype(np.float64)
    centred = (wide - wide.mean(axes, keepdims=True)) / np.sqrt(
        wide.var(axes, keepdims=True) + attribute_of(node, "epsilon", 1e-5)
    )
    result: Array = (centred * scale.reshape(per_channel) + bias.reshape(per_channel)).astype(x.dtype)
    return result


def _replace(graph: Any, results: dict[str, Array]) -> None:
    """Make `results` constants of `graph`, and remove the nodes that computed them."""
    from onnx import numpy_helper

    refill(graph.node, (node for node in graph.node if node.output[0] not in results))
    graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in results.items())
    remove_unused(graph)
