"""Full-INT8 quantization of a float model."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter

from edgert.errors import BuildFailed
from edgert_deploy.packager.tflite_lowering.quantize import quantize_int8
from tests.support.models.tflite_cases import (
    FEATURES,
    IMAGE,
    TOKENS,
    Case,
    inputs_of,
    model_of,
    quantized,
    random,
    run_onnx,
    run_tflite,
    sqnr_db,
)

# The limit is below the 40 dB of one operator with 8 bits, because three layers round their weights and results.
SQNR_DB_MIN = 28
SMALL_CNN = Case(
    "small CNN",
    "c = Conv<pads=[1,1,1,1]>(x, w1, b1) n = BatchNormalization(c, s, b, m, v) r = Relu(n)"
    "p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r) c2 = Conv(p, w2) r2 = Relu(c2) f = Flatten(r2)"
    "y = Gemm<transB=1>(f, w3, b3)",
    {"x": (1, 8, 8)},
    {
        "w1": random(8, 1, 3, 3),
        "b1": random(8),
        "s": np.abs(random(8, seed=1)),
        "b": random(8, seed=2),
        "m": random(8, seed=3),
        "v": np.abs(random(8, seed=4)) + 1,
        "w2": random(16, 8, 3, 3),
        "w3": random(10, 64),
        "b3": random(10),
    },
)


def test_the_int8_form_of_a_small_cnn_stays_accurate_and_small() -> None:
    content = quantized(SMALL_CNN)
    inputs = inputs_of(SMALL_CNN, 64, seed=1000)
    (wanted,), (got,) = run_onnx(model_of(SMALL_CNN), inputs), run_tflite(content, inputs)
    assert got.dtype == np.float32
    assert sqnr_db(wanted, got) >= SQNR_DB_MIN


def test_int8_quantization_is_deterministic() -> None:
    assert quantized(SMALL_CNN, 20) == quantized(SMALL_CNN, 20)


def test_int8_quantization_keeps_names_and_the_open_batch() -> None:
    interpreter = Interpreter(model_content=quantized(SMALL_CNN, 20))
    (source,), (answer,) = interpreter.get_input_details(), interpreter.get_output_details()
    assert (source["name"], list(source["shape_signature"])) == ("x", [-1, 1, 8, 8])
    assert (answer["name"], list(answer["shape_signature"])) == ("y", [-1, 10])


def test_int8_quantization_does_not_change_token_ids() -> None:
    body = "e = Gather(t, x) n = MatMul(e, w) y = ReduceMean<axes=[1], keepdims=0>(n)"
    constants = {"t": random(7, 16), "w": random(16, 6)}
    case = Case("tokens", body, {"x": (5,)}, constants, types={"x": "int64"})
    inputs = inputs_of(case, 32, seed=1000)
    (wanted,), (got,) = run_onnx(model_of(case), inputs), run_tflite(quantized(case), inputs)
    assert sqnr_db(wanted, got) >= SQNR_DB_MIN


def test_a_branch_that_is_always_zero_runs_in_int8() -> None:
    body = "r = Relu(x) n = Neg(r) z = Add(r, n) c = Conv(x, w, low) d = Relu(c) e = Conv(d, w, b) f = Add(e, z) y = Add(f, x)"
    case = Case("dead", body, IMAGE, {"w": random(4, 4, 1, 1), "low": np.full(4, -100, np.float32), "b": random(4)})
    inputs = inputs_of(case, 4, seed=1000)
    (wanted,), (got,) = run_onnx(model_of(case), inputs), run_tflite(quantized(case, 20), inputs)
    assert sqnr_db(wanted, got) >= SQNR_DB_MIN


def test_a_value_that_overflows_in_int8_fails_the_build() -> None:
    case = Case("overflow", "e = Mul(x, k) y = Exp(e)", FEATURES, {"k": np.float32(1000)})
    with pytest.raises(BuildFailed, match="not finite"):
        quantized(case, 5)


@pytest.mark.parametrize("bound", [0, 999])
def test_comparisons_whose_int8_form_aborts_stay_float(bound: float) -> None:
    constants = {"far": np.float32(bound), "half": np.float32(0.5)}
    case = Case("wide", "m = Mul(x, half) g = Greater(m, far) y = Where(g, x, half)", FEATURES, constants)
    inputs = inputs_of(case, 32, seed=1000)
    (wanted,), (got,) = run_onnx(model_of(case), inputs), run_tflite(quantized(case), inputs)
    assert sqnr_db(wanted, got) >= 15  # a value near the bound may be on the other side of it


@pytest.mark.parametrize("op", ["Elu", "Floor", "Sign", "Softsign", "Sin", "Trilu"])
def test_operators_that_stay_float_are_given_floats(op: str) -> None:
    case = Case(
        "float", f"m = Mul(x, k) e = {op}(m) f = {op}(x) s = Add(e, f) y = Add(s, x)", TOKENS, {"k": np.float32(3)}
    )
    inputs = inputs_of(case, 32, seed=1000)
    (wanted,), (got,) = run_onnx(model_of(case), inputs), run_tflite(quantized(case), inputs)
    assert sqnr_db(wanted, got) >= (15 if op in ("Floor", "Sign") else SQNR_DB_MIN)  # half a step becomes a whole step


def test_the_positions_of_samples_stay_float() -> None:
    case = Case("grid", "t = Tanh(g) y = GridSample(x, t)", {**IMAGE, "g": (5, 6, 2)}, opset=16)
    content, inputs = quantized(case), inputs_of(case, 4, seed=1000)
    details = Interpreter(model_content=content).get_tensor_details()
    assert {detail["dtype"] for detail in details if "_minimum" in detail["name"]} == {np.float32}
    (wanted,), (got,) = run_onnx(model_of(case), inputs), run_tflite(content, inputs)
    assert sqnr_db(wanted, got) >= 20  # the results of Tanh have 8 bits


@pytest.mark.parametrize("op", ["Log", "Sqrt"])
def test_operators_whose_int8_form_older_runtimes_lack_stay_float(op: str) -> None:
    case = Case("older", f"e = Exp(x) f = {op}(e) g = {op}(x) y = Add(f, g)", FEATURES, positive=True)
    content = quantized(case)
    model = schema.Model.GetRootAs(content, 0)
    codes = [model.OperatorCodes(i) for i in range(model.OperatorCodesLength())]
    assert [code.Version() for code in codes if code.BuiltinCode() == getattr(schema.BuiltinOperator, op.upper())] == [
        1
    ]
    inputs = inputs_of(case, 32, seed=1000)
    (wanted,), (got,) = run_onnx(model_of(case), inputs), run_tflite(content, inputs)
    assert sqnr_db(wanted, got) >= SQNR_DB_MIN


def test_a_model_that_the_quantizer_refuses_fails_the_build() -> None:
    with pytest.raises(BuildFailed, match=r"2\.3\.0"):
        quantize_int8(b"no model", [[random(1, 4)]])
