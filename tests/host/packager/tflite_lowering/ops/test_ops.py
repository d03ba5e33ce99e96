"""Every operator of the lowering agrees with ONNX Runtime at batch 1 and 3, and survives INT8."""

from __future__ import annotations

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from edgert_deploy.packager.tflite_lowering import lower
from edgert_deploy.packager.tflite_lowering.fusion import RSQRT
from edgert_deploy.packager.tflite_lowering.ops import OPS
from tests.support.models.lowering_cases import ALL_CASES, RUNNABLE_CASES, case_named, elements
from tests.support.models.tflite_cases import (
    Case,
    assert_agrees_with_onnx_runtime,
    inputs_of,
    model_of,
    operators_of,
    quantized,
    run_onnx,
    run_tflite,
    sqnr_db,
)


@pytest.mark.parametrize("case", RUNNABLE_CASES, ids=lambda case: case.name)
def test_a_lowered_operator_agrees_with_onnx_runtime(case: Case) -> None:
    assert_agrees_with_onnx_runtime(case)


# These operators need the length of every axis, and so a fixed batch. ONNX's node tests test them.
FIXED_BATCH = frozenset({"ScatterND"})


def test_every_operator_has_a_test_case() -> None:
    assert set(OPS) - {RSQRT} - FIXED_BATCH <= operators_of(ALL_CASES)


# --- INT8


def operators_in(content: bytes) -> set[str]:
    from ai_edge_litert.interpreter import Interpreter

    interpreter = Interpreter(model_content=content)
    return {detail["op_name"] for detail in interpreter._get_ops_details()}


def test_a_hard_swish_in_int8_has_only_operators_that_xnnpack_runs() -> None:
    """With TFLite's own kernel, a network with 28 of them took at least five times as long."""
    case = case_named("hard swish")
    float_file, int8_file = lower(model_of(case)), quantized(case, SAMPLES)
    assert "HARD_SWISH" in operators_in(float_file)
    assert "HARD_SWISH" not in operators_in(int8_file)
    assert {"ADD", "MUL"} <= operators_in(int8_file)
    inputs = inputs_of(case, 1, seed=3)
    (wanted,), (got,) = run_tflite(float_file, inputs), run_tflite(int8_file, inputs)
    assert sqnr_db(wanted, got) > 30


# With few samples, some values of the compared sample lie outside of the ranges.
SAMPLES = 12
SQNR_DB_MIN = 18
# The loss of operators whose result has steps, at which a small error becomes a large one.
COARSE = {"mod": 9}
# The test takes logarithms of negative numbers on purpose.
NOT_FINITE = "is nan"


INT8_CASES = [case for case in RUNNABLE_CASES if case in elements.CASES and case.name != NOT_FINITE]


@pytest.mark.parametrize("case", INT8_CASES, ids=lambda case: case.name)
def test_each_operator_stays_accurate_in_int8(case: Case) -> None:
    """The operator runs in INT8, or in float between a DEQUANTIZE and a QUANTIZE."""
    inputs = inputs_of(case, 1, seed=3)
    (wanted,), (got,) = run_tflite(lower(model_of(case)), inputs), run_tflite(quantized(case, SAMPLES), inputs)
    if wanted.dtype.kind == "f":
        assert sqnr_db(wanted, got) >= COARSE.get(case.name, SQNR_DB_MIN)


# Eight bits give one operator 40 dB on such values. An ONNX operator that becomes several operators loses a little
# at each of them.
COMPOSED_SQNR_DB_MIN = 25


@pytest.mark.parametrize(
    "name",
    [
        "concat empty",
        "conv grouped x5",
        "conv 3-D grouped",
        "conv 3-D block",
        "conv transpose grouped",
        "conv transpose two strides",
        "conv transpose 3-D",
        "max pool dilated",
        "average pool dilated, counted 0",
        "bhid,bhjd->bhij",
        "bid,hdk->bhik",
        "layer normalization mean",
        "rms normalization -1",
        "lp normalization 1 1",
        "lp normalization 2 1",
        "local response normalization",
        "instance normalization 3-D",
        "gru bidirectional",
        "pad wrap",
        "pad negative",
        "resize shrinks",
        "resize 3-D",
    ],
)
def test_the_int8_form_of_composed_operators_stays_accurate(name: str) -> None:
    case = case_named(name)
    inputs = inputs_of(case, 3, seed=1000)
    (wanted,), (got,) = run_onnx(model_of(case), inputs), run_tflite(quantized(case, 40), inputs)
    assert sqnr_db(wanted, got) >= COMPOSED_SQNR_DB_MIN
