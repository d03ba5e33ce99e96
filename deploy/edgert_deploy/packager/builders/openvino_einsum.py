"""Replaces an Einsum that OpenVINO computes wrongly by a MatMul."""

from __future__ import annotations

from typing import Any

from edgert_deploy.packager.sources.onnx_graph.nodes import attribute_of, copy_of, nodes_of, refill


def with_products(proto: Any) -> Any:
    """Return the model with a MatMul instead of each Einsum that broadcasts its second operand.

    OpenVINO 2026.4 gives wrong answers for `binh,tnh->bnit` if the second operand is computed from constants, as in
    the positions of a Funnel transformer.
    """
    if all(node.op_type != "Einsum" for node in nodes_of(proto.graph)):
        return proto
    changed = copy_of(proto)
    refill(changed.graph.node, [new for node in changed.graph.node for new in _product(node)])
    return changed


def _product(node: Any) -> list[Any]:
    """Return the nodes that compute `node`: a Transpose of each operand, a MatMul and a Transpose.

    In terms of axes: the operands become [outer, shared, row, summed] and [shared, summed, column].
    """
    from onnx import helper

    if node.op_type != "Einsum" or len(node.input) != 2:
        return [node]
    operands, _, result = attribute_of(node, "equation").decode().replace(" ", "").partition("->")
    left, right = operands.split(",")
    summed = [axis for axis in left if axis in right and axis not in result]
    shared = [axis for axis in result if axis in left and axis in right]
    rows = [axis for axis in result if axis in left and axis not in right]
    columns = [axis for axis in result if axis in right and axis not in left]
    is_plain = all(len(set(axes)) == len(axes) and axes.isalpha() for axes in (left, right, result))
    is_whole = len(left) == len(summed + shared + rows) and len(right) == len(summed + shared + columns)
    if not (is_plain and is_whole and len(summed) == 1 and len(columns) == 1 and len(rows) > 1):
        return [node]
    outer, row = rows[:-1], rows[-1:]
    a, b, y = (f"{node.output[0]}/{name}" for name in ("left", "right", "product"))
    made = [*outer, *shared, *row, *columns]
    return [
        helper.make_node("Transpose", node.input[:1], [a], a, perm=_order(left, [*outer, *shared, *row, *summed])),
        helper.make_node("Transpose", node.input[1:], [b], b, perm=_order(right, [*shared, *summed, *columns])),
        helper.make_node("MatMul", [a, b], [y], node.name),
        helper.make_node("Transpose", [y], node.output, y, perm=_order(made, list(result))),
    ]


def _order(before: str | list[str], after: list[str]) -> list[int]:
    return [before.index(axis) for axis in after]
