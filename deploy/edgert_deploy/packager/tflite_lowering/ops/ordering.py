"""Operators that order elements along an axis: ArgMax, ArgMin, TopK."""

from __future__ import annotations

import numpy as np

from edgert_deploy.packager.tflite_lowering.graph import Node
from edgert_deploy.packager.tflite_lowering.lowering import FLOAT32, Lowering, Uncovered
from edgert_deploy.packager.tflite_lowering.op import NARROW, Op, Write
from edgert_deploy.packager.tflite_lowering.ops.operands import INT32
from edgert_deploy.packager.tflite_lowering.writer import TENSOR_TYPES


def arg(code: str) -> Write:
    return lambda lowering, node: _arg(lowering, node, code)


def _arg(lowering: Lowering, node: Node, code: str) -> None:
    """Find an index. TFLite finds the first of equal elements; the last one is the first of the reversed axis."""
    source, output = node.inputs[0], node.outputs[0]
    shape, kept = lowering.shape(source), bool(node.attributes.get("keepdims", 1))
    axis = int(node.attributes.get("axis", 0)) % shape.rank
    if lowering.dtype(source) not in (FLOAT32, INT32):
        raise Uncovered(f"TFLite compares float32 and int32 here, not {lowering.dtype(source)}; cast to one of them")
    dtype, place = lowering.dtype(output), lowering.index_constant([axis], "axis")
    reduced_shape, x = shape.without_axis(axis), lowering.native(source)
    from_the_end = bool(node.attributes.get("select_last_index", 0))
    if from_the_end:
        x, straight = lowering.scratch(f"{output}_reversed", shape, lowering.dtype(source)), x
        lowering.emit("REVERSE_V2", [straight, place], [x])
    target = lowering.define(output)
    found = target if not (kept or from_the_end) else lowering.scratch(f"{output}_found", reduced_shape, dtype)
    lowering.emit(code, [x, place], [found], outputType=TENSOR_TYPES[dtype])
    if from_the_end:
        if shape.signature[axis] == -1:
            raise Uncovered(
                "select_last_index needs the length of the batch; export the model with its batch fixed to 1"
            )
        last = lowering.constant(shape.dims[axis] - 1, f"{output}_last", dtype)
        counted = lowering.scratch(f"{output}_counted", reduced_shape, dtype) if kept else target
        found = lowering.arithmetic("SUB", [last, found], counted)
    if kept:
        lowering.reshape(found, lowering.shape(output), target)


def top_k(lowering: Lowering, node: Node) -> None:
    """Find the k largest along the last axis, where another axis is moved. Inverted signs give the smallest."""
    source, (values, indices) = node.inputs[0], (*node.outputs, "")[:2]
    shape, result = lowering.shape(source), lowering.shape(values or indices)
    axis, dtype = int(node.attributes.get("axis", -1)) % shape.rank, lowering.dtype(source)
    order = (*(i for i in range(shape.rank) if i != axis), axis)
    back = tuple(int(i) for i in np.argsort(order))
    is_last, largest = axis == shape.rank - 1, bool(node.attributes.get("largest", 1))
    label = values or indices
    x = lowering.native(source)
    if not is_last:
        x = lowering.transpose(x, order, lowering.scratch(f"{label}_turned", shape.permuted(order), dtype))
    if not largest:
        x = _mirrored(lowering, x, lowering.scratch(f"{label}_mirrored", shape.permuted(order), dtype), dtype)
    count = lowering.constant(result.dims[axis], f"{label}_count", np.int32)
    is_direct = bool(values) and is_last and largest
    top = lowering.define(values) if is_direct else lowering.scratch(f"{label}_top", result.permuted(order), dtype)
    places = lowering.scratch(f"{label}_places", result.permuted(order), INT32)
    lowering.emit("TOPK_V2", [x, count], [top, places])
    if values and not largest:
        straight = lowering.scratch(f"{label}_straight", result.permuted(order), dtype)
        top = _mirrored(lowering, top, lowering.define(values) if is_last else straight, dtype)
    if values and not is_last:
        lowering.transpose(top, back, lowering.define(values))
    if indices:
        if not is_last:
            places = lowering.transpose(places, back, lowering.scratch(f"{label}_places", result, INT32))
        lowering.cast(places, lowering.define(indices), INT32, lowering.dtype(indices))


def _mirrored(lowering: Lowering, x: int, output: int, dtype: np.dtype[np.generic]) -> int:
    """Reverse the order of values: -x, or -1 - x for integers, where every value has a counterpart."""
    if dtype == FLOAT32:
        return lowering.arithmetic("MUL", [x, lowering.constant(-1.0, "minus_one")], output)
    return lowering.arithmetic("SUB", [lowering.constant(-1, "minus_one", dtype), x], output)


OPS = {
    "ArgMax": Op(arg("ARG_MAX"), widens=NARROW),
    "ArgMin": Op(arg("ARG_MIN"), widens=NARROW, stays_float=True),
    "TopK": Op(top_k, widens=NARROW, stays_float=True),
}
