"""The parts of an ONNX model: nodes, graphs inside nodes, tensors, and constants by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

PROTO_BYTES_MAX = 2**31 - 1  # the limit of a protobuf message; the build makes every artifact from one message

Array = NDArray[Any]
# The attributes in which a Constant may hold numbers without a tensor -> the dtypes of these numbers.
_NUMBERS = {"value_float": np.float32, "value_floats": np.float32, "value_int": np.int64, "value_ints": np.int64}


def copy_of(message: Any) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def refill(field: Any, messages: Iterable[Any]) -> None:
    """Replace the entries of a repeated field by `messages`, which may include some of these entries."""
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


def drop_repeated_names(proto: Any) -> bool:
    """Remove the names of nodes that an earlier node of their graph has; return whether there were any.

    Names mean nothing in ONNX, but ONNX Runtime refuses two nodes of the same name.
    """
    repeated = []
    for graph in graphs_of(proto.graph):
        taken: set[str] = set()
        for node in graph.node:
            if node.name in taken:
                repeated.append(node)
            elif node.name:
                taken.add(node.name)
    for node in repeated:
        node.name = ""
    return bool(repeated)


def attribute_of(node: Any, name: str, default: Any = None) -> Any:
    """Return the value of an attribute of `node`, or `default` if the node lacks it. Text is bytes."""
    from onnx import helper

    return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


class Constants:
    """The constants of a graph and of the graphs inside its nodes, by name.

    The constants are the initializers, and the results of Constant nodes that hold numbers.

    The branches of an `If` may use one name for different values. Such a name is not treated as a constant.
    """

    def __init__(self, proto: Any) -> None:
        # name -> its TensorProto, or the attribute of its Constant node; None if the value is not a constant
        self._makers: dict[str, Any] = {}
        for graph in graphs_of(proto.graph):
            for name, maker in _made(graph):
                if name not in self._makers:
                    self._makers[name] = maker
                elif self._makers[name] != maker:
                    self._makers[name] = None

    def __contains__(self, name: str) -> bool:
        return self._makers.get(name) is not None

    def get(self, name: str) -> Array | None:
        from onnx import helper, numpy_helper

        maker = self._makers.get(name)
        if maker is None:
            return None
        if hasattr(maker, "data_type"):
            return np.asarray(numpy_helper.to_array(maker))
        value = helper.get_attribute_value(maker)
        return np.array(value, _NUMBERS[maker.name])


def _made(graph: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, message of the constant) for each value of `graph`; (name, None) for computed values."""
    yield from ((tensor.name, tensor) for tensor in graph.initializer)
    for node in graph.node:
        maker = _constant_of(node) if node.op_type == "Constant" else None
        yield from ((name, maker) for name in node.output if name)


def _constant_of(node: Any) -> Any:
    """Return the tensor or the attribute that holds the numbers of a Constant node; None if it holds text."""
    for attribute in node.attribute:
        if attribute.name == "value":
            return attribute.t
        if attribute.name in _NUMBERS:
            return attribute
    return None
