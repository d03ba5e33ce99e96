"""Resampled sound equals SciPy's."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edgert.errors import RequestError
from edgert.processing.signals.resample import resample, resampled_length
from tests.support.needed import needed

signal = needed("scipy.signal")


@pytest.mark.parametrize(
    ("rate_hz", "wanted_hz", "count"),
    [(44100, 16000, 22057), (48000, 16000, 4801), (8000, 16000, 1), (22050, 16000, 999), (16000, 44100, 16001)],
)
def test_the_resampled_signal_equals_scipys(rate_hz: int, wanted_hz: int, count: int) -> None:
    samples = np.random.default_rng(count).normal(0, 0.3, count).astype(np.float32)
    shared = math.gcd(rate_hz, wanted_hz)
    wanted = signal.resample_poly(samples.astype(np.float64), wanted_hz // shared, rate_hz // shared)
    made = resample(samples, rate_hz, wanted_hz)
    assert len(made) == len(wanted) == resampled_length(count, rate_hz, wanted_hz)
    np.testing.assert_allclose(made, wanted, rtol=0, atol=1e-5)


def test_resampling_to_the_same_rate_returns_the_same_samples() -> None:
    samples = np.ones(5, np.float32)
    assert resample(samples, 16000, 16000) is samples


def test_rates_without_a_simple_ratio_are_refused() -> None:
    with pytest.raises(RequestError, match="send it with 16000 Hz"):
        resample(np.ones(5, np.float32), 44101, 16000)
