"""Recurrent operators that take the batch first are rewritten to take the steps first."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from edgert_deploy.packager.tflite_lowering import lower
from edgert_deploy.packager.tflite_lowering.batchwise import put_steps_first
from tests.support.lowering_cases.recurrent import GATES, HIDDEN, SEQUENCES, weights_of
from tests.support.tflite_cases import (
    ABSOLUTE_TOLERANCE,
    RELATIVE_TOLERANCE,
    Case,
    inputs_of,
    model_of,
    run_onnx,
    run_tflite,
)


@pytest.mark.parametrize("operator", GATES)
def test_a_layout_with_the_batch_first_is_taken(operator: str) -> None:
    body = f'y, h = {operator}<hidden_size={HIDDEN}, layout=1, direction="bidirectional">(x, w, r, b)'
    case = Case("layout", body, SEQUENCES, weights_of(operator, 2), outputs="float y, float h")
    runs = model_of(case)
    put_steps_first(runs)  # ONNX Runtime has no layout 1
    inputs = inputs_of(case, 3)
    for wanted, got in zip(run_onnx(runs, inputs), run_tflite(lower(model_of(case)), inputs), strict=True):
        np.testing.assert_allclose(got, wanted, RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE)
