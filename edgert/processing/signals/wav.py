"""WAV files as mono samples: PCM of 8, 16, 24 and 32 bits, and floats of 32 and 64 bits.

Python's own module `wave` does not read floats. Before Python 3.12, `wave` also does not read the extensible format
that many recorders write.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.errors import RequestError
from edgert.printable import counted

CHANNELS_MAX = 64
_PCM, _FLOAT, _EXTENSIBLE = 1, 3, 0xFFFE


def read_wav(data: bytes | memoryview) -> tuple[NDArray[np.float32], int]:
    """Return a file's samples, from -1 to 1 and averaged over the channels, and the file's rate in Hz.

    Zeros after the file are ignored. Raises RequestError if the file is incomplete or has another format.
    """
    view = memoryview(data)
    if len(view) < 12 or bytes(view[:4]) != b"RIFF" or bytes(view[8:12]) != b"WAVE":
        raise RequestError("this is not a WAV file; send a complete WAV file, or the samples as INT16 or FP32")
    form, offset = None, 12
    while offset + 8 <= len(view):
        name, size = struct.unpack_from("<4sI", view, offset)
        offset += 8
        if name == b"fmt ":
            form = _format(view[offset : offset + size])
        elif name == b"data":
            if form is None:
                raise RequestError("the WAV file has its data before its format; write it again")
            if offset + size > len(view):
                raise RequestError(
                    f"the WAV file states {size} bytes of samples but has {len(view) - offset}: send the complete file"
                )
            return _samples(view[offset : offset + size], *form)
        offset += size + size % 2
    raise RequestError("the WAV file has no samples; send a complete file")


def _format(chunk: memoryview) -> tuple[int, int, int, int]:
    """Return tag, channels, rate in Hz and bytes per sample."""
    if len(chunk) < 16:
        raise RequestError("the WAV file's format is cut off; send a complete file")
    tag, channels, rate_hz, _, _, bits = struct.unpack_from("<HHIIHH", chunk)
    if tag == _EXTENSIBLE and len(chunk) >= 26:
        (tag,) = struct.unpack_from("<H", chunk, 24)
    if not 1 <= channels <= CHANNELS_MAX or (tag, bits) not in _DTYPES:
        raise RequestError(
            f"the WAV file has {counted(channels, 'channel')} of {bits} bits in format {tag}; 8, 16, 24 or 32 bits of PCM and 32 "
            "or 64 of floats are supported: convert it"
        )
    return tag, channels, rate_hz, bits // 8


def _samples(data: memoryview, tag: int, channels: int, rate_hz: int, width: int) -> tuple[NDArray[np.float32], int]:
    whole = len(data) // (channels * width) * channels * width
    if width == 3:  # the three bytes become the upper bytes of 32 bits
        wide = np.zeros((whole // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(data[:whole], np.uint8).reshape(-1, 3)
        values = wide.view("<i4")[:, 0]
    else:
        values = np.frombuffer(data[:whole], _DTYPES[tag, width * 8])
    return _mono(values.reshape(-1, channels)), rate_hz


def _mono(frames: NDArray[Any]) -> NDArray[np.float32]:
    """Return frames [time, channels] as floats from -1 to 1, averaged over the channels."""
    if frames.dtype.kind == "f":
        with np.errstate(over="ignore"):  # values of 64 bits beyond FP32's range become infinite
            scaled = frames.astype(np.float32)
        if not np.isfinite(scaled).all():
            raise RequestError("the WAV file has values that are not finite; write samples from -1 to 1")
    elif frames.dtype == np.uint8:
        scaled = (frames.astype(np.float32) - np.float32(128)) / np.float32(128)
    else:
        scaled = frames.astype(np.float32) / np.float32(-float(np.iinfo(frames.dtype).min))
    return scaled[:, 0] if scaled.shape[1] == 1 else scaled.mean(axis=1, dtype=np.float32)


_DTYPES: dict[tuple[int, int], np.dtype[Any]] = {
    (_PCM, 8): np.dtype(np.uint8),
    (_PCM, 16): np.dtype("<i2"),
    (_PCM, 24): np.dtype("<i4"),
    (_PCM, 32): np.dtype("<i4"),
    (_FLOAT, 32): np.dtype("<f4"),
    (_FLOAT, 64): np.dtype("<f8"),
}
