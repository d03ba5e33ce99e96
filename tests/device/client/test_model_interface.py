"""An app's inputs that a model does not take are refused before anything is sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from edgert.client.model_interface import ModelInterface
from edgert.errors import RequestError


@pytest.mark.parametrize(
    ("shape", "given", "says"),
    [
        ([1, 4], np.zeros((3, 4), np.float32), r"takes FP32 \[1, 4\], got FP32 \[3, 4\]; send 1 item a request$"),
        ([-1, 4], np.zeros((3, 5), np.float32), r"takes FP32 \[-1, 4\], got FP32 \[3, 5\] \(-1: any length\)$"),
        ([-1, 4], [[1, 2], [3]], r"^the input is not an array: .*inhomogeneous.*; give values of one shape and dtype$"),
        ([-1, 4], {"y": [1]}, r"takes inputs \['x'\], got \['y'\]: send these names and no others$"),
    ],
)
def test_a_refusal_names_what_the_model_takes(shape: list[int], given: Any, says: str) -> None:
    model = ModelInterface("m", {"inputs": [{"name": "x", "datatype": "FP32", "shape": shape}]})
    with pytest.raises(RequestError, match=says):
        model.arrays(given)
