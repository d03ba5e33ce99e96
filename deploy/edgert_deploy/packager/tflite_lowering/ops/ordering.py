"""Operators that order elements along an axis: ArgMax, ArgMin, TopK, ReverseSequence."""

from __future__ import annotations

from functools import partial

import numpy as np

from edgert_deploy.packager.tflite_lowering.graph import Node
from edgert_deploy.packager.tflite_lowering.lowering import Lowering
from edgert_deploy.packager.tflite_lowering.op import NARROW, Op
from edgert_deploy.packager.tflite_lowering.value import FLOAT32, INT32, INT64, Unsupported, Value, require_fixed
from edgert_deploy.packager.tflite_lowering.writer import TENSOR_TYPES


def arg(code: str, lowering: Lowering, node: Node) -> None:
    """Find the index of the largest or the smallest element.

    Among equal elements, TFLite finds the first one. To find the last one, reverse the axis before.
    """
    if lowering.dtype(node.inputs[0]) not in (FLOAT32, INT32):
        raise Unsupported(
            f"TFLite compares float32 and int32 here, not {lowering.dtype(node.inputs[0])}; cast to one of them"
        )
    x, result, dtype = lowering.read(node), lowering.shape(node.outputs[0]), lowering.dtype(node.outputs[0])
    axis = node.axis(x.shape.rank, default=0)
    place = x.indices([axis])
    from_the_end = bool(node.attributes.get("select_last_index", 0))
    if from_the_end:
        require_fixed(x.shape, [axis], "select_last_index needs the length of the batch")
        x = x.op("REVERSE_V2", place)
    shape = x.shape.reduced([axis], keep=False)
    index = x.op(code, place, shape=shape, dtype=dtype, outputType=TENSOR_TYPES[dtype])
    if from_the_end:
        index = (x.shape.dims[axis] - 1) - index
    lowering.result(node, index.reshaped(result))


def top_k(lowering: Lowering, node: Node) -> None:
    """Find the k largest or smallest elements along an axis, which moves to the end and back.

    For the smallest elements, reverse the order of the values.
    """
    x, (values, indices) = lowering.read(node), (*node.outputs, "")[:2]
    axis, largest = node.axis(x.shape.rank), bool(node.attributes.get("largest", 1))
    order = [*(i for i in range(x.shape.rank) if i != axis), axis]
    back = np.argsort(order).tolist()
    result = lowering.shape(values or indices)
    shape, count = result.permuted(order), x.indices(result.dims[axis])
    turned = x.transposed(order) if largest else _mirrored(x.transposed(order))
    top, places = turned.op_of_many("TOPK_V2", [(shape, x.dtype), (shape, INT32)], count)
    if values:
        lowering.result(node, (top if largest else _mirrored(top)).transposed(back))
    if indices:
        lowering.result(node, places.transposed(back).cast(lowering.dtype(indices)), index=1)


def reverse_sequence(lowering: Lowering, node: Node) -> None:
    """Reverse the first elements of each sequence."""
    x, lengths = lowering.read(node), lowering.read(node, 1)
    if x.dtype not in (FLOAT32, INT32, INT64):
        raise Unsupported(f"TFLite reverses float32, int32 and int64 here, not {x.dtype}; cast to one of them")
    time, batch = (int(node.attributes.get(f"{name}_axis", default)) for name, default in (("time", 0), ("batch", 1)))
    lowering.result(node, x.op("REVERSE_SEQUENCE", lengths, seqDim=time, batchDim=batch))


def _mirrored(x: Value) -> Value:
    """Reverse the order of values: -x for floats, and -1 - x for integers, which cannot overflow."""
    return x * -1 if x.dtype == FLOAT32 else -1 - x


OPS = {
    "ArgMax": Op(partial(arg, "ARG_MAX"), widens=NARROW),
    "ArgMin": Op(partial(arg, "ARG_MIN"), widens=NARROW, stays_float=True),
    "ReverseSequence": Op(reverse_sequence, widens=NARROW, sign="as_input", stays_float=True),
    "TopK": Op(top_k, widens=NARROW, stays_float=True),
}
