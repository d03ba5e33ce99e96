"""An untrusted ONNX file gives a model on which every builder can rely, or one clear SourceInvalid."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.errors import SourceInvalid
from edgert.tensors import TensorSpec
from edgert_deploy.packager.accuracy.artifact_runs import reference_outputs
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models


def load(proto: Any, folder: Path) -> Any:
    return load_source(models.write(proto, folder / "model.onnx"))


def test_a_valid_model_is_described_by_its_tensors_and_its_digest(tmp_path: Path) -> None:
    source = load(models.mlp(), tmp_path)
    assert source.inputs == (TensorSpec("x", "FP32", (-1, 4)),)
    assert source.outputs == (TensorSpec("scores", "FP32", (-1, 3)),)
    data = (tmp_path / "model.onnx").read_bytes()
    assert (source.sha256, source.size_bytes) == (hashlib.sha256(data).hexdigest(), len(data))


def test_a_batch_fixed_to_one_stays_fixed(tmp_path: Path) -> None:
    source = load(models.mlp("float[1,4] x) => (float[1,3] scores"), tmp_path)
    assert (source.inputs[0].shape, source.outputs[0].shape) == ((1, 4), (1, 3))


def test_output_shapes_that_no_inference_finds_are_found_by_a_run_of_the_model(tmp_path: Path) -> None:
    # The shape for the Reshape is computed from the input, so it is unknown until the model runs.
    body = "s = Shape(x) k = Mul(s, one) y = Reshape(x, k)"
    proto = models.model("float[N,4] x) => (float[] y", body, {"one": np.ones(2, np.int64)})
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    assert load(proto, tmp_path).outputs == (TensorSpec("y", "FP32", (-1, 4)),)


def test_a_weight_that_is_also_listed_as_input_is_not_an_input(tmp_path: Path) -> None:
    proto = models.mlp("float[N,4] x, float[3] b2) => (float[N,3] scores")
    assert [spec.name for spec in load(proto, tmp_path).inputs] == ["x"]


def external(proto: Any) -> None:
    proto.graph.initializer[0].data_location = 1
    proto.graph.initializer[0].external_data.add(key="location", value="/etc/passwd")


def external_in_a_subgraph(proto: Any) -> None:
    node = proto.graph.node.add(op_type="If", input=["x"], output=["never"])
    branch = node.attribute.add(name="then_branch", type=5)
    branch.g.initializer.add(name="hidden", data_location=1)


def cycle(proto: Any) -> None:
    proto.graph.node[0].input[0] = "r"


def set_opset(version: int) -> Callable[[Any], None]:
    def change(proto: Any) -> None:
        proto.opset_import[0].version = version

    return change


def set_ir(proto: Any) -> None:
    proto.ir_version = 999


def no_such_operator(proto: Any) -> None:
    proto.graph.node[0].op_type = "Gemmm"


def no_nodes(proto: Any) -> None:
    del proto.graph.node[:]


def no_outputs(proto: Any) -> None:
    del proto.graph.output[:]


def input_as_output(proto: Any) -> None:
    proto.graph.output.append(proto.graph.input[0])


def text_input(proto: Any) -> None:
    proto.graph.input[0].type.tensor_type.elem_type = 8


def unknown_type(proto: Any) -> None:
    proto.graph.input[0].type.tensor_type.elem_type = 77


def no_shape(proto: Any) -> None:
    proto.graph.input[0].type.tensor_type.ClearField("shape")


def sequence_input(proto: Any) -> None:
    proto.graph.input[0].type.sequence_type.elem_type.tensor_type.elem_type = 1


def wrong_weight_shape(proto: Any) -> None:
    proto.graph.initializer[0].dims[0] = 5


def short_weight(proto: Any) -> None:
    proto.graph.initializer[0].raw_data = b"123"


def batch_first(proto: Any) -> None:
    weights: dict[str, NDArray[Any]] = {"W": np.ones((1, 8, 4), np.float32), "R": np.ones((1, 8, 2), np.float32)}
    body = "y = LSTM<hidden_size=2, layout=1>(x, W, R)"
    proto.CopyFrom(models.model("float[N,5,4] x) => (float[N,5,1,2] y", body, weights))


FAULTS: list[tuple[Callable[[Any], None], str]] = [
    (external, "not a file below the model's folder"),
    (external_in_a_subgraph, "not a file below the model's folder"),
    (cycle, "export it"),
    (
        set_opset(999),
        "the model has opset 999, and the newest opset that this runtime knows .* export it with standard operators, opset 13 to 21",
    ),
    (set_ir, "IR version|ir_version"),
    (no_such_operator, "Gemmm"),
    (no_nodes, "no operator"),
    (no_outputs, "no output"),
    (input_as_output, "'x' is an input and also an output of the model; omit it from the outputs"),
    (text_input, "text"),
    (unknown_type, "77"),
    (no_shape, "no shape"),
    (sequence_input, "not a tensor"),
    (wrong_weight_shape, "export it"),
    (short_weight, "export it"),
    (batch_first, "LSTM 'y' takes .batch, steps, inputs. .layout 1.*: export the model with layout 0"),
]


@pytest.mark.parametrize(("change", "says"), FAULTS, ids=[f[0].__qualname__.split(".")[0] for f in FAULTS])
def test_an_unsound_model_is_refused_with_the_next_step(
    change: Callable[[Any], None], says: str, tmp_path: Path
) -> None:
    proto = models.mlp()
    change(proto)
    with pytest.raises(SourceInvalid, match=says):
        load(proto, tmp_path)


@pytest.mark.parametrize(
    ("signature", "says"),
    [
        ("float[N,K] x) => (float[N,3] scores", "axis 1 of input 'x'.*--input x=1,K"),
        ("float[8,4] x) => (float[8,3] scores", r"axis 0 of input 'x' \[8, 4\] has 8 elements"),
        ("float x) => (float[N,3] scores", "has no axes.*--input x=NUMBER"),
    ],
)
def test_shapes_that_cannot_be_served_are_refused(signature: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(SourceInvalid, match=says):
        load(models.mlp(signature), tmp_path)


def test_a_model_with_a_layer_that_fixes_the_batch_gets_a_batch_of_one(tmp_path: Path) -> None:
    """Many exports have an open batch in their inputs, but fix the batch in a Reshape."""
    proto = models.model("float[N,4] x) => (float[1,4] y", "y = Reshape(x, k)", {"k": np.array([1, 4])})
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    assert [spec.shape for spec in (*source.inputs, *source.outputs)] == [(1, 4), (1, 4)]
    assert (
        "leaves its batch open but answers only one sample at a time, so its batch is fixed to 1" in source.remarks[0]
    )
    assert "does not run on a batch of 2" in source.remarks[0]
    assert "onnxruntime_src" not in source.remarks[0]  # the runtime's messages begin with a position in its own code


@pytest.mark.parametrize("batch", ["N", "1"])
def test_a_model_that_draws_random_numbers_is_refused(batch: str, tmp_path: Path) -> None:
    body = "r = RandomUniformLike(x) y = Add(x, r)"
    with pytest.raises(SourceInvalid, match=r"draws random numbers \(RandomUniformLike 'r'\).*model\.eval\(\)"):
        load(models.model(f"float[{batch},4] x) => (float[{batch},4] y", body), tmp_path)


def test_random_numbers_that_do_not_change_the_answer_are_accepted(tmp_path: Path) -> None:
    body = "r = RandomNormalLike(x) n = Mul(r, zero) y = Add(x, n)"
    proto = models.model("float[N,4] x) => (float[N,4] y", body, {"zero": np.zeros(1, np.float32)})
    assert load(proto, tmp_path).outputs[0].shape == (-1, 4)


def test_a_model_that_was_exported_in_training_mode_is_refused(tmp_path: Path) -> None:
    ones = {name: np.ones(4, np.float32) for name in ("scale", "bias", "mean", "variance")}
    body = "y, m, v = BatchNormalization <training_mode = 1> (x, scale, bias, mean, variance)"
    with pytest.raises(SourceInvalid, match=r"'y' is in training mode.*model\.eval\(\)\), and export it again"):
        load(models.model("float[1,4,8] x) => (float[1,4,8] y", body, ones), tmp_path)


def test_a_model_whose_answers_depend_on_the_batch_gets_a_batch_of_one(tmp_path: Path) -> None:
    """Example: the spectrogram of openWakeWord. On a device, the other samples come from other clients."""
    proto = models.model("float[N,4] x) => (float[N,4] y", "a = Abs(x) m = ReduceMax(a) y = Div(x, m)")
    source = load(proto, tmp_path)
    assert [spec.shape for spec in (*source.inputs, *source.outputs)] == [(1, 4), (1, 4)]
    assert "output 'y' of a sample depends on the other samples of its batch" in source.remarks[0]


@pytest.mark.parametrize(
    ("outputs", "body", "shape"),
    [
        ("float[1,4] x) => (float[4] y", "t = Constant <value = int64[1] {0}> () y = Squeeze(x, t)", (1, 4)),
        ("float[1,4] x) => (float y", "y = ReduceMax <keepdims = 0> (x)", (1,)),
        ("float[N,4] x) => (float y", "y = ReduceMax <keepdims = 0> (x)", (1,)),
        ("float[N,4] x) => (float[1,4] y", "y = ReduceMax <axes = [0]> (x)", (1, 4)),
    ],
)
def test_an_output_without_the_batch_gets_a_batch_if_the_model_takes_one_sample(
    outputs: str, body: str, shape: tuple[int, ...], tmp_path: Path
) -> None:
    """Examples: text recognizers whose output is [steps], and networks whose output is one number."""
    source = load(models.model(outputs, body), tmp_path)
    assert (source.inputs[0].shape, source.outputs[0].shape) == ((1, 4), shape)
    (answer,) = reference_outputs(source, CalibrationSet({"x": models.random(3, 4)}, None))
    want = models.random(3, 4) if shape == (1, 4) else models.random(3, 4).max(axis=1)
    np.testing.assert_array_equal(answer, want)
    if outputs.startswith("float[N"):
        assert any("answers only one sample" in remark for remark in source.remarks)


@pytest.mark.parametrize("data", [b"\0" * 64, b"not a model", b"\x08\x07"])
def test_other_files_are_refused(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "file.onnx").write_bytes(data)
    with pytest.raises(SourceInvalid, match="not an ONNX model"):
        load_source(tmp_path / "file.onnx")


def test_missing_files_and_folders_are_named(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.onnx"):
        with pytest.raises(SourceInvalid, match="not a file"):
            load_source(path)


def test_a_file_with_random_damage_gives_a_model_or_source_invalid(tmp_path: Path) -> None:
    whole = bytearray(models.cnn().SerializeToString())
    random = np.random.default_rng(3)
    for _ in range(12):
        damaged = bytearray(whole)
        for at in random.integers(0, len(whole), 4):
            damaged[at] ^= 1 << int(random.integers(0, 8))
        (tmp_path / "damaged.onnx").write_bytes(damaged)
        with contextlib.suppress(SourceInvalid):
            load_source(tmp_path / "damaged.onnx")


def test_a_truncated_model_raises_only_source_invalid(tmp_path: Path) -> None:
    whole = models.mlp().SerializeToString()
    # A child process checks each file that still parses, so the test tries only some lengths.
    for length in range(0, len(whole), len(whole) // 12):
        (tmp_path / "cut.onnx").write_bytes(whole[:length])
        with pytest.raises(SourceInvalid):
            load_source(tmp_path / "cut.onnx")
