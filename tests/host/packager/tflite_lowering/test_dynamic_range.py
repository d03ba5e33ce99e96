"""INT8 weights with float activations give a quarter of the file and nearly the same answers."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from edgert.errors import BuildFailed
from edgert_deploy.packager.tflite_lowering import lower
from edgert_deploy.packager.tflite_lowering.dynamic_range import with_int8_weights
from tests.support.models.tflite_cases import Case, inputs_of, model_of, random, run_tflite

MATMUL = Case("dense", "y = MatMul(x, w)", {"x": (64,)}, {"w": random(64, 256)})
CONV = Case("conv", "y = Conv<pads=[1,1,1,1]>(x, w)", {"x": (8, 9, 9)}, {"w": random(32, 8, 3, 3)})


@pytest.mark.parametrize("case", [MATMUL, CONV], ids=lambda case: case.name)
def test_weights_become_int8_with_a_scale_for_each_channel(case: Case) -> None:
    full, inputs = lower(model_of(case)), inputs_of(case, 3)
    small = with_int8_weights(full)
    assert len(small) < 0.4 * len(full)
    want, got = run_tflite(full, inputs)[0], run_tflite(small, inputs)[0]
    np.testing.assert_allclose(got, want, atol=0.02 * float(np.abs(want).max()))


def test_a_table_of_embeddings_has_a_scale_for_each_row_and_its_batch_stays_open() -> None:
    table = random(100, 32) * np.geomspace(1e-3, 1e3, 100, dtype=np.float32)[:, None]
    case = Case("table", "y = Gather(w, x)", {"x": (5,)}, {"w": table}, types={"x": "int64"})
    full = lower(model_of(case))
    small = with_int8_weights(full)
    rows = np.array([[0, 99, 50, 1, 98], [7, 7, 3, 2, 1]])
    got = run_tflite(small, {"x": rows})[0]
    largest = np.abs(table[rows]).max(axis=-1, keepdims=True)
    assert (np.abs(got - table[rows]) <= 0.51 / 127 * largest).all()  # half a step of the scale of each row


def test_a_named_operator_stays_in_float() -> None:
    case = Case("two", "h = MatMul(x, w)  y = MatMul(h, v)", {"x": (64,)}, {"w": random(64, 64), "v": random(64, 96)})
    full = lower(model_of(case))
    small, half = with_int8_weights(full), with_int8_weights(full, lambda name: name.startswith("h"))
    assert len(small) < len(half) < len(full)


def test_a_model_of_small_weights_is_refused() -> None:
    case = Case("small", "y = MatMul(x, w)", {"x": (4,)}, {"w": random(4, 4)})
    with pytest.raises(BuildFailed, match="would save nothing"):
        with_int8_weights(lower(model_of(case)))
