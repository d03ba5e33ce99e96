"""Image files and frames at the model's size: every way gives the same picture, and hostile files are refused."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("PIL")

from PIL import Image

from edgert.bundle.rules import Preprocess, Resize
from edgert.errors import DeadlineExceeded, RequestError
from edgert.processing.images.image import (
    _DECODING,
    PIXELS_MAX,
    PROGRESSIVE_PIXELS_MAX,
    SCANS_MAX,
    STORED_PIXELS_MAX,
    ImageReader,
)
from edgert.processing.images.placement import resize_steps
from tests.support.models.images import encoded, photo, png_header


def reader(rule: str = "stretch", height: int = 64, width: int = 64, **options: Any) -> ImageReader:
    colour = options.pop("colour", "rgb")
    resize = Resize(rule, height, width, **options)
    return ImageReader(Preprocess("x", colour=colour, resize=resize, decode=True), (height, width))


def plain(pixels: NDArray[Any], width: int, height: int) -> NDArray[Any]:
    """Resize like training code: the whole image, with Pillow's bilinear filter."""
    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR))


def difference(a: NDArray[Any], b: NDArray[Any]) -> float:
    assert a.shape == b.shape
    return float(np.abs(a.astype(int) - b.astype(int)).mean())


@pytest.mark.parametrize("size", [(1080, 1920), (481, 639), (70, 65), (20, 30)])
def test_a_jpeg_and_a_png_and_a_frame_give_the_picture_of_the_training_code(size: tuple[int, int]) -> None:
    picture = photo(*size)
    want = plain(picture, 64, 48)
    read = reader(height=48, width=64)
    for got, placement in (
        read.decoded(encoded(picture)),
        read.decoded(encoded(picture, "PNG")),
        read.resized(picture),
    ):
        assert difference(got, want) < 2.0
        assert (placement.width, placement.height) == (size[1], size[0])
        assert (placement.scale_x, placement.scale_y) == (64 / size[1], 48 / size[0])


def test_the_middle_is_cut_as_torchvision_cuts_it() -> None:
    picture = photo(300, 500)
    whole = plain(picture, 64 * 500 // 300, 64)
    left = round((whole.shape[1] - 56) / 2)
    got, placement = reader("crop", 56, 56, shortest_side=64).decoded(encoded(picture, "PNG"))
    assert difference(got, whole[4:60, left : left + 56]) < 1.0
    assert placement.offset_x == -left
    assert placement.offset_y == -4


def test_a_crop_without_a_side_resizes_the_image_to_just_cover_the_models_size() -> None:
    steps = resize_steps(Resize("crop", 100, 50), 400, 400)
    assert steps.full == (100, 100)
    assert steps.box == (100.0, 0.0, 300.0, 400.0)


@pytest.mark.parametrize(("height", "width"), [(50, 100), (100, 50), (33, 97), (1, 500), (64, 64)])
def test_a_letterbox_keeps_the_ratio_and_fills_the_rest(height: int, width: int) -> None:
    picture = np.full((height, width, 3), 200, np.uint8)
    got, placement = reader("letterbox", pad_value=7).decoded(encoded(picture, "PNG"))
    top, left = placement.offset_y, placement.offset_x
    bottom, right = top + height * placement.scale_y, left + width * placement.scale_x
    inside = np.zeros((64, 64), bool)
    inside[int(top) : round(bottom), int(left) : round(right)] = True
    assert (got[inside] == 200).all()
    assert (got[~inside] == 7).all()
    assert max(right - left, bottom - top) == 64
    assert abs((64 - right) - left) <= 1
    assert abs((64 - bottom) - top) <= 1


def test_colours_have_the_order_and_type_of_the_model() -> None:
    red = np.zeros((64, 64, 3), np.uint8)
    red[..., 0] = 255
    assert reader().decoded(encoded(red, "PNG"))[0][0, 0].tolist() == [255, 0, 0]
    gray, _ = reader(colour="gray").decoded(encoded(red, "PNG"))
    assert gray.shape == (64, 64, 1)
    assert gray[0, 0, 0] == 76  # ITU-R BT.601 luma


def test_every_usual_kind_of_png_is_read() -> None:
    picture = photo(64, 64)
    alpha = np.dstack([picture, np.full((64, 64), 90, np.uint8)])
    assert difference(reader().decoded(encoded(alpha, "PNG"))[0], picture) == 0
    gray = picture[..., 0].copy()
    assert difference(reader().decoded(encoded(gray, "PNG"))[0], np.dstack([gray] * 3)) == 0
    deep = gray.astype(np.uint16) * 257
    assert difference(reader().decoded(encoded(deep, "PNG"))[0], np.dstack([gray] * 3)) == 0
    assert difference(reader(colour="gray").decoded(encoded(deep, "PNG"))[0], gray[..., None]) == 0
    palette = Image.fromarray(picture).quantize(256)
    buffer = io.BytesIO()
    palette.save(buffer, "PNG")
    assert difference(reader().decoded(buffer.getvalue())[0], np.asarray(palette.convert("RGB"))) == 0


def test_without_resizing_only_the_models_size_is_taken() -> None:
    read = ImageReader(Preprocess("x", decode=True), (32, 48))
    picture = photo(32, 48)
    assert difference(read.decoded(encoded(picture, "PNG"))[0], picture) == 0
    with pytest.raises(RequestError, match="32 x 48"):
        read.decoded(encoded(photo(48, 32)))


BROKEN: list[tuple[str, Callable[[], bytes]]] = [
    ("nothing", lambda: b""),
    ("text", lambda: b"hello, I am a picture"),
    ("a cut JPEG", lambda: encoded(photo(200, 200))[:-2000]),
    ("a cut PNG", lambda: encoded(photo(200, 200), "PNG")[:-2000]),
    ("a header alone", lambda: encoded(photo(200, 200))[:300]),
    ("a GIF", lambda: encoded(photo(20, 20)[..., 0].copy(), "GIF")),
    ("a TIFF", lambda: encoded(photo(20, 20), "TIFF")),
    ("a chunk that fails its checksum", lambda: encoded(photo(99, 99), "PNG").replace(b"IDAT", b"IDAt", 1)),
    ("too little in a PNG", lambda: png_header(3000, 3000)),
]


@pytest.mark.parametrize("make", [make for _, make in BROKEN], ids=[name for name, _ in BROKEN])
def test_a_file_that_is_not_a_whole_image_is_refused_as_an_error_of_the_request(make: Callable[[], bytes]) -> None:
    with pytest.raises(RequestError, match=r"^(?!.*object at)"):
        reader().decoded(make())


def test_any_damage_gives_an_answer_or_a_request_error() -> None:
    random = np.random.default_rng(1)
    for form in ("JPEG", "PNG"):
        good = encoded(photo(40, 50), form)
        for _ in range(300):
            bad = bytearray(good)
            for at in random.integers(0, len(bad), random.integers(1, 9)):
                bad[at] = random.integers(256)
            try:
                got, _ = reader().decoded(bytes(bad))
                assert got.shape == (64, 64, 3)
            except RequestError:
                pass


@pytest.mark.parametrize(("width", "height"), [(30_000, 30_000), (100_000, 1), (2**31 - 1, 2**31 - 1), (8192, 8192)])
def test_a_bomb_is_refused_by_its_header_before_memory_is_taken(width: int, height: int) -> None:
    bomb = png_header(width, height)
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match=r"more than|at most|limit"):
            reader().decoded(bomb)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def claiming(file: bytes, marker: bytes, width: int, height: int) -> bytes:
    """Return the JPEG with another size in its header."""
    at = file.index(marker) + 5
    return file[:at] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + file[at + 4 :]


