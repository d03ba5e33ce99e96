"""RNN, GRU and LSTM, unrolled: one group of plain operators per step, so that each step has INT8 scales of its own.

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
from edgert_deploy.packager.tflite_lowering.lowering import Lowering, Uncovered
from edgert_deploy.packager.tflite_lowering.op import Op
from edgert_deploy.packager.tflite_lowering.ops.cells import KINDS, Activation, Cell, State, activations_of

# A step is some 15 operators per direction; beyond this limit the file loads too slowly.
STEPS_MAX = 512
# Positions among the inputs of ONNX's operators; only LSTM has the last two.
BIAS, LENGTHS, INITIAL_HIDDEN, INITIAL_MEMORY, PEEPHOLES = 3, 4, 5, 6, 7
DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}


@dataclass(frozen=True)
class _Sequence:
    """X, the shape of a state, and the items that have not ended at each step: shared by a node's directions.

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

    results: list[int]
    last: State


def recurrent(lowering: Lowering, node: Node) -> None:
    sequence = _sequence_of(lowering, node)
    turns = DIRECTIONS[node.attributes.get("direction", "forward")]
    activations = _activations(node, len(turns))
    hidden, memory = (_initial(sequence, place, len(turns)) for place in (INITIAL_HIDDEN, INITIAL_MEMORY))
    runs = []
    for i, is_reverse in enumerate(turns):
        cell, given = _cell(sequence, i, activations[i]), _given(sequence, i)
        runs.append(_run(sequence, cell, given, State(hidden[i], memory[i]), is_reverse))
    _write_results(sequence, runs)
    for place, tensors in ((1, [run.last.hidden for run in runs]), (2, [run.last.memory for run in runs])):
        if len(node.outputs) > place and lowering.is_read(node.outputs[place]):
            _stack(sequence, [t for t in tensors if t is not None], 0, sequence.state, node.outputs[place])


def _sequence_of(lowering: Lowering, node: Node) -> _Sequence:
    x, recurrent_shape = lowering.shape(node.inputs[0]), lowering.shape(node.inputs[2])
    if x.signature[0] == -1 or x.signature[2] == -1:
        raise Uncovered("the number of steps is open; export the model with a fixed number")
    if x.dims[0] > STEPS_MAX:
        raise Uncovered(
            f"it has {x.dims[0]} steps; at most {STEPS_MAX} are unrolled, so export the model for shorter sequences"
        )
    state = x.without_axis(0).with_length(1, recurrent_shape.dims[2])
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
    found = activations_of(
        names or default * directions,
        node.attributes.get("activation_alpha", ()),
        node.attributes.get("activation_beta", ()),
    )
    return [found[i * len(default) : (i + 1) * len(default)] for i in range(directions)]


def _initial(sequence: _Sequence, place: int, directions: int) -> list[int | None]:
    """Return the initial state of each direction."""
    lowering, name = sequence.lowering, sequence.node.input(place)
    if not name:
        return [None] * directions
    if lowering.is_constant(name):
        values = lowering.one_item(name, "the initial state")
        return [lowering.constant(v, f"{name}_state") if v.any() else None for v in values]
    tensor = lowering.native(name)
    if directions == 1:
        return [lowering.reshape(tensor, sequence.state, lowering.scratch(f"{name}_state", sequence.state))]
    return [*_unpacked(lowering, tensor, directions, sequence.state, f"{name}_state")]


def _cell(sequence: _Sequence, direction: int, activations: list[Activation]) -> Cell:
    lowering, node = sequence.lowering, sequence.node
    recurrent_weights = lowering.value(node.inputs[2], "R")[direction]
    peepholes = lowering.value(node.input(PEEPHOLES), "P")[direction] if node.input(PEEPHOLES) else None
    clip = node.attributes.get("clip")
    return Cell(
        lowering,
        f"{_name(node)}_{direction}",
        sequence.state,
        recurrent_weights,
        _biases(sequence, direction)[1],
        peepholes,
        activations,
        None if clip is None else float(clip),
        node.attributes,
    )


