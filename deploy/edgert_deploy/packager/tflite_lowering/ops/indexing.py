"""Lookups and writes by a constant or computed index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.graph import BatchShape, Node
from edgert_deploy.packager.tflite_lowering.lowering import Lowering
from edgert_deploy.packager.tflite_lowering.op import NARROW_BUT_BYTES, Op
from edgert_deploy.packager.tflite_lowering.ops.arithmetic import select
from edgert_deploy.packager.tflite_lowering.value import BOOL, INT32, INT64, Unsupported, Value, require_fixed


def gather(lowering: Lowering, node: Node) -> None:
    x, shape = lowering.read(node), lowering.shape(node.outputs[0])
    axis = node.axis(x.shape.rank, default=0)
    length, steps = x.shape.dims[axis], lowering.graph.item_steps.get(node.inputs[1])
    if axis == 0 and x.shape.signature[0] == -1 and steps is not None and bool((steps == length).all()):
        items = BatchShape((1, *x.shape.dims), (-1, length, *x.shape.signature[1:]))
        _gather_own(lowering, node, x.reshaped(items), lowering.graph.constants[node.inputs[1]][0])
        return
    if lowering.is_constant(node.inputs[1]):
        require_fixed(x.shape, [axis], "it picks elements along the batch")
    chosen = _non_negative(lowering, node, 1, x.shape.dims[axis])
    lowering.result(node, x.op("GATHER", chosen, shape=shape, axis=axis, batchDims=0))


def _gather_own(lowering: Lowering, node: Node, x: Value, places: NDArray[Any]) -> None:
    """Write a lookup of `places` in each item of the batch."""
    counted = np.where(places < 0, places + x.shape.dims[1], places)
    shape = lowering.shape(node.outputs[0])
    lowering.result(node, x.op("GATHER", x.indices(counted), shape=shape, axis=1, batchDims=0))


def gather_nd(lowering: Lowering, node: Node) -> None:
    """Write GATHER_ND. It has no batch axes, so an index begins with its position on ONNX's batch axes."""
    x, index_shape = lowering.read(node), lowering.shape(node.inputs[1])
    batch_dims = int(node.attributes.get("batch_dims", 0))
    end = batch_dims + index_shape.dims[-1]
    steps = lowering.graph.item_steps.get(node.inputs[1])
    if end == 2 and batch_dims == 0 and steps is not None and bool((steps == (1, 0)).all()):
        first = lowering.graph.constants[node.inputs[1]][0]
        if x.shape.signature[0] == -1 and not first[..., 0].any():
            _gather_own(lowering, node, x, first[..., 1])
            return
    require_fixed(x.shape, range(end), "it picks elements along the batch")
    chosen = _non_negative(lowering, node, 1, x.shape.dims[batch_dims:end])
    if batch_dims:
        require_fixed(index_shape, range(index_shape.rank), "batch_dims needs the length of the batch")
        places = chosen.constant(np.moveaxis(np.indices(index_shape.dims[:-1])[:batch_dims], 0, -1))
        whole = index_shape.with_length(index_shape.rank - 1, end)
        chosen = places.op("CONCATENATION", chosen, shape=whole, axis=index_shape.rank - 1)
    lowering.result(node, x.op("GATHER_ND", chosen, shape=lowering.shape(node.outputs[0])))


def gather_elements(lowering: Lowering, node: Node) -> None:
    """Look up in the flattened value, at index * (stride of the axis) + (position on the other axes)."""
    x, index_shape = lowering.read(node), lowering.shape(node.inputs[1])
    rank, dims = x.shape.rank, x.shape.dims
    axis = node.axis(rank, default=0)
    if lowering.is_constant(node.inputs[0]) and x.shape.dims[axis] == int(np.prod(dims)):  # the same row for each item
        row = x.reshaped(BatchShape.fixed(dims[axis]))
        chosen = _non_negative(lowering, node, 1, dims[axis])
        lowering.result(node, row.op("GATHER", chosen, shape=index_shape, axis=0, batchDims=0))
        return
    for shape in (x.shape, index_shape):
        require_fixed(shape, range(shape.rank), "it needs the length of every axis, the batch included")
    strides, grid = [int(np.prod(dims[i + 1 :])) for i in range(rank)], np.indices(index_shape.dims)
    base = sum((grid[i] * strides[i] for i in range(rank) if i != axis), np.zeros(index_shape.dims, np.int64))
    places = _non_negative(lowering, node, 1, dims[axis]) * strides[axis] + base
    flat = x.reshaped(BatchShape.fixed(int(np.prod(dims))))
    lowering.result(node, flat.op("GATHER", places, shape=index_shape, axis=0, batchDims=0))


