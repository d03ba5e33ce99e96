"""The tensors that apps send to a model: refused tensors, and the size of frames and shared memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.errors import RequestError
from edgert.worker.pipeline.app_tensors import FRAME_BYTES_MIN, SHARED_BYTES_MIN, AppTensors
from tests.support.stand_ins.loaded_models import loaded, pipeline_of, sent

ITEM = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)


def app_tensors(folder: Path, **options: Any) -> AppTensors:
    return pipeline_of(loaded(folder, **options)).tensors


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((), "takes 1 input, the request has 0"),
        ((ITEM, ITEM), "the request has 2"),
        ((ITEM[:, :3],), r"takes FP32 \[-1, 4\], got FP32 \[1, 3\]"),
        ((ITEM.astype(np.int32),), "got INT32"),
        ((ITEM[:0],), "has 0 items; it may have 1 to 1024: send one or more"),
        ((np.zeros((1025, 4), np.float32),), "1 to 1024: split it"),
    ],
)
def test_inputs_that_the_model_does_not_take_are_refused(
    tmp_path: Path, given: tuple[NDArray[Any], ...], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        app_tensors(tmp_path).read(sent(*given))


def test_the_error_names_a_tensor_with_the_number_of_another_input(tmp_path: Path) -> None:
    (tensor,) = sent(ITEM)
    with pytest.raises(RequestError, match=r"the place of input 0 \('x'\) has number 1: send the inputs in order"):
        app_tensors(tmp_path).read((tensor._replace(number=1),))


def test_the_sizes_of_frames_and_of_shared_memory_follow_the_model(tmp_path: Path) -> None:
    small = app_tensors(tmp_path / "small")
    assert FRAME_BYTES_MIN < small.frame_bytes_max(10**9) < 10**6
    assert small.frame_bytes_max(1000) == 1000
    assert small.shared_bytes == SHARED_BYTES_MIN
    large = app_tensors(tmp_path / "large", item_shape=(300_000,))
    assert large.shared_bytes > 8 * 1_200_000
    assert small.welcome() == {
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 4]}],
        "outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}],
    }
