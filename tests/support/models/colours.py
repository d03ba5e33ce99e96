"""A model that measures the red, green and blue of a picture, and pictures with a tint."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support import models
from tests.support.models.images import photo

LABELS = ("red", "green", "blue")
MEAN, STD = (0.4, 0.45, 0.5), (0.2, 0.25, 0.3)  # per channel of the model: blue, green, red


def bgr_model() -> Any:
    """Return a model that takes normalized BGR images [N, 3, 24, 32] and answers the amounts of red, green and blue."""
    body = """
        c = Conv <kernel_shape = [1, 1]> (image, w, b)
        g = GlobalAveragePool (c) f = Flatten (g) scores = Gemm (f, swap)
    """
    w = np.zeros((3, 3, 1, 1), np.float32)
    w[range(3), range(3), 0, 0] = np.array(STD) * 4
    weights = {"w": w, "b": np.array(MEAN, np.float32) * 4, "swap": np.eye(3, dtype=np.float32)[::-1]}
    weights["swap"] = np.ascontiguousarray(weights["swap"])
    return models.model("float[N,3,24,32] image) => (float[N,3] scores", body, weights)


def tinted(label: str, height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    picture = photo(height, width, seed) // 2
    picture[..., LABELS.index(label)] += 120
    return picture
