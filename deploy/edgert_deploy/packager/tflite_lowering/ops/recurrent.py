"""RNN, GRU and LSTM, unrolled: each step has separate plain operators, with their own INT8 scales.

TFLite has a sequence operator only for LSTM. This operator keeps its state between runs, and has no option for the
direction or the length of a sequence. The product of the input and its weights does not depend on the state, so one
FULLY_CONNECTED computes this product for all steps.

Shapes: X [steps, batch, inputs]; W [directions, gates * hidden, inputs]; R [directions, gates * hidden,
hidden]; B [directions, 2 * gates * hidden]; states [directions, batch, hidden].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.graph import BatchShape, Node
from edgert_deploy.packager.tflite_lowering.lowering import Lowering
from edgert_deploy.packager.tflite_lowering.op import Op
from edgert_deploy.packager.tflite_lowering.ops.cells import ACTIVATIONS, ALPHA, BETA, KINDS, Activation, Cell, State
from edgert_deploy.packager.tflite_lowering.value import Unsupported, Value

# A step has about 15 operators per direction. With more steps, a device would load the file too slowly.
STEPS_MAX = 512
# Positions of the inputs of ONNX's operators; only LSTM has the last two.
BIAS, LENGTHS, INITIAL_HIDDEN, INITIAL_MEMORY, PEEPHOLES = 3, 4, 5, 6, 7
DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


@dataclass(frozen=True)
class _Sequence:
    """The input X and the shape of a state, which all directions of a node share."""

    lowering: Lowering
    node: Node
    x: BatchShape
    state: BatchShape

    @property
    def steps(self) -> int:
        return self.x.dims[0]


def recurrent(lowering: Lowering, node: Node) -> None:
    sequence = _sequence_of(lowering, node)
    reversals = DIRECTIONS[node.attributes.get("direction", "forward")]
    activations = _activations(node, len(reversals))
    hidden, memory = (_initial(sequence, place, len(reversals)) for place in (INITIAL_HIDDEN, INITIAL_MEMORY))
    results, last = [], []
    for i, is_reverse in enumerate(reversals):
        cell, input_gates = _cell(sequence, i, activations[i]), _input_gates(sequence, i)
        of_steps, state = _run(sequence, cell, input_gates, State(hidden[i], memory[i]), is_reverse)
        results.append(of_steps)
        last.append(state)
    if lowering.is_read(node.outputs[0]):  # Y, [steps, directions, batch, hidden]
        lowering.result(node, _stacked([_stacked(of_steps, 0) for of_steps in results], 1))
    for place, values in ((1, [state.hidden for state in last]), (2, [state.memory for state in last])):
        if len(node.outputs) > place and lowering.is_read(node.outputs[place]):
            lowering.result(node, _stacked([value for value in values if value is not None], 0), index=place)


def _sequence_of(lowering: Lowering, node: Node) -> _Sequence:
    x, recurrent_shape = lowering.shape(node.inputs[0]), lowering.shape(node.inputs[2])
    if x.signature[0] == -1 or x.signature[2] == -1:
        raise Unsupported("the number of steps is open; export the model with a fixed number")
    if x.dims[0] > STEPS_MAX:
        raise Unsupported(
            f"it has {x.dims[0]} steps; at most {STEPS_MAX} are unrolled, so export the model for shorter sequences"
        )
    if node.input(LENGTHS) and (lowering.value(node.input(LENGTHS), "the lengths of the sequences") < x.dims[0]).any():
        raise Unsupported("some sequences are shorter than the input; omit sequence_lens, and pad or cut the input")
    unusual = [name for name in ("clip", "input_forget") if node.attributes.get(name)]
    if unusual or node.input(PEEPHOLES):
        raise Unsupported(f"{', '.join(unusual) or 'a peephole'} is not supported; export the model without it")
    return _Sequence(lowering, node, x, x.reduced([0], keep=False).with_length(1, recurrent_shape.dims[2]))


def _activations(node: Node, directions: int) -> list[list[Activation]]:
    """Return the activations of each direction.

    Raises Unsupported for rare activations and parameters, which no exporter writes.
    """
    default = KINDS[node.op_type].activations
    names = [
        n.decode() if isinstance(n, bytes) else n for n in node.attributes.get("activations", default * directions)
    ]
    if unknown := [name for name in names if name.lower() not in ACTIVATIONS]:
        raise Unsupported(f"activation {unknown[0]!r} is not supported; use one of {', '.join(ACTIVATIONS)}")
    alphas, betas = (node.attributes.get(f"activation_{name}", ()) for name in ("alpha", "beta"))
    if not (np.allclose(alphas, ALPHA) and np.allclose(betas, BETA)):
        raise Unsupported(
            f"an activation has parameters other than alpha {ALPHA} and beta {BETA}; omit these parameters"
        )
    activations = [ACTIVATIONS[name.lower()] for name in names]
    return [activations[i * len(default) : (i + 1) * len(default)] for i in range(directions)]


def _initial(sequence: _Sequence, place: int, directions: int) -> list[Value | None]:
    lowering, node = sequence.lowering, sequence.node
    if not node.input(place):
        return [None] * directions
    if lowering.is_constant(node.inputs[place]):
        values, x = lowering.one_item(node.inputs[place], "the initial state"), lowering.read(node)
        rows = [array[:1] if (array == array[:1]).all() else array for array in values]
        return [x.constant(array) if array.any() else None for array in rows]
    return [*_unpacked(lowering.read(node, place), directions, sequence.state)]


def _cell(sequence: _Sequence, direction: int, activations: list[Activation]) -> Cell:
    lowering, node = sequence.lowering, sequence.node
    return Cell(
        f"{node.name or next(filter(None, node.outputs))}_{direction}",
        lowering.value(node.inputs[2], "R")[direction],
        _biases(sequence, direction)[1],
        activations,
        node.attributes,
    )


def _input_gates(sequence: _Sequence, direction: int) -> list[Value]:
    """Return the input's contribution to the gates at each step, [batch, gates * hidden]."""
    lowering, node = sequence.lowering, sequence.node
    weights = lowering.value(node.inputs[1], "W")[direction]
    bias, recurrent_bias = (b.copy() for b in _biases(sequence, direction))
    if node.op_type == "GRU" and node.attributes.get("linear_before_reset", 0):
        recurrent_bias[2 * sequence.state.dims[1] :] = 0  # _gru_step adds this bias before it applies the reset gate
    product = lowering.read(node).times_weights(weights, bias + recurrent_bias)
    return _unpacked(product, sequence.steps, sequence.state.with_length(1, len(weights)))


