"""Rewrites the graph before the lowering: replaces a group of nodes by one node that TFLite supports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from edgert_deploy.packager.tflite_lowering.graph import Graph, Node
from edgert_deploy.packager.tflite_lowering.masking import soften_masks
from edgert_deploy.packager.tflite_lowering.op import Op
from edgert_deploy.packager.tflite_lowering.rewriting import CONSTANT_TOLERANCE, Links, replaced

# An operator that a fusion in this file adds; ONNX has no operator of this name.
RSQRT = "Rsqrt"


Changes = dict[str, Node | None]  # value -> the node that makes it now; None drops the node that made it


def fuse(graph: Graph, ops: Mapping[str, Op]) -> Graph:
    """Return the graph after all rewrites, each a pure function of a node and the graph's links."""
    graph = soften_masks(graph)
    for rewrite in (_gelu, _hard_swish, _mish, _rsqrt, partial(_activation, ops)):
        links = Links(graph)
        changes: Changes = {}
        for node in graph.nodes:
            changes |= rewrite(links, node)
        graph = replaced(graph, changes)
    return graph


def _gelu(links: Links, node: Node) -> Changes:
    """Replace 0.5 * x * (1 + erf(x / sqrt(2))) by Gelu(x), because TFLite has no Erf."""
    group = _gelu_group(links, node) if node.op_type == "Erf" else None
    if group is None:
        return {}
    x, members = group
    last = members[-1]
    changes: Changes = {member.outputs[0]: None for member in members}
    return changes | {last.outputs[0]: Node("Gelu", "", last.name, (x,), last.outputs)}


def _gelu_group(links: Links, erf: Node) -> tuple[str, list[Node]] | None:
    """Return the name of x, and the nodes of the GELU around `erf`; None if `erf` is not part of a GELU.

    The last of these nodes makes the result.
    """
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
    """If `node` multiplies a value by `factor`, return the name of the value; else None."""
    if node.op_type == "Mul":
        return links.operand_beside(node, factor)
    if node.op_type == "Div" and links.is_scalar(node.inputs[1], 1 / factor):
        return node.inputs[0]
    return None


def _hard_swish(links: Links, gate: Node) -> Changes:
    """Replace x * HardSigmoid(x) by HardSwish(x). ONNX Runtime's folding writes HardSwish as the former."""
    slope, offset = gate.attributes.get("alpha", 0.2), gate.attributes.get("beta", 0.5)
    is_swish = gate.op_type == "HardSigmoid" and abs(slope - 1 / 6) <= CONSTANT_TOLERANCE / 6 and offset == 0.5
    return _product(links, "HardSwish", gate, gate) if is_swish else {}


def _mish(links: Links, smooth: Node) -> Changes:
    """Replace x * Tanh(Softplus(x)) by Mish(x), for which ops/activation.py has a more exact formula."""
    bent = links.only_user(smooth) if smooth.op_type == "Softplus" else None
    return {} if bent is None or bent.op_type != "Tanh" else _product(links, "Mish", smooth, bent)


def _product(links: Links, op_type: str, first: Node, last: Node) -> Changes:
    """Replace x * last(first(x)) by one node `op_type`, if the graph has this product."""
    product = links.only_user(last)
    if product is None or product.op_type != "Mul" or first.inputs[0] not in product.inputs:
        return {}
    replacement = Node(op_type, "", product.name, first.inputs, product.outputs)
    return {first.outputs[0]: None, last.outputs[0]: None, product.outputs[0]: replacement}


def _rsqrt(links: Links, root: Node) -> Changes:
    """Replace a / sqrt(b) by a * rsqrt(b), because TFLite's DIV has no INT8 kernel."""
    division = links.only_user(root) if root.op_type == "Sqrt" else None
    if division is None or division.op_type != "Div" or division.inputs[1] != root.outputs[0]:
        return {}
    return {root.outputs[0]: replace(root, op_type=RSQRT), division.outputs[0]: replace(division, op_type="Mul")}


def _activation(ops: Mapping[str, Op], links: Links, node: Node) -> Changes:
    """If a Relu or a similar node follows `node`, fuse it into `node`, which then clamps its own result."""
    user = links.only_user(node)
    activation = "NONE" if user is None else clamp_name(user, links.scalar)
    if user is None or activation == "NONE" or not _clamps_itself(links.graph, ops, node):
        return {}
    return {node.outputs[0]: replace(node, outputs=user.outputs, activation=activation), user.outputs[0]: None}


def _clamps_itself(graph: Graph, ops: Mapping[str, Op], node: Node) -> bool:
    if node.op_type in ("Gemm", "MatMul"):  # two computed matrices become a BATCH_MATMUL, which cannot clamp
        weights = graph.constants.get(node.inputs[1])
        return weights is not None and weights.ndim == 2
    is_float = graph.dtypes.get(node.outputs[0]) == np.float32
    return is_float and node.op_type in ops and ops[node.op_type].clamps


def clamp_name(node: Node, scalar: Callable[[str], float | None]) -> str:
    """Return TFLite's name of the activation that `node` computes; "NONE" if TFLite has no such name."""
    if node.op_type == "Relu":
        return "RELU"
    if node.op_type != "Clip":
        return "NONE"
    low = float(node.attributes["min"]) if "min" in node.attributes else scalar(node.input(1))
    high = float(node.attributes["max"]) if "max" in node.attributes else scalar(node.input(2))
    if low is None or (high is None and node.input(2)):
        return "NONE"
    return {(0.0, 6.0): "RELU6", (-1.0, 1.0): "RELU_N1_TO_1", (0.0, None): "RELU"}.get((low, high), "NONE")
