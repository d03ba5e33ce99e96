"""Recurrent operators that take the batch first (layout 1), rewritten to take the steps first.

ONNX Runtime, which folds the model, refuses layout 1.
"""

from __future__ import annotations

import onnx
from onnx import helper

RECURRENT = ("GRU", "LSTM", "RNN")
# The inputs that change: X and the initial states.
STATES = (5, 6)


def put_steps_first(model: onnx.ModelProto) -> None:
    """Rewrite `model` in place."""
    nodes = []
    for index, node in enumerate(model.graph.node):
        layout = next((a for a in node.attribute if a.name == "layout"), None)
        if node.op_type in RECURRENT and node.domain in ("", "ai.onnx") and layout is not None and layout.i == 1:
            nodes += _with_steps_first(node, f"{node.name or node.op_type}_{index}")
        else:
            nodes.append(node)
    del model.graph.node[:]
    model.graph.node.extend(nodes)


def _with_steps_first(node: onnx.NodeProto, name: str) -> list[onnx.NodeProto]:
    """Return `node` between transpositions of X, Y [batch, steps, directions, hidden] and the states."""
    inner = onnx.NodeProto()
    inner.CopyFrom(node)
    attributes = [a for a in node.attribute if a.name != "layout"]
    del inner.attribute[:]
    inner.attribute.extend(attributes)
    before, after = [], []
    for place in (0, *STATES):
        if place < len(node.input) and node.input[place]:
            inner.input[place] = f"{name}_input_{place}"
            before.append(_transpose(node.input[place], inner.input[place], [1, 0, 2]))
    for place, outer in enumerate(node.output):
        if outer:
            inner.output[place] = f"{name}_output_{place}"
            after.append(_transpose(inner.output[place], outer, [2, 0, 1, 3] if place == 0 else [1, 0, 2]))
    return [*before, inner, *after]


def _transpose(source: str, output: str, order: list[int]) -> onnx.NodeProto:
    return helper.make_node("Transpose", [source], [output], perm=order)
