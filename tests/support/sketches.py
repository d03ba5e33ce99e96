"""Sketches of single values, by the definition of a bucket in edgert/telemetry/sketch.py."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from edgert.telemetry.sketch import INDEX_MAX, INDEX_MIN, PER_OCTAVE, Sketch


def sketch_of(values_ms: Iterable[float]) -> Sketch:
    """Return the sketch of finite values. Values below zero count as zero."""
    values = [max(value, 0.0) for value in values_ms]
    sketch = Sketch.of_counts(dict(Counter(index_of(value) for value in values if value)), values.count(0.0))
    sketch.sum, sketch.min, sketch.max = math.fsum(values), min(values, default=0.0), max(values, default=0.0)
    return sketch


def index_of(value_ms: float) -> int:
    """Return the bucket of a positive value, clamped to INDEX_MIN ... INDEX_MAX."""
    return min(max(math.ceil(math.log2(value_ms) * PER_OCTAVE) - 1, INDEX_MIN), INDEX_MAX)
