"""Writes one step of an RNN, GRU or LSTM in TFLite's operators, by the equations of ONNX."""

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
    """The state of a cell: values [batch, hidden]. None means zeros, for which no operator is needed."""

    hidden: Value | None = None
    memory: Value | None = None


@dataclass
class Cell:
    """The weights of one direction, and the values that its steps share.

    Attributes:
        name: The start of the names of the cell's tensors.
        recurrent: The weights of the state, [gates * hidden, hidden].
        recurrent_bias: The biases of the state, [gates * hidden].
        activations: The activations of the gates.
        options: The attributes of the node.
    """

    name: str
    recurrent: NDArray[Any]
    recurrent_bias: NDArray[Any]
    activations: Sequence[Activation]
    options: dict[str, Any]
    # The tensors of weights that an earlier step wrote. Every step reads the same tensors.
    _weights: dict[tuple[int, int], Value] = field(default_factory=dict)

    @property
    def hidden(self) -> int:
        return int(self.recurrent.shape[1])

    def at_step(self, step: int, value: Value, *, is_first: bool) -> Value:
        """Return `value` with the name of its `step`. The first step has other names, because it has no state."""
        return replace(value, name=self.name, step="first" if is_first else f"{STEP_MARK}{step}")

    def gates(self, joined: Value, count: int) -> list[Value]:
        """Split a value [batch, count * hidden] into its gates."""
        gate = (joined.shape.with_length(1, self.hidden), joined.dtype)
        return joined.indices(1).op_of_many("SPLIT", [gate] * count, joined, numSplits=count)

    def times_recurrent(self, state: Value, first: int, end: int, bias: NDArray[Any] | None = None) -> Value:
        """Return the product of a state and the recurrent weights of the gates from `first` to `end`."""
        if (first, end) not in self._weights:
            self._weights[first, end] = state.constant(self.recurrent[first * self.hidden : end * self.hidden])
        shape = state.shape.with_length(1, (end - first) * self.hidden)
        return state.op("FULLY_CONNECTED", self._weights[first, end], *([] if bias is None else [bias]), shape=shape)


# --- activations


# ONNX's defaults for HardSigmoid, the only activation here that has parameters.
ALPHA = 0.2
BETA = 0.5
ACTIVATIONS: dict[str, Activation] = {
    "hardsigmoid": lambda x: hard_sigmoid(x, ALPHA, BETA),
    "relu": lambda x: x.op("RELU"),
    "sigmoid": lambda x: x.op("LOGISTIC"),
    "tanh": lambda x: x.op("TANH"),
}


# --- one step; `from_input` is the product of the input and its weights, plus the biases


def _rnn_step(cell: Cell, from_input: Value, state: State) -> State:
    if state.hidden is not None:
        from_input = from_input + cell.times_recurrent(state.hidden, 0, 1)
    return State(cell.activations[0](from_input))


def _gru_step(cell: Cell, from_input: Value, state: State) -> State:
    """Compute a step with ONNX's gates z, r, h.

    The result is (1 - update) * new + update * old, written as new + update * (old - new).
    """
    applies_reset_last = bool(cell.options.get("linear_before_reset", 0))
    update, reset, new = cell.gates(from_input, 3)
    if state.hidden is not None:
        recurrent_update, recurrent_reset = cell.gates(cell.times_recurrent(state.hidden, 0, 2), 2)
        update, reset = update + recurrent_update, reset + recurrent_reset
    update, reset = cell.activations[0](update), cell.activations[0](reset)
    bias = cell.recurrent_bias[2 * cell.hidden :]
    if applies_reset_last:
        new = new + reset * (bias[None] if state.hidden is None else cell.times_recurrent(state.hidden, 2, 3, bias))
    elif state.hidden is not None:
        new = new + cell.times_recurrent(reset * state.hidden, 2, 3)
    new = cell.activations[1](new)
    return State(new - update * new if state.hidden is None else new + update * (state.hidden - new))


def _lstm_step(cell: Cell, from_input: Value, state: State) -> State:
    """Compute a step with ONNX's gates i, o, f, c."""
    if state.hidden is not None:
        from_input = from_input + cell.times_recurrent(state.hidden, 0, 4)
    input_gate, output_gate, forget_gate, candidate = cell.gates(from_input, 4)
    memory = cell.activations[0](input_gate) * cell.activations[1](candidate)
    if state.memory is not None:
        memory = cell.activations[0](forget_gate) * state.memory + memory
    return State(cell.activations[0](output_gate) * cell.activations[2](memory), memory)


@dataclass(frozen=True)
class Kind:
    """An ONNX operator: its number of gates, its default activations, and the function for one step."""

    gates: int
    activations: tuple[str, ...]
    step: Callable[[Cell, Value, State], State]


KINDS = {
    "RNN": Kind(1, ("Tanh",), _rnn_step),
    "GRU": Kind(3, ("Sigmoid", "Tanh"), _gru_step),
    "LSTM": Kind(4, ("Sigmoid", "Tanh", "Tanh"), _lstm_step),
}
