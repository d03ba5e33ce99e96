"""The parts of an ONNX model: nodes, graphs inside nodes, tensors, and constants by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

PROTO_BYTES_MAX = 2**31 - 1  # of a protobuf message, as which every engine's artifact is made

Array = NDArray[Any]


def refill(field: Any, messages: Iterable[Any]) -> None:
    """Let a repeated field of a message hold `messages` alone, which may be some of its own."""
    kept = list(messages)
    del field[:]
    field.extend(kept)


def tensors(message: Any) -> Iterator[Any]:
    """Yield every TensorProto inside `message` (protobuf bounds the nesting to 100)."""
    from onnx import TensorProto

    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for child in [value] if hasattr(value, "ListFields") else value:
            if isinstance(child, TensorProto):
                yield child
            elif hasattr(child, "ListFields"):
                yield from tensors(child)


def nodes_of(graph: Any) -> Iterator[Any]:
    """Yield every node of `graph` and of the graphs inside its nodes."""
    for each in graphs_of(graph):
        yield from each.node


def graphs_of(graph: Any) -> Iterator[Any]:
    """Yield `graph` and every graph inside its nodes."""
    yield graph
    for node in graph.node:
        yield from graphs_inside(node)


def graphs_inside(node: Any) -> Iterator[Any]:
    """Yield every graph inside `node`, such as the branches of an `If`."""
    for attribute in node.attribute:
        for graph in [attribute.g] if attribute.HasField("g") else attribute.graphs:
            yield from graphs_of(graph)


class Constants:
    """The constants of a graph by name: initializers and Constant nodes, also inside nodes."""

    def __init__(self, proto: Any) -> None:
        self._tensors: dict[str, Any] = {}
        for graph in graphs_of(proto.graph):
            self._tensors.update((tensor.name, tensor) for tensor in graph.initializer)
            for node in graph.node:
                if node.op_type == "Constant":
                    self._tensors.update((node.output[0], a.t) for a in node.attribute if a.name == "value")

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def get(self, name: str) -> Array | None:
        from onnx import numpy_helper

        return np.asarray(numpy_helper.to_array(self._tensors[name])) if name in self._tensors else None
