"""The ranges of activations, which determine the INT8 scales."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from edgert_deploy.packager.tflite_lowering import lower
from edgert_deploy.packager.tflite_lowering.quantize import quantize_int8
from tests.support.models.tflite_cases import (
    IMAGE,
    Case,
    inputs_of,
    model_of,
    quantized,
    random,
    run_onnx,
    run_tflite,
    sqnr_db,
)


def test_int8_scales_fit_the_input_of_an_operator_that_overwrites_its_input() -> None:
    case = Case("in place", "s = Sigmoid(x) m = Mul(s, k) y = Mul(m, k)", IMAGE, {"k": np.float32(40)})
    inputs = inputs_of(case, 4, seed=1000)
    (wanted,), (got,) = run_onnx(model_of(case), inputs), run_tflite(quantized(case, 20), inputs)
    assert sqnr_db(wanted, got) >= 40


def test_a_cut_leaves_outliers_out_of_the_range_so_that_all_other_values_keep_their_steps() -> None:
    weights = random(1024, 16)
    weights[7] = 0  # the outlier must not reach the answer: a cut range of the answer would clip other values
    case = Case("outlier", "y = MatMul(x, w)", {"x": (1024,)}, {"w": weights})
    full = lower(model_of(case))
    samples = [[random(1, 1024, seed=seed)] for seed in range(20)]
    for (sample,) in samples:
        sample[0, 7] = 1e4
    usual = {"x": random(4, 1024, seed=99)}
    wanted = run_tflite(full, usual)[0]
    plain, cut = (run_tflite(quantize_int8(full, samples, cut=share), usual)[0] for share in (0.0, 0.001))
    assert sqnr_db(wanted, plain) < 5
    assert sqnr_db(wanted, cut) > 15