def scatter_nd(lowering: Lowering, node: Node) -> None:
    """Write SCATTER_ND, which writes into zeros. ADD or SELECT_V2 combines this with the input."""
    x, updates = lowering.read(node), lowering.read(node, 2)
    reduction = node.attributes.get("reduction", "none")
    if reduction not in ("none", "add"):
        raise Unsupported(f"reduction {reduction!r} is not supported; use 'none' or 'add'")
    require_fixed(x.shape, range(x.shape.rank), "it needs the length of every axis, the batch included")
    depth = lowering.shape(node.inputs[1]).dims[-1]
    places, whole = _non_negative(lowering, node, 1, x.shape.dims[:depth], INT32), x.indices(x.shape.dims)
    written = places.op("SCATTER_ND", updates, whole, shape=x.shape, dtype=x.dtype)
    if reduction == "add":
        lowering.result(node, x + written)
        return
    counts = places.op("SCATTER_ND", np.ones(updates.shape.dims), whole, shape=x.shape)
    lowering.result(node, select(counts.op("GREATER", 0, dtype=BOOL), written, x))


def one_hot(lowering: Lowering, node: Node) -> None:
    depth = int(lowering.value(node.inputs[1], "the depth").reshape(-1)[0])
    off, on = lowering.value(node.inputs[2], "the values")
    shape, dtype = lowering.shape(node.outputs[0]), lowering.dtype(node.outputs[0])
    axis, chosen = node.axis(shape.rank), _non_negative(lowering, node, 0, depth, INT32)
    inputs = [chosen.indices(depth), *(chosen.constant(value, dtype) for value in (on, off))]
    axis = -1 if axis == shape.rank - 1 else axis
    lowering.result(node, chosen.op("ONE_HOT", *inputs, shape=shape, dtype=dtype, axis=axis))


def trilu(lowering: Lowering, node: Node) -> None:
    x = lowering.read(node)
    rank, dims = x.shape.rank, x.shape.dims
    require_fixed(x.shape, range(rank - 2, rank), "its triangle includes the batch")
    k = int(lowering.value(node.inputs[1], "k").reshape(())) if node.input(1) else 0
    whole = np.ones((*[1] * (rank - 2), *dims[-2:]), bool)
    mask = np.triu(whole, k) if node.attributes.get("upper", 1) else np.tril(whole, k)
    lowering.result(node, select(x.constant(mask, BOOL), x, x.constant(0)))


# --- indices


def _non_negative(
    lowering: Lowering, node: Node, index: int, lengths: int | Sequence[int], wanted: np.dtype[Any] | None = None
) -> Value:
    """Return input `index` of `node` without negative indices, which TFLite does not accept.

    `lengths` are the lengths of the axes that the indices address. Constant indices become int32. Computed indices are
    cast to `wanted`. If `wanted` is None, int32 and int64 stay, and other dtypes become int32.
    """
    name = node.inputs[index]
    if lowering.is_constant(name):
        values = lowering.value(name, "the index")
        counted = np.where(values < 0, values + np.array(lengths), values)
        return lowering.constant_of(node, name, counted.astype(np.int32))
    indices = lowering.read(node, index)
    if indices.dtype not in (INT32, INT64) or (wanted is not None and indices.dtype != wanted):
        indices = indices.cast(wanted or INT32)
    if lowering.is_non_negative(name):
        return indices
    return select(indices.op("LESS", 0, dtype=BOOL), indices + lengths, indices)


OPS = {
    "Gather": Op(gather, widens=NARROW_BUT_BYTES),
    "GatherElements": Op(gather_elements, widens=NARROW_BUT_BYTES),
    "GatherND": Op(gather_nd, widens=NARROW_BUT_BYTES),
    "OneHot": Op(one_hot, widens=NARROW_BUT_BYTES),
    "ScatterND": Op(scatter_nd, widens=NARROW_BUT_BYTES, stays_float=True),
    "Trilu": Op(trilu, widens=NARROW_BUT_BYTES, stays_float=True),
}
