"""ONNX operator -> its record. Each module owns a family of operators."""

from __future__ import annotations

from edgert_deploy.packager.tflite_lowering.op import Op
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

OPS: dict[str, Op] = {
    **activation.OPS,
    **arithmetic.OPS,
    **convolution.OPS,
    **einsum.OPS,
    **elementwise.OPS,
    **indexing.OPS,
    **matrix.OPS,
    **movement.OPS,
    **normalization.OPS,
    **ordering.OPS,
    **padding.OPS,
    **pooling.OPS,
    **recurrent.OPS,
    **reduction.OPS,
    **resize.OPS,
    **transposed.OPS,
}
