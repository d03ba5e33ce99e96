"""FP16 weights: half the file, nearly the same answers."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from edgert_deploy.packager.tflite_lowering import lower
from edgert_deploy.packager.tflite_lowering.half import ELEMENTS_MIN, with_half_weights
from tests.support.tflite_cases import Case, inputs_of, model_of, random, run_tflite


def test_large_weights_become_fp16() -> None:
    weights = random(64, 256)
    weights[0, 0] = 1e6  # beyond the range of FP16: clipped
    case = Case("half", "y = MatMul(x, w)", {"x": (64,)}, {"w": weights})
    full, inputs = lower(model_of(case)), inputs_of(case, 2)
    half = with_half_weights(full)
    assert len(half) < 0.6 * len(full)
    inputs["x"][:, 0] = 0
    np.testing.assert_allclose(run_tflite(half, inputs)[0], run_tflite(full, inputs)[0], atol=0.05)


def test_a_model_of_small_weights_stays_as_it_is() -> None:
    case = Case("small", "y = Mul(x, w)", {"x": (4,)}, {"w": random(4)})
    assert ELEMENTS_MIN > 4
    inputs, full = inputs_of(case, 1), lower(model_of(case))
    np.testing.assert_array_equal(run_tflite(with_half_weights(full), inputs)[0], run_tflite(full, inputs)[0])
