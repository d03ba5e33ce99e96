"""One step of an RNN, GRU or LSTM in TFLite's operators, by the equations of ONNX."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.ops.activation import hard_sigmoid
from edgert_deploy.packager.tflite_lowering.value import Value
from edgert_deploy.packager.tflite_lowering.writer import STEP_MARK

Activation = Callable[[Value], Value]


@dataclass(frozen=True)
class State:
    """Values [batch, hidden]; None is zeros, which cost no operator."""

    hidden: Value | None = None
    memory: Value | None = None


@dataclass
class Cell:
    """The weights of one direction, and what its steps share.

    `recurrent` is [gates * hidden, hidden]; `recurrent_bias` and `peepholes` are [gates * hidden] and
    [3 * hidden], or None.
    """

    name: str
    recurrent: NDArray[Any]
    recurrent_bias: NDArray[Any]
    peepholes: NDArray[Any] | None
    activations: Sequence[Activation]
    options: dict[str, Any]
    # Weights are written once and read at every step.
    _weights: dict[tuple[int, int], Value] = field(default_factory=dict)

    @property
    def hidden(self) -> int:
        return int(self.recurrent.shape[1])

    def at_step(self, step: int, value: Value, *, is_first: bool) -> Value:
        """Return `value` as one of `step`; the first, which has no state, has operators of its own."""
        return replace(value, name=self.name, step="first" if is_first else f"{STEP_MARK}{step}")

    def gates(self, given: Value, count: int) -> list[Value]:
        """Split a value [batch, count * hidden] into its gates."""
        gate = (given.shape.with_length(1, self.hidden), given.dtype)
        return given.indices(1).op_of_many("SPLIT", [gate] * count, given, numSplits=count)

    def recur(self, state: Value, first: int, end: int, bias: NDArray[Any] | None = None) -> Value:
        """Return the product of a state and the recurrent weights of the gates from `first` to `end`."""
        if (first, end) not in self._weights:
            self._weights[first, end] = state.constant(self.recurrent[first * self.hidden : end * self.hidden])
        shape = state.shape.with_length(1, (end - first) * self.hidden)
        return state.op("FULLY_CONNECTED", self._weights[first, end], *([] if bias is None else [bias]), shape=shape)


# --- activations


ALPHA, BETA = 0.2, 0.5  # ONNX's defaults for HardSigmoid, the only one here that has parameters
ACTIVATIONS: dict[str, Activation] = {
    "hardsigmoid": lambda x: hard_sigmoid(x, ALPHA, BETA),
    "relu": lambda x: x.op("RELU"),
    "sigmoid": lambda x: x.op("LOGISTIC"),
    "tanh": lambda x: x.op("TANH"),
}


# --- one step; `given` is the product with the input, with biases


def _rnn_step(cell: Cell, given: Value, state: State) -> State:
    if state.hidden is not None:
        given = given + cell.recur(state.hidden, 0, 1)
    return State(cell.activations[0](given))


def _gru_step(cell: Cell, given: Value, state: State) -> State:
    """Gates z, r, h: (1 - z) * new + z * old, written as new + z * (old - new)."""
    before = bool(cell.options.get("linear_before_reset", 0))
    z, r, new = cell.gates(given, 3)
    if state.hidden is not None:
        of_z, of_r = cell.gates(cell.recur(state.hidden, 0, 2), 2)
        z, r = z + of_z, r + of_r
    z, r = cell.activations[0](z), cell.activations[0](r)
    bias = cell.recurrent_bias[2 * cell.hidden :]
    if before:
        new = new + r * (bias[None] if state.hidden is None else cell.recur(state.hidden, 2, 3, bias))
    elif state.hidden is not None:
        new = new + cell.recur(r * state.hidden, 2, 3)
    new = cell.activations[1](new)
    return State(new - z * new if state.hidden is None else new + z * (state.hidden - new))


def _lstm_step(cell: Cell, given: Value, state: State) -> State:
    """Gates i, o, f, c."""
    if state.hidden is not None:
        given = given + cell.recur(state.hidden, 0, 4)
    i, o, f, c = cell.gates(given, 4)
    i = cell.activations[0](_peeped(cell, i, 0, state.memory))
    memory = i * cell.activations[1](c)
    if state.memory is not None:
        f = cell.activations[0](_peeped(cell, f, 2, state.memory))
        memory = f * state.memory + memory
    o = cell.activations[0](_peeped(cell, o, 1, memory))
    return State(o * cell.activations[2](memory), memory)


def _peeped(cell: Cell, gate: Value, place: int, memory: Value | None) -> Value:
    """Add the peephole's view of the memory to a gate; peepholes are in the order i, o, f."""
    if cell.peepholes is None or memory is None:
        return gate
    return gate + memory * cell.peepholes[None, place * cell.hidden : (place + 1) * cell.hidden]


@dataclass(frozen=True)
class Kind:
    """An ONNX operator: its number of gates, their activations, and its step."""

    gates: int
    activations: tuple[str, ...]
    step: Callable[[Cell, Value, State], State]


KINDS = {
    "RNN": Kind(1, ("Tanh",), _rnn_step),
    "GRU": Kind(3, ("Sigmoid", "Tanh"), _gru_step),
    "LSTM": Kind(4, ("Sigmoid", "Tanh", "Tanh"), _lstm_step),
}
