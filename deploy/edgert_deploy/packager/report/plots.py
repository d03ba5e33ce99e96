"""The plots: small SVG pictures in table cells, beside the numbers that they show.

A picture contains no text, because it scales with its cell. A screen reader finds all numbers in the table. Colours are
classes of the page's style sheet, so they follow the colour scheme.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH = 200.0
HEIGHT = 16.0


def bars(shares: Sequence[tuple[str, float]]) -> str:
    """Return thin bars, one below the other, from (class, share of the full width)."""
    height = HEIGHT / max(1, len(shares))
    drawn = [
        f'<rect class="{name}" x="0" y="{_n(i * height + 1)}" width="{_n(WIDTH * _clip(share))}" height="{_n(height - 2)}" rx="1.5"/>'
        for i, (name, share) in enumerate(shares)
    ]
    return _svg("".join(drawn))


def segments(parts: Sequence[tuple[str, float]]) -> str:
    """Return one bar that has a part for each (class, share)."""
    drawn, x = [], 0.0
    for name, share in parts:
        width = WIDTH * _clip(share)
        drawn.append(f'<rect class="{name}" x="{_n(x)}" y="3" width="{_n(max(0.0, width - 0.8))}" height="10"/>')
        x += width
    return _svg("".join(drawn))


@dataclass(frozen=True)
class Scale:
    """An axis that is linear near 0 and logarithmic beyond `unit` (asinh), for small and large ranges."""

    low: float
    high: float
    unit: float

    @classmethod
    def over(cls, values: Sequence[float]) -> Scale:
        """Return the scale that covers all values and 0. Its unit is the median magnitude of the values."""
        magnitudes = sorted(abs(value) for value in values if value)
        unit = magnitudes[len(magnitudes) // 2] if magnitudes else 1.0
        return cls(min(0.0, *values), max(0.0, *values), unit)

    def at(self, value: float) -> float:
        """Return the position of `value`, 0 to WIDTH."""
        low, high = math.asinh(self.low / self.unit), math.asinh(self.high / self.unit)
        if high == low:
            return WIDTH / 2
        return WIDTH * _clip((math.asinh(value / self.unit) - low) / (high - low))


def spread(scale: Scale, low: float, high: float, quantiles: Sequence[float]) -> str:
    """Return a range: a thin line for all values, a thick line for most, marks at the median and at 0."""
    inner_low, median, inner_high = (scale.at(value) for value in quantiles)
    zero, left, right = scale.at(0.0), scale.at(low), scale.at(high)
    return _svg(
        f'<rect class="zero" x="{_n(zero - 0.4)}" y="0" width="0.8" height="16"/>'
        f'<rect class="all" x="{_n(left)}" y="7" width="{_n(max(0.8, right - left))}" height="2"/>'
        f'<rect class="most" x="{_n(inner_low)}" y="4" width="{_n(max(0.8, inner_high - inner_low))}" height="8" rx="1.5"/>'
        f'<rect class="median" x="{_n(median - 0.8)}" y="2" width="1.6" height="12"/>'
    )


def _svg(drawn: str) -> str:
    return (
        f'<svg class="plot" viewBox="0 0 {WIDTH:g} {HEIGHT:g}" preserveAspectRatio="none" aria-hidden="true" '
        f'focusable="false">{drawn}</svg>'
    )


def _clip(share: float) -> float:
    return min(1.0, max(0.0, share))


def _n(value: float) -> str:
    return f"{value:.1f}"
