"""Reads the operands of element-wise nodes in one layout, ready to broadcast."""

from __future__ import annotations

from collections.abc import Callable

from edgert_deploy.packager.tflite_lowering.graph import Node
from edgert_deploy.packager.tflite_lowering.lowering import Layout, Lowering
from edgert_deploy.packager.tflite_lowering.op import Write
from edgert_deploy.packager.tflite_lowering.value import Value


def of_one(compute: Callable[[Value, Node], Value]) -> Write:
    """Return a writer that computes the result of a node from its first input, in the input's layout."""

    def write(lowering: Lowering, node: Node) -> None:
        x, layout = lowering.read_as_made(node)
        lowering.result(node, compute(x, node), layout)

    return write


def of_several(compute: Callable[[list[Value], Node], Value]) -> Write:
    """Return a writer that computes the result of a node from all its inputs, which broadcast."""

    def write(lowering: Lowering, node: Node) -> None:
        values, layout = operands(lowering, node)
        lowering.result(node, compute(values, node), layout)

    return write


def operands(lowering: Lowering, node: Node) -> tuple[list[Value], Layout]:
    """Return the inputs of `node` in one layout."""
    layout, rank = operand_layout(lowering, node), lowering.shape(node.outputs[0]).rank
    return [lowering.read(node, index, layout, rank) for index in range(len(node.inputs))], layout


def operand_layout(lowering: Lowering, node: Node) -> Layout:
    ranks = {lowering.shape(name).rank for name in node.inputs if not lowering.is_constant(name)}
    same = ranks == {lowering.shape(node.outputs[0]).rank}
    return lowering.common_layout(node.inputs) if same else Layout.NATIVE
