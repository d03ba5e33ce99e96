"""Operators that move elements and compute nothing: reshapes, transpositions, joins, cuts."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.graph import BatchShape, Node
from edgert_deploy.packager.tflite_lowering.lowering import (
    FLOAT32,
    TO_CHANNELS_FIRST,
    TO_CHANNELS_LAST,
    Layout,
    Lowering,
    Uncovered,
)
from edgert_deploy.packager.tflite_lowering.op import NARROW_BUT_BYTES, Op

# --- shape only


def reshape(lowering: Lowering, node: Node) -> None:
    """Write Reshape, Flatten, Squeeze or Unsqueeze: ONNX's shape inference has computed the new shape."""
    source, output = node.inputs[0], node.outputs[0]
    if _flattens_features(lowering, node):
        lowering.feature_order[output] = _channels_last_order(lowering.shape(source).dims[1:])
        tensor = lowering.channels_last(source)
    else:
        tensor = lowering.in_native_order(source)
    lowering.reshape(tensor, lowering.shape(output), lowering.define(output))


def _flattens_features(lowering: Lowering, node: Node) -> bool:
    """Whether only constant weights read a flattened channels-last value: they are permuted instead of the value."""
    source, output = node.inputs[0], node.outputs[0]
    if lowering.layout(source) is not Layout.CHANNELS_LAST:
        return False
    dims, user = lowering.shape(source).dims, lowering.only_user(output)
    if lowering.shape(output).dims != (dims[0], int(np.prod(dims[1:]))) or user is None:
        return False
    takes = user.op_type == "MatMul" or (user.op_type == "Gemm" and not user.attributes.get("transA", 0))
    if not takes or user.inputs[0] != output or output in user.inputs[1:]:
        return False
    return lowering.is_constant(user.inputs[1]) and lowering.shape(user.inputs[1]).rank == 2


def _channels_last_order(item: tuple[int, ...]) -> NDArray[np.intp]:
    """Return the position in the flattened ONNX item of each element of a flattened channels-last item."""
    return np.moveaxis(np.arange(int(np.prod(item))).reshape(item), 0, -1).reshape(-1)


def transpose(lowering: Lowering, node: Node) -> None:
    """Transpose. Between the two layouts this only renames the tensor."""
    source, output = node.inputs[0], node.outputs[0]
    rank = lowering.shape(source).rank
    order = tuple(int(i) for i in node.attributes.get("perm", reversed(range(rank))))
    if lowering.layout(source) is Layout.CHANNELS_LAST and order == TO_CHANNELS_LAST:
        lowering.alias(output, Layout.NATIVE, lowering.channels_last(source))
    elif order == TO_CHANNELS_FIRST:
        lowering.alias(output, Layout.CHANNELS_LAST, lowering.native(source))
    else:
        lowering.transpose(lowering.native(source), order, lowering.define(output))


def expand(lowering: Lowering, node: Node) -> None:
    """Broadcast to a shape without the batch, or one whose batch the value has already."""
    source, output = node.inputs[0], node.outputs[0]
    before, after = lowering.shape(source), lowering.shape(output)
    if before == after:
        lowering.alias(output, Layout.NATIVE, lowering.native(source))
        return
    if after.signature.count(-1) > before.signature.count(-1):
        raise Uncovered("it expands a computed value to the batch; export the model with its batch fixed to 1")
    held = before
    while held.rank < after.rank:
        held = held.with_axis(0, 1)
    tensor = lowering.native(source)
    if held.rank != before.rank:
        tensor = lowering.reshape(tensor, held, lowering.scratch(f"{output}_held", held, lowering.dtype(source)))
    repeats = [n if n != h else 1 for n, h in zip(after.dims, held.dims, strict=True)]
    lowering.emit("TILE", [tensor, lowering.index_constant(repeats, "repeats")], [lowering.define(output)])


def tile(lowering: Lowering, node: Node) -> None:
    source, output = node.inputs[0], node.outputs[0]
    repeats = lowering.value(node.inputs[1], "the repeats").reshape(-1)
    shape = lowering.shape(source)
    if any(length == -1 and n != 1 for length, n in zip(shape.signature, repeats, strict=True)):
        raise Uncovered("it repeats the batch; export the model with its batch fixed to 1")
    inputs = [lowering.native(source), lowering.index_constant(repeats, "repeats")]
    lowering.emit("TILE", inputs, [lowering.define(output)])


# --- joining and cutting


def concat(lowering: Lowering, node: Node) -> None:
    layout = lowering.common_layout(node.inputs)
    shape = lowering.shape(node.outputs[0])
    axis = int(node.attributes["axis"]) % shape.rank
    if shape.signature[axis] == -1:
        raise Uncovered("it joins along the batch; export the model with its batch fixed to 1")
    inputs = [_joined(lowering, node, name, layout) for name in node.inputs]
    output = lowering.define(node.outputs[0], layout)
    lowering.emit("CONCATENATION", inputs, [output], axis=lowering.axis(axis, shape.rank, layout))


