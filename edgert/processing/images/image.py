"""Resizes image files and frames to the model's size, in Pillow's code, which releases the GIL.

Only Pillow decodes images, on host and device, so their pixels are equal
(docs/decisions/0004-pillow-is-the-only-image-decoder.md).

A JPEG is decoded at 1/1, 1/2, 1/4 or 1/8 of its size: the smallest size that is not below the wanted size. A frame is
first averaged in whole blocks. Limits are checked on the header, before the decode. EXIF orientation is not applied.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.rules import Preprocess, Resize
from edgert.errors import DeadlineExceeded, EngineMissing, RequestError
from edgert.processing.images.placement import Placement, resize_steps

STORED_PIXELS_MAX = 64 * 1024**2  # pixels that a file's header may state
PIXELS_MAX = 16 * 1024**2  # decoded pixels, of a JPEG at its reduced size; each takes 4 bytes, or 8 in a conversion
# A progressive file may have the pixels of a 4K image, because the decoder keeps all coefficients of such a file.
PROGRESSIVE_PIXELS_MAX = 8 * 1024**2 + 512 * 1024
SCANS_MAX = 64  # scans of a progressive file; each scan costs a pass over the whole image
SIDE_MAX = 32_768
FORMATS = ("JPEG", "PNG")
REDUCING_GAP = 1.5  # before interpolation, a frame has at least this many times the wanted size

# The number of images that are decoded at once. More than one per processor would only use memory.
_DECODING = threading.BoundedSemaphore(os.cpu_count() or 1)


class ImageReader:
    """Produces images of one size and colour: UINT8 [height, width, channels], each with its placement.

    `size` is (height, width) of the model's image. Without a resize rule, each image must have exactly this size.
    Raises EngineMissing if Pillow is not installed.
    """

    def __init__(self, rule: Preprocess, size: tuple[int, int]) -> None:
        self._image = sdk()
        self._mode = "L" if rule.colour == "gray" else "RGB"
        self._resize = rule.resize
        self.size = size if rule.resize is None else (rule.resize.height, rule.resize.width)
        name = "bilinear" if rule.resize is None else rule.resize.filter
        self._filter = self._image.Resampling[name.upper()]

    def decoded(self, data: bytes | memoryview, deadline_s: float | None = None) -> tuple[NDArray[np.uint8], Placement]:
        """Return a JPEG or PNG file as an image of the model's size.

        Raises RequestError if the file has another format or is too large. Raises DeadlineExceeded if `deadline_s`
        (monotonic) passes before a processor is free.
        """
        with _decoding_slot(deadline_s), _translated():
            image = self._image.open(io.BytesIO(data), formats=FORMATS)
            _check_header(image, data)
            return self._fitted(image)

    def resized(self, frame: NDArray[np.uint8], deadline_s: float | None = None) -> tuple[NDArray[np.uint8], Placement]:
        """Return `frame` [H, W, C] at the model's size, with its placement. Raises the errors of `decoded`."""
        height, width = frame.shape[:2]
        if not height or not width:
            raise RequestError(f"a frame of {height} x {width} pixels is empty")
        if self.size == (height, width):
            return frame, Placement(width, height)
        _check_size(width, height, PIXELS_MAX)
        with _decoding_slot(deadline_s), _translated():
            pixels = np.ascontiguousarray(frame)
            image = self._image.frombuffer(self._mode, (width, height), pixels.data, "raw", self._mode, 0, 1)
            return self._fitted(image)

    def _fitted(self, image: Any) -> tuple[NDArray[np.uint8], Placement]:
        width, height = image.size
        if self._resize is None or self.size == (height, width):
            if self.size != (height, width):
                raise RequestError(
                    f"the image has {height} x {width} pixels; the model needs {self.size[0]} x {self.size[1]}, "
                    "and its manifest has no resize rule"
                )
            return _array(_in_mode(image, self._mode)), Placement(width, height)
        steps = resize_steps(self._resize, width, height)
        reduced = image.draft(self._mode, steps.full)  # None except for a JPEG
        _check_size(image.width, image.height, PIXELS_MAX)
        image = _in_mode(image, self._mode)
        # The last row and column of a reduced JPEG are incomplete.
        shrink_x, shrink_y = (reduced[1][2] / width, reduced[1][3] / height) if reduced else (1.0, 1.0)
        left, top, right, bottom = steps.box
        box = (
            left * shrink_x,
            top * shrink_y,
            min(right * shrink_x, image.width),
            min(bottom * shrink_y, image.height),
        )
        gap = REDUCING_GAP if self._filter != self._image.Resampling.NEAREST else None
        small = image.resize((steps.width, steps.height), self._filter, box=box, reducing_gap=gap)
        return _padded(_array(small), self._resize, steps.left, steps.top), steps.placement


