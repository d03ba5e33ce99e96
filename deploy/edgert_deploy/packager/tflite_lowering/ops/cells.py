"""One step of an RNN, a GRU or an LSTM in TFLite's operators, by the equations of ONNX's specification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.graph import BatchShape
from edgert_deploy.packager.tflite_lowering.lowering import Lowering, Uncovered
from edgert_deploy.packager.tflite_lowering.writer import STEP_MARK


@dataclass(frozen=True)
class State:
    """Tensors [batch, hidden]; None is zeros, which cost no operator."""

    hidden: int | None = None
    memory: int | None = None


@dataclass
class Cell:
    """The weights of one direction, and the writer of its steps.

    `recurrent` is [gates * hidden, hidden]; `recurrent_bias` and `peepholes` are [gates * hidden] and
    [3 * hidden], or None.
    """

    lowering: Lowering
    name: str
    shape: BatchShape
    recurrent: NDArray[Any]
    recurrent_bias: NDArray[Any]
    peepholes: NDArray[Any] | None
    activations: Sequence[Activation]
    clip: float | None
    options: dict[str, Any]
    # Weights are written once and read at every step.
    _weights: dict[tuple[int, int], int] = field(default_factory=dict)
    _step: str = ""
    _counts: Counter[str] = field(default_factory=Counter)

    @property
    def hidden(self) -> int:
        return self.shape.dims[1]

    def begin(self, step: int, is_first: bool) -> None:
        """Begin `step`. The first one has no state to continue from, and operators of its own."""
        self._step = "first" if is_first else f"{STEP_MARK}{step}"
        self._counts.clear()

    # --- operators over [batch, hidden]

    def op(self, code: str, *inputs: int, width: int | None = None, **options: Any) -> int:
        output = self._made(code.lower(), self.shape if width is None else self.shape.with_length(1, width))
        self.lowering.emit(code, list(inputs), [output], **options)
        return output

    def _made(self, what: str, shape: BatchShape) -> int:
        self._counts[what] += 1
        return self.lowering.scratch(f"{self.name}_{what}_{self._counts[what]}{self._step}", shape)

    def constant(self, values: Any) -> int:
        return self.lowering.constant(np.asarray(values, np.float32), f"{self.name}_constant")

    def gates(self, tensor: int, count: int) -> list[int]:
        """Split a tensor [batch, count * hidden] into its gates."""
        if count == 1:
            return [tensor]
        outputs = [self._made("gate", self.shape) for _ in range(count)]
        self.lowering.emit("SPLIT", [self.lowering.index_constant(1, "axis"), tensor], outputs, numSplits=count)
        return outputs

    def recur(self, state: int, first: int, end: int, bias: NDArray[Any] | None = None) -> int:
        """Return the product of a state and the recurrent weights of the gates from `first` to `end`."""
        rows = slice(first * self.hidden, end * self.hidden)
        if (first, end) not in self._weights:
            self._weights[first, end] = self.lowering.constant(self.recurrent[rows], f"{self.name}_recurrent")
        biases = [] if bias is None else [self.constant(bias)]
        width = (end - first) * self.hidden
        return self.op("FULLY_CONNECTED", state, self._weights[first, end], *biases, width=width)

    def activate(self, which: int, tensor: int) -> int:
        if self.clip is not None:
            tensor = self.op("MAXIMUM", tensor, self.constant(-self.clip))
            tensor = self.op("MINIMUM", tensor, self.constant(self.clip))
        return self.activations[which](self, tensor)


# --- activations

Activation = Callable[[Cell, int], int]


def _affine(cell: Cell, x: int, alpha: float, beta: float) -> int:
    return cell.op("ADD", cell.op("MUL", x, cell.constant(alpha)), cell.constant(beta))


def _scaled_tanh(cell: Cell, x: int, alpha: float, beta: float) -> int:
    return cell.op("MUL", cell.op("TANH", cell.op("MUL", x, cell.constant(beta))), cell.constant(alpha))


def _hard_sigmoid(cell: Cell, x: int, alpha: float, beta: float) -> int:
    """relu6(6 * (alpha * x + beta)) / 6 = clip(alpha * x + beta, 0, 1)."""
    return cell.op("MUL", cell.op("RELU6", _affine(cell, x, 6 * alpha, 6 * beta)), cell.constant(1 / 6))


def _elu(cell: Cell, x: int, alpha: float, beta: float) -> int:
    if alpha != 1:
        raise Uncovered(f"activation Elu has alpha {alpha}, and TFLite's has 1; export the model with alpha 1")
    return cell.op("ELU", x)


def _softsign(cell: Cell, x: int, alpha: float, beta: float) -> int:
    return cell.op("DIV", x, cell.op("ADD", cell.op("ABS", x), cell.constant(1)))


def _softplus(cell: Cell, x: int, alpha: float, beta: float) -> int:
    """max(x, 0) + log(1 + exp(-|x|)), which does not overflow."""
    decay = cell.op("EXP", cell.op("MUL", cell.op("ABS", x), cell.constant(-1)))
    return cell.op("ADD", cell.op("RELU", x), cell.op("LOG", cell.op("ADD", decay, cell.constant(1))))


@dataclass(frozen=True)
class _Kind:
    """An activation, and the defaults of its parameters."""

    write: Callable[[Cell, int, float, float], int]
    alpha: float | None = None
    beta: float | None = None


_KINDS = {
    "affine": _Kind(_affine, 1.0, 0.0),
    "elu": _Kind(_elu, 1.0),
    "hardsigmoid": _Kind(_hard_sigmoid, 0.2, 0.5),
    "leakyrelu": _Kind(lambda cell, x, alpha, beta: cell.op("LEAKY_RELU", x, alpha=alpha), 0.01),
    "relu": _Kind(lambda cell, x, alpha, beta: cell.op("RELU", x)),
    "scaledtanh": _Kind(_scaled_tanh, 1.0, 1.0),
    "sigmoid": _Kind(lambda cell, x, alpha, beta: cell.op("LOGISTIC", x)),
    "softplus": _Kind(_softplus),
    "softsign": _Kind(_softsign),
    "tanh": _Kind(lambda cell, x, alpha, beta: cell.op("TANH", x)),
}


def activations_of(names: Sequence[str], alphas: Sequence[float], betas: Sequence[float]) -> list[Activation]:
    """Return the activations by name. Each takes the next given parameter of its kind, else its default."""
    given = {"alpha": list(alphas), "beta": list(betas)}
    found: list[Activation] = []
    for name in names:
        kind = _KINDS.get(name.lower())
        if kind is None:
            raise Uncovered(f"activation {name!r} is not covered; use one of {', '.join(_KINDS)}")
        values = {}
        for parameter, default in (("alpha", kind.alpha), ("beta", kind.beta)):
            takes = default is not None and given[parameter]
            values[parameter] = float(given[parameter].pop(0)) if takes else (default or 0.0)
        found.append(_bound(kind, **values))
    return found


def _bound(kind: _Kind, alpha: float, beta: float) -> Activation:
    return lambda cell, x: kind.write(cell, x, alpha, beta)


# --- one step; `given` is the product with the input, with biases


def _rnn_step(cell: Cell, given: int, state: State) -> State:
    if state.hidden is not None:
        given = cell.op("ADD", given, cell.recur(state.hidden, 0, 1))
    return State(cell.activate(0, given))


def _gru_step(cell: Cell, given: int, state: State) -> State:
    """Gates z, r, h: (1 - z) * new + z * old, written as new + z * (old - new)."""
    before = bool(cell.options.get("linear_before_reset", 0))
    z, r, new = cell.gates(given, 3)
    if state.hidden is not None:
        of_z, of_r = cell.gates(cell.recur(state.hidden, 0, 2), 2)
        z, r = cell.op("ADD", z, of_z), cell.op("ADD", r, of_r)
    z, r = cell.activate(0, z), cell.activate(0, r)
    bias = cell.recurrent_bias[2 * cell.hidden :]
    if before:
        product = cell.constant(bias[None]) if state.hidden is None else cell.recur(state.hidden, 2, 3, bias)
        new = cell.op("ADD", new, cell.op("MUL", r, product))
    elif state.hidden is not None:
        new = cell.op("ADD", new, cell.recur(cell.op("MUL", r, state.hidden), 2, 3))
    new = cell.activate(1, new)
    if state.hidden is None:
        return State(cell.op("SUB", new, cell.op("MUL", z, new)))
    return State(cell.op("ADD", new, cell.op("MUL", z, cell.op("SUB", state.hidden, new))))


def _lstm_step(cell: Cell, given: int, state: State) -> State:
    """Gates i, o, f, c."""
    if state.hidden is not None:
        given = cell.op("ADD", given, cell.recur(state.hidden, 0, 4), width=4 * cell.hidden)
    i, o, f, c = cell.gates(given, 4)
    i = cell.activate(0, _peeped(cell, i, 0, state.memory))
    memory = cell.op("MUL", i, cell.activate(1, c))
    if state.memory is not None:
        if cell.options.get("input_forget", 0):
            f = cell.op("SUB", cell.constant(1), i)
        else:
            f = cell.activate(0, _peeped(cell, f, 2, state.memory))
        memory = cell.op("ADD", cell.op("MUL", f, state.memory), memory)
    o = cell.activate(0, _peeped(cell, o, 1, memory))
    # ONNX Runtime clips the inputs of the gates' activations, not the memory.
    return State(cell.op("MUL", o, cell.activations[2](cell, memory)), memory)


def _peeped(cell: Cell, gate: int, place: int, memory: int | None) -> int:
    """Add the peephole's view of the memory to a gate; peepholes are in the order i, o, f."""
    if cell.peepholes is None or memory is None:
        return gate
    weights = cell.peepholes[place * cell.hidden : (place + 1) * cell.hidden]
    return cell.op("ADD", gate, cell.op("MUL", memory, cell.constant(weights[None])))


@dataclass(frozen=True)
class Kind:
    """An ONNX operator: its number of gates, their activations, and its step."""

    gates: int
    activations: tuple[str, ...]
    step: Callable[[Cell, int, State], State]


KINDS = {
    "RNN": Kind(1, ("Tanh",), _rnn_step),
    "GRU": Kind(3, ("Sigmoid", "Tanh"), _gru_step),
    "LSTM": Kind(4, ("Sigmoid", "Tanh", "Tanh"), _lstm_step),
}
