"""The layers of an artifact, and the share of their arithmetic that runs in INT8."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

SHARE_MIN = 0.9  # an artifact with a smaller share of its multiply-accumulates in INT8 is "mixed"

Shape = Sequence[int] | None  # None if the file does not state the shape


class ArtifactLayer(NamedTuple):
    """A layer of an artifact.

    `precision` is "int8", "fp16", "fp32" or another dtype. `macs` counts the multiply-accumulates of one sample in a
    layer with weights or a matrix product. It is 0 for other layers, and None if the file lacks the shapes.
    """

    kind: str
    precision: str
    macs: int | None = 0


def int8_share(layers: Iterable[ArtifactLayer]) -> float | None:
    """Return the share of multiply-accumulates in INT8. Return None if their number is unknown or 0."""
    total = in_int8 = 0
    for layer in layers:
        if layer.macs is None:
            return None
        total += layer.macs
        in_int8 += layer.macs if layer.precision == "int8" else 0
    return in_int8 / total if total else None


def product(*shapes: Shape) -> int | None:
    """Return the product of all lengths; None if a shape is unknown. An open axis (-1) counts as 1."""
    if any(shape is None for shape in shapes):
        return None
    return math.prod(length if length >= 0 else 1 for shape in shapes if shape is not None for length in shape)
