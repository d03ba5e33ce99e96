"""Features of sound equal librosa's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgert.bundle.signal_rules import Sound
from edgert.processing.signals.sound_features import SoundFeatures
from tests.support.models.librosa_features import CASES, PATH, RATE_HZ, sound


@pytest.mark.parametrize("name", CASES)
def test_features_equal_librosas_features(name: str) -> None:
    rule = Sound("x", RATE_HZ, len(sound()), **CASES[name])
    with np.load(PATH) as librosas:
        wanted = librosas[name]
    made = SoundFeatures(rule)(sound()[None])[0]
    assert made.shape == wanted.shape == (rule.bins, rule.frames)
    np.testing.assert_allclose(made, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", [{}, {"features": "mfcc"}])
def test_windows_of_one_request_do_not_touch_each_other(case: dict[str, Any]) -> None:
    rule = Sound("x", RATE_HZ, 2000, **case)
    windows = sound().reshape(2, 2000)
    together, alone = SoundFeatures(rule)(windows), [SoundFeatures(rule)(one[None])[0] for one in windows]
    np.testing.assert_allclose(together, np.stack(alone), rtol=1e-5, atol=1e-5)


def test_silence_gives_the_lowest_value() -> None:
    made = SoundFeatures(Sound("x", RATE_HZ, 2000))(np.zeros((1, 2000), np.float32))
    np.testing.assert_allclose(made, -100.0)  # 10 log10(1e-10)


def test_the_feature_samples_leaves_the_samples_unchanged() -> None:
    made = SoundFeatures(Sound("x", RATE_HZ, 4000, features="samples"))(sound()[None])
    np.testing.assert_array_equal(made[0, 0], sound())
