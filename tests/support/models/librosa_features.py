"""Write features that librosa computes, for tests of ours: tests/device/processing/data/librosa.npz.

    pip install librosa && python -m tests.support.models.librosa_features

librosa needs numba and llvmlite, 150 MB, so its answers are committed instead.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.paths import ROOT

PATH = ROOT / "tests/device/processing/data/librosa.npz"
RATE_HZ = 8000
# Keys of the rule [sound]; librosa's arguments have the same names.
CASES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "whisper-like": {"n_fft": 400, "n_mels": 80, "log": "log10"},
    "htk": {
        "n_fft": 1024,
        "win_length": 640,
        "hop_length": 320,
        "htk": True,
        "norm": "none",
        "power": 1.0,
        "log": "ln",
    },
    "not centred": {"center": False, "fmin": 125.0, "fmax": 3800.0},
    "all decibels": {"top_db": 0.0},
    "mfcc": {"features": "mfcc", "n_mfcc": 20, "n_mels": 64},
}


def sound() -> NDArray[np.float32]:
    """Return half a second with silence, a glide, and noise: FP32 [4000]."""
    random = np.random.default_rng(5)
    time_s = np.arange(4000) / RATE_HZ
    glide = 0.4 * np.sin(2 * np.pi * (300 + 1500 * time_s) * time_s)
    glide[:900] = 0
    return (glide + random.normal(0, 0.01, 4000) * (time_s > 0.3)).astype(np.float32)


def librosa_features(case: dict[str, Any]) -> NDArray[np.float32]:
    import librosa  # type: ignore[import-not-found, unused-ignore]

    rule: dict[str, Any] = {
        "n_fft": 512,
        "win_length": None,
        "hop_length": 160,
        "center": True,
        "n_mels": 40,
        "fmin": 0.0,
    }
    rule |= {"fmax": None, "htk": False, "norm": "slaney", "power": 2.0, "log": "db", "top_db": 80.0} | case
    log, top_db = rule.pop("log"), rule.pop("top_db") or None
    features, n_mfcc = rule.pop("features", "log_mel"), rule.pop("n_mfcc", 0)
    rule["norm"] = None if rule["norm"] == "none" else rule["norm"]
    mel = librosa.feature.melspectrogram(y=sound(), sr=RATE_HZ, pad_mode="constant", **rule)
    if log == "db":
        logs = librosa.power_to_db(mel, amin=1e-10, top_db=top_db)
    else:
        logs = (np.log if log == "ln" else np.log10)(np.maximum(mel, 1e-10))
    return np.asarray(librosa.feature.mfcc(S=logs, n_mfcc=n_mfcc) if features == "mfcc" else logs, np.float32)


if __name__ == "__main__":
    np.savez_compressed(PATH, **{name: librosa_features(case) for name, case in CASES.items()})  # type: ignore[arg-type]
    print(f"{PATH}: {PATH.stat().st_size} bytes")
