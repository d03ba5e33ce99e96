"""Converts samples to another rate, with the polyphase filter of scipy.signal.resample_poly."""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from edgert.errors import RequestError

# The limit of both numbers in the reduced ratio of two rates. From 44,100 to 16,000 Hz, this ratio is 160 / 441.
FACTOR_MAX = 1000
_KAISER_BETA = 5.0
_BLOCK = 16_384  # outputs that are computed at once, to limit the memory


def resampled_length(count: int, rate_hz: int, wanted_hz: int) -> int:
    """Return the number of samples that `resample` returns for `count`."""
    return -(-count * wanted_hz // rate_hz)


def resample(samples: NDArray[np.float32], rate_hz: int, wanted_hz: int) -> NDArray[np.float32]:
    """Return `samples` [time] at `wanted_hz`. Raises RequestError for rates without a simple ratio."""
    shared = math.gcd(rate_hz, wanted_hz)
    up, down = wanted_hz // shared, rate_hz // shared
    if up == down:
        return samples
    if max(up, down) > FACTOR_MAX:
        raise RequestError(f"sound of {rate_hz} Hz cannot be resampled here: send it with {wanted_hz} Hz")
    phases, before = _filter(up, down)
    taps = phases.shape[1]
    padded = np.concatenate((np.zeros(taps - 1, np.float32), samples, np.zeros(taps + before // up + 1, np.float32)))
    windows = sliding_window_view(padded, taps)
    out = np.empty(resampled_length(len(samples), rate_hz, wanted_hz), np.float32)
    for begin in range(0, len(out), _BLOCK):
        at = np.arange(begin, min(begin + _BLOCK, len(out)), dtype=np.int64) * down + before
        part = np.einsum("ij,ij->i", windows[at // up], phases[at % up])
        out[begin : begin + len(part)] = part
    return out


@lru_cache(maxsize=8)
def _filter(up: int, down: int) -> tuple[NDArray[np.float32], int]:
    """Return the filter as [up, taps] with each row reversed, and its delay.

    The delay is in samples at the upsampled rate (`up` times the input's rate).
    """
    most = max(up, down)
    half = 10 * most
    at = np.arange(-half, half + 1, dtype=np.float64)
    lowpass = np.sinc(at / most) / most * np.kaiser(len(at), _KAISER_BETA)
    lowpass *= up / lowpass.sum()
    taps = -(-len(lowpass) // up)
    table = np.zeros(taps * up)
    table[: len(lowpass)] = lowpass
    return np.ascontiguousarray(table.reshape(taps, up).T[:, ::-1], np.float32), half
