"""RNN, GRU and LSTM in the TFLite lowering."""

from __future__ import annotations

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from dataclasses import replace
from typing import Any

import numpy as np

from edgert.errors import OperatorUnsupported
from edgert_deploy.packager.tflite_lowering import lower
from edgert_deploy.packager.tflite_lowering.batchwise import put_steps_first
from tests.support.tflite_cases import (
    ABSOLUTE_TOLERANCE,
    RELATIVE_TOLERANCE,
    Case,
    assert_agrees_with_onnx_runtime,
    inputs_of,
    ints,
    model_of,
    quantized,
    random,
    run_onnx,
    run_tflite,
    sqnr_db,
)

HIDDEN = 6
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
# The sequences are [batch, steps, inputs]; exporters turn them around like this.
SEQUENCES = {"x": (7, 5)}
STEPS_FIRST = "s = Transpose<perm=[1,0,2]>(x) "
LAST = " y = Transpose<perm=[1,0,2]>(h)"


def weights_of(operator: str, directions: int = 1, inputs: int = 5, scale: float = 0.5) -> dict[str, Any]:
    rows = GATES[operator] * HIDDEN
    return {
        "w": scale * random(directions, rows, inputs),
        "r": scale * random(directions, rows, HIDDEN, seed=1),
        "b": scale * random(directions, 2 * rows, seed=2),
    }


def case_of(operator: str, name: str, attributes: str, body: str, directions: int = 1, **more: Any) -> Case:
    """`body` has OP(...) for the operator and its attributes, and s for its input."""
    spelled = body.replace("OP(", f"{operator}<{', '.join(filter(None, [f'hidden_size={HIDDEN}', attributes]))}>(")
    constants = weights_of(operator, directions) | more.pop("constants", {})
    return Case(f"{operator.lower()} {name}", STEPS_FIRST + spelled, SEQUENCES, constants, **more)


def both_ways(operator: str) -> list[Case]:
    """The rows that all three operators have."""
    squeezed = "a = OP(s, w, r, b) q = Squeeze(a, one)" + " y = Transpose<perm=[1,0,2]>(q)"
    one = {"one": ints(1)}
    return [
        case_of(operator, "all steps", "", squeezed, constants=one),
        case_of(operator, "last step", "", "a, h = OP(s, w, r, b)" + LAST),
        case_of(operator, "no bias", "", "a, h = OP(s, w, r)" + LAST),
        case_of(operator, "reverse", 'direction="reverse"', squeezed, constants=one),
        case_of(
            operator,
            "bidirectional",
            'direction="bidirectional"',
            "a, h = OP(s, w, r, b) t = Transpose<perm=[2,0,1,3]>(a) f = Reshape(t, flat)"
            "u = Transpose<perm=[1,0,2]>(h) g = Reshape(u, one) y = Add(f, g)",
            2,
            constants={"flat": ints(0, 7, -1), "one": ints(0, 1, -1)},
        ),
        case_of(
            operator,
            "initial state of zeros",
            "",
            "n = Shape<start=1, end=2>(s) t = Concat<axis=0>(d, n, e) z = ConstantOfShape(t) a, h = OP(s, w, r, b, , z)"
            + LAST,
            constants={"d": ints(1), "e": ints(HIDDEN)},
        ),
        case_of(
            operator,
            "initial state",
            'direction="bidirectional"',
            "m = MatMul(x, v) i = ReduceMean<axes=[1], keepdims=0>(m) j = Reshape(i, split) k = Transpose<perm=[1,0,2]>(j)"
            "a, h = OP(s, w, r, b, , k)" + LAST,
            2,
            constants={"v": random(5, 2 * HIDDEN), "split": ints(-1, 2, HIDDEN)},
        ),
        case_of(
            operator,
            "constant initial state",
            "",
            "n = Shape<start=1, end=2>(s) t = Concat<axis=0>(d, n, d) z = Expand(c, t) a, h = OP(s, w, r, b, , z)"
            + LAST,
            constants={"d": ints(1), "c": random(1, 1, HIDDEN)},
        ),
        case_of(
            operator,
            "lengths",
            'direction="bidirectional"',
            "n = Shape<start=1, end=2>(s) e = Expand(five, n) i = Cast<to=6>(e) a, h = OP(s, w, r, b, i)"
            "t = Transpose<perm=[2,0,1,3]>(a) f = Reshape(t, flat) u = Transpose<perm=[1,0,2]>(h) g = Reshape(u, one) y = Add(f, g)",
            2,
            constants={"five": ints(5), "flat": ints(0, 7, -1), "one": ints(0, 1, -1)},
        ),
        case_of(operator, "clip", "clip=0.3", "a, h = OP(s, w, r, b)" + LAST),
    ]


