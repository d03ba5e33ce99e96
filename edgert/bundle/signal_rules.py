"""Rules for sound and for sensor series: how a device computes a model's input from samples in time.

Rules are values in the manifest, like the rules for images in `edgert.bundle.rules`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from edgert.bundle.rules import TIME_AXES, Classify, check_choice, check_mean_and_std, spec_of
from edgert.errors import BundleError
from edgert.tensors import TensorSpec
from edgert.typed_json import Closed

RATE_HZ_MIN = 1_000  # the lowest sample rate of sound
RATE_HZ_MAX = 384_000  # the highest sample rate of sound
WINDOW_VALUES_MAX = 16 * 1024**2  # the values of one window, over all channels
FFT_MAX = 65_536
BINS_MAX = 4096  # mel bands, frequency bands
CHANNELS_MAX = 1024
SOUND_FEATURES = ("samples", "log_mel", "mfcc")
SERIES_FEATURES = ("values", "spectrum", "bands", "statistics")
STATISTICS = ("mean", "std", "rms", "min", "max", "peak_to_peak", "crest", "skewness", "kurtosis")
MISSING_RULES = ("refuse", "zero", "hold", "linear")


@dataclass(frozen=True)
class Sound(Closed):
    """The rule that computes features of mono sound.

    Fields that are not listed here have the names and definitions of librosa.

    Attributes:
        length: The number of samples in a window.
        step: The distance between the starts of two windows, in samples; each window is an item. With 0, a request
            contains one window, and the device pads the end of a shorter signal with zeros.
        lead: The number of zeros that the device adds before a signal.
        features: "samples", "log_mel" or "mfcc".
        log: "db", "ln" or "log10": the logarithm of max(floor, power) + offset.
        time_axis: "first" or "last": the place of the time among the model's axes.
        mean: One number, or one number per band or coefficient. A feature becomes (value - mean) / std.
        std: One number, or one number per band or coefficient.
    """

    input: str
    rate_hz: int
    length: int
    step: int = 0
    lead: int = 0
    features: str = "log_mel"
    n_fft: int = 512
    win_length: int = 0  # 0: n_fft
    hop_length: int = 160
    center: bool = True
    n_mels: int = 40
    fmin: float = 0.0
    fmax: float = 0.0  # 0: half of rate_hz
    htk: bool = False
    norm: str = "slaney"
    power: float = 2.0
    log: str = "db"
    floor: float = 1e-10
    offset: float = 0.0
    top_db: float = 80.0  # only with log "db"; 0: no limit
    n_mfcc: int = 13
    time_axis: str = "last"
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    decode: bool = True  # whether WAV files are accepted

    channels: ClassVar[int] = 1

    @property
    def bins(self) -> int:
        """The number of features of each frame; 1 for samples."""
        return {"samples": 1, "log_mel": self.n_mels, "mfcc": self.n_mfcc}[self.features]

    @property
    def frames(self) -> int:
        """The number of frames of a window; for samples, the window's length."""
        if self.features == "samples":
            return self.length
        return 1 + (self.length if self.center else self.length - self.n_fft) // self.hop_length


@dataclass(frozen=True)
class Series(Closed):
    """The rule that computes features of sensor values [time, channels], for each window of `length`.

    The steps, in order: replace missing values, normalize values, compute features, normalize features. Features other
    than values are [channels, features] for the model.

    Attributes:
        length: The number of values of each channel in a window.
        step: The distance between the starts of two windows, in values; each window is an item. With 0, a request
            contains exactly one window.
        missing: The treatment of NaN: "refuse", "zero", "hold" the last value, or "linear" between neighbours.
        scale: Values become (value * scale - mean) / std.
        mean: One number, or one number per channel.
        std: One number, or one number per channel.
        features: The features of a channel, which are concatenated: "values", "spectrum" (the magnitude, as
            scipy.fft.rfft), "bands" (the power, as scipy.signal.periodogram), "statistics".
        detrend: Whether the window's mean is subtracted before spectrum and bands are computed.
        window: The window function before spectrum and bands: "boxcar" or "hann".
        bands: The limits [low, high) of each band in Hz.
        feature_mean: One number, or one number per feature. A feature becomes (feature - feature_mean) / feature_std.
        feature_std: One number, or one number per feature.
        time_axis: "first" if a window of values is [time, channels] for the model, "last" if it is [channels, time].
    """

    input: str
    channels: int
    length: int
    step: int = 0
    missing: str = "refuse"
    scale: float = 1.0
    mean: tuple[float, ...] = (0.0,)
    std: tuple[float, ...] = (1.0,)
    features: tuple[str, ...] = ("values",)
    rate_hz: float = 1.0
    detrend: bool = True
    window: str = "hann"
    bands: tuple[tuple[float, float], ...] = ()
    statistics: tuple[str, ...] = STATISTICS
    feature_mean: tuple[float, ...] = (0.0,)
    feature_std: tuple[float, ...] = (1.0,)
    time_axis: str = "first"

    lead: ClassVar[int] = 0

    @property
    def features_per_channel(self) -> int:
        counts = {
            "values": self.length,
            "spectrum": self.length // 2 + 1,
            "bands": len(self.bands),
            "statistics": len(self.statistics),
        }
        return sum(counts[name] for name in self.features)


