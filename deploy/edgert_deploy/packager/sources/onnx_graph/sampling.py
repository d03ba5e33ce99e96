"""Positions and weights with which ONNX's Resize samples an axis.

Sources: the specification of Resize; ONNX's reference (onnx/reference/ops/op_resize.py) for details that the
specification leaves open.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Half the width of each kernel.
REACH = {"linear": 1, "cubic": 2}
# ONNX's rules for the position of an output on the axis.
RULES = (
    "half_pixel",
    "half_pixel_symmetric",
    "pytorch_half_pixel",
    "align_corners",
    "asymmetric",
    "tf_half_pixel_for_nn",
)


@dataclass(frozen=True)
class Sampling:
    """An axis of `length` elements that Resize changes to `outputs` elements, by one of RULES."""

    length: int
    outputs: int
    scale: float
    rule: str

    def positions(self) -> NDArray[np.float32]:
        """Return the position of each output on the axis, in elements.

        The positions are float32, so that they round as in the runtimes.
        """
        x, half = np.arange(self.outputs, dtype=np.float32), np.float32(0.5)
        scale = np.float32(self.scale)
        resized = np.float32(self.scale * self.length)  # the resized length, which may be a fraction
        placed: NDArray[np.float32] = (x + half) / scale - half
        match self.rule:
            case "asymmetric":
                placed = x / scale
            case "tf_half_pixel_for_nn":  # of opset 11
                placed = (x + half) / scale
            case "align_corners":
                placed = x * 0 if resized == 1 else x * np.float32(self.length - 1) / (resized - 1)
            case "half_pixel_symmetric":
                placed = placed + np.float32(self.length / 2) * (1 - self.outputs / resized)
            case "pytorch_half_pixel" if self.outputs == 1:
                placed = x
        return placed

    def nearest(self, rounding: str) -> NDArray[np.intp]:
        """Return the index of the element that each output copies."""
        x = self.positions()
        rounded = {
            "floor": np.floor(x),
            "ceil": np.ceil(x),
            "round_prefer_floor": np.ceil(x - 0.5),
            "round_prefer_ceil": np.floor(x + 0.5),
        }[rounding]
        picked: NDArray[np.intp] = np.clip(rounded, 0, self.length - 1).astype(np.intp)
        return picked

    def weights(
        self, mode: str, coefficient: float = -0.75, antialias: bool = False, exclude_outside: bool = False
    ) -> NDArray[np.float32]:
        """Return the weight of each element for each output, [outputs, length].

        The first and the last element also stand for positions outside of the axis.

        Args:
            mode: "linear" or "cubic".
            coefficient: ONNX's `cubic_coeff_a`.
            antialias: Whether a smaller output averages more elements.
            exclude_outside: Whether positions outside of the axis have the weight 0.
        """
        shrink = min(self.scale, 1.0) if antialias else 1.0
        reach = int(np.ceil(REACH[mode] / shrink)) + 1
        x = self.positions()[:, None].astype(np.float64)
        elements = np.floor(x).astype(np.intp) + np.arange(-reach, reach + 1)
        weights = _kernel(np.abs(elements - x) * shrink, mode, coefficient)
        if exclude_outside:
            weights = np.where((elements >= 0) & (elements < self.length), weights, 0)
        if antialias or exclude_outside:
            weights = weights / weights.sum(axis=1, keepdims=True)
        matrix = np.zeros((self.outputs, self.length))
        np.add.at(matrix, (np.arange(self.outputs)[:, None], np.clip(elements, 0, self.length - 1)), weights)
        return matrix.astype(np.float32)


def _kernel(distance: NDArray[np.float64], mode: str, a: float) -> NDArray[np.float64]:
    if mode == "linear":
        return np.maximum(1 - distance, 0)
    square, cube = distance**2, distance**3
    near = (a + 2) * cube - (a + 3) * square + 1
    far = a * (cube - 5 * square + 8 * distance - 4)
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))
