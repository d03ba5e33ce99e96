"""Rewrites of the graph before it is lowered: groups of nodes become one that TFLite has an operator for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.tflite_lowering.graph import BatchShape, Graph, Node

# Nodes whose TFLite operator can clamp its own result. The rest keep their activation as an operator.
TAKES_ACTIVATION = frozenset({"Conv", "Gemm", "MatMul", "Add", "Sub", "Mul"})
# How far a constant of a GELU (1, 0.5, the square root of 2) may be off: exporters write it in float32 or float16.
CONSTANT_TOLERANCE = 1e-3
# What a masked score is lowered to. Exporters write -3.4e38 or minus infinity, which no INT8 scale can hold; the
# exponential of this is zero in float32 already.
MASKED_SCORE = -1e4
# What may lie between such a constant and its Softmax.
MASK_CHAIN = frozenset({"Add", "Expand", "Identity", "Mul", "Reshape", "Squeeze", "Transpose", "Unsqueeze", "Where"})
# An operator of ours, for the fusion below; ONNX has no such name.
RSQRT = "Rsqrt"


def fuse(graph: Graph) -> Graph:
    """All rewrites, each a pure function of the graph."""
    for rewrite in (_soften_masks, _fuse_gelu, _fuse_hard_swish, _fuse_rsqrt, _fuse_activations):
        graph = rewrite(graph)
    return graph


class _Links:
    """Who makes and who reads each value of a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.producers = {output: node for node in graph.nodes for output in node.outputs}
        self.users: dict[str, list[Node]] = {}
        for node in graph.nodes:
            for name in dict.fromkeys(node.inputs):
                self.users.setdefault(name, []).append(node)

    def only_user(self, node: Node) -> Node | None:
        """The one reader of `node`'s result, where there is one and the result is no output of the model."""
        users = self.users.get(node.outputs[0], [])
        return users[0] if len(users) == 1 and node.outputs[0] not in self.graph.outputs else None

    def scalar(self, name: str) -> float | None:
        array = self.graph.constants.get(name)
        return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None

    def is_scalar(self, name: str, value: float) -> bool:
        scalar = self.scalar(name)
        return scalar is not None and abs(scalar - value) <= CONSTANT_TOLERANCE * value

    def operand_beside(self, node: Node, value: float) -> str | None:
        """The other operand of a binary node that has the scalar `value` as one."""
        for constant, other in (node.inputs, node.inputs[::-1]):
            if self.is_scalar(constant, value):
                return other
        return None


def _replaced(graph: Graph, changes: dict[str, Node | None]) -> Graph:
    """`graph` with the nodes that make the named values replaced, or dropped where None."""
    nodes = [changes.get(node.outputs[0], node) for node in graph.nodes]
    return replace(graph, nodes=tuple(node for node in nodes if node is not None))


def _soften_masks(graph: Graph) -> Graph:
    """Constants below MASKED_SCORE that are added to a Softmax's scores -> MASKED_SCORE."""
    links = _Links(graph)
    waiting = [name for node in graph.nodes if node.op_type == "Softmax" for name in node.inputs]
    changes: dict[str, Node | None] = {}
    constants: dict[str, NDArray[Any]] = {}
    while waiting:
        node = links.producers.get(waiting.pop())
        if node is None or node.op_type not in MASK_CHAIN or node.outputs[0] in changes:
            continue
        below = {n for n in node.inputs if _is_below(graph.constants.get(n))}
        constants |= {f"{n}_softened": np.maximum(graph.constants[n], np.float32(MASKED_SCORE)) for n in below}
        changes[node.outputs[0]] = replace(
            node, inputs=tuple(f"{n}_softened" if n in below else n for n in node.inputs)
        )
        waiting += node.inputs
    return replace(
        _replaced(graph, changes),
        constants=graph.constants | constants,
        shapes=graph.shapes | {name: BatchShape.fixed(*array.shape) for name, array in constants.items()},
        dtypes=graph.dtypes | {name: array.dtype for name, array in constants.items()},
        batch_constants=graph.batch_constants | _also_softened(graph.batch_constants, constants),
        expanded_constants=graph.expanded_constants | _also_softened(graph.expanded_constants, constants),
    )


def _is_below(array: NDArray[Any] | None) -> bool:
    return array is not None and array.dtype == np.float32 and bool((array < MASKED_SCORE).any())


def _also_softened(names: frozenset[str], constants: dict[str, NDArray[Any]]) -> frozenset[str]:
    return frozenset(f"{name}_softened" for name in names) & constants.keys()


def _fuse_gelu(graph: Graph) -> Graph:
    """0.5 * x * (1 + erf(x / sqrt(2))) -> Gelu(x): TFLite has no Erf."""
    links = _Links(graph)
    changes: dict[str, Node | None] = {}
    for erf in (node for node in graph.nodes if node.op_type == "Erf"):
        group = _gelu_group(links, erf)
        if group is not None:
            x, members = group
            changes |= {member.outputs[0]: None for member in members}
            last = members[-1]
            changes[last.outputs[0]] = Node("Gelu", "", last.name, (x,), last.outputs)
    return _replaced(graph, changes)


