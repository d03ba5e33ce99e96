"""The state of a manifest: the outputs and inputs that may form a pair."""

from __future__ import annotations

import pytest

from edgert.bundle.state import State, Stateful, check_state, state_bytes
from edgert.errors import BundleError
from edgert.tensors import TensorSpec

X, Y = TensorSpec("x", "FP32", (-1, 4)), TensorSpec("y", "FP32", (-1, 2))
STATE = (State("s", "t"),)


def spec(name: str, shape: tuple[int, ...] = (-1, 2, 8), datatype: str = "FP32") -> TensorSpec:
    return TensorSpec(name, datatype, shape)


def test_apps_see_only_the_tensors_that_are_not_state() -> None:
    model = Stateful()
    model.inputs, model.outputs, model.state = (X, spec("s")), (spec("t"), Y), STATE
    assert (model.app_inputs, model.app_outputs) == ((X,), (Y,))


def test_state_with_one_shape_and_datatype_is_accepted_and_measured() -> None:
    check_state(STATE, "v1", (X, spec("s")), (Y, spec("t")))
    check_state((), "", (X,), (Y,))
    assert state_bytes(STATE, (X, spec("s"))) == 64
    assert state_bytes(STATE, (X, spec("s", datatype="FP16"))) == 32


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (spec("s"), spec("t", (-1, 8, 2)), r"state 's' is FP32 \[N, 2, 8\], output 't' is FP32 \[N, 8, 2\]"),
        (spec("s"), spec("t", datatype="FP16"), "output 't' is FP16"),
        (spec("s", (2, 8)), spec("t", (2, 8)), "only its first axis, the batch, may be open"),
        (spec("s", (-1, -1)), spec("t", (-1, -1)), "only its first axis, the batch, may be open"),
        (spec("s", ()), spec("t", ()), "only its first axis, the batch, may be open"),
        (spec("s", (-1, 2**23)), spec("t", (-1, 2**23)), "33554432 bytes per session; at most"),
    ],
)
def test_state_that_an_item_could_not_pass_on_to_the_next_is_refused(
    before: TensorSpec, after: TensorSpec, message: str
) -> None:
    with pytest.raises(BundleError, match=message):
        check_state(STATE, "", (X, before), (Y, after))


def test_state_with_unknown_names_or_with_repeated_names_or_without_other_outputs_is_refused() -> None:
    with pytest.raises(BundleError, match="names input 's'"):
        check_state(STATE, "", (X,), (Y, spec("t")))
    with pytest.raises(BundleError, match="the same output twice"):
        check_state((State("s", "t"), State("r", "t")), "", (X, spec("s"), spec("r")), (Y, spec("t")))
    with pytest.raises(BundleError, match="every output of the model is state"):
        check_state(STATE, "", (X, spec("s")), (spec("t"),))
    with pytest.raises(BundleError, match="no axes"):
        check_state(STATE, "", (X, spec("s")), (spec("y", ()), spec("t")))
