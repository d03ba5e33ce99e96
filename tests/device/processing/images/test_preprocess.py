"""From a request's tensors, frames and files to the model's tensor."""

from __future__ import annotations

import numpy as np
import pytest

from edgert.bundle.rules import Preprocess, Resize
from edgert.errors import RequestError
from edgert.processing.images.preprocess import EXPANDED_BYTES_MAX, Preprocessor
from edgert.tensors import TensorSpec
from tests.support.models.images import encoded, photo

NCHW, NHWC = (-1, 3, 12, 16), (-1, 12, 16, 3)


def test_a_tensor_of_the_models_form_is_used_unchanged() -> None:
    array = np.zeros((1, *NCHW[1:]), np.float32)
    got, placements = Preprocessor(Preprocess("x", 2.0), TensorSpec("x", "FP32", NCHW))(array)
    assert got is array
    assert placements is None


@pytest.mark.parametrize("frame_colour", ["model", "rgb", "bgr"])
@pytest.mark.parametrize("colour", ["rgb", "bgr"])
@pytest.mark.parametrize("resize", [None, Resize("stretch", 12, 16)])
def test_colours_arrive_in_the_models_order(frame_colour: str, colour: str, resize: Resize | None) -> None:
    pytest.importorskip("PIL")
    red = np.zeros((1, 12, 16, 3), np.uint8)
    sent = colour if frame_colour == "model" else frame_colour
    red[..., "rgb".index("r") if sent == "rgb" else 2] = 255
    rule = Preprocess("x", layout="nhwc", colour=colour, frame_colour=frame_colour, resize=resize, decode=True)
    pre = Preprocessor(rule, TensorSpec("x", "FP32", NCHW))
    want = [255.0, 0.0, 0.0] if colour == "rgb" else [0.0, 0.0, 255.0]
    assert pre(red)[0][0, :, 5, 5].tolist() == want
    picture = np.zeros((12, 16, 3), np.uint8)
    picture[..., 0] = 255
    file = np.frombuffer(encoded(picture, "PNG"), np.uint8)[None]
    assert pre(file)[0][0, :, 5, 5].tolist() == want


def test_files_of_a_request_are_rows_filled_with_zeros() -> None:
    pytest.importorskip("PIL")
    rule = Preprocess("x", decode=True, resize=Resize("letterbox", 12, 16))
    pre = Preprocessor(rule, TensorSpec("x", "FP32", NCHW))
    files = [encoded(photo(30, 20)), encoded(photo(100, 90), "PNG"), encoded(photo(12, 16))]
    rows = np.zeros((3, max(map(len, files))), np.uint8)
    for row, file in zip(rows, files, strict=True):
        row[: len(file)] = np.frombuffer(file, np.uint8)
    together, placements = pre(rows)
    assert placements is not None
    assert [(p.width, p.height) for p in placements] == [(20, 30), (90, 100), (16, 12)]
    for one, file in zip(together, files, strict=True):
        assert np.array_equal(pre(np.frombuffer(file, np.uint8)[None])[0][0], one)
    cut = len(files[0]) // 2
    rows[0, cut:] = 0
    with pytest.raises(RequestError, match="decoded"):
        pre(rows)


def test_small_files_that_decode_to_more_than_the_limit_are_refused() -> None:
    pytest.importorskip("PIL")
    spec = TensorSpec("x", "FP32", (-1, 3, 640, 640))
    pre = Preprocessor(Preprocess("x", decode=True, resize=Resize("stretch", 640, 640)), spec)
    file = np.frombuffer(encoded(photo(8, 8)), np.uint8)
    with pytest.raises(RequestError, match=f"at most {EXPANDED_BYTES_MAX}"):
        pre(np.stack([file] * 100))
    frames = np.zeros((100, 3, 2, 2), np.uint8)
    with pytest.raises(RequestError, match=f"at most {EXPANDED_BYTES_MAX}"):
        pre(frames)
