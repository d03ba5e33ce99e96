"""Features of sensor series equal SciPy's; missing values follow the rule."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.bundle.signal_rules import STATISTICS, Series
from edgert.errors import RequestError
from edgert.processing.signals.series_features import SeriesFeatures, fill_missing
from tests.support.needed import needed

signal = needed("scipy.signal")
stats = needed("scipy.stats")
NAN = float("nan")


def series(length: int = 256, channels: int = 3) -> NDArray[np.float32]:
    random = np.random.default_rng(length)
    return (random.normal(2, 3, (4, length, channels)) * [1, 10, 0.1][:channels]).astype(np.float32)


def features(windows: NDArray[np.float32], **rule: Any) -> NDArray[np.float32]:
    return SeriesFeatures(Series("x", windows.shape[2], windows.shape[1], **rule))(windows)


@pytest.mark.parametrize("length", [256, 255])
@pytest.mark.parametrize("window", ["hann", "boxcar"])
@pytest.mark.parametrize("detrend", [True, False])
def test_spectrum_and_bands_equal_those_of_numpy_and_scipy(length: int, window: str, detrend: bool) -> None:
    values = series(length).transpose(0, 2, 1).astype(np.float64)
    common: dict[str, Any] = {"rate_hz": 100.0, "window": window, "detrend": detrend}
    centred = values - values.mean(axis=2, keepdims=True) if detrend else values
    wanted = np.abs(np.fft.rfft(centred * signal.get_window(window, length)))
    np.testing.assert_allclose(features(series(length), features=("spectrum",), **common), wanted, rtol=1e-5, atol=1e-5)

    bands = ((0.0, 10.0), (10.0, 50.1), (20.0, 20.5))
    hz, density = signal.periodogram(values, 100.0, window, detrend="constant" if detrend else False, axis=2)
    powers = [density[..., (hz >= low) & (hz < high)].sum(axis=-1) * hz[1] for low, high in bands]
    made = features(series(length), features=("bands",), bands=bands, **common)
    np.testing.assert_allclose(made, np.stack(powers, axis=2), rtol=1e-5, atol=1e-6)


def test_statistics_equal_those_of_scipy() -> None:
    values = series().transpose(0, 2, 1).astype(np.float64)
    rms = np.sqrt((values**2).mean(axis=2))
    wanted = {
        "mean": values.mean(axis=2),
        "std": values.std(axis=2),
        "rms": rms,
        "min": values.min(axis=2),
        "max": values.max(axis=2),
        "peak_to_peak": np.ptp(values, axis=2),
        "crest": np.abs(values).max(axis=2) / rms,
        "skewness": stats.skew(values, axis=2),
        "kurtosis": stats.kurtosis(values, axis=2),
    }
    assert tuple(wanted) == STATISTICS
    made = features(series(), features=("statistics",))
    np.testing.assert_allclose(made, np.stack(list(wanted.values()), axis=2), rtol=1e-5, atol=1e-5)


def test_statistics_of_shape_are_zero_for_constant_values() -> None:
    made = features(
        np.full((1, 64, 1), 0.1, np.float32), features=("statistics",), statistics=("skewness", "kurtosis", "std")
    )
    np.testing.assert_allclose(made, 0, atol=1e-6)
    zeros = features(np.zeros((1, 64, 1), np.float32), features=("statistics",), statistics=("crest", "rms"))
    np.testing.assert_array_equal(zeros, 0)


def test_values_are_normalized_per_channel_and_features_are_normalized_per_feature() -> None:
    made = features(
        np.array([[[2.0, 30.0], [4.0, 50.0]]], np.float32),
        scale=0.5,
        mean=(1.0, 5.0),
        std=(1.0, 10.0),
        features=("statistics",),
        statistics=("mean", "max"),
        feature_mean=(0.0, 1.0),
        feature_std=(2.0, 1.0),
    )
    np.testing.assert_allclose(made, [[[0.25, 0.0], [0.75, 1.0]]])


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [("zero", [0, 1, 0, 0, 4, 0]), ("hold", [1, 1, 1, 1, 4, 4]), ("linear", [1, 1, 2, 3, 4, 4])],
)
def test_missing_values_are_completed_by_the_rule(rule: str, wanted: list[float]) -> None:
    values = np.array([[[NAN, 1, NAN, NAN, 4, NAN]]])
    np.testing.assert_array_equal(fill_missing(values, rule), [[wanted]])


def test_missing_and_infinite_values_are_refused_if_no_rule_completes_them() -> None:
    with pytest.raises(RequestError, match=r"1 missing value \(NaN\), and the model has no rule"):
        fill_missing(np.array([[[NAN, 1.0]]]), "refuse")
    with pytest.raises(RequestError, match="only missing values"):
        fill_missing(np.array([[[NAN, NAN]]]), "hold")
    with pytest.raises(RequestError, match="infinite"):
        fill_missing(np.array([[[np.inf, 1.0]]]), "zero")
    with pytest.raises(RequestError, match="not finite"):
        features(np.full((1, 8, 1), 3e38, np.float32), features=("spectrum",), detrend=False)