CASES = [
    *both_ways("RNN"),
    *both_ways("GRU"),
    *both_ways("LSTM"),
    case_of("RNN", "relu", 'activations=["Relu"]', "a, h = OP(s, w, r, b)" + LAST),
    case_of(
        "RNN",
        "affine",
        'activations=["Affine"], activation_alpha=[0.4], activation_beta=[0.1]',
        "a, h = OP(s, w, r, b)" + LAST,
    ),
    case_of("GRU", "linear before reset", "linear_before_reset=1", "a, h = OP(s, w, r, b)" + LAST),
    case_of(
        "GRU",
        "activations",
        'activations=["HardSigmoid", "Softsign"], activation_alpha=[0.3], activation_beta=[0.4]',
        "a, h = OP(s, w, r, b)" + LAST,
    ),
    case_of("LSTM", "memory", "", "a, g, h = OP(s, w, r, b)" + LAST),
    case_of("LSTM", "input forget", "input_forget=1", "a, h = OP(s, w, r, b)" + LAST),
    case_of("LSTM", "peepholes", "", "a, h = OP(s, w, r, b, , , , p)" + LAST, constants={"p": random(1, 3 * HIDDEN)}),
    case_of(
        "LSTM",
        "activations",
        'direction="bidirectional", activations=["Sigmoid", "ScaledTanh", "Tanh", "HardSigmoid", "LeakyRelu", "Softplus"],'
        "activation_alpha=[0.9, 0.3, 0.2], activation_beta=[0.7, 0.4]",
        "a, h = OP(s, w, r, b)" + LAST,
        2,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_recurrent_agrees_with_onnx_runtime(case: Case) -> None:
    assert_agrees_with_onnx_runtime(case)


@pytest.mark.parametrize("operator", GATES)
def test_a_layout_with_the_batch_first_is_taken(operator: str) -> None:
    body = f'y, h = {operator}<hidden_size={HIDDEN}, layout=1, direction="bidirectional">(x, w, r, b)'
    case = Case("layout", body, SEQUENCES, weights_of(operator, 2), outputs="float y, float h")
    runs = model_of(case)
    put_steps_first(runs)  # ONNX Runtime has no layout 1
    inputs = inputs_of(case, 3)
    for wanted, got in zip(run_onnx(runs, inputs), run_tflite(lower(model_of(case)), inputs), strict=True):
        np.testing.assert_allclose(got, wanted, RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE)


@pytest.mark.parametrize(
    ("attributes", "inputs", "items", "reason"),
    [
        ("", "s, w, r", {"x": (513, 5)}, "513 steps; at most 512"),
        ("", "x, w, r", {"x": (7, 5)}, "the number of steps is open"),
        (', activations=["ThresholdedRelu"]', "s, w, r", {"x": (7, 5)}, "'ThresholdedRelu'"),
        ("", "s, w, r, , l", {"x": (7, 5), "l": ()}, "the lengths of the sequences is not a constant"),
    ],
)
def test_what_is_not_covered_says_why(
    attributes: str, inputs: str, items: dict[str, tuple[int, ...]], reason: str
) -> None:
    body = f"{STEPS_FIRST} y, h = RNN<hidden_size={HIDDEN}{attributes}>({inputs})"
    with pytest.raises(OperatorUnsupported, match=reason):
        lower(model_of(Case("uncovered", body, items, weights_of("RNN"), types={"l": "int32"})))


@pytest.mark.parametrize("operator", GATES)
def test_int8_of_many_steps_stays_close_and_small(operator: str) -> None:
    case = case_of(operator, "long", "", "a, h = OP(s, w, r, b)" + LAST)
    case = replace(case, items={"x": (60, 5)}, constants=weights_of(operator, scale=0.3))
    content, inputs = quantized(case, 30), inputs_of(case, 16, seed=1000)
    (wanted,), (got,) = run_onnx(model_of(case), inputs), run_tflite(content, inputs)
    assert sqnr_db(wanted, got) >= 28  # an error of one step goes into all that follow
    assert len(content) < len(lower(model_of(case))) * 2
