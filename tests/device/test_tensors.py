"""Tensors by name, datatype and shape."""

from __future__ import annotations

import numpy as np
import pytest

from edgert.errors import RequestError
from edgert.tensors import ITEM_BYTES, MAX_RANK, NUMPY_NAMES, TensorSpec, batchable, byte_rows, fits


def test_each_datatype_has_the_size_that_numpy_gives_it() -> None:
    assert {name: np.dtype(numpy_name).itemsize for name, numpy_name in NUMPY_NAMES.items()} == ITEM_BYTES


@pytest.mark.parametrize(
    ("datatype", "shape", "says"),
    [
        ("FP8", (1,), "known: BOOL"),
        ("FP32", (-2,), "each >= 0 or -1"),
        ("FP32", (1,) * (MAX_RANK + 1), "at most 8 axes"),
    ],
)
def test_a_spec_that_no_tensor_can_have_is_refused(datatype: str, shape: tuple[int, ...], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        TensorSpec("x", datatype, shape)


def test_a_spec_is_read_back_from_json() -> None:
    spec = TensorSpec("x", "FP16", (2, 0, 3))
    assert (spec.form, spec.item_shape, spec.dtype) == ("FP16 [2, 0, 3]", (0, 3), np.dtype("float16"))
    assert TensorSpec.from_json(spec.as_json()) == spec
    assert TensorSpec("x", "INT8", (-1, 3, -1)).form == "INT8 [N, 3, any]"


@pytest.mark.parametrize(
    ("datatype", "shape", "scores", "classes"),
    [
        ("FP32", (-1, 3), True, True),
        ("INT8", (1, 2), True, True),
        ("FP32", (-1, 1), True, False),
        ("FP32", (-1, -1), True, False),
        ("INT64", (-1, 3), False, False),
        ("FP32", (-1, 3, 3), False, False),
    ],
)
def test_an_output_may_be_scores_by_its_shape_and_ranks_classes_if_there_are_several(
    datatype: str, shape: tuple[int, ...], scores: bool, classes: bool
) -> None:
    spec = TensorSpec("y", datatype, shape)
    assert (spec.may_be_scores, spec.ranks_classes) == (scores, classes)


def test_a_tensor_fits_where_datatype_and_every_stated_axis_agree() -> None:
    spec = TensorSpec("x", "FP32", (-1, 3))
    assert fits(spec, "FP32", (0, 3))
    assert not any((fits(spec, "FP16", (1, 3)), fits(spec, "FP32", (3,)), fits(spec, "FP32", (1, 4))))
    assert batchable([spec])
    assert not batchable([spec, TensorSpec("scalar", "FP32", ())])


def test_files_of_different_lengths_are_rows_with_zeros_at_their_end() -> None:
    assert byte_rows([b"ab", b"", b"xyz"]).tolist() == [[97, 98, 0], [0, 0, 0], [120, 121, 122]]
    assert byte_rows([]).shape == (0, 0)