def _given(sequence: _Sequence, direction: int) -> list[int]:
    """Return the input's contribution to the gates at each step, [batch, gates * hidden]."""
    lowering, node = sequence.lowering, sequence.node
    weights = lowering.value(node.inputs[1], "W")[direction]
    bias, recurrent_bias = (b.copy() for b in _biases(sequence, direction))
    if node.op_type == "GRU" and node.attributes.get("linear_before_reset", 0):
        recurrent_bias[2 * sequence.state.dims[1] :] = 0  # the reset gate is applied first
    inputs = [
        lowering.native(node.inputs[0]),
        lowering.constant(weights, f"{_name(node)}_weights"),
        lowering.constant(bias + recurrent_bias, f"{_name(node)}_bias"),
    ]
    product = lowering.scratch(f"{_name(node)}_given", sequence.x.with_length(2, len(weights)))
    lowering.emit("FULLY_CONNECTED", inputs, [product], keepNumDims=True)
    step = sequence.state.with_length(1, len(weights))
    return _unpacked(lowering, product, sequence.steps, step, f"{_name(node)}_step")


def _biases(sequence: _Sequence, direction: int) -> NDArray[np.float32]:
    """Return the biases of the input and of the state, [2, gates * hidden]."""
    lowering, node = sequence.lowering, sequence.node
    width = KINDS[node.op_type].gates * sequence.state.dims[1]
    if not node.input(BIAS):
        return np.zeros((2, width), np.float32)
    biases: NDArray[np.float32] = lowering.value(node.input(BIAS), "B")[direction].reshape(2, width)
    return biases


def _run(sequence: _Sequence, cell: Cell, given: list[int], state: State, is_reverse: bool) -> _Run:
    order = range(sequence.steps)[:: -1 if is_reverse else 1]
    results: dict[int, int] = {}
    for step in order:
        cell.begin(step, is_first=step == order[0])
        made = KINDS[sequence.node.op_type].step(cell, given[step], state)
        assert made.hidden is not None
        results[step] = made.hidden
        if sequence.masks is not None and not sequence.masks[step].all():
            mask = cell.constant(sequence.masks[step])
            results[step] = cell.op("MUL", made.hidden, mask)
            made = State(*(_kept(cell, mask, *pair) for pair in zip(_parts(state), _parts(made), strict=True)))
        state = made
    return _Run([results[step] for step in range(sequence.steps)], state)


def _parts(state: State) -> tuple[int | None, int | None]:
    return state.hidden, state.memory


def _kept(cell: Cell, mask: int, old: int | None, new: int | None) -> int | None:
    """Return `new` for items that have not ended, else `old`."""
    if new is None:
        return None
    if old is None:
        return cell.op("MUL", new, mask)
    return cell.op("ADD", old, cell.op("MUL", cell.op("SUB", new, old), mask))


# --- results


def _write_results(sequence: _Sequence, runs: list[_Run]) -> None:
    """Write Y, [steps, directions, batch, hidden]."""
    lowering, node = sequence.lowering, sequence.node
    if not lowering.is_read(node.outputs[0]):
        return
    whole, packed = sequence.state.with_axis(0, sequence.steps), []
    for run in runs:
        packed.append(lowering.scratch(f"{_name(node)}_steps", whole))
        lowering.emit("PACK", run.results, [packed[-1]], valuesCount=sequence.steps, axis=0)
    _stack(sequence, packed, 1, whole, node.outputs[0])


def _stack(sequence: _Sequence, tensors: list[int], axis: int, shape: BatchShape, name: str) -> None:
    """Join `tensors` of `shape`, one per direction, along a new axis into the value `name`."""
    lowering = sequence.lowering
    if len(tensors) == 1:
        lowering.reshape(tensors[0], shape.with_axis(axis, 1), lowering.define(name))
    else:
        lowering.emit("PACK", tensors, [lowering.define(name)], valuesCount=len(tensors), axis=axis)


def _unpacked(lowering: Lowering, tensor: int, count: int, shape: BatchShape, name: str) -> list[int]:
    """Split a tensor along its first axis."""
    if count == 1:
        return [lowering.reshape(tensor, shape, lowering.scratch(name, shape))]
    outputs = [lowering.scratch(name, shape) for _ in range(count)]
    lowering.emit("UNPACK", [tensor], outputs, num=count, axis=0)
    return outputs


def _name(node: Node) -> str:
    return node.name or next(filter(None, node.outputs))


OPS = {name: Op(recurrent) for name in KINDS}
