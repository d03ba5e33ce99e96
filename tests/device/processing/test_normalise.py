"""UINT8 to the model's values: as the formula says, whatever the axes, the dtype and the colours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.bundle.rules import Preprocess, Resize
from edgert.errors import BundleError, RequestError
from edgert.processing.normalise import Normaliser
from edgert.processing.preprocess import EXPANDED_BYTES_MAX, Preprocessor
from edgert.tensors import TensorSpec
from tests.support.images import encoded, photo

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NCHW, NHWC = (-1, 3, 12, 16), (-1, 12, 16, 3)
FRAMES = np.random.default_rng(0).integers(0, 256, (2, 12, 16, 3), dtype=np.uint8)


def formula(values: NDArray[Any], rule: Preprocess, axis: int) -> NDArray[np.float64]:
    shape = [1] * values.ndim
    shape[axis] = -1
    mean, std = (np.asarray(v, np.float64).reshape(shape) if len(v) > 1 else v[0] for v in (rule.mean, rule.std))
    return np.asarray((values.astype(np.float64) * rule.scale - mean) / std)


@pytest.mark.parametrize("layout", ["nhwc", "nchw", "model"])
@pytest.mark.parametrize("model_layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("datatype", ["FP32", "FP16", "UINT8", "INT8"])
@pytest.mark.parametrize(("mean", "std"), [(MEAN, STD), ((0.0,), (1.0,)), ((0.5,), STD), ((5.0, 1.0, 3.0), (0.02,))])
def test_values_are_what_the_formula_gives(
    layout: str, model_layout: str, datatype: str, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    rule = Preprocess("x", 1 / 255, mean, std, layout=layout, model_layout=model_layout)
    spec = TensorSpec("x", datatype, NCHW if model_layout == "nchw" else NHWC)
    pre = Preprocessor(rule, spec)
    source = FRAMES if (model_layout if layout == "model" else layout) == "nhwc" else FRAMES.transpose(0, 3, 1, 2)
    if source.shape[1:] == spec.item_shape and datatype == "UINT8":
        assert not pre.wants(source)  # it cannot be told from the model's own tensor
        return
    got, placements = pre(np.ascontiguousarray(source))
    want = formula(FRAMES, rule, 3)
    want = want.transpose(0, 3, 1, 2) if model_layout == "nchw" else want
    assert got.dtype == spec.dtype
    assert got.flags.c_contiguous
    assert got.shape == (2, *spec.item_shape)
    assert placements == [(16, 12, 1.0, 1.0, 0.0, 0.0)] * 2
    if got.dtype.kind == "f":
        bound = 4 * np.finfo(got.dtype).eps * max(1.0, np.abs(want).max())
        assert np.abs(got.astype(np.float64) - want).max() <= bound
    else:
        limits = np.iinfo(got.dtype)
        assert np.array_equal(got, np.rint(want).clip(limits.min, limits.max))


def test_tensors_that_are_no_images_are_normalised_along_axis_1() -> None:
    rule = Preprocess("x", 1.0, (1.0, 2.0), (2.0, 4.0))
    got, placements = Preprocessor(rule, TensorSpec("x", "FP32", (-1, 2)))(np.array([[3, 10], [1, 2]], np.uint8))
    assert got.tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert placements is None


def test_the_models_own_tensor_is_left_alone() -> None:
    array = np.zeros((1, *NCHW[1:]), np.float32)
    got, placements = Preprocessor(Preprocess("x", 2.0), TensorSpec("x", "FP32", NCHW))(array)
    assert got is array
    assert placements is None


def test_channels_that_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(BundleError, match="2 channels"):
        Normaliser(Preprocess("x", 1.0, (1.0, 2.0)), TensorSpec("x", "FP32", NCHW))


def test_one_table_and_three_agree_for_8_bit_models() -> None:
    spec = TensorSpec("x", "INT8", NCHW)
    one = Normaliser(Preprocess("x", 1.0, (128.0,)), spec)
    three = Normaliser(Preprocess("x", 1.0, (128.0,) * 3), spec)
    values = np.ascontiguousarray(FRAMES.transpose(0, 3, 1, 2))
    want = (values ^ 0x80).view(np.int8)  # minus 128, which flips the upper bit
    assert np.array_equal(one(values), want)
    assert np.array_equal(three(values), want)


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


def test_many_small_files_cannot_become_more_than_the_limit() -> None:
    pytest.importorskip("PIL")
    spec = TensorSpec("x", "FP32", (-1, 3, 640, 640))
    pre = Preprocessor(Preprocess("x", decode=True, resize=Resize("stretch", 640, 640)), spec)
    file = np.frombuffer(encoded(photo(8, 8)), np.uint8)
    with pytest.raises(RequestError, match=f"at most {EXPANDED_BYTES_MAX}"):
        pre(np.stack([file] * 100))
    frames = np.zeros((100, 3, 2, 2), np.uint8)
    with pytest.raises(RequestError, match=f"at most {EXPANDED_BYTES_MAX}"):
        pre(frames)
