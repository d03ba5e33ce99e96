"""Inputs that do not fit the model are refused before the client sends anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgert.client.model_interface import ModelInterface
from edgert.errors import RequestError


class Tensor:
    """Like a PyTorch tensor that NumPy cannot read."""

    def __array__(self) -> None:
        raise RuntimeError("it requires grad.")


@pytest.mark.parametrize(
    ("shape", "given", "says"),
    [
        ([1, 4], np.zeros((3, 4), np.float32), r"takes FP32 \[1, 4\], got FP32 \[3, 4\]; send 1 item a request$"),
        ([-1, 4], np.zeros((3, 5), np.float32), r"takes FP32 \[-1, 4\], got FP32 \[3, 5\] \(-1: any length\)$"),
        ([-1, 4], [[1, 2], [3]], r"^the input is not an array: .*inhomogeneous.*; give values of one shape and dtype$"),
        ([-1, 4], Tensor(), r"^the input is not an array: it requires grad; give values of one shape and dtype$"),
        ([-1, 4], Path("cat.jpg"), r"^the input is a \w+Path, not an array: give numbers, or the bytes of a file$"),
        ([-1, 4], None, r"^the input is a NoneType, not an array"),
        ([-1, 4], {"y": [1]}, r"takes inputs \['x'\], got \['y'\]: send these names and no others$"),
    ],
)
def test_a_refusal_of_inputs_names_the_inputs_of_the_model(shape: list[int], given: Any, says: str) -> None:
    model = ModelInterface("m", {"inputs": [{"name": "x", "datatype": "FP32", "shape": shape}]})
    with pytest.raises(RequestError, match=says):
        model.arrays(given)


@pytest.mark.parametrize(
    ("frame", "given", "says"),
    [
        ([-1, 1, 8, 8], np.zeros((8, 8), np.uint8), r"; a gray frame needs its axis of channels: frame\[None\]$"),
        (
            [-1, 8, 8, 1],
            np.zeros((8, 8), np.uint8),
            r"; a gray frame needs its axis of channels: frame\[\.\.\., None\]$",
        ),
        ([-1, 8, 8, 3], np.zeros((8, 8), np.uint8), r"; a frame has an axis of channels$"),
        (
            [-1, 8, 8, 3],
            np.zeros((9, 9, 3), np.uint8),
            r"; frames of another size .* need \[resize\] and `layout` in the",
        ),
        (
            [-1, 8, 8, 3],
            b"\xff\xd8",
            r"; to send image files, build the model with decode = true in its --preprocess$",
        ),
    ],
)
def test_the_refusal_of_a_frame_names_the_rule_that_would_let_the_model_accept_it(
    frame: list[int], given: Any, says: str
) -> None:
    inputs = [{"name": "x", "datatype": "FP32", "shape": [-1, 3, 8, 8]}]
    form = {"name": "x", "datatype": "UINT8", "shape": frame}
    with pytest.raises(RequestError, match=says):
        ModelInterface("m", {"inputs": inputs, "preprocess": {"input": form}}).arrays(given)