def check_sound(rule: Sound, inputs: Sequence[TensorSpec]) -> None:
    """Raise BundleError unless `rule` can be applied to one of `inputs`."""
    spec = _input_of("sound", rule.input, inputs)
    check_choice("sound", "features", rule.features, SOUND_FEATURES)
    check_choice("sound", "norm", rule.norm, ("slaney", "none"))
    check_choice("sound", "log", rule.log, ("db", "ln", "log10"))
    check_choice("sound", "time_axis", rule.time_axis, TIME_AXES)
    _check_range("sound", "rate_hz", rule.rate_hz, RATE_HZ_MIN, RATE_HZ_MAX)
    _check_window("sound", rule.length, rule.step, 1)
    _check_range("sound", "lead", rule.lead, 0, rule.length - 1)
    _check_normalization("sound", rule.mean, rule.std, rule.bins, "band or coefficient")
    if rule.features != "samples":
        _check_range("sound", "n_fft", rule.n_fft, 2, FFT_MAX)
        _check_range("sound", "win_length", rule.win_length, 0, rule.n_fft)
        _check_range("sound", "hop_length", rule.hop_length, 1, rule.length)
        _check_range("sound", "n_mels", rule.n_mels, 1, BINS_MAX)
        _check_range("sound", "n_mfcc", rule.n_mfcc, 1, rule.n_mels)
        _check_range("sound", "fmax", rule.fmax, 0, rule.rate_hz / 2)
        _check_range("sound", "fmin", rule.fmin, 0, rule.fmax or rule.rate_hz / 2)
        _check_range("sound", "power", rule.power, 0.1, 4)
        _check_range("sound", "floor", rule.floor, 1e-30, 1)
        _check_range("sound", "offset", rule.offset, 0, 1e6)
        _check_range("sound", "top_db", rule.top_db, 0, 1e6)
        if rule.length < (rule.n_fft // 2 + 1 if rule.center else rule.n_fft):
            raise BundleError(f"sound has windows of {rule.length} samples, too short for n_fft = {rule.n_fft}")
    by_time = (rule.frames, rule.bins) if rule.time_axis == "first" else (rule.bins, rule.frames)
    _check_shape(spec, (rule.frames,) if rule.features == "samples" else by_time)


def check_series(rule: Series, inputs: Sequence[TensorSpec]) -> None:
    """Raise BundleError unless `rule` can be applied to one of `inputs`."""
    spec = _input_of("series", rule.input, inputs)
    check_choice("series", "missing", rule.missing, MISSING_RULES)
    check_choice("series", "window", rule.window, ("boxcar", "hann"))
    check_choice("series", "time_axis", rule.time_axis, TIME_AXES)
    for name in rule.features:
        check_choice("series", "features", name, SERIES_FEATURES)
    for name in rule.statistics:
        check_choice("series", "statistics", name, STATISTICS)
    _check_range("series", "channels", rule.channels, 1, CHANNELS_MAX)
    _check_range("series", "rate_hz", rule.rate_hz, 1e-9, 1e9)
    _check_range("series", "scale", rule.scale, -1e30, 1e30)
    _check_range("series", "number of bands", len(rule.bands), 0, BINS_MAX)
    _check_window("series", rule.length, rule.step, rule.channels)
    _check_normalization("series", rule.mean, rule.std, rule.channels, "channel")
    if not rule.features or not rule.features_per_channel or len(set(rule.features)) < len(rule.features):
        raise BundleError(f"series needs features, each once, of {', '.join(SERIES_FEATURES)}")
    for low, high in rule.bands:
        if not 0 <= low < high <= rule.rate_hz:
            raise BundleError(f"series has the band {low:g} to {high:g} Hz; give 0 <= low < high <= rate_hz")
    _check_normalization("series", rule.feature_mean, rule.feature_std, rule.features_per_channel, "feature")
    if rule.features == ("values",):
        by_time = (rule.length, rule.channels)
        _check_shape(spec, by_time if rule.time_axis == "first" else by_time[::-1])
    else:
        _check_shape(spec, (rule.channels, rule.features_per_channel))


def check_smoothing(classify: Classify | None, rule: Sound | Series | None) -> None:
    """Raise BundleError if answers are smoothed over windows, but `rule` gives no windows."""
    if classify is not None and classify.smooth is not None and (rule is None or not rule.step):
        raise BundleError("smoothing needs windows: give --preprocess a table [sound] or [series] with a step")


def _input_of(what: str, name: str, inputs: Sequence[TensorSpec]) -> TensorSpec:
    spec = spec_of(what, "input", name, inputs)
    if spec.datatype != "FP32" or not spec.shape:
        raise BundleError(f"{what} gives FP32 values; input {name!r} is {spec.form}")
    return spec


def _check_shape(spec: TensorSpec, shape: tuple[int, ...]) -> None:
    """Raise BundleError unless items of `spec` have `shape` (without axes of length 1) or one flat axis."""
    item = spec.item_shape
    wanted = [n for n in item if n != 1]
    if wanted in ([n for n in shape if n != 1], [math.prod(shape)]):
        return
    axes = [n for n in shape if n != 1]
    if -1 in wanted and len(wanted) == len(axes) and all(w in (-1, n) for w, n in zip(wanted, axes, strict=True)):
        return
    raise BundleError(f"the rule gives {list(shape)} for each item, and input {spec.name!r} needs {list(item)}")


def _check_window(what: str, length: int, step: int, channels: int) -> None:
    _check_range(what, "length", length, 2, WINDOW_VALUES_MAX // channels)
    _check_range(what, "step", step, 0, WINDOW_VALUES_MAX)


def _check_normalization(what: str, mean: Sequence[float], std: Sequence[float], count: int, per: str) -> None:
    for values in (mean, std):
        if len(values) not in (1, count):
            raise BundleError(f"{what} has a mean or std of {len(values)} numbers; give 1, or {count}, one per {per}")
    check_mean_and_std(what, mean, std)


def _check_range(what: str, key: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:  # written so that NaN fails
        raise BundleError(f"{what} has {key} = {value:g}; give {least:g} to {most:g}")
