"""Features of sensor series: values, spectra, powers of bands and statistics, as SciPy computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.signal_rules import Series
from edgert.errors import RequestError
from edgert.printable import counted
from edgert.processing.signals.spectra import energies, hann

Values = NDArray[np.float64]


class SeriesFeatures:
    """Computes the features of `rule` for windows of values. The same input always gives the same bits."""

    def __init__(self, rule: Series) -> None:
        self._rule = rule
        n = rule.length
        self._window = np.ones(n) if rule.window == "boxcar" else hann(n)
        hz = np.fft.rfftfreq(n, 1.0 / rule.rate_hz)
        bands = np.asarray(rule.bands, np.float64).reshape(-1, 2)
        within = (hz >= bands[:, :1]) & (hz < bands[:, 1:])
        # The spectrum is one-sided, so the power of bins between 0 and half the rate is doubled. A bin's power is its
        # density times its width.
        twice = np.full(len(hz), 2.0)
        twice[0] = 1.0
        if n % 2 == 0:
            twice[-1] = 1.0
        self._bands = within * (twice / ((self._window**2).sum() * n))

    def __call__(self, windows: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return [windows, channels, features] of values [windows, length, channels]. Raises RequestError."""
        rule = self._rule
        values = fill_missing(windows.transpose(0, 2, 1).astype(np.float64), rule.missing)
        mean, std = (np.asarray(v, np.float64)[:, None] for v in (rule.mean, rule.std))
        values = (values * rule.scale - mean) / std
        parts = list(self._features_of(values))
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=2)
        joined = (joined - np.asarray(rule.feature_mean)) / np.asarray(rule.feature_std)
        with np.errstate(over="ignore"):
            out = np.asarray(joined, np.float32)
        if not np.isfinite(out).all():
            raise RequestError("the series gives features that are not finite: its values are too large")
        return out

    def _features_of(self, values: Values) -> Iterator[Values]:
        """Yield the values of each of the rule's features, for values [windows, channels, length]."""
        rule = self._rule
        energy: Values | None = None
        if {"spectrum", "bands"} & set(rule.features):
            centred = values - values.mean(axis=2, keepdims=True) if rule.detrend else values
            energy = energies(centred * self._window)
        for name in rule.features:
            if name == "values":
                yield values
            elif name == "statistics":
                yield np.stack([_STATISTICS[each](values) for each in rule.statistics], axis=2)
            else:
                assert energy is not None  # computed above for both features
                yield np.sqrt(energy) if name == "spectrum" else energy @ self._bands.T


def fill_missing(values: Values, rule: str) -> Values:
    """Return values [windows, channels, length] without NaN. Raises RequestError.

    `rule` is the manifest's rule for missing values.
    """
    missing = np.isnan(values)
    if np.isinf(values).any():
        raise RequestError("the series has infinite values: send finite values, and NaN for a missing value")
    if not missing.any():
        return values
    if rule == "refuse":
        raise RequestError(
            f"the series has {counted(int(missing.sum()), 'missing value')} (NaN), and the model has no rule for them: send all values"
        )
    if rule == "zero":
        return np.asarray(np.where(missing, 0.0, values))
    if missing.all(axis=2).any():
        raise RequestError(
            "in a window, a channel has only missing values: send at least one value for each channel and window"
        )
    filled: Values = values.copy()
    at = np.arange(values.shape[2])
    for row, gone in zip(filled.reshape(-1, len(at)), missing.reshape(-1, len(at)), strict=True):
        known = at[~gone]
        if rule == "linear":
            row[gone] = np.interp(at[gone], known, row[known])
        else:  # use the last known value; before the first known value, use the first known value
            row[gone] = row[known[np.maximum(np.searchsorted(known, at[gone]) - 1, 0)]]
    return filled


def _moment(values: Values, order: int) -> Values:
    """Return the standardised central moment along the last axis; 0 for constant values."""
    centred = values - values.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1)
    level = np.abs(values).max(axis=-1)
    constant = variance <= (np.finfo(np.float64).eps * level) ** 2
    scale = np.where(constant, 1.0, variance) ** (order / 2)
    return np.asarray(np.where(constant, 0.0, (centred**order).mean(axis=-1) / scale))


def _rms(values: Values) -> Values:
    return np.asarray(np.sqrt((values**2).mean(axis=-1)))


def _crest(values: Values) -> Values:
    rms = _rms(values)
    return np.asarray(np.where(rms == 0, 0.0, np.abs(values).max(axis=-1) / np.where(rms == 0, 1.0, rms)))


def _kurtosis(values: Values) -> Values:
    """Return Fisher's kurtosis: 0 for a normal distribution, and for constant values."""
    moment = _moment(values, 4)
    return np.asarray(np.where(moment == 0, 0.0, moment - 3.0))


_STATISTICS: dict[str, Callable[[Values], Values]] = {
    "mean": lambda values: values.mean(axis=-1),
    "std": lambda values: values.std(axis=-1),
    "rms": _rms,
    "min": lambda values: values.min(axis=-1),
    "max": lambda values: values.max(axis=-1),
    "peak_to_peak": lambda values: np.ptp(values, axis=-1),
    "crest": _crest,
    "skewness": lambda values: _moment(values, 3),
    "kurtosis": _kurtosis,
}
