"""A model's state: an output that becomes an input of the next item of a session."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from edgert.bundle.rules import spec_of
from edgert.errors import BundleError
from edgert.tensors import ITEM_BYTES, TensorSpec
from edgert.typed_json import Closed

STATE_BYTES_MAX = 16 * 1024**2  # the state of one session, over all tensors
STATE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


@dataclass(frozen=True)
class State(Closed):
    """A pair: an item's `output` becomes the session's next `input`. The first item gets zeros."""

    input: str
    output: str


class Stateful:
    """The tensors of a model: the tensors that apps see, and the tensors that are state."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    state: tuple[State, ...]

    @property
    def app_inputs(self) -> tuple[TensorSpec, ...]:
        """The inputs in a request: all inputs that are not state."""
        bound = {binding.input for binding in self.state}
        return tuple(spec for spec in self.inputs if spec.name not in bound)

    @property
    def app_outputs(self) -> tuple[TensorSpec, ...]:
        """The model's outputs that an answer may have: all outputs that are not state."""
        bound = {binding.output for binding in self.state}
        return tuple(spec for spec in self.outputs if spec.name not in bound)


def check_state(
    state: Sequence[State], state_id: str, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]
) -> None:
    """Raise BundleError unless each state names an input and an output of one datatype and shape."""
    if state_id and not state:
        raise BundleError(
            f"state_id is {state_id[:80]!r}, but the model has no state: add [[state]], or remove state_id"
        )
    if state_id and not STATE_ID.fullmatch(state_id):
        raise BundleError(
            f"state_id {state_id[:80]!r} is not allowed: give letters, digits and . _ - (at most 63, a letter or digit first)"
        )
    pairs = [
        (spec_of("state", "input", binding.input, inputs), spec_of("state", "output", binding.output, outputs))
        for binding in state
    ]
    for kind, names, count in (
        ("input", [binding.input for binding in state], len(inputs)),
        ("output", [binding.output for binding in state], len(outputs)),
    ):
        if len(set(names)) < len(names):
            raise BundleError(f"state names the same {kind} twice: give each {kind} once")
        if state and len(names) == count:
            raise BundleError(f"every {kind} of the model is state: the model needs another {kind} for the app")
    for binding, (before, after) in zip(state, pairs, strict=True):
        if (before.datatype, before.shape) != (after.datatype, after.shape):
            raise BundleError(
                f"state {binding.input!r} is {before.form}, output {binding.output!r} is {after.form}: they must be the same"
            )
        if before.shape[:1] not in ((-1,), (1,)) or -1 in before.item_shape:
            raise BundleError(f"state {binding.input!r} is {before.form}: only its first axis, the batch, may be open")
    if state and (flat := [spec.name for spec in outputs if not spec.shape]):
        raise BundleError(f"output {flat[0]!r} has no axes: a model with state needs a batch axis in every output")
    if (size := state_bytes(state, inputs)) > STATE_BYTES_MAX:
        raise BundleError(f"the state has {size} bytes per session; at most {STATE_BYTES_MAX} are allowed")


def state_bytes(state: Sequence[State], inputs: Sequence[TensorSpec]) -> int:
    """Return the bytes of a session's state."""
    names = {binding.input for binding in state}
    return sum(math.prod(spec.item_shape) * ITEM_BYTES[spec.datatype] for spec in inputs if spec.name in names)
