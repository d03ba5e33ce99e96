"""`check_sound` and `check_series` refuse rules that do not fit the model's input."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from edgert.bundle.signal_rules import Series, Sound, check_series, check_sound
from edgert.errors import BundleError
from edgert.tensors import TensorSpec

SOUND = Sound("x", 16000, 16000)
SERIES = Series("x", 3, 128, features=("statistics", "bands"), rate_hz=100.0, bands=((0.0, 10.0),))


def inputs(*shape: int) -> tuple[TensorSpec, ...]:
    return (TensorSpec("x", "FP32", (-1, *shape)),)


@pytest.mark.parametrize("shape", [(1, 40, 101), (40, 101), (40, -1), (1, -1, 101, 1), (4040,)])
def test_features_of_sound_may_have_axes_of_length_1_or_be_flat(shape: tuple[int, ...]) -> None:
    check_sound(SOUND, inputs(*shape))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": "y"}, "names input 'y'"),
        ({"features": "chroma"}, "known: samples, log_mel, mfcc"),
        ({"hop_length": 0}, "hop_length = 0; give 1 to 16000"),
        ({"length": 200}, "too short for n_fft = 512"),
        ({"fmax": 9000.0}, "fmax = 9000; give 0 to 8000"),
        ({"features": "mfcc", "n_mfcc": 41}, "n_mfcc = 41; give 1 to 40"),
        ({"mean": (0.0, 1.0)}, "give 1, or 40, one per band or coefficient"),
        ({"std": (0.0,)}, "no std may be 0"),
        ({"top_db": float("nan")}, "top_db = nan"),
        ({"n_mels": 64}, r"gives \[64, 101\] for each item, and input 'x' needs \[40, 101\]"),
        ({"rate_hz": 10**9}, "rate_hz"),
    ],
)
def test_a_rule_for_sound_that_cannot_be_applied_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        check_sound(replace(SOUND, **change), inputs(40, 101))


def test_features_of_series_are_counted_per_channel() -> None:
    check_series(SERIES, inputs(3, 10))
    check_series(SERIES, inputs(30))
    check_series(Series("x", 3, 128), inputs(128, 3))
    check_series(Series("x", 3, 128, time_axis="last"), inputs(3, 128))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"features": ()}, "needs features"),
        ({"features": ("bands", "bands")}, "each once"),
        ({"bands": ((5.0, 5.0),)}, "band 5 to 5 Hz"),
        ({"statistics": ("median",)}, "known: mean, std"),
        ({"missing": "guess"}, "known: refuse, zero, hold, linear"),
        ({"length": 1}, "length = 1; give 2 to"),
        ({"channels": 4}, r"gives \[4, 10\]"),
        ({"feature_std": (1.0, 2.0)}, "give 1, or 10, one per feature"),
    ],
)
def test_a_rule_for_series_that_cannot_be_applied_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(BundleError, match=message):
        check_series(replace(SERIES, **change), inputs(3, 10))
