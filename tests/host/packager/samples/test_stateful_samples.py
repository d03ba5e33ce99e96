"""Recordings through a model with state, and the file that binds the state."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from onnx import TensorProto, helper

from edgert.bundle.state import State
from edgert.engines.null import NullSession
from edgert.errors import CalibrationInvalid, ConfigInvalid
from edgert.tensors import TensorSpec
from edgert_deploy.packager.samples.stateful_samples import read_state, run_in_turn, with_state
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support import models

STATE = (State("s", "next_s"),)


def sums(batch: int = -1) -> NullSession:
    """Return a model whose `y` and next state are the sum of its input and its state."""
    inputs, outputs = (
        [TensorSpec(name, "FP32", (batch, 1)) for name in names] for names in (("x", "s"), ("y", "next_s"))
    )
    return NullSession(tuple(inputs), tuple(outputs), "add", 0.0)


def source(batch: int = -1) -> SourceModel:
    session = sums(batch)
    return SourceModel(Path("sums.onnx"), None, "", 0, session.inputs, session.outputs, state=STATE)


@pytest.mark.parametrize("batch", [-1, 1])
def test_each_recording_has_its_own_state_in_the_order_of_its_samples(batch: int) -> None:
    recordings = np.array([5, 5, 2, 5, 2, 9] * 20)  # 9 has the fewest
    values = np.random.default_rng(0).integers(1, 9, (120, 1)).astype(np.float32)
    (y, next_s), met = run_in_turn(sums(batch), {"x": values}, recordings, STATE)
    for number in (2, 5, 9):
        rows = recordings == number
        total: NDArray[np.float32] = np.cumsum(values[rows], axis=0)
        np.testing.assert_array_equal(y[rows], total)
        np.testing.assert_array_equal(met["s"][rows], total - values[rows])
    np.testing.assert_array_equal(y, next_s)


def test_recordings_beyond_the_number_that_run_together_are_run() -> None:
    recordings = np.repeat(np.arange(100), 2)
    (y, _), _ = run_in_turn(sums(), {"x": np.ones((200, 1), np.float32)}, recordings, STATE)
    np.testing.assert_array_equal(y[:, 0], np.tile([1, 2], 100))


def test_a_recording_that_crashes_the_engine_is_named_and_others_keep_their_state(tmp_path: Path) -> None:
    proto = models.dividing()
    proto.graph.node.extend([helper.make_node("Add", ["x", "h"], ["next_h"])])
    for values, name in ((proto.graph.input, "h"), (proto.graph.output, "next_h")):
        values.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 4]))
    found = load_source(models.write(proto, tmp_path / "m.onnx"))
    stateful, samples = replace(found, state=(State("h", "next_h"),)), models.for_dividing(3)
    met = with_state(tmp_path, stateful, {"x": samples}, np.zeros(3, np.int64))["h"]
    np.testing.assert_allclose(met, [0 * samples[0], samples[0], samples[0] + samples[1]], rtol=1e-5)
    with pytest.raises(CalibrationInvalid, match=r"one after another: onnxruntime crashed \(SIGFPE\)"):
        with_state(tmp_path, stateful, {"x": models.crashing(samples)}, np.zeros(4, np.int64))


def test_samples_without_an_order_are_refused() -> None:
    with pytest.raises(CalibrationInvalid, match="does not define the order of its samples"):
        with_state(Path("samples.npz"), source(), {"x": np.ones((3, 1), np.float32)}, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[[state]]\ninput = "z"\noutput = "next_s"', "names input 'z', which the model does not have"),
        ('[[state]]\ninput = "s"\noutput = "z"', "names output 'z', which the model does not have: it has "),
        ('[[state]]\ninput = "s"', "output"),
        ('[state]\ninput = "s"\noutput = "next_s"', "in double brackets"),
        ('[[state]]\ninput = "s"\noutput = "next_s"\nzero = 1', "unknown key 'zero'"),
        ('state_id = "v1"', "but the model has no state: add"),
        ('state_id = "a b"\n[[state]]\ninput = "s"\noutput = "next_s"', "give letters, digits"),
        ("state = 3", "state"),
        (
            '[[state]]\ninput = "s"\noutput = "next_s"\n[[state]]\ninput = "x"\noutput = "y"',
            "every input of the model is state",
        ),
    ],
)
def test_a_file_that_binds_no_state_of_the_model_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(ConfigInvalid, match=message):
        read_state(path, source())


def test_the_state_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text('state_id = "v1"\n[[state]]\ninput = "s"\noutput = "next_s"\n')
    assert read_state(path, source()) == (STATE, "v1")
    assert read_state(Path("imagenet"), source()) == ((), "")
