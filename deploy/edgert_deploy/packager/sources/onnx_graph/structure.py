"""The structure of an ONNX model, with only the types and shapes of its large weights.

ONNX's checker and shape inference copy a model two or three times, and accept at most 2 GB. But they need only the
shapes of weights. They also need the values of short constants, because such a constant may be a shape.
"""

from __future__ import annotations

import math
from graphlib import CycleError, TopologicalSorter
from typing import Any

from edgert_deploy.packager.sources.onnx_graph.nodes import graphs_inside, graphs_of, nodes_of, refill

ONNX_DOMAINS = ("", "ai.onnx")  # both name ONNX's own operators
# Operators that give as many results as the data determine. Detectors use them for NMS.
OF_DATA_LENGTHS = frozenset({"Compress", "NonMaxSuppression", "NonZero", "Unique"})
SHAPE_VALUES_MAX = 1024  # a constant with more elements is not a shape


def opset_of(proto: Any) -> int:
    """Return the model's version of ONNX's own operators; 0 if the model gives no version."""
    return next((int(entry.version) for entry in proto.opset_import if entry.domain in ONNX_DOMAINS), 0)


def structure_of(proto: Any) -> Any:
    """Return a copy of `proto` in which each large weight is an input with the weight's type and shape."""
    from onnx import ModelProto, helper

    copy = ModelProto()
    for field in ("ir_version", "opset_import", "functions"):
        _copy(proto, copy, field)
    graph = copy.graph
    for field in ("name", "node", "input", "output", "value_info", "sparse_initializer"):
        _copy(proto.graph, graph, field)
    inputs = {value.name for value in graph.input}
    for tensor in proto.graph.initializer:
        if math.prod(tensor.dims) <= SHAPE_VALUES_MAX:
            graph.initializer.append(tensor)
        elif tensor.name not in inputs:
            graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
    return copy


def forget_inner_shapes(proto: Any) -> None:
    """Remove the shapes of the values inside the model, even inside its `If` and `Loop` nodes.

    These shapes are optional. ONNX Runtime ignores wrong shapes, because its own inference finds the right ones.
    """
    outer, *inner = graphs_of(proto.graph)
    for graph in (outer, *inner):
        del graph.value_info[:]
    for value in (value for graph in inner for value in graph.output):
        if value.type.HasField("tensor_type"):
            value.type.tensor_type.ClearField("shape")


def sort_nodes(proto: Any) -> bool:
    """Put each node after the nodes whose results it reads; return whether the order was another.

    ONNX requires this order, but ONNX Runtime does not, and converters to FP16 put the casts of the inputs last. In a
    cycle, the order stays, and ONNX's checker refuses the model.
    """
    return sum(_sort(graph) for graph in graphs_of(proto.graph)) > 0


def _sort(graph: Any) -> bool:
    makers = {name: i for i, node in enumerate(graph.node) for name in node.output if name}
    read = {i: _read_by(node, makers) - {i} for i, node in enumerate(graph.node)}
    if all(max(each, default=-1) < i for i, each in read.items()):
        return False
    nodes = list(graph.node)
    try:
        refill(graph.node, [nodes[i] for i in TopologicalSorter(read).static_order()])
    except CycleError:
        return False
    return True


def _read_by(node: Any, makers: dict[str, int]) -> set[int]:
    """Return the nodes whose results `node`, or a graph inside it, reads."""
    names = [*node.input, *(name for graph in graphs_inside(node) for each in nodes_of(graph) for name in each.input)]
    return {makers[name] for name in names if name in makers}


def _copy(source: Any, to: Any, field: str) -> None:
    value = getattr(source, field)
    if isinstance(value, str | int):
        setattr(to, field, value)
    else:
        getattr(to, field).extend(value)
