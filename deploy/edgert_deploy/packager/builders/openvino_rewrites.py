"""Replaces nodes that OpenVINO computes wrongly or cannot compile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from edgert_deploy.packager.builders.openvino_layers import CONVOLUTIONS
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


def split_gathered(openvino: Any, model: Any) -> None:
    """Replace each Slice of the first values of an axis by a VariadicSplit, if a GatherElements reads it.

    OpenVINO 2026.4 drops such a Slice when it compiles the model. This is right only along the axis of the
    GatherElements; otherwise, the shapes no longer fit, as in the segments and poses of YOLO26.
    """
    made = openvino.opset13
    for node in model.get_ordered_ops():
        if node.get_type_name() != "Slice" or "GatherElements" not in _readers(node):
            continue
        numbers = [_number(node.input_value(i)) for i in range(1, 5)]
        shape = node.input_value(0).get_partial_shape()
        if None in numbers or shape.rank.is_dynamic:
            continue
        start, stop, step, axis = numbers
        length = shape[axis]
        if (start, step) == (0, 1) and length.is_static and 0 < stop < length.get_length():
            node.output(0).replace(made.variadic_split(node.input_value(0), axis, [stop, -1]).output(0))


def separate_products(openvino: Any, model: Any) -> None:
    """Add an axis to each product with a constant that varies over positions, if a convolution reads it.

    If the lengths of such a constant equal those of the kernel, OpenVINO 2026.4 multiplies the weights by it, as in
    CSATv2. This is right only for a constant of channels.
    """
    made = openvino.opset13
    kinds = {"Divide": made.divide, "Multiply": made.multiply}
    for node in model.get_ordered_ops():
        if node.get_type_name() not in kinds or not _readers(node) & CONVOLUTIONS:
            continue
        values = [node.input_value(i) for i in (0, 1)]
        data, constant = (1, 0) if _is_constant(values[0]) else (0, 1)
        rank = values[data].get_partial_shape().rank
        if not _is_constant(values[constant]) or rank.is_dynamic:
            continue
        lengths = list(values[constant].get_shape())
        if len(lengths) <= rank.get_length() and max(lengths[2 - rank.get_length() :], default=1) > 1:
            values[data] = made.unsqueeze(values[data], 0).output(0)
            wide = kinds[node.get_type_name()](*values, name=node.get_friendly_name())
            product = made.squeeze(wide, 0).output(0)
            product.set_names(node.output(0).get_names())
            node.output(0).replace(product)


def separate_heads(openvino: Any, model: Any, sizes: Sequence[int]) -> None:
    """Transpose the results of attention with five axes if there are as many heads as tokens.

    If a model of fixed lengths reads queries, keys and values from one Split, OpenVINO 2026.4 compiles its attention
    and the Transpose of [batch, heads, tokens, values] into one kernel. With as many heads as tokens, the answers of
    this kernel are wrong. `sizes` are the lengths of the open axis of `model`; () if only its batch is open.
    """
    if not any(map(_is_of_heads, model.get_ordered_ops())):
        return
    made = openvino.opset13
    square = {name for size in sizes or (1,) for name in _square_attention(model, size)}
    for node in model.get_ordered_ops():
        if node.get_friendly_name() in square:
            parts = made.transpose(made.unsqueeze(node.input_value(0), 3), [0, 2, 1, 3, 4])
            joined = made.squeeze(parts, 3).output(0)
            joined.set_names(node.output(0).get_names())
            node.output(0).replace(joined)


def _square_attention(model: Any, size: int) -> Iterator[str]:
    """Yield the name of each Transpose of as many heads as tokens; open lengths are `size`."""
    fixed = model.clone()
    shapes = {}
    for value in fixed.inputs:
        dims = enumerate(value.get_partial_shape())
        shapes[value] = [dim.get_length() if dim.is_static else size if axis else 1 for axis, dim in dims]
    fixed.reshape(shapes)
    for node in filter(_is_of_heads, fixed.get_ordered_ops()):
        shape = node.get_output_partial_shape(0)
        if shape[1] == shape[2]:
            yield node.get_friendly_name()


def _is_of_heads(node: Any) -> bool:
    """Return whether `node` transposes the heads and tokens of a product, as attention does."""
    if node.get_type_name() != "Transpose" or node.input_value(0).get_node().get_type_name() != "MatMul":
        return False
    order = node.input_value(1).get_node()
    return bool(order.get_type_name() == "Constant" and order.get_vector().tolist() == [0, 2, 1, 3])


def _is_constant(value: Any) -> bool:
    return bool(value.get_node().get_type_name() == "Constant")


def _readers(node: Any) -> set[str]:
    return {reader.get_node().get_type_name() for reader in node.output(0).get_target_inputs()}


def _number(value: Any) -> Any:
    """Return the whole number that `value` holds; None if it is not a constant of one element.

    OpenVINO's reader adds a Broadcast of 1 to a Slice without steps.
    """
    node = value.get_node()
    if node.get_type_name() == "Broadcast":
        return _number(node.input_value(0))
    if node.get_type_name() != "Constant" or node.get_vector().size != 1:
        return None
    return int(node.get_vector()[0])
