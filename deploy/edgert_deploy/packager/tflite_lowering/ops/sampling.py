"""Positions and weights with which TFLite's operators sample an axis.

Source: tflite/kernels/internal/reference/{resize_bilinear.h,resize_nearest_neighbor.h}.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def nearest_of_tflite(length: int, outputs: int, half_pixel: bool) -> NDArray[np.intp]:
    """Return the index of the element that RESIZE_NEAREST_NEIGHBOR copies to each output."""
    x = (np.arange(outputs, dtype=np.float32) + np.float32(0.5 if half_pixel else 0)) * np.float32(length / outputs)
    picked: NDArray[np.intp] = np.clip(np.floor(x), 0, length - 1).astype(np.intp)
    return picked


def weights_of_tflite(length: int, outputs: int, align_corners: bool, half_pixel: bool) -> NDArray[np.float32]:
    """Return the weight of each element in RESIZE_BILINEAR, [outputs, length]."""
    aligned = align_corners and outputs > 1
    scale = np.float32((length - 1) / (outputs - 1) if aligned else length / outputs)
    x: NDArray[np.floating[Any]] = np.arange(outputs, dtype=np.float32)
    x = (x + np.float32(0.5)) * scale - np.float32(0.5) if half_pixel else x * scale
    low = np.maximum(np.floor(x), 0).astype(np.intp)
    high = np.minimum(np.ceil(x), length - 1).astype(np.intp).clip(0)
    matrix, rows = np.zeros((outputs, length), np.float32), np.arange(outputs)
    np.add.at(matrix, (rows, low.clip(max=length - 1)), 1 - (x - low))
    np.add.at(matrix, (rows, high), x - low)
    return matrix