def _joined(lowering: Lowering, node: Node, name: str, layout: Layout) -> int:
    """Return an operand of a join. A constant that ONNX expands to the batch (a class token) is expanded here too."""
    if name not in lowering.graph.expanded_constants:
        return lowering.tensor(name, layout)
    peer = next((n for n in node.inputs if lowering.shape(n).signature[0] == -1), None)
    if peer is None or lowering.dtype(peer) != FLOAT32 or layout is not Layout.NATIVE:
        raise Uncovered(f"{name!r} depends on the batch; export the model with its batch fixed to 1")
    shape = lowering.shape(peer)
    one = BatchShape((*shape.dims[:1], *(1,) * (shape.rank - 1)), (*shape.signature[:1], *(1,) * (shape.rank - 1)))
    label = f"{node.outputs[0]}_expanded"
    first = lowering.cut(lowering.native(peer), [0] * shape.rank, one.signature, lowering.scratch(label, one))
    nothing = lowering.arithmetic("MUL", [first, lowering.constant(np.float32(0), label)], lowering.scratch(label, one))
    constant = lowering.shape(name)
    expanded = BatchShape(constant.dims, (-1, *constant.dims[1:]))
    return lowering.arithmetic("ADD", [nothing, lowering.tensor(name, layout)], lowering.scratch(label, expanded))


def split(lowering: Lowering, node: Node) -> None:
    source, layout = node.inputs[0], lowering.layout(node.inputs[0])
    shape = lowering.shape(source)
    axis = int(node.attributes.get("axis", 0)) % shape.rank
    if shape.signature[axis] == -1:
        raise Uncovered("it splits the batch; export the model with its batch fixed to 1")
    place = lowering.axis(axis, shape.rank, layout)
    start = 0
    for output in node.outputs:
        length = lowering.shape(output).dims[axis]
        piece = lowering.laid_out(lowering.shape(output), layout)
        begin = [start if i == place else 0 for i in range(piece.rank)]
        lowering.cut(lowering.tensor(source, layout), begin, piece.signature, lowering.define(output, layout))
        start += length


def slice_(lowering: Lowering, node: Node) -> None:
    source, layout = node.inputs[0], lowering.layout(node.inputs[0])
    shape, cut = lowering.shape(source), lowering.shape(node.outputs[0])
    starts = lowering.integers(node, "starts", 1) or []
    axes = lowering.integers(node, "axes", 3) or list(range(len(starts)))
    steps = lowering.integers(node, "steps", 4) or [1] * len(starts)
    rank = lowering.laid_out(shape, layout).rank
    begin, stride = [0] * rank, [1] * rank
    for axis, start, step in zip(axes, starts, steps, strict=True):
        if shape.signature[axis] == -1 and (start != 0 or step != 1 or cut.signature[axis] != -1):
            raise Uncovered("it cuts the batch; export the model with its batch fixed to 1")
        place = lowering.axis(axis, shape.rank, layout)
        begin[place], stride[place] = _start(start, shape.dims[axis], step), step
    piece = lowering.laid_out(cut, layout)
    tensor, output = lowering.tensor(source, layout), lowering.define(node.outputs[0], layout)
    if all(step == 1 for step in stride):
        lowering.cut(tensor, begin, piece.signature, output)
        return
    _strided(lowering, tensor, begin, stride, piece, output)


def _start(start: int, length: int, step: int) -> int:
    """Return ONNX's start, counted from the front and clipped to the axis."""
    start = start + length if start < 0 else start
    return min(max(start, 0), length - 1 if step < 0 else length)


def _strided(
    lowering: Lowering, tensor: int, begin: list[int], stride: list[int], piece: BatchShape, output: int
) -> None:
    """Write STRIDED_SLICE. The end is one step after the last element; masks open the batch and ends before 0."""
    last = [b + n * s for b, n, s in zip(begin, piece.dims, stride, strict=True)]
    open_ends = [i for i, (end, n) in enumerate(zip(last, piece.signature, strict=True)) if n == -1 or end < 0]
    inputs = [tensor, *(lowering.index_constant(values, "cut") for values in (begin, last, stride))]
    lowering.emit("STRIDED_SLICE", inputs, [output], endMask=sum(1 << i for i in open_ends))


# --- between space and channels


def space_to_depth(lowering: Lowering, node: Node) -> None:
    """Move blocks to channels. TFLite's order of channels is ONNX's DCR mode; a look-up reorders them for CRD."""
    output, block = node.outputs[0], int(node.attributes["blocksize"])
    source = lowering.channels_last(node.inputs[0])
    if node.attributes.get("mode", "DCR") == "DCR":
        target = lowering.define(output, Layout.CHANNELS_LAST)
        lowering.emit("SPACE_TO_DEPTH", [source], [target], blockSize=block)
        return
    shape = lowering.laid_out(lowering.shape(output), Layout.CHANNELS_LAST)
    deep = lowering.scratch(f"{output}_deep", shape, lowering.dtype(output))
    lowering.emit("SPACE_TO_DEPTH", [source], [deep], blockSize=block)
    order = np.arange(shape.dims[3]).reshape(block * block, -1).T.reshape(-1)
    lowering.pick(deep, order, 3, lowering.define(output, Layout.CHANNELS_LAST))


def depth_to_space(lowering: Lowering, node: Node) -> None:
    """Move channels to blocks, the reverse of `space_to_depth`. CRD is PixelShuffle."""
    source, block = lowering.channels_last(node.inputs[0]), int(node.attributes["blocksize"])
    if node.attributes.get("mode", "DCR") == "CRD":
        shape = lowering.laid_out(lowering.shape(node.inputs[0]), Layout.CHANNELS_LAST)
        order = np.arange(shape.dims[3]).reshape(-1, block * block).T.reshape(-1)
        target = lowering.scratch(f"{node.outputs[0]}_reordered", shape, lowering.dtype(node.inputs[0]))
        source = lowering.pick(source, order, 3, target)
    lowering.emit("DEPTH_TO_SPACE", [source], [lowering.define(node.outputs[0], Layout.CHANNELS_LAST)], blockSize=block)


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
