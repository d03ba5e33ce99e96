"""The written file fulfills the requirements of TFLite's kernels."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from edgert_deploy.packager.tflite_lowering import lower
from tests.support.models.lowering_cases import case_named
from tests.support.models.tflite_cases import model_of


def test_weights_are_aligned_in_the_file() -> None:
    case = case_named("conv 3x3 padded")
    content = lower(model_of(case))
    kernel = np.ascontiguousarray(np.asarray(case.constants["w"]).transpose(0, 2, 3, 1)).tobytes()
    assert content.index(kernel) % 16 == 0