def _biases(sequence: _Sequence, direction: int) -> NDArray[np.float32]:
    """Return the biases of the input and of the state, [2, gates * hidden]."""
    lowering, node = sequence.lowering, sequence.node
    width = KINDS[node.op_type].gates * sequence.state.dims[1]
    if not node.input(BIAS):
        return np.zeros((2, width), np.float32)
    biases: NDArray[np.float32] = lowering.value(node.input(BIAS), "B")[direction].reshape(2, width)
    return biases


def _run(
    sequence: _Sequence, cell: Cell, input_gates: list[Value], state: State, is_reverse: bool
) -> tuple[list[Value], State]:
    """Return the results of all steps in the order of time, and the last state."""
    order = range(sequence.steps)[:: -1 if is_reverse else 1]
    results: dict[int, Value] = {}
    for step in order:
        x, hidden, memory = (
            None if value is None else cell.at_step(step, value, is_first=step == order[0])
            for value in (input_gates[step], state.hidden, state.memory)
        )
        assert x is not None
        state = KINDS[sequence.node.op_type].step(cell, x, State(hidden, memory))
        assert state.hidden is not None
        results[step] = state.hidden
    return [results[step] for step in range(sequence.steps)], state


def _stacked(values: list[Value], axis: int) -> Value:
    """Join `values`, one per step or direction, along a new axis."""
    shape = values[0].shape.with_axis(axis, len(values))
    if len(values) == 1:
        return values[0].reshaped(shape)
    return values[0].op("PACK", *values[1:], shape=shape, valuesCount=len(values), axis=axis)


def _unpacked(value: Value, count: int, shape: BatchShape) -> list[Value]:
    """Split a value along its first axis into values of `shape`."""
    if count == 1:
        return [value.reshaped(shape)]
    return value.op_of_many("UNPACK", [(shape, value.dtype)] * count, num=count, axis=0)


OPS = {name: Op(recurrent) for name in KINDS}
