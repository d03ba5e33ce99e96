"""Computes the model's input from sound or sensor series: windows, then their features.

A request may contain the signal in several forms, which differ in datatype and shape:

- FP32 [N, time] (sound, -1 to 1) or [N, time, channels] (series);
- INT16 of the same shape: PCM, or a sensor's own values;
- if the rule decodes, WAV files: UINT8 [N, bytes] with one file in each row; shorter files are padded with zeros;
- the model's own tensor. If a signal may have the same shape as this tensor, FP32 values are always the signal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from edgert.bundle.signal_rules import RATE_HZ_MAX, RATE_HZ_MIN, Series, Sound
from edgert.errors import RequestError
from edgert.processing.images.preprocess import EXPANDED_BYTES_MAX
from edgert.processing.signals.resample import resample, resampled_length
from edgert.processing.signals.series_features import SeriesFeatures
from edgert.processing.signals.sound_features import SoundFeatures
from edgert.processing.signals.wav import read_wav
from edgert.tensors import TensorSpec, fits

WINDOWS_MAX = 1024  # windows of one request

Floats = NDArray[np.float32]


class SignalPreprocessor:
    """Applies `rule` to the input `spec`.

    Attributes:
        step: The distance between the starts of two windows; 0 if a request has one window.
        held_max: The largest number of values that a session keeps between requests.
        forms: The tensors that a request may contain.
    """

    of_images = False

    def __init__(self, rule: Sound | Series, spec: TensorSpec) -> None:
        self._rule = rule
        self._spec = spec
        self.step = rule.step
        self.held_max = rule.length  # the maximum number of values that a session keeps between requests
        self.files: TensorSpec | None = None
        if isinstance(rule, Sound):
            shape: tuple[int, ...] = (-1, -1)
            self._features: SoundFeatures | SeriesFeatures = SoundFeatures(rule)
            self._made = (rule.bins, rule.frames) if rule.time_axis == "last" else (rule.frames, rule.bins)
            self._mean, self._std = (np.asarray(v, np.float32)[:, None] for v in (rule.mean, rule.std))
            if rule.decode:
                self.files = TensorSpec(spec.name, "UINT8", (-1, -1))
        else:
            shape = (-1, -1, rule.channels)
            self._features = SeriesFeatures(rule)
            self._made = (rule.channels, rule.features_per_channel)
            if rule.features == ("values",) and rule.time_axis == "first":
                self._made = self._made[::-1]
        self.frames = TensorSpec(spec.name, "FP32", shape)
        self.integers = TensorSpec(spec.name, "INT16", shape)
        self._takes_own = not _may_be_signal(spec.shape, shape)
        forms = (spec if self._takes_own else None, self.frames, self.integers, self.files)
        self.forms = tuple(form for form in forms if form is not None)
        self._item_shape = _item_shape(spec.item_shape, self._made)

    def __call__(self, array: NDArray[Any], deadline_s: float | None = None) -> tuple[Floats, list[int] | None]:
        """Return the model's tensor of all windows, and each signal's number of windows. Raises RequestError."""
        if not self.wants(array):
            return array, None
        windows, counts = self.windows(array)
        return self.features(windows), counts

    def wants(self, array: NDArray[Any]) -> bool:
        """Return whether `array` (of one of the `forms`) is a signal and not the model's own tensor."""
        return not (self._takes_own and array.dtype == np.float32 and fits(self._spec, "FP32", array.shape))

    def windows(self, array: NDArray[Any]) -> tuple[Floats, list[int]]:
        """Return all windows [items, length(, channels)], and the number of windows of each signal. Raises
        RequestError.
        """
        rule = self._rule
        cut = [self._cut(signal, rule.lead) for signal in self._signals(array)]
        if sum(map(len, cut)) > WINDOWS_MAX:
            raise RequestError(
                f"the request has {sum(map(len, cut))} windows; at most {WINDOWS_MAX} are allowed: split it"
            )
        counts = [len(part) for part in cut]
        return self._bounded(cut[0] if len(cut) == 1 else np.concatenate(cut)), counts

    @property
    def nothing_held(self) -> Floats:
        """The initial held values of a session: the values before its signal."""
        shape = (self._rule.lead,) if isinstance(self._rule, Sound) else (0, self._rule.channels)
        return np.zeros(shape, np.float32)

    def next_windows(self, array: NDArray[Any], rest: Floats, skip: int) -> tuple[Floats, Floats, int]:
        """Return the windows that `array` completes, the new rest and the new skip. Raises RequestError.

        Args:
            array: The next part of one signal.
            rest: The values before `array` that later windows need.
            skip: How many values at the start of `array` belong to no window.
        """
        rule = self._rule
        if not rule.step:
            return self.windows(array)[0], rest, skip
        if len(array) != 1 or array.dtype == np.uint8:
            raise RequestError("a request of a session has one signal, as values, not as a file: send [1, time]")
        signal = next(self._signals(array))
        allowed = isinstance(rule, Series) and rule.missing != "refuse"
        if np.isinf(signal).any() or (not allowed and np.isnan(signal).any()):  # such values would spoil later requests
            raise RequestError("the signal has values that are not finite: send it without them")
        values = np.concatenate((rest, signal[skip:]))
        if len(values) < rule.length:
            return np.empty((0, rule.length, *rest.shape[1:]), np.float32), values, max(0, skip - len(signal))
        windows = self._bounded(self._cut(values, 0))
        begin = len(windows) * rule.step  # the start of the next window
        return windows, values[begin:].copy(), max(0, begin - len(values))

    def _bounded(self, windows: Floats) -> Floats:
        """Return `windows` in their own memory. Raises RequestError above EXPANDED_BYTES_MAX."""
        rule = self._rule
        size = len(windows) * max(rule.length * rule.channels, math.prod(self._made)) * 4
        if len(windows) > 1 and size > EXPANDED_BYTES_MAX:
            raise RequestError(
                f"the request's windows have {size} bytes; at most {EXPANDED_BYTES_MAX} are allowed: split the request"
            )
        return np.ascontiguousarray(windows)

    def features(self, windows: Floats) -> Floats:
        """Return the model's tensor for `windows`. Raises RequestError for values that are not finite."""
        features = self._features(windows)
        if isinstance(self._rule, Sound):
            features = (features - self._mean) / self._std
            if not np.isfinite(features).all():
                raise RequestError("the sound has values that are not finite; send samples from -1 to 1")
        if features.shape[1:] != self._made:
            features = features.transpose(0, 2, 1)
        return np.ascontiguousarray(features).reshape(-1, *self._item_shape)

    def _signals(self, array: NDArray[Any]) -> Iterator[Floats]:
        """Yield each signal as [time] or [time, channels], at the rule's rate."""
        if array.dtype == np.uint8:
            for row in array:
                yield self._decoded(row.tobytes())
        elif array.dtype == np.int16 and isinstance(self._rule, Sound):
            yield from array.astype(np.float32) / np.float32(32768)
        else:
            yield from array.astype(np.float32, copy=False)

    def _decoded(self, file: bytes) -> Floats:
        rule = self._rule
        assert isinstance(rule, Sound)  # only sound has files
        samples, rate_hz = read_wav(file)
        if not RATE_HZ_MIN <= rate_hz <= RATE_HZ_MAX:
            allowed = f"{RATE_HZ_MIN} to {RATE_HZ_MAX}"
            raise RequestError(f"the file has {rate_hz} samples a second; {allowed} are allowed: resample it first")
        self._count(resampled_length(len(samples), rate_hz, rule.rate_hz), rule.lead)  # before resampling
        return resample(samples, rate_hz, rule.rate_hz)

    def _cut(self, signal: Floats, lead: int) -> Floats:
        """Put `lead` zeros before a signal and return its windows as [windows, length(, channels)]."""
        rule = self._rule
        count = self._count(len(signal), lead)
        if lead:
            signal = np.concatenate((np.zeros(lead, np.float32), signal))
        if len(signal) < rule.length:
            signal = np.concatenate((signal, np.zeros(rule.length - len(signal), np.float32)))
        if count == 1:
            return signal[None, : rule.length]
        windows = sliding_window_view(signal, rule.length, axis=0)[:: rule.step]
        return windows if windows.ndim == 2 else windows.transpose(0, 2, 1)

    def _count(self, length: int, lead: int) -> int:
        """Return the number of windows of a signal of `length` values after `lead` zeros. Raises RequestError."""
        rule, unit = self._rule, "samples" if isinstance(self._rule, Sound) else "values"
        if not length:
            raise RequestError(f"the signal is empty; send {rule.length} {unit}")
        length += lead
        if length < rule.length and isinstance(rule, Series):
            raise RequestError(f"the series has {length} values per channel, and a window has {rule.length}: send more")
        if length > rule.length and not rule.step:
            raise RequestError(
                f"the signal has {length} {unit}, but the model's window has {rule.length}: send one window, or build the "
                f"model with a step between windows (step = {rule.length} in the file of --preprocess: no overlap)"
            )
        count = 1 + max(0, length - rule.length) // rule.step if rule.step else 1
        if count > WINDOWS_MAX:
            raise RequestError(
                f"the signal has {count} windows; at most {WINDOWS_MAX} are allowed per request: split it"
            )
        return count


def _may_be_signal(own: tuple[int, ...], signal: tuple[int, ...]) -> bool:
    """Return whether a tensor of the shape `own` could also be a signal."""
    return len(own) == len(signal) and all(-1 in (a, b) or a == b for a, b in zip(own, signal, strict=True))


def _item_shape(item: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of the model's item, with open axes filled from the rule's output `shape`."""
    if -1 not in item:
        return item
    lengths = iter(n for n in shape if n != 1)
    return tuple(1 if n == 1 else next(lengths) for n in item)
