"""Operators that move elements and compute nothing: reshapes, transpositions, joins, cuts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.graph import BatchShape, Node
from edgert_deploy.packager.tflite_lowering.lowering import (
    SPATIAL_RANKS,
    TO_CHANNELS_FIRST,
    TO_CHANNELS_LAST,
    Layout,
    Lowering,
)
from edgert_deploy.packager.tflite_lowering.op import NARROW_BUT_BYTES, Op
from edgert_deploy.packager.tflite_lowering.value import FLOAT32, NeedsFixedBatch, Value, require_fixed

# The order that turns [batch, places, channels], as in a transformer, to [batch, channels, places], and back.
TOKENS_ORDER = (0, 2, 1)
RESHAPES = ("Flatten", "Reshape", "Squeeze", "Unsqueeze")

# --- shape only


def reshape(lowering: Lowering, node: Node) -> None:
    """Write Reshape, Flatten, Squeeze or Unsqueeze with the shape from ONNX's shape inference."""
    source, shape = node.inputs[0], lowering.shape(node.outputs[0])
    if lowering.layout(source) is Layout.CHANNELS_LAST and _keeps_channels(lowering, node):
        x = lowering.read(node, 0, Layout.CHANNELS_LAST)
        lowering.result(node, x.reshaped(lowering.laid_out(shape, Layout.CHANNELS_LAST)), Layout.CHANNELS_LAST)
        return
    if _flattens_features(lowering, node):
        lowering.feature_order[node.outputs[0]] = _channels_last_order(lowering.shape(source).dims[1:])
        x = lowering.read(node, 0, Layout.CHANNELS_LAST)
    else:
        x = lowering.read(node, 0, lowering.layout_in_order(source))
    lowering.result(node, x.reshaped(shape))


def _keeps_channels(lowering: Lowering, node: Node) -> bool:
    """Whether `node` reshapes only the axes after the channels, so that channels last stays possible."""
    before, after = lowering.shape(node.inputs[0]), lowering.shape(node.outputs[0])
    is_spatial = before.rank in SPATIAL_RANKS and after.rank in SPATIAL_RANKS
    return is_spatial and before.signature[:2] == after.signature[:2]


def _flattens_features(lowering: Lowering, node: Node) -> bool:
    """Whether `node` flattens a value for only one layer, which can permute its own constant weights."""
    source, output = node.inputs[0], node.outputs[0]
    if lowering.layout(source) is not Layout.CHANNELS_LAST:
        return False
    dims, user = lowering.shape(source).dims, lowering.links.only_user(node)
    if lowering.shape(output).dims != (dims[0], int(np.prod(dims[1:]))) or user is None:
        return False
    is_layer = user.op_type == "MatMul" or (user.op_type == "Gemm" and not user.attributes.get("transA", 0))
    if not is_layer or user.inputs[0] != output or output in user.inputs[1:]:
        return False
    return lowering.is_constant(user.inputs[1]) and lowering.shape(user.inputs[1]).rank == 2


def _channels_last_order(item: tuple[int, ...]) -> NDArray[np.intp]:
    """Return, for each element of a flattened channels-last item, its position in ONNX's flattened item."""
    return np.moveaxis(np.arange(int(np.prod(item))).reshape(item), 0, -1).reshape(-1)


def transpose(lowering: Lowering, node: Node) -> None:
    """Write Transpose. A change between the two layouts only renames the tensor."""
    source = node.inputs[0]
    rank = lowering.shape(source).rank
    order = tuple(int(i) for i in node.attributes.get("perm", reversed(range(rank))))
    if lowering.layout(source) is Layout.CHANNELS_LAST and order == TO_CHANNELS_LAST:
        lowering.result(node, lowering.read(node, 0, Layout.CHANNELS_LAST))
    elif order == TO_CHANNELS_FIRST:
        lowering.result(node, lowering.read(node), Layout.CHANNELS_LAST)
    elif order == TOKENS_ORDER and lowering.layout(source) is Layout.CHANNELS_LAST:
        lowering.result(node, lowering.read(node, 0, Layout.CHANNELS_LAST).reshaped(lowering.shape(node.outputs[0])))
    elif order == TOKENS_ORDER and _makes_images(lowering, node):
        shape = lowering.result_shape(node, Layout.CHANNELS_LAST)
        lowering.result(node, lowering.read(node).reshaped(shape), Layout.CHANNELS_LAST)
    else:
        lowering.result(node, lowering.read(node).transposed(order))


