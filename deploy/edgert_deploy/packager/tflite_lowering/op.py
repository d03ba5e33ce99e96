"""One record per ONNX operator, with everything that the lowering knows about the operator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from edgert_deploy.packager.tflite_lowering.graph import Node

if TYPE_CHECKING:
    from edgert_deploy.packager.tflite_lowering.lowering import Lowering

Write = Callable[["Lowering", Node], None]
# TFLite's arithmetic treats these integers as quantized values with a scale. In the lowering, they have no scale.
NARROW: frozenset[np.dtype[Any]] = frozenset(map(np.dtype, ("int8", "uint8", "int16", "uint16", "uint32")))
# For operators that move elements, because these operators have kernels for bytes.
NARROW_BUT_BYTES = NARROW - {np.dtype("int8"), np.dtype("uint8")}


@dataclass(frozen=True)
class Op:
    """An ONNX operator.

    Attributes:
        write: Writes a node of this operator. Raises Unsupported if TFLite cannot express the node.
        widens: The dtypes that the lowering casts to a wider dtype before this operator.
        clamps: Whether the TFLite operator can clamp its own result; a Relu after the operator then costs nothing.
        sign: "non_negative": the result is never negative. "as_input": it is only negative if an input is.
        stays_float: Whether the quantizer leaves the operator in float32, wholly or in part.
    """

    write: Write
    widens: frozenset[np.dtype[Any]] = frozenset()
    clamps: bool = False
    sign: Literal["any", "non_negative", "as_input"] = "any"
    stays_float: bool = False
