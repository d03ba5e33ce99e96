"""Spectra of windows of samples, in FP64, because NumPy before 2.0 computes FFTs only in FP64."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def hann(length: int) -> NDArray[np.float64]:
    """Return the periodic Hann window, like scipy.signal.get_window."""
    return np.asarray(0.5 - 0.5 * np.cos(2 * np.pi * np.arange(length) / length))


def energies(samples: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the squared magnitudes of the Fourier transform; axis -1 changes from n to n / 2 + 1 values."""
    spectrum = np.fft.rfft(samples)
    return np.asarray(spectrum.real**2 + spectrum.imag**2)
