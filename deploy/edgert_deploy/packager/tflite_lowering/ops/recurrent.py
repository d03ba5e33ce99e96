"""RNN, GRU and LSTM, unrolled: plain operators for each step, which has its own INT8 scales.

TFLite has a sequence operator for LSTM alone, which keeps its state between runs and takes neither a direction nor a
sequence's length. The product with the input does not depend on the state: it is one FULLY_CONNECTED over all steps.

Shapes: X [steps, batch, inputs]; W [directions, gates * hidden, inputs]; R [directions, gates * hidden,
hidden]; B [directions, 2 * gates * hidden]; P [directions, 3 * hidden]; states [directions, batch, hidden].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from edgert_deploy.packager.tflite_lowering.graph import BatchShape, Node
from edgert_deploy.packager.tflite_lowering.lowering import Lowering
from edgert_deploy.packager.tflite_lowering.op import Op
from edgert_deploy.packager.tflite_lowering.ops.cells import KINDS, Activation, Cell, State, activations_of
from edgert_deploy.packager.tflite_lowering.value import Uncovered, Value

# A step is some 15 operators per direction; beyond this limit the file loads too slowly.
STEPS_MAX = 512
# Positions among the inputs of ONNX's operators; only LSTM has the last two.
BIAS, LENGTHS, INITIAL_HIDDEN, INITIAL_MEMORY, PEEPHOLES = 3, 4, 5, 6, 7
DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


@dataclass(frozen=True)
class _Sequence:
    """X, a state's shape, and the items not yet ended at each step, for all of a node's directions.

    `masks` is [steps, batch, 1], or None where no item ends before the others.
    """

    lowering: Lowering
    node: Node
    x: BatchShape
    state: BatchShape
    masks: NDArray[np.float32] | None

    @property
    def steps(self) -> int:
        return self.x.dims[0]


@dataclass(frozen=True)
class _Run:
    """The outcome of one direction: the results of its steps in the order of time, and the last state."""

    results: list[Value]
    last: State


def recurrent(lowering: Lowering, node: Node) -> None:
    sequence = _sequence_of(lowering, node)
    turns = DIRECTIONS[node.attributes.get("direction", "forward")]
    activations = _activations(node, len(turns))
    hidden, memory = (_initial(sequence, place, len(turns)) for place in (INITIAL_HIDDEN, INITIAL_MEMORY))
    runs = []
    for i, is_reverse in enumerate(turns):
        cell, given = _cell(sequence, i, activations[i]), _input_gates(sequence, i)
        runs.append(_run(sequence, cell, given, State(hidden[i], memory[i]), is_reverse))
    if lowering.is_read(node.outputs[0]):  # Y, [steps, directions, batch, hidden]
        lowering.result(node, _stacked([_stacked(run.results, 0) for run in runs], 1))
    for place, values in ((1, [run.last.hidden for run in runs]), (2, [run.last.memory for run in runs])):
        if len(node.outputs) > place and lowering.is_read(node.outputs[place]):
            lowering.result(node, _stacked([value for value in values if value is not None], 0), index=place)


def _sequence_of(lowering: Lowering, node: Node) -> _Sequence:
    x, recurrent_shape = lowering.shape(node.inputs[0]), lowering.shape(node.inputs[2])
    if x.signature[0] == -1 or x.signature[2] == -1:
        raise Uncovered("the number of steps is open; export the model with a fixed number")
    if x.dims[0] > STEPS_MAX:
        raise Uncovered(
            f"it has {x.dims[0]} steps; at most {STEPS_MAX} are unrolled, so export the model for shorter sequences"
        )
    state = x.reduced([0], keep=False).with_length(1, recurrent_shape.dims[2])
    return _Sequence(lowering, node, x, state, _masks(lowering, node, x.dims[0]))


def _masks(lowering: Lowering, node: Node, steps: int) -> NDArray[np.float32] | None:
    if not node.input(LENGTHS):
        return None
    lengths = lowering.value(node.input(LENGTHS), "the lengths of the sequences")
    if (lengths >= steps).all():
        return None
    masks: NDArray[np.float32] = (np.arange(steps)[:, None, None] < lengths[None, :, None]).astype(np.float32)
    return masks


def _activations(node: Node, directions: int) -> list[list[Activation]]:
    """Return the activations of each direction."""
    default = KINDS[node.op_type].activations
    names = [n.decode() if isinstance(n, bytes) else str(n) for n in node.attributes.get("activations", ())]
    activations = activations_of(
        names or default * directions,
        node.attributes.get("activation_alpha", ()),
        node.attributes.get("activation_beta", ()),
    )
    return [activations[i * len(default) : (i + 1) * len(default)] for i in range(directions)]


def _initial(sequence: _Sequence, place: int, directions: int) -> list[Value | None]:
    """Return the initial state of each direction."""
    lowering, node = sequence.lowering, sequence.node
    if not node.input(place):
        return [None] * directions
    if lowering.is_constant(node.inputs[place]):
        values, x = lowering.one_item(node.inputs[place], "the initial state"), lowering.read(node)
        return [x.constant(array) if array.any() else None for array in values]
    return [*_unpacked(lowering.read(node, place), directions, sequence.state)]


def _cell(sequence: _Sequence, direction: int, activations: list[Activation]) -> Cell:
    lowering, node = sequence.lowering, sequence.node
    clip = node.attributes.get("clip")
    return Cell(
        f"{_name(node)}_{direction}",
        lowering.value(node.inputs[2], "R")[direction],
        _biases(sequence, direction)[1],
        lowering.value(node.input(PEEPHOLES), "P")[direction] if node.input(PEEPHOLES) else None,
        activations,
        None if clip is None else float(clip),
        node.attributes,
    )


def _input_gates(sequence: _Sequence, direction: int) -> list[Value]:
    """Return the input's contribution to the gates at each step, [batch, gates * hidden]."""
    lowering, node = sequence.lowering, sequence.node
    weights = lowering.value(node.inputs[1], "W")[direction]
    bias, recurrent_bias = (b.copy() for b in _biases(sequence, direction))
    if node.op_type == "GRU" and node.attributes.get("linear_before_reset", 0):
        recurrent_bias[2 * sequence.state.dims[1] :] = 0  # the reset gate is applied first
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


def _run(sequence: _Sequence, cell: Cell, given: list[Value], state: State, is_reverse: bool) -> _Run:
    order = range(sequence.steps)[:: -1 if is_reverse else 1]
    results: dict[int, Value] = {}
    for step in order:
        x, hidden, memory = (
            None if value is None else cell.at_step(step, value, is_first=step == order[0])
            for value in (given[step], state.hidden, state.memory)
        )
        assert x is not None
        next_state = KINDS[sequence.node.op_type].step(cell, x, State(hidden, memory))
        assert next_state.hidden is not None
        results[step] = next_state.hidden
        if sequence.masks is not None and not sequence.masks[step].all():
            mask = x.constant(sequence.masks[step])
            results[step] = next_state.hidden * mask
            next_state = State(_masked(mask, hidden, next_state.hidden), _masked(mask, memory, next_state.memory))
        state = next_state
    return _Run([results[step] for step in range(sequence.steps)], state)


def _masked(mask: Value, old: Value | None, new: Value | None) -> Value | None:
    """Return `new` for items that have not ended, else `old`."""
    if new is None:
        return None
    return new * mask if old is None else old + (new - old) * mask


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


def _name(node: Node) -> str:
    return node.name or next(filter(None, node.outputs))


OPS = {name: Op(recurrent) for name in KINDS}
