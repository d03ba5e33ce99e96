"""INT8 of operators that are lowered to several of TFLite's, or to ones that its quantiser treats in ways of its own."""

from __future__ import annotations

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from tests.host.packager.tflite_lowering import (
    test_convolution,
    test_einsum,
    test_normalization,
    test_recurrent,
    test_resize,
)
from tests.support.tflite_cases import inputs_of, model_of, quantized, run_onnx, run_tflite, sqnr_db

FAMILIES = (
    test_convolution,
    test_einsum,
    test_normalization,
    test_recurrent,
    test_resize,
)
CASES = {case.name: case for family in FAMILIES for case in family.CASES}
# Eight bits give one operator 40 dB on such values; what is made of several loses a little at each.
SQNR_DB_MIN = 25


@pytest.mark.parametrize(
    "name",
    [
        "conv grouped x5",
        "conv 3-D grouped",
        "conv 3-D block",
        "conv transpose grouped",
        "conv transpose two strides",
        "conv transpose 3-D",
        "max pool dilated",
        "average pool dilated, counted 0",
        "lp pool 2",
        "global lp pool 1",
        "bhid,bhjd->bhij",
        "bid,hdk->bhik",
        "layer normalization mean",
        "rms normalization -1",
        "lp normalization 1 1",
        "lp normalization 2 1",
        "local response normalization",
        "instance normalization 3-D",
        "rnn lengths",
        "gru bidirectional",
        "lstm peepholes",
        "pad wrap",
        "pad negative",
        "resize shrinks",
        "resize 3-D",
        "crop and resize linear",
    ],
)
def test_int8_stays_close(name: str) -> None:
    case = CASES[name]
    inputs = inputs_of(case, 3, seed=1000)
    (wanted,), (got,) = run_onnx(model_of(case), inputs), run_tflite(quantized(case, 40), inputs)
    assert sqnr_db(wanted, got) >= SQNR_DB_MIN
