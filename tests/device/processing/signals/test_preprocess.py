"""A request's signal becomes windows, then the model's tensor; wrong signals are refused before the work."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.bundle.signal_rules import Series, Sound
from edgert.errors import RequestError
from edgert.processing.signals.preprocess import SignalPreprocessor
from edgert.tensors import TensorSpec
from tests.support.needed import needed

wavfile = needed("scipy.io.wavfile")


def spec(*shape: int) -> TensorSpec:
    return TensorSpec("x", "FP32", (-1, *shape))


def sound(item: tuple[int, ...] = (1, 40, 26), **keys: Any) -> SignalPreprocessor:
    return SignalPreprocessor(Sound("x", 8000, 4000, **keys), spec(*item))


def wav(samples: NDArray[Any], rate_hz: int) -> NDArray[np.uint8]:
    file = io.BytesIO()
    wavfile.write(file, rate_hz, samples)
    return np.frombuffer(file.getvalue(), np.uint8)


def tone(count: int, rate_hz: int) -> NDArray[np.int16]:
    return (9000 * np.sin(2 * np.pi * 440 * np.arange(count) / rate_hz)).astype(np.int16)


def test_every_form_of_the_same_sound_gives_the_same_features() -> None:
    pre, samples = sound(), tone(4000, 8000)
    wanted, _ = pre((samples / 32768).astype(np.float32)[None])
    assert wanted.shape == (1, 1, 40, 26)
    np.testing.assert_array_equal(pre(samples[None])[0], wanted)
    np.testing.assert_array_equal(pre(wav(samples, 8000)[None])[0], wanted)
    other_rate = pre(wav(tone(22050, 44100), 44100)[None])[0]
    loud = wanted > wanted.max() - 40
    np.testing.assert_allclose(other_rate[loud], wanted[loud], atol=1.5)


def test_the_models_own_tensor_is_used_unchanged() -> None:
    own = np.ones((3, 1, 40, 26), np.float32)
    assert sound()(own)[0] is own


def test_a_tensor_that_could_be_a_signal_or_the_models_tensor_is_read_as_a_signal() -> None:
    rule = Series("x", 3, 8, mean=(1.0,))
    pre = SignalPreprocessor(rule, spec(8, 3))
    assert [form.datatype for form in pre.forms] == ["FP32", "INT16"]
    np.testing.assert_array_equal(pre(np.ones((1, 8, 3), np.float32))[0], np.zeros((1, 8, 3)))


def test_short_sound_is_padded_and_short_series_are_refused() -> None:
    short = sound()(tone(1000, 8000)[None])[0]
    padded = sound()(np.concatenate([tone(1000, 8000), np.zeros(3000, np.int16)])[None])[0]
    np.testing.assert_array_equal(short, padded)
    with pytest.raises(RequestError, match="has 7 values per channel, and a window has 8"):
        SignalPreprocessor(Series("x", 3, 8), spec(8, 3))(np.ones((1, 7, 3), np.float32))


def test_windows_begin_one_step_apart_and_each_window_is_an_item() -> None:
    pre = SignalPreprocessor(Series("x", 2, 4, step=3), spec(4, 2))
    values = np.arange(22, dtype=np.float32).reshape(1, 11, 2)
    made = pre(values)[0]
    np.testing.assert_array_equal(made, np.stack([values[0, at : at + 4] for at in (0, 3, 6)]))
    two = pre(np.concatenate([values, values]))[0]
    np.testing.assert_array_equal(two, np.concatenate([made, made]))


def test_a_signal_in_any_form_gets_the_leading_zeros() -> None:
    pre = SignalPreprocessor(Sound("x", 8000, 8, step=4, lead=3, features="samples"), spec(8))
    samples = np.arange(1, 14, dtype=np.int16) * 1000
    led = np.concatenate([np.zeros(3), samples / 32768]).astype(np.float32)
    want = np.stack([led[at : at + 8] for at in (0, 4, 8)])
    for form in (samples, (samples / 32768).astype(np.float32), wav(samples, 8000)):
        made, counts = pre(form[None])
        np.testing.assert_array_equal(made, want)
        assert counts == [3]
    one = SignalPreprocessor(Sound("x", 8000, 8, lead=3, features="samples"), spec(8))
    np.testing.assert_array_equal(one(samples[None, :5])[0], want[:1])
    with pytest.raises(RequestError, match="has 9 samples, but the model's window has 8"):
        one(samples[None, :6])


@pytest.mark.parametrize(("item", "time_axis"), [((26, 40), "first"), ((40, 26), "last"), ((1, 26, 40, 1), "first")])
def test_features_are_placed_in_the_axes_of_the_model(item: tuple[int, ...], time_axis: str) -> None:
    samples = tone(4000, 8000)[None]
    made = sound(item, time_axis=time_axis)(samples)[0]
    plain = sound()(samples)[0].reshape(40, 26)
    np.testing.assert_array_equal(
        made.reshape(plain.shape[::-1] if time_axis == "first" else plain.shape),
        plain.T if time_axis == "first" else plain,
    )


def test_a_signal_that_is_too_long_is_refused_before_it_is_resampled() -> None:
    with pytest.raises(RequestError, match="the signal has 4001 samples, but the model's window has 4000"):
        sound()(tone(4001, 8000)[None])
    with pytest.raises(RequestError, match="1000 to 384000 are allowed"):
        sound()(wav(tone(4000, 8000), 7)[None])
    with pytest.raises(RequestError, match="windows; at most 1024"):
        sound((40, 26), step=1)(np.zeros((1, 6000), np.int16))
    with pytest.raises(RequestError, match="1025 windows; at most 1024"):
        sound((40, 26), step=4000)(np.zeros((1025, 4000), np.int16))
    with pytest.raises(RequestError, match="empty"):
        sound()(np.zeros((1, 0), np.int16))


def test_values_that_are_not_finite_are_refused() -> None:
    samples = np.zeros((1, 4000), np.float32)
    samples[0, 7] = np.nan
    with pytest.raises(RequestError, match="not finite"):
        sound()(samples)
