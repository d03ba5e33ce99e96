"""RNN, GRU and LSTM."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.models.tflite_cases import Case, ints, random

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
    """Return a case. In `body`, OP(...) stands for the operator with its attributes, and `s` is the input."""
    spelled = body.replace("OP(", f"{operator}<{', '.join(filter(None, [f'hidden_size={HIDDEN}', attributes]))}>(")
    constants = weights_of(operator, directions) | more.pop("constants", {})
    return Case(f"{operator.lower()} {name}", STEPS_FIRST + spelled, SEQUENCES, constants, **more)


def both_ways(operator: str) -> list[Case]:
    """Return the cases that all three operators have."""
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
            "",
            "n = Shape<start=1, end=2>(s) e = Expand(seven, n) i = Cast<to=6>(e) a, h = OP(s, w, r, b, i)" + LAST,
            constants={"seven": ints(7)},
        ),
    ]


CASES = [
    *both_ways("RNN"),
    *both_ways("GRU"),
    *both_ways("LSTM"),
    case_of("RNN", "relu", 'activations=["Relu"]', "a, h = OP(s, w, r, b)" + LAST),
    case_of("GRU", "linear before reset", "linear_before_reset=1", "a, h = OP(s, w, r, b)" + LAST),
    case_of(
        "GRU",
        "activations",
        'activations=["HardSigmoid", "Relu"], activation_alpha=[0.2], activation_beta=[0.5]',
        "a, h = OP(s, w, r, b)" + LAST,
    ),
    *(
        Case(
            f"lstm over rows of an image from {state}",
            f"f = Reshape(x, flat) s = Transpose<perm=[1,0,2]>(f) n = Shape<start=1, end=2>(s) t = Concat<axis=0>(d, n, e) "
            f"z = Expand({state}, t) a, h = LSTM<hidden_size={HIDDEN}>(s, w, r, b, , z) o = Transpose<perm=[1,0,2]>(h) "
            "y = Reshape(o, apart)",
            {"x": (4, 7, 5)},
            weights_of("LSTM")
            | {"zeros": np.zeros((1, 1, 1), np.float32), "learned": random(1, 1, HIDDEN)}
            | {"flat": ints(-1, 7, 5), "d": ints(1), "e": ints(HIDDEN), "apart": ints(-1, 4, HIDDEN)},
        )
        for state in ("zeros", "learned")
    ),
    case_of("LSTM", "memory", "", "a, g, h = OP(s, w, r, b)" + LAST),
    case_of(
        "LSTM",
        "activations",
        'direction="bidirectional", activations=["Sigmoid", "Tanh", "Tanh", "HardSigmoid", "Relu", "Tanh"]',
        "a, h = OP(s, w, r, b)" + LAST,
        2,
    ),
]