def _makes_images(lowering: Lowering, node: Node) -> bool:
    """Whether all readers of `node` read channels last: convolutions, and reshapes to an image."""
    output, readers = node.outputs[0], lowering.links.users.get(node.outputs[0], [])
    return bool(readers) and all(
        reader.inputs[0] == output
        and (reader.op_type == "Conv" or (reader.op_type in RESHAPES and _keeps_channels(lowering, reader)))
        for reader in readers
    )


def expand(lowering: Lowering, node: Node) -> None:
    """Broadcast a value to a shape. This shape may contain the batch only if the value already does."""
    x, after = lowering.read(node), lowering.shape(node.outputs[0])
    if x.shape != after and after.signature.count(-1) > x.shape.signature.count(-1):
        raise NeedsFixedBatch("it expands a computed value to the batch")
    x = x.reshaped(x.shape.of_rank(after.rank))
    repeats = [n if n != h else 1 for n, h in zip(after.dims, x.shape.dims, strict=True)]
    lowering.result(node, x if x.shape == after else x.op("TILE", x.indices(repeats), shape=after))


def tile(lowering: Lowering, node: Node) -> None:
    x, repeats = lowering.read(node), lowering.value(node.inputs[1], "the repeats").reshape(-1)
    require_fixed(x.shape, np.flatnonzero(repeats != 1), "it repeats the batch")
    lowering.result(node, x.op("TILE", x.indices(repeats), shape=lowering.shape(node.outputs[0])))


# --- joining and cutting


def concat(lowering: Lowering, node: Node) -> None:
    """Join the inputs along an axis, without empty inputs, which TFLite's quantizer refuses."""
    shape = lowering.shape(node.outputs[0])
    axis = node.axis(shape.rank)
    require_fixed(shape, [axis], "it joins along the batch")
    indices = [i for i, name in enumerate(node.inputs) if lowering.shape(name).dims[axis] != 0]
    layout = lowering.common_layout(tuple(node.inputs[i] for i in indices))
    first, *others = (_joined(lowering, node, index, layout) for index in indices)
    place, shape = lowering.axis(axis, shape.rank, layout), lowering.laid_out(shape, layout)
    joined = first.op("CONCATENATION", *others, shape=shape, axis=place) if others else first
    lowering.result(node, joined, layout)


def _joined(lowering: Lowering, node: Node, index: int, layout: Layout) -> Value:
    """Return input `index` of a Concat.

    If the input is a constant that the model repeats for each item of the batch, the lowered graph repeats it, too.
    """
    name = node.inputs[index]
    if name not in lowering.graph.expanded_constants:
        return lowering.read(node, index, layout)
    peers = (i for i, n in enumerate(node.inputs) if lowering.shape(n).signature[0] == -1)
    peer = next(peers, None)
    if peer is None or lowering.dtype(node.inputs[peer]) != FLOAT32 or layout is not Layout.NATIVE:
        raise NeedsFixedBatch(f"{name!r} depends on the batch")
    x = lowering.read(node, peer)
    ones = (1,) * (x.shape.rank - 1)
    one_element = x.sliced([0] * x.shape.rank, BatchShape((x.shape.dims[0], *ones), (-1, *ones)))
    return one_element * 0 + lowering.read(node, index)


def split(lowering: Lowering, node: Node) -> None:
    x, layout = lowering.read_as_made(node)
    shape = lowering.shape(node.inputs[0])
    axis = node.axis(shape.rank, default=0)
    require_fixed(shape, [axis], "it splits the batch")
    place, start = lowering.axis(axis, shape.rank, layout), 0
    for index, output in enumerate(node.outputs):
        piece = lowering.laid_out(lowering.shape(output), layout)
        begin = [start if i == place else 0 for i in range(piece.rank)]
        lowering.result(node, x.sliced(begin, piece), layout, index)
        start += lowering.shape(output).dims[axis]


