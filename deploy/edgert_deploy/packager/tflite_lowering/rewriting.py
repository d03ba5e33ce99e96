"""Helpers for rewrites of a graph: producers and readers of values, and the replacement of nodes."""

from __future__ import annotations

from dataclasses import replace

from edgert_deploy.packager.tflite_lowering.graph import Graph, Node

# Relative tolerance for the constants of a GELU (1, 0.5, the square root of 2), written in float32 or float16.
CONSTANT_TOLERANCE = 1e-3


class Links:
    """The producer and the readers of each value of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.producers = {output: node for node in graph.nodes for output in node.outputs}
        self.users: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for name in dict.fromkeys(node.inputs):
                self.users.setdefault(name, []).append(node)

    def only_user(self, node: Node) -> Node | None:
        """Return the only node that reads the result of `node`.

        Return None if several nodes read the result, or if it is an output of the model.
        """
        users = self.users.get(node.outputs[0], [])
        return users[0] if len(users) == 1 and node.outputs[0] not in self.graph.outputs else None

    def scalar(self, name: str) -> float | None:
        array = self.graph.constants.get(name)
        return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None

    def is_scalar(self, name: str, value: float) -> bool:
        scalar = self.scalar(name)
        return scalar is not None and abs(scalar - value) <= CONSTANT_TOLERANCE * value

    def operand_beside(self, node: Node, value: float) -> str | None:
        """If one operand of a binary node is the scalar `value`, return the other operand; else None."""
        for constant, other in (node.inputs, node.inputs[::-1]):
            if self.is_scalar(constant, value):
                return other
        return None


def replaced(graph: Graph, changes: dict[str, Node | None]) -> Graph:
    """Return `graph` after `changes`: value -> the node that makes it now; None drops the node."""
    nodes = [changes.get(node.outputs[0], node) for node in graph.nodes]
    return replace(graph, nodes=tuple(node for node in nodes if node is not None))
