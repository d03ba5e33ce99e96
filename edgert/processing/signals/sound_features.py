"""Features of sound: log-mel spectra and MFCC as librosa computes them, vectorised."""

from __future__ import annotations

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from edgert.bundle.signal_rules import Sound
from edgert.processing.signals.spectra import energies, hann

Floats = NDArray[np.float32]


class SoundFeatures:
    """Computes the features of `rule` for windows of samples. The same input always gives the same bits."""

    def __init__(self, rule: Sound) -> None:
        self._rule = rule
        if rule.features == "samples":
            return
        width = rule.win_length or rule.n_fft
        self._window = np.zeros(rule.n_fft)
        left = (rule.n_fft - width) // 2
        self._window[left : left + width] = hann(width)
        self._mel = np.ascontiguousarray(mel_filters(rule).T)
        self._dct = np.ascontiguousarray(_dct(rule.n_mfcc, rule.n_mels).T)

    def __call__(self, windows: Floats) -> Floats:
        """Return [windows, bins, frames] of samples [windows, length]; for "samples" [windows, 1, length]."""
        rule = self._rule
        if rule.features == "samples":
            return windows[:, None, :]
        if rule.center:
            windows = np.pad(windows, ((0, 0), (rule.n_fft // 2, rule.n_fft // 2)))
        frames = sliding_window_view(windows, rule.n_fft, axis=1)[:, :: rule.hop_length]
        energy = energies(frames * self._window)
        if rule.power != 2:
            energy **= rule.power / 2
        features = self._log(energy @ self._mel)
        if rule.features == "mfcc":
            features = features @ self._dct
        return np.asarray(features.transpose(0, 2, 1), np.float32)

    def _log(self, mel: NDArray[np.float64]) -> NDArray[np.float64]:
        rule = self._rule
        bounded = np.maximum(mel, rule.floor) + rule.offset
        if rule.log == "ln":
            return np.log(bounded)
        logs = np.log10(bounded)
        if rule.log == "log10":
            return logs
        decibels = 10.0 * logs
        if not rule.top_db:
            return decibels
        return np.asarray(np.maximum(decibels, decibels.max(axis=(1, 2), keepdims=True) - rule.top_db))


def mel_filters(rule: Sound) -> NDArray[np.float64]:
    """Return triangular filters [n_mels, 1 + n_fft / 2], by Slaney's or HTK's mel scale."""
    hz = np.fft.rfftfreq(rule.n_fft, 1.0 / rule.rate_hz)
    top = rule.fmax or rule.rate_hz / 2
    mels = np.linspace(_mel(rule.fmin, rule.htk), _mel(top, rule.htk), rule.n_mels + 2, dtype=np.float64)
    edges = _hz(mels, rule.htk)
    widths = np.diff(edges)
    slopes = edges[:, None] - hz
    rising, falling = -slopes[:-2] / widths[:-1, None], slopes[2:] / widths[1:, None]
    filters = np.maximum(0.0, np.minimum(rising, falling))
    if rule.norm == "slaney":
        filters *= (2.0 / (edges[2:] - edges[:-2]))[:, None]
    return np.asarray(filters)


# Slaney's mel scale is linear up to _LOG_FROM_HZ, and logarithmic above.
_LINEAR_HZ = 200.0 / 3  # the width of a mel in the linear part
_LOG_FROM_HZ = 1000.0
_LOG_STEP = np.log(6.4) / 27.0  # the step of ln(Hz) for a mel in the logarithmic part


def _mel(hz: float, htk: bool) -> float:
    if htk:
        return float(2595.0 * np.log10(1.0 + hz / 700.0))
    if hz < _LOG_FROM_HZ:
        return hz / _LINEAR_HZ
    return float(_LOG_FROM_HZ / _LINEAR_HZ + np.log(hz / _LOG_FROM_HZ) / _LOG_STEP)


def _hz(mel: NDArray[np.float64], htk: bool) -> NDArray[np.float64]:
    if htk:
        return np.asarray(700.0 * (10.0 ** (mel / 2595.0) - 1.0))
    begin = _LOG_FROM_HZ / _LINEAR_HZ
    return np.where(mel < begin, mel * _LINEAR_HZ, _LOG_FROM_HZ * np.exp(_LOG_STEP * (mel - begin)))


def _dct(count: int, bands: int) -> NDArray[np.float64]:
    """Return the first rows of the orthonormal DCT-II."""
    rows = np.cos(np.pi / bands * (np.arange(bands) + 0.5) * np.arange(count)[:, None]) * np.sqrt(2.0 / bands)
    rows[0] /= np.sqrt(2.0)
    return np.asarray(rows)
