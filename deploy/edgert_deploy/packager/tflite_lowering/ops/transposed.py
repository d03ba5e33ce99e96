"""ConvTranspose: a convolution that computes the phases of the stride, a rearrangement, and a slice.

TRANSPOSE_CONV is not used, because it needs the output's shape, including the batch, as a constant. It also has neither
groups nor dilations. Along one axis, let s be the stride, and let the kernel w have up to m * s elements. Then output
s * q + r is the sum over j < m of x[q - j] * w[r + s * j]. For each phase r, this is an ordinary convolution.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.graph import BatchShape, Node
from edgert_deploy.packager.tflite_lowering.lowering import SPATIAL_RANKS, Layout, Lowering
from edgert_deploy.packager.tflite_lowering.op import Op
from edgert_deploy.packager.tflite_lowering.ops.convolution import Kernel, as_2d, convolved, plain_options
from edgert_deploy.packager.tflite_lowering.value import Unsupported, Value, require_fixed


@dataclass(frozen=True)
class TransposedAxis:
    """One axis of a ConvTranspose. An output element reads at most `taps` input elements."""

    size: int
    outputs: int
    stride: int
    dilation: int
    before: int
    taps: int

    @property
    def positions(self) -> int:
        return self.size + self.taps - 1

    @property
    def is_whole(self) -> bool:
        """Whether every phase of every position is an output. Otherwise a slice removes the others."""
        return self.before == 0 and self.outputs == self.positions * self.stride


# The missing height of a one-dimensional ConvTranspose.
NO_AXIS = TransposedAxis(size=1, outputs=1, stride=1, dilation=1, before=0, taps=1)


def conv_transpose(lowering: Lowering, node: Node) -> None:
    weights = lowering.value(node.inputs[1], "the kernel")
    if weights.ndim not in SPATIAL_RANKS:
        raise Unsupported(
            f"the kernel has {weights.ndim - 2} spatial axes, but only one to three are supported; export the model without this node"
        )
    source = lowering.shape(node.inputs[0])
    require_fixed(source, range(1, source.rank), "the batch is part of a spatial axis")
    axes = _axes(lowering, node, weights.shape[2:])
    shape = lowering.result_shape(node, Layout.CHANNELS_LAST)
    whole = _rearranged(_phases(lowering, node, axes, as_2d(weights)), axes, shape)
    if not all(axis.is_whole for axis in axes):
        whole = whole.sliced([0, *(axis.before for axis in axes), 0], shape)
    lowering.result(node, whole, Layout.CHANNELS_LAST)


def _axes(lowering: Lowering, node: Node, kernel: tuple[int, ...]) -> list[TransposedAxis]:
    """Return the axes of the window. The number of outputs is ONNX's own, which includes output_padding."""
    sizes, outputs = (lowering.shape(name).dims[2:] for name in (node.inputs[0], node.outputs[0]))
    rank, axes = len(kernel), []
    for i in range(rank):
        stride, dilation, extra = (
            int(node.attributes.get(name, [default] * rank)[i])
            for name, default in (("strides", 1), ("dilations", 1), ("output_padding", 0))
        )
        reach = (kernel[i] - 1) * dilation + 1
        surplus = stride * (sizes[i] - 1) + extra + reach - outputs[i]
        before = _padding_before(node, i, rank, surplus)
        taps = max(-(-reach // stride), -(-(before + outputs[i]) // stride) - sizes[i] + 1)
        axes.append(TransposedAxis(sizes[i], outputs[i], stride, dilation, before, taps))
    return axes if rank > 1 else [NO_AXIS, *axes]


def _padding_before(node: Node, axis: int, rank: int, surplus: int) -> int:
    """Return the number of elements to remove at the front: as the node declares, or half of the surplus."""
    scheme = node.attributes.get("auto_pad", "NOTSET")
    if scheme.startswith("SAME") or "output_shape" in node.attributes:
        surplus = max(surplus, 0)
        return surplus // 2 if scheme == "SAME_UPPER" else surplus - surplus // 2
    return 0 if scheme == "VALID" else int(node.attributes.get("pads", [0] * 2 * rank)[axis])


def _phases(lowering: Lowering, node: Node, axes: list[TransposedAxis], weights: NDArray[Any]) -> Value:
    """Return all phases of all positions as channels: phase by phase, each phase with ONNX's channels."""
    groups, count = int(node.attributes.get("group", 1)), int(np.prod([axis.stride for axis in axes]))
    channels = weights.shape[1] * groups
    bias = lowering.value(node.input(2), "the bias") if node.input(2) else np.zeros(channels, np.float32)
    x = lowering.read(node, 0, Layout.CHANNELS_LAST)
    if any(axis.taps > 1 for axis in axes):
        x = x.padded([[0, 0], *([axis.taps - 1] * 2 for axis in axes), [0, 0]])
    shape = x.shape.with_lengths({place: axis.positions for place, axis in enumerate(axes, start=1)})
    by_group = np.concatenate([_phase_kernel(part, axes) for part in np.split(weights, groups)])
    biases = np.concatenate([np.tile(part, count) for part in np.split(bias, groups)])
    kernel = Kernel(by_group, biases, groups, plain_options(len(axes)))
    deep = convolved(kernel, x, shape.with_length(len(axes) + 1, channels * count))
    if groups == 1 or count == 1:
        return deep
    return deep.gathered(np.arange(channels * count).reshape(groups, count, -1).swapaxes(0, 1), len(axes) + 1)


def _phase_kernel(weights: NDArray[Any], axes: list[TransposedAxis]) -> NDArray[Any]:
    """Turn [in, out, *kernel] into [phase * out, in, *taps], with the taps reversed."""
    spatial = len(axes)
    whole = np.zeros((*weights.shape[:2], *(axis.taps * axis.stride for axis in axes)), weights.dtype)
    places = [np.arange(n) * axis.dilation for n, axis in zip(weights.shape[2:], axes, strict=True)]
    whole[(slice(None), slice(None)) + np.ix_(*places)] = weights  # mypy accepts no star here
    split = whole.reshape(*weights.shape[:2], *(n for axis in axes for n in (axis.taps, axis.stride)))
    taps, phases = (tuple(range(first, 2 + 2 * spatial, 2)) for first in (2, 3))
    kernel: NDArray[Any] = np.flip(split, taps).transpose(*phases, 1, 0, *taps)
    return kernel.reshape(-1, weights.shape[0], *(axis.taps for axis in axes))


def _rearranged(deep: Value, axes: list[TransposedAxis], result: BatchShape) -> Value:
    """Move the phases from the channels to their positions, by DEPTH_TO_SPACE or axis by axis."""
    strides, channels = [axis.stride for axis in axes], result.dims[-1]
    shape = result.with_lengths({place: axis.positions * axis.stride for place, axis in enumerate(axes, start=1)})
    if len(axes) == 2 and strides[0] == strides[1]:
        return deep.op("DEPTH_TO_SPACE", shape=shape, blockSize=strides[0])
    for place in range(len(axes) - 1, 0, -1):
        outer = int(np.prod(strides[:place]))  # the number of phases of the axes before this one
        inner = int(channels * strides[place] * np.prod([a.stride * a.positions for a in axes[place + 1 :]]))
        if outer == 1:
            continue
        items = int(np.prod([axis.positions for axis in axes[:place]])) * shape.dims[0]
        rest = (axes[place].positions, outer, inner)
        by_position = BatchShape((items, *rest), (-1 if shape.signature[0] == -1 else items, *rest))
        deep = deep.reshaped(by_position).transposed((0, 2, 1, 3))
    return deep.reshaped(shape)


OPS = {"ConvTranspose": Op(conv_transpose)}