def sdk() -> Any:
    """Import Pillow's Image module. Raises EngineMissing, which names what to install."""
    try:
        from PIL import Image
    except ImportError as error:
        raise EngineMissing(
            "the model's manifest decodes or resizes images, and Pillow is not installed: pip install pillow"
        ) from error
    return Image


def _check_header(image: Any, data: bytes | memoryview) -> None:
    progressive = bool(image.info.get("progressive"))
    _check_size(image.width, image.height, PROGRESSIVE_PIXELS_MAX if progressive else STORED_PIXELS_MAX)
    if progressive and (scans := bytes(data).count(b"\xff\xda")) > SCANS_MAX:
        raise RequestError(f"the JPEG has {scans} scans; at most {SCANS_MAX} are decoded: save it again")


def _check_size(width: int, height: int, pixels_max: int) -> None:
    if width * height > pixels_max or max(width, height) > SIDE_MAX:
        raise RequestError(
            f"the image has {width} x {height} pixels; at most {pixels_max} in all and {SIDE_MAX} a side are allowed: "
            "make it smaller"
        )


def _in_mode(image: Any, mode: str) -> Any:
    """Return the decoded image in `mode`, without alpha, and with only the upper 8 of 16 bits."""
    image.load()
    if image.mode.startswith("I"):
        image = sdk().fromarray((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    return image if image.mode == mode else image.convert(mode)


def _array(image: Any) -> NDArray[np.uint8]:
    pixels: NDArray[np.uint8] = np.asarray(image)
    return pixels[:, :, None] if pixels.ndim == 2 else pixels


def _padded(pixels: NDArray[np.uint8], rule: Resize, left: int, top: int) -> NDArray[np.uint8]:
    height, width, channels = pixels.shape
    if (height, width) == (rule.height, rule.width):
        return pixels
    canvas = np.full((rule.height, rule.width, channels), rule.pad_value, np.uint8)
    canvas[top : top + height, left : left + width] = pixels
    return canvas


@contextmanager
def _decoding_slot(deadline_s: float | None) -> Iterator[None]:
    """Wait until fewer images are decoded than there are processors. Raises DeadlineExceeded."""
    wait_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
    if not _DECODING.acquire(timeout=wait_s):
        raise DeadlineExceeded(
            "the request's time-out passed while other images were decoded: send fewer requests, or allow more time"
        )
    try:
        yield
    finally:
        _DECODING.release()


@contextmanager
def _translated() -> Iterator[None]:
    """Translate every error of Pillow to RequestError: the file cannot be decoded."""
    try:
        yield
    except RequestError:
        raise
    except sdk().DecompressionBombError as error:
        raise RequestError(f"the image has more than {STORED_PIXELS_MAX} pixels: make it smaller") from error
    except sdk().UnidentifiedImageError as error:
        raise RequestError(
            "the file is neither a JPEG nor a PNG, or its head is damaged: send a complete file"
        ) from error
    except Exception as error:  # decoders' errors share no base class: OSError, SyntaxError, ValueError, struct.error
        raise RequestError(
            f"the image cannot be decoded: {str(error)[:200] or type(error).__name__}; send a complete JPEG or PNG file"
        ) from error
