"""The ranges that INT8 scales are made from."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from tests.support.tflite_cases import IMAGE, Case, inputs_of, model_of, quantized, run_onnx, run_tflite, sqnr_db


def test_int8_scales_are_of_what_an_operator_reads_though_it_writes_its_result_there() -> None:
    case = Case("in place", "s = Sigmoid(x) m = Mul(s, k) y = Mul(m, k)", IMAGE, {"k": np.float32(40)})
    inputs = inputs_of(case, 4, seed=1000)
    (wanted,), (got,) = run_onnx(model_of(case), inputs), run_tflite(quantized(case, 20), inputs)
    assert sqnr_db(wanted, got) >= 40
