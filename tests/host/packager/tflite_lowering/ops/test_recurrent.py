"""RNN, GRU and LSTM: unsupported nodes are refused, and INT8 is accurate over many steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from edgert.errors import OperatorUnsupported
from edgert_deploy.packager.tflite_lowering import lower
from tests.support.models.lowering_cases.recurrent import GATES, HIDDEN, LAST, STEPS_FIRST, case_of, weights_of
from tests.support.models.tflite_cases import Case, inputs_of, model_of, quantized, run_onnx, run_tflite, sqnr_db


@pytest.mark.parametrize(
    ("attributes", "inputs", "items", "reason"),
    [
        ("", "s, w, r", {"x": (513, 5)}, "513 steps; at most 512"),
        ("", "x, w, r", {"x": (7, 5)}, "the number of steps is open"),
        (
            ', activations=["Affine"]',
            "s, w, r",
            {"x": (7, 5)},
            "'Affine' is not supported; use one of hardsigmoid, relu",
        ),
        (', activations=["HardSigmoid"], activation_alpha=[0.3]', "s, w, r", {"x": (7, 5)}, "alpha 0.2 and beta 0.5"),
        (", clip=0.3", "s, w, r", {"x": (7, 5)}, "clip is not supported; export the model without it"),
        ("", "s, w, r, , five", {"x": (7, 5)}, "some sequences are shorter"),
        ("", "s, w, r, , l", {"x": (7, 5), "l": ()}, "the lengths of the sequences is not a constant"),
    ],
)
def test_the_error_names_the_unsupported_part(
    attributes: str, inputs: str, items: dict[str, tuple[int, ...]], reason: str
) -> None:
    body = f"{STEPS_FIRST} y, h = RNN<hidden_size={HIDDEN}{attributes}>({inputs})"
    constants = {**weights_of("RNN"), "five": np.array([5], np.int32)}
    with pytest.raises(OperatorUnsupported, match=reason):
        lower(model_of(Case("unsupported", body, items, constants, types={"l": "int32"})))


def test_peepholes_are_refused() -> None:
    case = case_of(
        "LSTM",
        "peepholes",
        "",
        "a, h = OP(s, w, r, b, , , , p)" + LAST,
        constants={"p": np.ones((1, 3 * HIDDEN), np.float32)},
    )
    with pytest.raises(OperatorUnsupported, match="a peephole is not supported; export the model without it"):
        lower(model_of(case))


@pytest.mark.parametrize("operator", GATES)
def test_the_int8_form_of_many_steps_stays_accurate_and_small(operator: str) -> None:
    case = case_of(operator, "long", "", "a, h = OP(s, w, r, b)" + LAST)
    case = replace(case, items={"x": (60, 5)}, constants=weights_of(operator, scale=0.3))
    content, inputs = quantized(case, 30), inputs_of(case, 16, seed=1000)
    (wanted,), (got,) = run_onnx(model_of(case), inputs), run_tflite(content, inputs)
    assert sqnr_db(wanted, got) >= 28  # an error of one step is in the state of all later steps
    assert len(content) < len(lower(model_of(case))) * 2