def test_progressive_files_are_bounded_in_size_and_scans() -> None:
    good = encoded(photo(64, 64), progressive=True)
    assert reader().decoded(good)[0].shape == (64, 64, 3)
    scan = good[good.rindex(b"\xff\xda") : -2]
    with pytest.raises(RequestError, match=f"at most {SCANS_MAX}"):
        reader().decoded(good[:-2] + scan * SCANS_MAX + b"\xff\xd9")
    with pytest.raises(RequestError, match=f"at most {PROGRESSIVE_PIXELS_MAX}"):
        reader().decoded(claiming(good, b"\xff\xc2", 4096, 4096))
    baseline = encoded(photo(64, 64))
    with pytest.raises(RequestError, match=f"at most {STORED_PIXELS_MAX}"):
        reader().decoded(claiming(baseline, b"\xff\xc0", 8192, 8193))
    # An image that can be decoded at an eighth of its size is accepted. An image that must be decoded whole is refused.
    assert reader().decoded(claiming(baseline, b"\xff\xc0", 8192, 8192))[0].shape == (64, 64, 3)
    with pytest.raises(RequestError, match=f"at most {PIXELS_MAX}"):
        reader(height=4100, width=4100).decoded(claiming(baseline, b"\xff\xc0", 8192, 8192))


def test_frames_that_are_too_large_or_empty_are_refused() -> None:
    huge = np.broadcast_to(np.uint8(0), (40_000, 40_000, 3))
    with pytest.raises(RequestError, match="at most"):
        reader().resized(huge)
    with pytest.raises(RequestError, match="is empty"):
        reader().resized(np.zeros((0, 5, 3), np.uint8))


def test_an_image_whose_deadline_has_passed_is_not_decoded() -> None:
    with pytest.raises(DeadlineExceeded):
        threads_all_busy(lambda: reader().decoded(encoded(photo(64, 64)), time.monotonic() + 0.02))


def threads_all_busy(ask: Callable[[], Any]) -> None:
    """Send a request while as many images are decoded as there are processors."""
    with ExitStack() as stack:
        for _ in range(os.cpu_count() or 1):
            stack.enter_context(_DECODING)
        ask()


def test_the_exif_orientation_is_ignored() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    picture = photo(40, 80)
    _, placement = reader().decoded(encoded(picture, exif=exif))
    assert (placement.width, placement.height) == (80, 40)


def test_a_device_without_pillow_says_what_to_install() -> None:
    code = """
import sys
sys.modules["PIL"] = None
from edgert.errors import EngineMissing
from edgert.bundle.rules import Preprocess
from edgert.processing.images.preprocess import Preprocessor
from edgert.tensors import TensorSpec
spec = TensorSpec("x", "FP32", (-1, 3, 8, 8))
Preprocessor(Preprocess("x", 2.0), spec)  # arithmetic alone needs no codec
try:
    Preprocessor(Preprocess("x", decode=True), spec)
except EngineMissing as error:
    print(error.message)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install pillow" in done.stdout
