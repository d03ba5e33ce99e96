"""Test images: smooth like a photograph, as arrays and files."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
from numpy.typing import NDArray


def photo(height: int, width: int, seed: int = 0) -> NDArray[np.uint8]:
    """Return UINT8 [height, width, 3] made of a few waves: detail that survives JPEG and does not alias."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / max(height, width)
    channels = []
    for _ in range(3):
        waves = [
            np.sin(2 * np.pi * (random.uniform(-6, 6) * x + random.uniform(-6, 6) * y) + random.uniform(0, 6))
            for _ in range(4)
        ]
        channels.append(128 + 28 * np.sum(waves, axis=0))
    return np.stack(channels, axis=-1).clip(0, 255).astype(np.uint8)


def encoded(pixels: NDArray[Any], form: str = "JPEG", **options: Any) -> bytes:
    """Return the bytes of the file. [H, W, 3], [H, W, 4], or [H, W] for gray."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels).save(
        buffer, form, **({"quality": 95, "subsampling": 0} if form == "JPEG" else {}) | options
    )
    return buffer.getvalue()


def png_header(width: int, height: int) -> bytes:
    """Return a PNG file that claims that size and contains nearly nothing."""
    import struct
    import zlib

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )
