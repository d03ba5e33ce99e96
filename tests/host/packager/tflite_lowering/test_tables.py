"""A .tflite file holds equal weights only once, in every precision, and its answers stay the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from edgert_deploy.packager.tflite_lowering import lower
from edgert_deploy.packager.tflite_lowering.dynamic_range import with_int8_weights
from edgert_deploy.packager.tflite_lowering.half import with_half_weights
from edgert_deploy.packager.tflite_lowering.quantize import quantize_int8
from edgert_deploy.packager.tflite_lowering.tables import with_shared_weights
from tests.support.models.tflite_cases import Case, inputs_of, model_of, random, run_tflite

WEIGHTS: dict[str, NDArray[np.float32]] = {"w": random(64, 64) / np.float32(8), "v": random(64, 64, seed=1)}
# Each step reads the same weights, as in an LSTM that an exporter unrolls.
STEPS = Case("steps", "a = MatMul(x, w)  b = MatMul(a, w)  c = MatMul(b, w)  y = MatMul(c, v)", {"x": (64,)}, WEIGHTS)
SAMPLES = [list(inputs_of(STEPS, 1, seed).values()) for seed in range(10)]
FORMS: dict[str, Callable[[bytes], bytes]] = {
    "fp32": bytes,
    "fp16": with_half_weights,
    "dynamic-range": with_int8_weights,
    "int8": lambda content: quantize_int8(content, SAMPLES),
}


@pytest.mark.parametrize("form", FORMS)
def test_weights_that_several_operators_read_are_written_once(form: str) -> None:
    model, inputs = model_of(STEPS), inputs_of(STEPS, 2)
    whole = FORMS[form](lower(model, share_weights=False))  # as for a search that leaves one of the steps in float
    shared, shared_first = with_shared_weights(whole), FORMS[form](lower(model))
    weight_bytes = WEIGHTS["w"].size * {"fp32": 4, "fp16": 2}.get(form, 1)
    assert 0 <= len(whole) - len(shared) - 2 * weight_bytes < 1024
    assert len(shared_first) <= len(shared)
    for content in (shared, shared_first):
        np.testing.assert_array_equal(run_tflite(content, inputs)[0], run_tflite(whole, inputs)[0])


def test_a_file_without_equal_weights_stays_unchanged() -> None:
    case = Case("two", "h = MatMul(x, w)  y = MatMul(h, v)", {"x": (64,)}, WEIGHTS)
    whole = lower(model_of(case))
    assert with_shared_weights(whole) is whole
