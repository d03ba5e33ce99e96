"""WAV files of other programs are read; damaged files are refused."""

from __future__ import annotations

import io
import struct
import wave
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.errors import RequestError
from edgert.processing.signals.wav import read_wav
from tests.support.needed import needed

wavfile = needed("scipy.io.wavfile")
RAMP = np.linspace(-1, 0.99, 200)


def written(samples: NDArray[Any], rate_hz: int = 16000) -> bytes:
    file = io.BytesIO()
    wavfile.write(file, rate_hz, samples)
    return file.getvalue()


@pytest.mark.parametrize(
    ("samples", "step"),
    [
        (((RAMP + 1) * 127.5).astype(np.uint8), 1 / 64),
        ((RAMP * 32768).astype(np.int16), 1 / 32768),
        ((RAMP * 2**31).astype(np.int32), 1e-6),
        (RAMP.astype(np.float32), 1e-7),
        (RAMP, 1e-7),
    ],
)
def test_a_file_that_scipy_wrote_is_read(samples: NDArray[Any], step: float) -> None:
    made, rate_hz = read_wav(written(samples))
    assert rate_hz == 16000
    assert made.dtype == np.float32
    np.testing.assert_allclose(made, RAMP, rtol=0, atol=2 * step)


def test_files_with_24_bits_and_two_channels_are_read() -> None:
    left, right = (RAMP * 2**23).astype(np.int32), np.zeros(200, np.int32)
    frames = b"".join(int(v).to_bytes(3, "little", signed=True) for pair in zip(left, right, strict=True) for v in pair)
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((2, 3, 44100, 0, "NONE", ""))
        out.writeframes(frames)
    made, rate_hz = read_wav(file.getvalue())
    assert rate_hz == 44100
    np.testing.assert_allclose(made, RAMP / 2, rtol=0, atol=1e-6)


def test_wav_files_with_the_extensible_format_or_other_chunks_or_padding_are_read() -> None:
    data = (RAMP * 32768).astype("<i2").tobytes()
    form = struct.pack("<HHIIHHHHIH14s", 0xFFFE, 1, 8000, 16000, 2, 16, 22, 16, 4, 1, b"\0" * 14)
    chunks = b"LIST" + struct.pack("<I", 3) + b"abc\0" + b"fmt " + struct.pack("<I", len(form)) + form
    file = b"RIFF" + struct.pack("<I", 0) + b"WAVE" + chunks + b"data" + struct.pack("<I", len(data)) + data
    made, rate_hz = read_wav(file + b"\0" * 77)
    assert (rate_hz, len(made)) == (8000, 200)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda file: b"OggS" + file[4:], "not a WAV file"),
        (lambda file: file[:11], "not a WAV file"),
        (lambda file: file[:-10], "states 400 bytes of samples but has 390"),
        (lambda file: file[:20] + b"\x55\0" + file[22:], "in format 85"),
        (lambda file: file[:22] + b"\0\0" + file[24:], "0 channels"),
        (lambda file: file[:36] + b"cue " + file[40:], "no samples"),
        (lambda file: file[:12] + file[36:], "before its format"),
    ],
)
def test_other_files_are_refused(damage: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        read_wav(damage(written((RAMP * 32768).astype(np.int16))))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("value", [1e300, np.nan, -np.inf])
def test_floats_that_fp32_does_not_hold_are_refused(value: float) -> None:
    with pytest.raises(RequestError, match="values that are not finite; write samples from -1 to 1"):
        read_wav(written(np.append(RAMP, value)))


def test_a_file_with_a_damaged_head_is_read_or_refused() -> None:
    random, whole = np.random.default_rng(0), written((RAMP * 32768).astype(np.int16))
    for _ in range(3000):
        file = bytearray(whole)
        for at in random.integers(0, 48, 3):
            file[at] = random.integers(0, 256)
        try:
            samples, _ = read_wav(bytes(file))
        except RequestError:
            continue
        assert len(samples) <= 500
