"""Rewrites of the graph before it is lowered: groups of nodes become one node that TFLite has an operator for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from edgert_deploy.packager.tflite_lowering.graph import Graph, Node
from edgert_deploy.packager.tflite_lowering.masking import soften_masks
from edgert_deploy.packager.tflite_lowering.op import Op
from edgert_deploy.packager.tflite_lowering.rewriting import CONSTANT_TOLERANCE, Links, replaced

# An operator that the fusion below adds; ONNX has none of that name.
RSQRT = "Rsqrt"


def fuse(graph: Graph, ops: Mapping[str, Op]) -> Graph:
    """Return the graph after all rewrites, each a pure function of the graph."""
    for rewrite in (soften_masks, _fuse_gelu, _fuse_hard_swish, _fuse_mish, _fuse_rsqrt):
        graph = rewrite(graph)
    return _fuse_activations(graph, ops)


def _fuse_gelu(graph: Graph) -> Graph:
    """0.5 * x * (1 + erf(x / sqrt(2))) -> Gelu(x): TFLite has no Erf."""
    links = Links(graph)
    changes: dict[str, Node | None] = {}
    for erf in (node for node in graph.nodes if node.op_type == "Erf"):
        group = _gelu_group(links, erf)
        if group is not None:
            x, members = group
            changes |= {member.outputs[0]: None for member in members}
            last = members[-1]
            changes[last.outputs[0]] = Node("Gelu", "", last.name, (x,), last.outputs)
    return replaced(graph, changes)


def _gelu_group(links: Links, erf: Node) -> tuple[str, list[Node]] | None:
    """Return the name of x and the nodes of the GELU around `erf`, its result last."""
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


def _scaled_by(links: Links, node: Node, factor: float) -> str | None:
    """Return the value that `node` multiplies by `factor`, or None where it does something else."""
    if node.op_type == "Mul":
        return links.operand_beside(node, factor)
    if node.op_type == "Div" and links.is_scalar(node.inputs[1], 1 / factor):
        return node.inputs[0]
    return None


def _fuse_hard_swish(graph: Graph) -> Graph:
    """x * HardSigmoid(x) -> HardSwish(x): ONNX Runtime writes HardSwish in that form."""
    links = Links(graph)
    changes: dict[str, Node | None] = {}
    for gate in (node for node in graph.nodes if node.op_type == "HardSigmoid"):
        product = links.only_user(gate)
        slope, offset = gate.attributes.get("alpha", 0.2), gate.attributes.get("beta", 0.5)
        is_swish = abs(slope - 1 / 6) <= CONSTANT_TOLERANCE / 6 and offset == 0.5
        if is_swish and product is not None and product.op_type == "Mul" and gate.inputs[0] in product.inputs:
            changes[gate.outputs[0]] = None
            changes[product.outputs[0]] = Node("HardSwish", "", product.name, gate.inputs, product.outputs)
    return replaced(graph, changes)


def _fuse_mish(graph: Graph) -> Graph:
    """x * Tanh(Softplus(x)) -> Mish(x), which has a more exact form (ops/activation.py)."""
    links = Links(graph)
    changes: dict[str, Node | None] = {}
    for smooth in (node for node in graph.nodes if node.op_type == "Softplus"):
        bent = links.only_user(smooth)
        product = links.only_user(bent) if bent is not None and bent.op_type == "Tanh" else None
        if bent is not None and product is not None and product.op_type == "Mul" and smooth.inputs[0] in product.inputs:
            changes |= {smooth.outputs[0]: None, bent.outputs[0]: None}
            changes[product.outputs[0]] = Node("Mish", "", product.name, smooth.inputs, product.outputs)
    return replaced(graph, changes)


def _fuse_rsqrt(graph: Graph) -> Graph:
    """a / sqrt(b) -> a * rsqrt(b): TFLite's DIV has no INT8 kernel."""
    links = Links(graph)
    changes: dict[str, Node | None] = {}
    for root in (node for node in graph.nodes if node.op_type == "Sqrt"):
        division = links.only_user(root)
        if division is not None and division.op_type == "Div" and division.inputs[1] == root.outputs[0]:
            changes[root.outputs[0]] = replace(root, op_type=RSQRT)
            changes[division.outputs[0]] = replace(division, op_type="Mul")
    return replaced(graph, changes)


def _fuse_activations(graph: Graph, ops: Mapping[str, Op]) -> Graph:
    """Fuse Relu and its kin into the node before them, which then makes the activation's result."""
    links = Links(graph)
    changes: dict[str, Node | None] = {}
    for node in graph.nodes:
        user = links.only_user(node)
        if user is None or not _clamps_itself(graph, ops, node):
            continue
        activation = clamp_name(user, links.scalar)
        if activation != "NONE":
            changes[node.outputs[0]] = replace(node, outputs=user.outputs, activation=activation)
            changes[user.outputs[0]] = None
    return replaced(graph, changes)


def _clamps_itself(graph: Graph, ops: Mapping[str, Op], node: Node) -> bool:
    if node.op_type in ("Gemm", "MatMul"):  # BATCH_MATMUL, for two computed matrices, has no such option
        weights = graph.constants.get(node.inputs[1])
        return weights is not None and weights.ndim == 2
    is_float = graph.dtypes.get(node.outputs[0]) == np.float32
    return is_float and node.op_type in ops and ops[node.op_type].clamps


def clamp_name(node: Node, scalar: Callable[[str], float | None]) -> str:
    """Return TFLite's name for the effect of a Relu or Clip node, or "NONE" where it has none."""
    if node.op_type == "Relu":
        return "RELU"
    if node.op_type != "Clip":
        return "NONE"
    low = float(node.attributes["min"]) if "min" in node.attributes else scalar(node.input(1))
    high = float(node.attributes["max"]) if "max" in node.attributes else scalar(node.input(2))
    if low is None or (high is None and node.input(2)):
        return "NONE"
    return {(0.0, 6.0): "RELU6", (-1.0, 1.0): "RELU_N1_TO_1", (0.0, None): "RELU"}.get((low, high), "NONE")
