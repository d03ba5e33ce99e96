"""UINT8 becomes the model's values as in the formula, for all axes, dtypes and colours."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.bundle.rules import Preprocess
from edgert.errors import BundleError
from edgert.processing.images.normalize import Normalizer
from edgert.processing.images.preprocess import Preprocessor
from edgert.tensors import TensorSpec

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
def test_normalized_values_equal_those_of_the_formula(
    layout: str, model_layout: str, datatype: str, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    rule = Preprocess("x", 1 / 255, mean, std, layout=layout, model_layout=model_layout)
    spec = TensorSpec("x", datatype, NCHW if model_layout == "nchw" else NHWC)
    pre = Preprocessor(rule, spec)
    source = FRAMES if (model_layout if layout == "model" else layout) == "nhwc" else FRAMES.transpose(0, 3, 1, 2)
    if source.shape[1:] == spec.item_shape and datatype == "UINT8":
        assert not pre.wants(source)  # this tensor looks like the model's own tensor
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


def test_tensors_that_are_not_images_are_normalized_along_axis_1() -> None:
    rule = Preprocess("x", 1.0, (1.0, 2.0), (2.0, 4.0))
    got, placements = Preprocessor(rule, TensorSpec("x", "FP32", (-1, 2)))(np.array([[3, 10], [1, 2]], np.uint8))
    assert got.tolist() == [[1.0, 2.0], [0.0, 0.0]]
    assert placements is None


def test_channels_that_the_model_does_not_have_are_refused() -> None:
    with pytest.raises(BundleError, match="2 channels"):
        Normalizer(Preprocess("x", 1.0, (1.0, 2.0)), TensorSpec("x", "FP32", NCHW))


def test_one_table_for_all_channels_and_three_tables_give_the_same_8_bit_values() -> None:
    spec = TensorSpec("x", "INT8", NCHW)
    one = Normalizer(Preprocess("x", 1.0, (128.0,)), spec)
    three = Normalizer(Preprocess("x", 1.0, (128.0,) * 3), spec)
    values = np.ascontiguousarray(FRAMES.transpose(0, 3, 1, 2))
    want = (values ^ 0x80).view(np.int8)  # minus 128: this flips the upper bit
    assert np.array_equal(one(values), want)
    assert np.array_equal(three(values), want)