def _gelu_group(links: _Links, erf: Node) -> tuple[str, list[Node]] | None:
    """The nodes of the GELU around `erf`, the last one last, and the name of its x."""
    scale = links.producers.get(erf.inputs[0])
    x = _scaled_by(links, scale, float(np.sqrt(0.5))) if scale else None
    plus_one = links.only_user(erf)
    if scale is None or x is None or plus_one is None or plus_one.op_type != "Add":
        return None
    if links.only_user(scale) is None or links.operand_beside(plus_one, 1.0) != erf.outputs[0]:
        return None
    product = links.only_user(plus_one)
    if product is None or product.op_type != "Mul":
        return None
    other = next((name for name in product.inputs if name != plus_one.outputs[0]), "")
    group = [scale, erf, plus_one, product]
    half = links.producers.get(other)
    if half is not None and _scaled_by(links, half, 0.5) == x and links.only_user(half) is product:
        return x, [half, *group]
    last = links.only_user(product)
    if last is None:
        return None
    rest = {name for name in last.inputs if name != product.outputs[0]}
    if other == x and _scaled_by(links, last, 0.5) == product.outputs[0]:
        return x, [*group, last]
    if links.is_scalar(other, 0.5) and last.op_type == "Mul" and rest == {x}:
        return x, [*group, last]
    return None


def _scaled_by(links: _Links, node: Node, factor: float) -> str | None:
    """What `node` multiplies by `factor`, where that is what it does."""
    if node.op_type == "Mul":
        return links.operand_beside(node, factor)
    if node.op_type == "Div" and links.is_scalar(node.inputs[1], 1 / factor):
        return node.inputs[0]
    return None


def _fuse_hard_swish(graph: Graph) -> Graph:
    """x * HardSigmoid(x) -> HardSwish(x), which is what ONNX Runtime spells out so."""
    links = _Links(graph)
    changes: dict[str, Node | None] = {}
    for gate in (node for node in graph.nodes if node.op_type == "HardSigmoid"):
        product = links.only_user(gate)
        slope, offset = gate.attributes.get("alpha", 0.2), gate.attributes.get("beta", 0.5)
        is_swish = abs(slope - 1 / 6) <= CONSTANT_TOLERANCE / 6 and offset == 0.5
        if is_swish and product is not None and product.op_type == "Mul" and gate.inputs[0] in product.inputs:
            changes[gate.outputs[0]] = None
            changes[product.outputs[0]] = Node("HardSwish", "", product.name, gate.inputs, product.outputs)
    return _replaced(graph, changes)


def _fuse_rsqrt(graph: Graph) -> Graph:
    """a / sqrt(b) -> a * rsqrt(b): TFLite's DIV has no INT8 kernel."""
    links = _Links(graph)
    changes: dict[str, Node | None] = {}
    for root in (node for node in graph.nodes if node.op_type == "Sqrt"):
        division = links.only_user(root)
        if division is not None and division.op_type == "Div" and division.inputs[1] == root.outputs[0]:
            changes[root.outputs[0]] = replace(root, op_type=RSQRT)
            changes[division.outputs[0]] = replace(division, op_type="Mul")
    return _replaced(graph, changes)


def _fuse_activations(graph: Graph) -> Graph:
    """Relu and the like into the node before them, which then makes the activation's result."""
    links = _Links(graph)
    changes: dict[str, Node | None] = {}
    for node in graph.nodes:
        user = links.only_user(node)
        if user is None or not _clamps_itself(graph, node):
            continue
        activation = clamp_name(user, links.scalar)
        if activation != "NONE":
            changes[node.outputs[0]] = replace(node, outputs=user.outputs, activation=activation)
            changes[user.outputs[0]] = None
    return _replaced(graph, changes)


def _clamps_itself(graph: Graph, node: Node) -> bool:
    if node.op_type in ("Gemm", "MatMul"):  # a product of two computed matrices has no such option
        weights = graph.constants.get(node.inputs[1])
        return weights is not None and weights.ndim == 2
    is_float = graph.dtypes.get(node.outputs[0]) == np.float32
    return node.op_type in TAKES_ACTIVATION and is_float


def clamp_name(node: Node, scalar: Callable[[str], float | None]) -> str:
    """TFLite's name for what a Relu or Clip node does, or "NONE" where it has none."""
    if node.op_type == "Relu":
        return "RELU"
    if node.op_type != "Clip":
        return "NONE"
    low = float(node.attributes["min"]) if "min" in node.attributes else scalar(node.input(1))
    high = float(node.attributes["max"]) if "max" in node.attributes else scalar(node.input(2))
    if low is None or (high is None and node.input(2)):
        return "NONE"
    return {(0.0, 6.0): "RELU6", (-1.0, 1.0): "RELU_N1_TO_1", (0.0, None): "RELU"}.get((low, high), "NONE")
