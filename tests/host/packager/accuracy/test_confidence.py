"""The confidence interval of a drop."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert_deploy.packager.accuracy.confidence import drop_interval, samples_needed


def drops(lost: int, gained: int, count: int) -> NDArray[np.float64]:
    return np.array([1.0] * lost + [-1.0] * gained + [0.0] * (count - lost - gained))


def test_without_losses_the_interval_follows_the_number_of_samples() -> None:
    low, high = drop_interval(drops(0, 0, 300))
    assert high == pytest.approx(1.96**2 / (300 + 1.96**2), abs=1e-5)
    assert low == pytest.approx(-high)


def test_losses_without_gains_have_the_interval_of_wilson() -> None:
    """Without gains, the drop is a simple share of losses. Wilson's interval of 10 in 100 is .0552 to .1744."""
    low, high = drop_interval(drops(10, 0, 100))
    assert high == pytest.approx(0.1744, abs=1e-4)
    assert 0 < low < 0.1


@pytest.mark.parametrize(("lost", "gained", "count"), [(1, 0, 44), (12, 5, 80), (3, 9, 60)])
def test_the_interval_ends_where_the_score_test_rejects(lost: int, gained: int, count: int) -> None:
    """The test finds the most likely shares with a difference of `end` by a search over all shares."""
    for end in drop_interval(drops(lost, gained, count)):
        gains = np.linspace(max(0.0, -end), (1 - end) / 2, 200_001)[1:-1]
        losses = gains + end
        with np.errstate(divide="ignore"):
            likelihood = lost * np.log(losses) + gained * np.log(gains)
            likelihood += (count - lost - gained) * np.log(1 - losses - gains)
        best = int(likelihood.argmax())
        variance = count * (losses[best] + gains[best] - end**2)
        assert abs(lost - gained - count * end) / np.sqrt(variance) == pytest.approx(1.96, abs=0.01)


def test_the_interval_contains_the_true_drop_about_as_often_as_promised() -> None:
    rng, held = np.random.default_rng(0), 0
    for _ in range(300):
        lost = rng.random(200)
        low, high = drop_interval(np.where(lost < 0.05, 1.0, np.where(lost < 0.07, -1.0, 0.0)))
        held += low <= 0.03 <= high
    assert 0.92 <= held / 300 <= 0.98


def test_the_interval_ends_at_1_at_most_and_accepts_parts_of_samples() -> None:
    assert drop_interval(drops(5, 0, 5))[1] == pytest.approx(1.0)
    low, high = drop_interval(np.full(100, 0.02))
    assert low < 0.02 < high


@pytest.mark.parametrize(("max_drop", "samples"), [(0.01, 300), (0.05, 60), (1.0, 3), (0.007, 429)])
def test_the_number_of_needed_samples_follows_the_rule_of_three(max_drop: float, samples: int) -> None:
    assert samples_needed(max_drop) == samples
