"""FP16 and sparse weights of published files become plain weights, which TFLite's quantizer accepts."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from edgert_deploy.packager.tflite_lowering import lower
from edgert_deploy.packager.tflite_lowering.half import with_half_weights
from edgert_deploy.packager.tflite_lowering.plain_weights import with_plain_weights
from edgert_deploy.packager.tflite_lowering.quantize import quantize_int8
from tests.support.models.tflite_cases import Case, inputs_of, model_of, random, run_tflite, sqnr_db

DENSE = Case("dense", "y = MatMul(x, w)", {"x": (64,)}, {"w": random(64, 256)})


def test_fp16_weights_become_fp32_with_the_same_answers_and_then_int8() -> None:
    half, inputs = with_half_weights(lower(model_of(DENSE))), inputs_of(DENSE, 3)
    plain = with_plain_weights(half)
    want = run_tflite(half, inputs)[0]
    np.testing.assert_allclose(run_tflite(plain, inputs)[0], want, rtol=1e-5, atol=1e-5)
    assert len(plain) > 1.8 * len(half)  # and the FP16 weights are gone
    assert len(plain) < 2.2 * len(half)
    samples = [[random(1, 64, seed=seed)] for seed in range(20)]
    assert sqnr_db(want, run_tflite(quantize_int8(plain, samples), inputs)[0]) > 25


def test_a_model_with_plain_weights_stays_unchanged() -> None:
    full = lower(model_of(DENSE))
    assert with_plain_weights(full) is full
