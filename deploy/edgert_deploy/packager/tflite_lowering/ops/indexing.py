"""Look-ups by a constant or computed index, and writes by one."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.graph import BatchShape, Node
from edgert_deploy.packager.tflite_lowering.lowering import Lowering, Uncovered
from edgert_deploy.packager.tflite_lowering.op import NARROW_BUT_BYTES, Op
from edgert_deploy.packager.tflite_lowering.ops.operands import BOOL, INT32, INT64


def gather(lowering: Lowering, node: Node) -> None:
    source, chosen = node.inputs
    shape = lowering.shape(source)
    axis = int(node.attributes.get("axis", 0)) % shape.rank
    if lowering.is_constant(chosen) and shape.signature[axis] == -1:
        raise Uncovered("it picks elements along the batch; export the model with its batch fixed to 1")
    indices = _non_negative(lowering, node, chosen, np.array(shape.dims[axis]))
    output = lowering.define(node.outputs[0])
    lowering.emit("GATHER", [lowering.native(source), indices], [output], axis=axis, batchDims=0)


def gather_nd(lowering: Lowering, node: Node) -> None:
    """Look up. TFLite has no batch axes here: each index gets its position on ONNX's batch axes prepended."""
    source, chosen = node.inputs
    shape, batch_dims = lowering.shape(source), int(node.attributes.get("batch_dims", 0))
    depth = lowering.shape(chosen).dims[-1]
    _require_fixed(shape, range(batch_dims + depth), "it picks elements along the batch")
    indices = _non_negative(lowering, node, chosen, np.array(shape.dims[batch_dims : batch_dims + depth]))
    if batch_dims:
        indices = _with_batch_places(lowering, node, indices, batch_dims)
    lowering.emit("GATHER_ND", [lowering.native(source), indices], [lowering.define(node.outputs[0])])


def _with_batch_places(lowering: Lowering, node: Node, indices: int, batch_dims: int) -> int:
    chosen, output = lowering.shape(node.inputs[1]), node.outputs[0]
    _require_fixed(chosen, range(chosen.rank), "batch_dims needs the length of the batch")
    dtype = INT32 if lowering.is_constant(node.inputs[1]) else lowering.dtype(node.inputs[1])
    places = np.moveaxis(np.indices(chosen.dims[:-1])[:batch_dims], 0, -1)
    shape = chosen.with_length(chosen.rank - 1, chosen.dims[-1] + batch_dims)
    whole = lowering.scratch(f"{output}_indices", shape, dtype)
    inputs = [lowering.constant(places, f"{output}_places", dtype), indices]
    lowering.emit("CONCATENATION", inputs, [whole], axis=chosen.rank - 1)
    return whole


def gather_elements(lowering: Lowering, node: Node) -> None:
    """Look up in the flattened value: index * stride of the axis + the position on the other axes."""
    source, chosen = node.inputs
    shape, wanted = lowering.shape(source), lowering.shape(chosen)
    for each in (shape, wanted):
        _require_fixed(each, range(each.rank), "it needs the length of every axis, the batch included")
    axis = int(node.attributes.get("axis", 0)) % shape.rank
    strides = np.array([int(np.prod(shape.dims[i + 1 :])) for i in range(shape.rank)])
    grid = np.indices(wanted.dims)
    base = sum((grid[i] * strides[i] for i in range(shape.rank) if i != axis), np.zeros(wanted.dims, np.int64))
    indices = _non_negative(lowering, node, chosen, np.array(shape.dims[axis]))
    dtype, label = INT32 if lowering.is_constant(chosen) else lowering.dtype(chosen), f"{node.outputs[0]}_places"
    scaled, places = (lowering.scratch(label, wanted, dtype) for _ in range(2))
    lowering.arithmetic("MUL", [indices, lowering.constant(int(strides[axis]), label, dtype)], scaled)
    lowering.arithmetic("ADD", [scaled, lowering.constant(base, label, dtype)], places)
    flat_shape = BatchShape.fixed(int(np.prod(shape.dims)))
    flat = lowering.scratch(f"{node.outputs[0]}_flat", flat_shape, lowering.dtype(source))
    lowering.reshape(lowering.native(source), flat_shape, flat)
    lowering.emit("GATHER", [flat, places], [lowering.define(node.outputs[0])], axis=0, batchDims=0)


