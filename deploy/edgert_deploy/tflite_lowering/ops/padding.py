"""Pad: constants, mirrors and repeats around a value."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.tflite_lowering.graph import Node
from edgert_deploy.tflite_lowering.lowering import FLOAT32, Layout, Lowering, Uncovered

MIRROR_REFLECT = 0  # schema MirrorPadMode: the edge element itself is not repeated


def pad(lowering: Lowering, node: Node) -> None:
    source, layout = node.inputs[0], lowering.layout(node.inputs[0])
    mode = node.attributes.get("mode", "constant")
    shape = lowering.shape(source)
    amounts = _pad_amounts(lowering, node, shape.rank, layout)
    if amounts.min() < 0:
        raise Uncovered("negative padding is not covered; use Slice")
    if any(
        shape.signature[axis] == -1 and amounts[lowering.axis(axis, shape.rank, layout)].any()
        for axis in range(shape.rank)
    ):
        raise Uncovered("padding the batch is not covered")
    if mode not in ("constant", "reflect"):
        raise Uncovered(f"mode {mode!r} is not covered")
    inputs = [lowering.tensor(source, layout), lowering.index_constant(amounts, "pads")]
    value = 0.0 if mode == "reflect" else _pad_value(lowering, node)
    if value and lowering.dtype(source) == FLOAT32:
        _pad_with(lowering, node, inputs, amounts, value, layout)
        return
    if value:
        raise Uncovered("padding integers with another value than 0 is not covered")
    output = lowering.define(node.outputs[0], layout)
    if mode == "reflect":
        lowering.emit("MIRROR_PAD", inputs, [output], mode=MIRROR_REFLECT)
    else:
        lowering.emit("PAD", inputs, [output])


def _pad_with(
    lowering: Lowering, node: Node, inputs: list[int], amounts: NDArray[np.int32], value: float, layout: Layout
) -> None:
    """Pad with zeros, then add `value` where they are: the quantiser leaves the value of PADV2 in float32."""
    output = node.outputs[0]
    shape = lowering.laid_out(lowering.shape(output), layout)
    item = [1 if length == -1 else length for length in shape.signature]
    mask = np.full(item, value, np.float32)
    mask[tuple(slice(before, n - after) for (before, after), n in zip(amounts, item, strict=True))] = 0
    padded = lowering.scratch(f"{output}_zeros", shape)
    lowering.emit("PAD", inputs, [padded])
    lowering.arithmetic("ADD", [padded, lowering.constant(mask, f"{output}_value")], lowering.define(output, layout))


def _pad_amounts(lowering: Lowering, node: Node, rank: int, layout: Layout) -> NDArray[np.int32]:
    pads = lowering.integers(node, "pads", 1) or []
    axes = lowering.integers(node, "axes", 3) or list(range(rank))
    amounts = np.zeros((max(rank, 4) if layout is Layout.CHANNELS_LAST else rank, 2), np.int32)
    for i, axis in enumerate(axes):
        amounts[lowering.axis(axis, rank, layout)] = pads[i], pads[i + len(axes)]
    return amounts


def _pad_value(lowering: Lowering, node: Node) -> float:
    if "value" in node.attributes:
        return float(node.attributes["value"])
    return float(lowering.value(node.input(2), "the value").reshape(())) if node.input(2) else 0.0


LOWERINGS: dict[str, Callable[[Lowering, Node], None]] = {
    "Pad": pad,
}
