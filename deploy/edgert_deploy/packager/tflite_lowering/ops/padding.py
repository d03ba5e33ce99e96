"""Pad: constants, mirrored or repeated elements around a value; negative padding cuts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.graph import BatchShape, Node
from edgert_deploy.packager.tflite_lowering.lowering import FLOAT32, Layout, Lowering, Uncovered
from edgert_deploy.packager.tflite_lowering.op import NARROW_BUT_BYTES, Op

# schema MirrorPadMode: whether the element at the edge is repeated.
MIRROR_REFLECT, MIRROR_SYMMETRIC = 0, 1
# ONNX's modes, and numpy's names for them.
LOOKED_UP = {"edge": "edge", "reflect": "reflect", "wrap": "wrap"}


@dataclass(frozen=True)
class Padding:
    """A tensor, and the amounts before and after each of its axes, [rank, 2]."""

    tensor: int
    shape: BatchShape
    amounts: NDArray[np.int32]

    def padded_shape(self) -> BatchShape:
        shape = self.shape
        for axis, (length, amount) in enumerate(zip(shape.dims, self.amounts, strict=True)):
            shape = shape.with_length(axis, int(length + amount.sum())) if amount.any() else shape
        return shape


def pad(lowering: Lowering, node: Node) -> None:
    source, output, layout = node.inputs[0], node.outputs[0], lowering.layout(node.inputs[0])
    mode = node.attributes.get("mode", "constant")
    shape = lowering.laid_out(lowering.shape(source), layout)
    amounts = _amounts(lowering, node, shape.rank, layout)
    if any(length == -1 and amount.any() for length, amount in zip(shape.signature, amounts, strict=True)):
        raise Uncovered("it pads the batch; export the model with its batch fixed to 1")
    padding = _cut(lowering, node, Padding(lowering.tensor(source, layout), shape, amounts))
    if mode == "constant":
        tensor = _pad_with_constant(lowering, node, padding, layout)
    elif mode in LOOKED_UP:
        tensor = _pad_with_itself(lowering, node, padding, mode)
    else:
        raise Uncovered(f"mode {mode!r} is not covered; use constant, {', '.join(LOOKED_UP)}")
    lowering.alias(output, layout, tensor)


def _amounts(lowering: Lowering, node: Node, rank: int, layout: Layout) -> NDArray[np.int32]:
    """Return the amounts before and after each axis of the tensor in `layout`."""
    onnx_rank = lowering.shape(node.inputs[0]).rank
    pads = lowering.integers(node, "pads", 1) or []
    axes = lowering.integers(node, "axes", 3) or list(range(onnx_rank))
    amounts = np.zeros((rank, 2), np.int32)
    for i, axis in enumerate(axes):
        amounts[lowering.axis(axis, onnx_rank, layout)] = pads[i], pads[i + len(axes)]
    return amounts


def _cut(lowering: Lowering, node: Node, padding: Padding) -> Padding:
    """Apply and remove the negative amounts."""
    if padding.amounts.min(initial=0) == 0:
        return padding
    begin = np.maximum(-padding.amounts[:, 0], 0)
    cut = replace(padding, amounts=np.minimum(padding.amounts, 0)).padded_shape()
    tensor = lowering.scratch(f"{node.outputs[0]}_cut", cut, lowering.dtype(node.inputs[0]))
    lowering.cut(padding.tensor, begin, cut.signature, tensor)
    return Padding(tensor, cut, np.maximum(padding.amounts, 0))


def _pad_with_constant(lowering: Lowering, node: Node, padding: Padding, layout: Layout) -> int:
    """Pad with a value. Floats get zeros, to which the value is added: the quantiser leaves PADV2 in float32."""
    output, dtype, value = node.outputs[0], lowering.dtype(node.inputs[0]), _value(lowering, node)
    shape = padding.padded_shape()
    inputs = [padding.tensor, lowering.index_constant(padding.amounts, "pads")]
    padded = lowering.scratch(f"{output}_padded", shape, dtype)
    if value and dtype != FLOAT32:
        lowering.emit("PADV2", [*inputs, lowering.constant(value, f"{output}_value", dtype)], [padded])
        return padded
    lowering.emit("PAD", inputs, [padded])
    if not value:
        return padded
    item = [1 if length == -1 else length for length in shape.signature]
    mask = np.full(item, value, np.float32)
    mask[tuple(slice(before, n - after) for (before, after), n in zip(padding.amounts, item, strict=True))] = 0
    valued = lowering.scratch(f"{output}_valued", shape)
    return lowering.arithmetic("ADD", [padded, lowering.constant(mask, f"{output}_value")], valued)


def _value(lowering: Lowering, node: Node) -> Any:
    if "value" in node.attributes:
        return float(node.attributes["value"])
    return lowering.value(node.input(2), "the value").reshape(()).item() if node.input(2) else 0


def _pad_with_itself(lowering: Lowering, node: Node, padding: Padding, mode: str) -> int:
    """Write MIRROR_PAD where it has the mode, else a look-up along each axis."""
    output, dtype = node.outputs[0], lowering.dtype(node.inputs[0])
    widest = padding.amounts.max(axis=1)
    mirrors = mode == "reflect" and bool((widest < padding.shape.dims).all())
    if mirrors or (mode == "edge" and widest.max() == 1):
        padded = lowering.scratch(f"{output}_padded", padding.padded_shape(), dtype)
        inputs = [padding.tensor, lowering.index_constant(padding.amounts, "pads")]
        lowering.emit("MIRROR_PAD", inputs, [padded], mode=MIRROR_REFLECT if mirrors else MIRROR_SYMMETRIC)
        return padded
    tensor, shape = padding.tensor, padding.shape
    for axis, amount in enumerate(padding.amounts):
        if amount.any():
            elements = np.pad(np.arange(shape.dims[axis]), amount, mode=LOOKED_UP[mode])  # type: ignore[call-overload]
            shape = shape.with_length(axis, len(elements))
            tensor = lowering.pick(tensor, elements, axis, lowering.scratch(f"{output}_padded", shape, dtype))
    return tensor


OPS = {"Pad": Op(pad, widens=NARROW_BUT_BYTES)}
