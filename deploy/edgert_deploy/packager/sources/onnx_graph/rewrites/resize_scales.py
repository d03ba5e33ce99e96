"""Rounds the scales of a Resize up, if rounding made its output too short.

tf2onnx writes the scale 24 / 50 in FP32, which is slightly less than 0.48. Then ONNX's rule floor(length * scale) gives
23 instead of 24.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.packager.sources.onnx_graph.nodes import nodes_of

LENGTH_MAX = 4096  # FP32 tells all ratios of two lengths up to this one apart


def round_scales_up(proto: Any) -> bool:
    """Round up scales just below a ratio of lengths, in place; return whether there were any."""
    from onnx import numpy_helper

    names = {node.input[2] for node in nodes_of(proto.graph) if node.op_type == "Resize" and len(node.input) > 2}
    found = False
    for tensor in proto.graph.initializer:
        if tensor.name in names and (scales := numpy_helper.to_array(tensor)).dtype == np.float32:
            rounded = _rounded_up(scales)
            if not np.array_equal(rounded, scales):
                tensor.CopyFrom(numpy_helper.from_array(rounded, tensor.name))
                found = True
    return found


def _rounded_up(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    ratios = [Fraction(scale).limit_denominator(LENGTH_MAX) for scale in scales.tolist()]
    is_less = np.array([Fraction(scale) < ratio for scale, ratio in zip(scales.tolist(), ratios, strict=True)], bool)
    return np.where(is_less, np.nextafter(scales, np.float32(np.inf)), scales)