def slice_(lowering: Lowering, node: Node) -> None:
    x, layout = lowering.read_as_made(node)
    shape, cut = lowering.shape(node.inputs[0]), lowering.shape(node.outputs[0])
    starts = lowering.integers(node, "starts", 1) or []
    axes = lowering.integers(node, "axes", 3) or list(range(len(starts)))
    steps = lowering.integers(node, "steps", 4) or [1] * len(starts)
    begin, stride = [0] * x.shape.rank, [1] * x.shape.rank
    for axis, start, step in zip(axes, starts, steps, strict=True):
        if start != 0 or step != 1 or cut.signature[axis] != -1:
            require_fixed(shape, [axis], "it cuts the batch")
        place = lowering.axis(axis, shape.rank, layout)
        begin[place], stride[place] = _start(start, shape.dims[axis], step), step
    piece = lowering.laid_out(cut, layout)
    is_plain = all(step == 1 for step in stride)
    lowering.result(node, x.sliced(begin, piece) if is_plain else _strided(x, begin, stride, piece), layout)


def _start(start: int, length: int, step: int) -> int:
    """Return ONNX's start, counted from the front and clipped to the axis."""
    start = start + length if start < 0 else start
    return min(max(start, 0), length - 1 if step < 0 else length)


def _strided(x: Value, begin: list[int], stride: list[int], piece: BatchShape) -> Value:
    """Write STRIDED_SLICE. Its end is one step after the last element.

    A mask marks the axes without an end: the batch, and an axis whose end would be below 0.
    """
    last = [b + n * s for b, n, s in zip(begin, piece.dims, stride, strict=True)]
    open_ends = [i for i, (end, n) in enumerate(zip(last, piece.signature, strict=True)) if n == -1 or end < 0]
    cut = (x.indices(values) for values in (begin, last, stride))
    return x.op("STRIDED_SLICE", *cut, shape=piece, endMask=sum(1 << i for i in open_ends))


# --- between space and channels


def space_to_depth(lowering: Lowering, node: Node) -> None:
    """Move blocks to channels.

    TFLite orders the channels as ONNX's mode DCR does. For the mode CRD, a lookup changes the order.
    """
    block, shape = int(node.attributes["blocksize"]), lowering.result_shape(node, Layout.CHANNELS_LAST)
    deep = lowering.read(node, 0, Layout.CHANNELS_LAST).op("SPACE_TO_DEPTH", shape=shape, blockSize=block)
    if node.attributes.get("mode", "DCR") != "DCR":
        deep = deep.gathered(np.arange(shape.dims[3]).reshape(block * block, -1).T, 3)
    lowering.result(node, deep, Layout.CHANNELS_LAST)


def depth_to_space(lowering: Lowering, node: Node) -> None:
    """Move channels to blocks, the reverse of `space_to_depth`. PixelShuffle has the mode CRD."""
    x, block = lowering.read(node, 0, Layout.CHANNELS_LAST), int(node.attributes["blocksize"])
    if node.attributes.get("mode", "DCR") == "CRD":
        x = x.gathered(np.arange(x.shape.dims[3]).reshape(-1, block * block).T, 3)
    shape = lowering.result_shape(node, Layout.CHANNELS_LAST)
    lowering.result(node, x.op("DEPTH_TO_SPACE", shape=shape, blockSize=block), Layout.CHANNELS_LAST)


OPS = {
    "Concat": Op(concat, widens=NARROW_BUT_BYTES, sign="as_input"),
    "DepthToSpace": Op(depth_to_space, widens=NARROW_BUT_BYTES),
    "Expand": Op(expand, widens=NARROW_BUT_BYTES),
    "Flatten": Op(reshape),
    "Reshape": Op(reshape, sign="as_input"),
    "Slice": Op(slice_),
    "SpaceToDepth": Op(space_to_depth, widens=NARROW_BUT_BYTES),
    "Split": Op(split),
    "Squeeze": Op(reshape),
    "Tile": Op(tile, widens=NARROW_BUT_BYTES),
    "Transpose": Op(transpose, sign="as_input"),
    "Unsqueeze": Op(reshape),
}
