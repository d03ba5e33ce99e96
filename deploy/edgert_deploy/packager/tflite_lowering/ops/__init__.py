"""ONNX operator -> the function that writes it into the lowering. One dict; each module owns a family."""

from __future__ import annotations

from collections.abc import Callable

from edgert_deploy.packager.tflite_lowering.graph import Node
from edgert_deploy.packager.tflite_lowering.lowering import Lowering
from edgert_deploy.packager.tflite_lowering.ops import (
    activation,
    arithmetic,
    convolution,
    einsum,
    elementwise,
    indexing,
    matrix,
    movement,
    normalization,
    ordering,
    padding,
    pooling,
    recurrent,
    reduction,
    resize,
    transposed,
)

LOWERINGS: dict[str, Callable[[Lowering, Node], None]] = {
    **activation.LOWERINGS,
    **arithmetic.LOWERINGS,
    **convolution.LOWERINGS,
    **einsum.LOWERINGS,
    **elementwise.LOWERINGS,
    **indexing.LOWERINGS,
    **matrix.LOWERINGS,
    **movement.LOWERINGS,
    **normalization.LOWERINGS,
    **ordering.LOWERINGS,
    **padding.LOWERINGS,
    **pooling.LOWERINGS,
    **recurrent.LOWERINGS,
    **reduction.LOWERINGS,
    **resize.LOWERINGS,
    **transposed.LOWERINGS,
}
