"""Computes the model's input by the manifest's rule, from tensors, frames or image files.

A request may contain the input in up to three forms, which differ in datatype and shape:

- the model's own tensor;
- UINT8 frames in the rule's layout: frames of the model's size, or of any size if the rule resizes;
- if the rule decodes, image files: UINT8 [N, bytes] with one file in each row; shorter files are padded with zeros.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.rules import Preprocess, height_and_width
from edgert.errors import RequestError
from edgert.processing.images.image import ImageReader
from edgert.processing.images.normalize import Normalizer
from edgert.processing.images.placement import Placement
from edgert.tensors import TensorSpec, fits

# The limit for all images or windows of a request, because a small file may be a large image.
EXPANDED_BYTES_MAX = 64 * 1024**2

_TO_NCHW, _TO_NHWC = (0, 3, 1, 2), (0, 2, 3, 1)


class Preprocessor:
    """Applies `rule` to the input `spec`.

    Raises EngineMissing if the rule is about images and Pillow is missing.

    Attributes:
        frames: The UINT8 frames that a request may contain instead of `spec`; None if they are not allowed.
        files: The UINT8 files that a request may contain instead of `spec`; None if they are not allowed.
        forms: `spec` and all forms that are allowed instead.
    """

    def __init__(self, rule: Preprocess, spec: TensorSpec) -> None:
        self._rule = rule
        self._spec = spec
        self._normalize = Normalizer(rule, spec)
        self._transposition = _transposition(rule)
        self._flip = rule.frame_colour not in ("model", rule.colour)
        self._reader: ImageReader | None = None
        if rule.of_images:
            self._reader = ImageReader(rule, height_and_width(spec.shape, rule.model_layout))
        self.of_images = rule.of_images
        self.frames = _frames(rule, spec)
        self.files = TensorSpec(spec.name, "UINT8", (spec.shape[0], -1)) if rule.decode else None
        self.integers: TensorSpec | None = None  # only signals have this form
        self.forms = tuple(form for form in (spec, self.frames, self.files) if form is not None)

    def __call__(
        self, array: NDArray[Any], deadline_s: float | None = None
    ) -> tuple[NDArray[Any], list[Placement] | None]:
        """Return the model's tensor and the placement of each image.

        The placement is None if `array` is the model's own tensor. Raises RequestError for images that cannot be
        decoded or are too large. Raises DeadlineExceeded if `deadline_s` (monotonic) passes while images of other
        requests are decoded.
        """
        if not self.wants(array):
            return array, None
        if array.ndim == 2 and self.files is not None:
            return self._from_images(_files(array), len(array), deadline_s)
        if self._rule.resize is None:
            transposed = self._transposed(array)
            return self._normalize(transposed), self._in_place(transposed.shape)
        return self._from_images(array, len(array), deadline_s)

    def wants(self, array: NDArray[Any]) -> bool:
        """Return whether `array` (of one of the `forms`) is not the model's own tensor."""
        return array.dtype == np.uint8 and not fits(self._spec, "UINT8", array.shape)

    def _transposed(self, array: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return frames that have the model's size as a view with the model's axes and colours."""
        if self._flip:
            array = array[:, ::-1] if _channels_first(self._rule) else array[..., ::-1]
        return array if self._transposition is None else array.transpose(self._transposition)

    def _in_place(self, shape: tuple[int, ...]) -> list[Placement] | None:
        if len(shape) != 4:
            return None
        height, width = height_and_width(shape, self._rule.model_layout)
        return [Placement(width, height)] * shape[0]

    def _from_images(
        self, images: Iterable[Any], count: int, deadline_s: float | None
    ) -> tuple[NDArray[Any], list[Placement] | None]:
        assert self._reader is not None
        height, width = self._reader.size
        channels = 1 if self._rule.colour == "gray" else 3
        size = count * height * width * channels * self._normalize.dtype.itemsize
        if count > 1 and size > EXPANDED_BYTES_MAX:
            raise RequestError(
                f"{count} images become {size} bytes; at most {EXPANDED_BYTES_MAX} are allowed: split the request"
            )
        first = self._rule.model_layout == "nchw"
        out = np.empty(
            (count, channels, height, width) if first else (count, height, width, channels), self._spec.dtype
        )
        placements = []
        for row, image in zip(out, images, strict=True):
            pixels, placement = self._image(image, deadline_s)
            self._normalize.write((pixels.transpose(2, 0, 1) if first else pixels)[None], row[None])
            placements.append(placement)
        return out, placements

    def _image(self, image: Any, deadline_s: float | None) -> tuple[NDArray[np.uint8], Placement]:
        """Return one file or frame as [height, width, channels] in the model's colours."""
        assert self._reader is not None
        if isinstance(image, np.ndarray):
            frame = image.transpose(1, 2, 0) if _channels_first(self._rule) else image
            pixels, placement = self._reader.resized(frame, deadline_s)
            return (pixels[:, :, ::-1] if self._flip else pixels), placement
        pixels, placement = self._reader.decoded(image, deadline_s)
        return (pixels[:, :, ::-1] if self._rule.colour == "bgr" else pixels), placement


def _files(array: NDArray[np.uint8]) -> Iterator[bytes | memoryview]:
    """Yield the file of each row without its padding, because zeros would hide that a file is truncated."""
    if len(array) == 1:
        yield array[0].data
        return
    for row in array:
        yield row.tobytes().rstrip(b"\0")


def _channels_first(rule: Preprocess) -> bool:
    return (rule.model_layout if rule.layout == "model" else rule.layout) == "nchw"


def _transposition(rule: Preprocess) -> tuple[int, ...] | None:
    if rule.layout in ("model", rule.model_layout):
        return None
    return _TO_NCHW if rule.layout == "nhwc" else _TO_NHWC


def _frames(rule: Preprocess, spec: TensorSpec) -> TensorSpec:
    """Return the UINT8 tensor that a request may contain instead of `spec`."""
    shape = spec.shape
    if rule.resize is not None:
        shape = (shape[0], shape[1], -1, -1) if rule.model_layout == "nchw" else (shape[0], -1, -1, shape[3])
    if (axes := _transposition(rule)) is not None:
        shape = tuple(shape[axis] for axis in ((0, 2, 3, 1) if axes == _TO_NCHW else (0, 3, 1, 2)))
    return TensorSpec(spec.name, "UINT8", shape)