def scatter_nd(lowering: Lowering, node: Node) -> None:
    """Write by index. SCATTER_ND writes into zeros, so a mask selects the other elements, or ADD adds them."""
    source, chosen, updates = node.inputs
    output, shape = node.outputs[0], lowering.shape(source)
    reduction = node.attributes.get("reduction", "none")
    if reduction not in ("none", "add"):
        raise Uncovered(f"reduction {reduction!r} is not covered; use 'none' or 'add'")
    _require_fixed(shape, range(shape.rank), "it needs the length of every axis, the batch included")
    depth = lowering.shape(chosen).dims[-1]
    indices = _non_negative(lowering, node, chosen, np.array(shape.dims[:depth]), INT32)
    whole, dtype = lowering.index_constant(shape.dims, "shape"), lowering.dtype(source)
    written = lowering.scratch(f"{output}_written", shape, dtype)
    lowering.emit("SCATTER_ND", [indices, lowering.native(updates), whole], [written])
    if reduction == "add":
        lowering.arithmetic("ADD", [lowering.native(source), written], lowering.define(output))
        return
    ones = lowering.constant(np.ones(lowering.shape(updates).dims), f"{output}_ones", np.int32)
    counts, mask = (lowering.scratch(f"{output}_mask", shape, d) for d in (INT32, BOOL))
    lowering.emit("SCATTER_ND", [indices, ones, whole], [counts])
    lowering.emit("GREATER", [counts, lowering.constant(0, f"{output}_zero", np.int32)], [mask])
    lowering.emit("SELECT_V2", [mask, written, lowering.native(source)], [lowering.define(output)])


def one_hot(lowering: Lowering, node: Node) -> None:
    chosen, output = node.inputs[0], node.outputs[0]
    depth = int(lowering.value(node.inputs[1], "the depth").reshape(-1)[0])
    off, on = lowering.value(node.inputs[2], "the values")
    rank = lowering.shape(output).rank
    axis = int(node.attributes.get("axis", -1)) % rank
    indices = _non_negative(lowering, node, chosen, np.array(depth), INT32)
    dtype = lowering.dtype(output)
    values = [lowering.constant(value, f"{output}_value", dtype) for value in (on, off)]
    inputs = [indices, lowering.constant(depth, f"{output}_depth", np.int32), *values]
    lowering.emit("ONE_HOT", inputs, [lowering.define(output)], axis=-1 if axis == rank - 1 else axis)


def trilu(lowering: Lowering, node: Node) -> None:
    source, output = node.inputs[0], node.outputs[0]
    shape, dtype = lowering.shape(source), lowering.dtype(source)
    _require_fixed(shape, range(shape.rank - 2, shape.rank), "its triangle includes the batch")
    k = int(lowering.value(node.inputs[1], "k").reshape(())) if node.input(1) else 0
    whole = np.ones(shape.dims[-2:], bool)
    kept = np.triu(whole, k) if node.attributes.get("upper", 1) else np.tril(whole, k)
    kept = kept.reshape((1,) * (shape.rank - 2) + kept.shape)
    inputs = [lowering.constant(kept, f"{output}_kept", bool), lowering.native(source)]
    lowering.emit("SELECT_V2", [*inputs, lowering.constant(0, f"{output}_zero", dtype)], [lowering.define(output)])


# --- indices


def _non_negative(
    lowering: Lowering, node: Node, name: str, lengths: NDArray[Any], wanted: np.dtype[Any] | None = None
) -> int:
    """Return the indices `name` into axes of `lengths`, without the negative ones that TFLite does not take.

    Constant indices are int32; computed ones keep their dtype, or are cast to the `wanted` one.
    """
    if lowering.is_constant(name):
        values = lowering.value(name, "the index")
        return lowering.index_constant(np.where(values < 0, values + lengths, values), name)
    indices, dtype, shape = lowering.native(name), lowering.dtype(name), lowering.shape(name)
    if dtype not in (INT32, INT64) or (wanted is not None and dtype != wanted):
        before, dtype = dtype, wanted or INT32
        indices = lowering.cast(indices, lowering.scratch(f"{name}_index", shape, dtype), before, dtype)
    if lowering.is_non_negative(name):
        return indices
    label = f"{node.outputs[0]}_index"
    below, shifted, counted = (lowering.scratch(label, shape, d) for d in (BOOL, dtype, dtype))
    lowering.emit("LESS", [indices, lowering.constant(0, label, dtype)], [below])
    lowering.arithmetic("ADD", [indices, lowering.constant(lengths, label, dtype)], shifted)
    lowering.emit("SELECT_V2", [below, shifted, indices], [counted])
    return counted


def _require_fixed(shape: BatchShape, axes: range, what: str) -> None:
    if any(shape.signature[axis] == -1 for axis in axes):
        raise Uncovered(f"{what}; export the model with its batch fixed to 1")


OPS = {
    "Gather": Op(gather, widens=NARROW_BUT_BYTES),
    "GatherElements": Op(gather_elements, widens=NARROW_BUT_BYTES),
    "GatherND": Op(gather_nd, widens=NARROW_BUT_BYTES),
    "OneHot": Op(one_hot, widens=NARROW_BUT_BYTES),
    "ScatterND": Op(scatter_nd, widens=NARROW_BUT_BYTES, stays_float=True),
    "Trilu": Op(trilu, widens=NARROW_BUT_BYTES, stays_float=True),
}
