"""The latency sketch: an exponential histogram at fixed scale 5, in milliseconds.

Base 2**(1/32); bucket `i` counts values in (base**i, base**(i+1)], the convention of OpenTelemetry's
exponential histogram and of Prometheus' native histograms at schema 5
(https://opentelemetry.io/docs/specs/otel/metrics/data-model/#exponentialhistogram).
The scale never changes, so merging only adds integers, and is exact in any order.

Guarantee: `quantile` differs from the true value by at most (base - 1) / (base + 1) < 1.09 %, for values from 1
microsecond to 17 minutes. Values outside this range are clamped to the outermost bucket.

Thread rule: a sketch has one writer at a time. It has no lock of its own; the caller holds a lock.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from fractions import Fraction
from operator import lt

from edgert.errors import ProtocolError

SCALE = 5
PER_OCTAVE = 1 << SCALE
INDEX_MIN = -320
INDEX_MAX = 640
BASE = math.pow(2, 1 / PER_OCTAVE)
RELATIVE_ERROR_MAX = (BASE - 1) / (BASE + 1)


class Sketch:
    """A histogram of latencies. `sum`, `min` and `max` are exact; in an empty sketch they are 0."""

    __slots__ = ("buckets", "count", "max", "min", "sum", "zero")

    def __init__(self) -> None:
        self.buckets: dict[int, int] = {}
        self.zero = 0
        self.count = 0
        self.sum = 0.0
        self.min = 0.0
        self.max = 0.0

    def merge(self, other: Sketch) -> None:
        """Add the counts of `other`, so that this sketch represents both samples."""
        if not other.count:
            return
        for index, count in other.buckets.items():
            self.buckets[index] = self.buckets.get(index, 0) + count
        self.min = min(self.min, other.min) if self.count else other.min
        self.max = max(self.max, other.max)
        self.zero += other.zero
        self.count += other.count
        self.sum += other.sum

    def quantile(self, q: Fraction | float) -> float:
        """Return the value (ms) that a share `q` of the sample does not exceed (nearest rank); 0 if empty.

        The result differs from the true value by at most RELATIVE_ERROR_MAX, and is never outside [min, max]. The rank
        is exact: it uses the printed decimal of `q`, because 0.999 in binary times 1000 may be just above 999.
        """
        if not 0 <= q <= 1:
            raise ValueError(f"a quantile of {q}; give a share from 0 to 1")
        share = Fraction(repr(q)) if isinstance(q, float) else q
        rank = max(1, math.ceil(share * self.count))
        if not self.count or rank <= self.zero:
            return 0.0
        if rank == self.count:
            return self.max
        seen = self.zero
        for index in sorted(self.buckets):
            seen += self.buckets[index]
            if seen >= rank:
                return min(max(middle_ms(index), self.min), self.max)
        return self.max

    def encode(self) -> str:
        """Return the buckets in their wire form: `index:count,...`, ascending, without the zero bucket."""
        return ",".join(f"{index}:{count}" for index, count in sorted(self.buckets.items()))

    @classmethod
    def decode(
        cls, buckets: str, *, zero: int = 0, sum_ms: float = 0.0, min_ms: float = 0.0, max_ms: float = 0.0
    ) -> Sketch:
        """Return the sketch that the text of `encode` and the scalar fields describe. Raises ProtocolError."""
        sketch = cls()
        sketch.buckets = _parse_buckets(buckets)
        sketch.zero = zero
        sketch.count = zero + sum(sketch.buckets.values())
        sketch.sum, sketch.min, sketch.max = sum_ms, min_ms, max_ms
        if zero < 0 or not math.isfinite(sum_ms) or not 0 <= min_ms <= max_ms < math.inf:
            raise ProtocolError(f"a histogram has zero={zero}, sum={sum_ms}, min={min_ms}, max={max_ms}")
        return sketch

    @classmethod
    def of_counts(cls, buckets: dict[int, int], zero: int) -> Sketch:
        """Return the sketch of counts alone; it estimates `sum`, `min` and `max` from the buckets' middles."""
        sketch = cls()
        sketch.buckets = buckets
        sketch.zero = zero
        sketch.count = zero + sum(buckets.values())
        sketch.sum = sum(count * middle_ms(index) for index, count in buckets.items())
        if buckets:
            sketch.min, sketch.max = 0.0 if zero else middle_ms(min(buckets)), middle_ms(max(buckets))
        return sketch

    def __eq__(self, other: object) -> bool:
        """Compare the exact values only; `sum` is a float and may differ in its last digits."""
        if not isinstance(other, Sketch):
            return NotImplemented
        mine = (self.buckets, self.zero, self.count, self.min, self.max)
        return mine == (other.buckets, other.zero, other.count, other.min, other.max)

    __hash__ = None  # type: ignore[assignment]  # a sketch is changed in place

    def __repr__(self) -> str:
        return f"Sketch(count={self.count}, min={self.min}, max={self.max}, buckets={self.encode()!r})"


def merged(sketches: Iterable[Sketch]) -> Sketch:
    """Return one sketch of all samples."""
    total = Sketch()
    for sketch in sketches:
        total.merge(sketch)
    return total


def middle_ms(index: int) -> float:
    """Return the point with the least relative distance to all values of the bucket: 2ab / (a + b)."""
    lower = math.pow(2, index / PER_OCTAVE)
    return 2 * lower * BASE / (1 + BASE)


def _parse_buckets(text: str) -> dict[int, int]:
    """Parse all buckets at once: subscribers of large fleets spend most time here. Raises ProtocolError."""
    if not text:
        return {}
    if not _BUCKETS.match(text):
        wrong = next((pair for pair in text.split(",") if not _BUCKETS.match(pair)), text)
        raise ProtocolError(f"a histogram's buckets hold {wrong[:40]!r}; expected index:count")
    numbers = list(map(int, text.replace(":", ",").split(",")))
    indices, counts = numbers[::2], numbers[1::2]
    ascending = all(map(lt, indices, indices[1:]))
    if not ascending or indices[0] < INDEX_MIN or indices[-1] > INDEX_MAX or min(counts) < 1:
        raise ProtocolError(
            f"a histogram's buckets hold {text[:40]!r}; indices ascend within {INDEX_MIN} ... {INDEX_MAX} "
            "and counts are 1 or more"
        )
    return dict(zip(indices, counts, strict=True))


_BUCKETS = re.compile(r"-?[0-9]{1,4}:[0-9]{1,18}(?:,-?[0-9]{1,4}:[0-9]{1,18})*\Z")

# For a whole number of microseconds, us > bound is equivalent to us > floor(bound), and integers compare exactly.
LOWER_BOUNDS_US = [math.floor(math.pow(2, index / PER_OCTAVE) * 1000) for index in range(INDEX_MIN, INDEX_MAX + 1)]
