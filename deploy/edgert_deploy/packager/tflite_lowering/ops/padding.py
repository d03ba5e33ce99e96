"""Pad: puts constants, mirrored or repeated elements around a value. Negative padding crops it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.graph import Node
from edgert_deploy.packager.tflite_lowering.lowering import Layout, Lowering
from edgert_deploy.packager.tflite_lowering.op import NARROW_BUT_BYTES, Op
from edgert_deploy.packager.tflite_lowering.value import FLOAT32, Unsupported, Value, require_fixed

LOOKED_UP = ("edge", "reflect", "wrap")  # modes with the same names in ONNX and in numpy.pad


def pad(lowering: Lowering, node: Node) -> None:
    x, layout = lowering.read_as_made(node)
    mode = node.attributes.get("mode", "constant")
    amounts = _amounts(lowering, node, x.shape.rank, layout)
    require_fixed(x.shape, np.flatnonzero(amounts.any(axis=1)), "it pads the batch")
    if amounts.min(initial=0) < 0:
        cut = x.shape.padded(np.minimum(amounts, 0).tolist())
        x, amounts = x.sliced(np.maximum(-amounts[:, 0], 0).tolist(), cut), np.maximum(amounts, 0)
    if mode == "constant":
        y = _padded_with_constant(x, amounts, _value(lowering, node))
    elif mode in LOOKED_UP:
        y = _padded_with_itself(x, amounts, mode)
    else:
        raise Unsupported(f"mode {mode!r} is not supported; use constant, {', '.join(LOOKED_UP)}")
    lowering.result(node, y, layout)


def _amounts(lowering: Lowering, node: Node, rank: int, layout: Layout) -> NDArray[np.int32]:
    """Return the amounts before and after each axis of the tensor in `layout`."""
    onnx_rank = lowering.shape(node.inputs[0]).rank
    pads = lowering.integers(node, "pads", 1) or []
    axes = lowering.integers(node, "axes", 3) or list(range(onnx_rank))
    amounts = np.zeros((rank, 2), np.int32)
    for i, axis in enumerate(axes):
        amounts[lowering.axis(axis, onnx_rank, layout)] = pads[i], pads[i + len(axes)]
    return amounts


def _value(lowering: Lowering, node: Node) -> Any:
    if "value" in node.attributes:
        return float(node.attributes["value"])
    return lowering.value(node.input(2), "the value").reshape(()).item() if node.input(2) else 0


def _padded_with_constant(x: Value, amounts: NDArray[np.int32], value: Any) -> Value:
    """Pad with `value`.

    Floats are padded with zeros, and an ADD adds `value` to the padding, because PADV2 would stay in float32.
    """
    if value and x.dtype != FLOAT32:
        return x.op("PADV2", x.indices(amounts), value, shape=x.shape.padded(amounts.tolist()))
    padded = x.padded(amounts.tolist())
    if not value:
        return padded
    item = [1 if length == -1 else length for length in padded.shape.signature]
    mask = np.full(item, value, np.float32)
    mask[tuple(slice(before, n - after) for (before, after), n in zip(amounts, item, strict=True))] = 0
    return padded + mask


def _padded_with_itself(x: Value, amounts: NDArray[np.int32], mode: str) -> Value:
    """Write MIRROR_PAD if it supports the mode, else a lookup along each axis."""
    widest = amounts.max(axis=1)
    if mode == "reflect" and bool((widest < x.shape.dims).all()):
        return x.padded(amounts.tolist(), "REFLECT")
    if mode == "edge" and widest.max() == 1:
        return x.padded(amounts.tolist(), "SYMMETRIC")
    for axis, amount in enumerate(amounts):
        if amount.any():
            elements = np.pad(np.arange(x.shape.dims[axis]), amount, mode=mode)  # type: ignore[call-overload]  # wants a literal
            x = x.gathered(elements, axis)
    return x


OPS = {"Pad": Op(pad, widens=NARROW_BUT_BYTES)}
