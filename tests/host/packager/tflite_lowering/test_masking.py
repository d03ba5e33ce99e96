"""Masked scores of attention survive INT8."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from edgert_deploy.packager.tflite_lowering import lower
from edgert_deploy.packager.tflite_lowering.quantize import quantize_int8
from tests.support.models.tflite_cases import (
    ABSOLUTE_TOLERANCE,
    RELATIVE_TOLERANCE,
    Arrays,
    Case,
    model_of,
    random,
    run_onnx,
    run_tflite,
    sqnr_db,
)


@pytest.mark.parametrize(
    ("mask", "masked"),
    [
        ("f = Cast<to=1>(m) b = Mul(f, low)", np.finfo(np.float32).min),
        ("f = Cast<to=1>(m) b = Mul(f, low)", -1e9),
        ("n = Cast<to=9>(m) b = Where(n, low, zero)", np.finfo(np.float32).min),
        ("n = Cast<to=9>(m) b = Where(n, low, zero)", -np.inf),
        ("f = Cast<to=1>(m) c = Mul(f, zero) b = Add(c, causal)", -np.inf),
    ],
)
def test_a_mask_of_scores_works_in_float_and_in_int8(mask: str, masked: float) -> None:
    body = (
        "q = MatMul(x, w) k = Transpose<perm=[0,2,1]>(x) s = MatMul(q, k)"
        f"{mask} t = Add(s, b) p = Softmax(t) y = MatMul(p, x)"
    )
    causal = np.triu(np.full((1, 5, 5), masked, np.float32), 1)
    constants = {"w": random(8, 8) / 4, "low": np.float32(masked), "zero": np.float32(0), "causal": causal}
    case = Case("mask", body, {"x": (5, 8), "m": (1, 5)}, constants, types={"m": "int64"})

    def masked_inputs(batch: int, seed: int) -> Arrays:
        hidden = np.random.default_rng(seed).integers(0, 2, (batch, 1, 5))
        hidden[..., 0] = 0
        return {"x": random(batch, 5, 8, seed=seed), "m": hidden}

    content, inputs = lower(model_of(case)), masked_inputs(16, 1000)
    samples = [list(masked_inputs(1, seed).values()) for seed in range(100)]
    (wanted,), (got,) = run_onnx(model_of(case), inputs), run_tflite(content, inputs)
    np.testing.assert_allclose(got, wanted, RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE)
    (got,) = run_tflite(quantize_int8(content, samples), inputs)
    assert sqnr_db(wanted, got) >= 20  # the scores go through an exponential
