"""A float .tflite is a source for TFLite targets. The source's own answers are the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("ai_edge_litert")

from ai_edge_litert import schema_py_generated as schema

from edgert.bundle.signing import SigningKey
from edgert.errors import BuildFailed, ConfigInvalid, SourceInvalid
from edgert_deploy.devices.profiles import load_profile
from edgert_deploy.packager.accuracy.artifact_runs import artifact_outputs, reference_outputs
from edgert_deploy.packager.pack import build_bundle
from edgert_deploy.packager.request import BuildRequest
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from edgert_deploy.packager.tflite_lowering import lower
from edgert_deploy.packager.tflite_lowering.tables import packed, unpacked
from edgert_deploy.packager.tflite_lowering.writer import operator_code
from tests.support import models
from tests.support.builders import build
from tests.support.packs import candidates_of, pack


@pytest.fixture(scope="module")
def digits_tflite(digits_source: SourceModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tflite") / "digits.tflite"
    path.write_bytes(lower(digits_source.proto))
    return path


def test_a_tflite_model_has_the_same_description_as_its_onnx_model(
    digits_tflite: Path, digits_source: SourceModel
) -> None:
    source = load_source(digits_tflite)
    assert (source.kind, source.proto, source.quantized) == ("tflite", None, False)
    assert (source.inputs, source.outputs) == (digits_source.inputs, digits_source.outputs)


@pytest.fixture
def digits_request(
    digits_tflite: Path, digits_calibration: CalibrationSet, digits_holdout: CalibrationSet
) -> BuildRequest:
    targets = (load_profile("raspberry-pi-4"),)
    return BuildRequest(load_source(digits_tflite), digits_calibration, digits_holdout, targets, "digits")


def test_a_target_without_tflite_is_refused_before_others_are_built(
    digits_request: BuildRequest, tmp_path: Path, signing_key: SigningKey
) -> None:
    request = replace(digits_request, targets=(*digits_request.targets, load_profile("intel-nuc")))
    lines: list[str] = []
    with pytest.raises(ConfigInvalid, match=r"target intel-nuc uses openvino.* omit --target intel-nuc$"):
        build_bundle(request, signing_key, tmp_path / "d.edgert", lines.append, lambda choice: None)
    assert lines == []


def test_a_tflite_model_is_built_and_judged_and_packed_for_tflite(
    digits_request: BuildRequest, tmp_path: Path, signing_key: SigningKey
) -> None:
    result = pack(digits_request, signing_key, tmp_path / "d.edgert")
    (one,) = candidates_of(result)
    assert (one.artifact.engine, one.artifact.kind, one.result.accuracy.metric, one.passed) == (
        "tflite",
        "int8",
        "top1",
        True,
    )
    assert one.size_bytes < digits_request.source.size_bytes


def test_a_model_that_leaves_its_batch_open_and_takes_one_sample_gets_a_batch_of_one(tmp_path: Path) -> None:
    """Converters keep the fixed batch in a Reshape of the training, but leave the batch of the input open."""
    proto = models.model("float[1,4] x) => (float[1,2,2] y", "y = Reshape(x, s)", {"s": np.array([1, 2, 2])})
    model = unpacked(lower(proto))
    for tensor in model.subgraphs[0].tensors[:1]:
        tensor.shapeSignature = [-1, 4]
    (tmp_path / "net.tflite").write_bytes(packed(model))
    source = load_source(tmp_path / "net.tflite")
    assert [spec.shape for spec in (*source.inputs, *source.outputs)] == [(1, 4), (1, 2, 2)]
    assert "answers only one sample at a time, so its batch is fixed to 1" in source.remarks[0]
    x = models.random(12, 4)
    samples = CalibrationSet({"x": x}, None)
    artifact = build("tflite", source, samples, "fp16", tmp_path / "out")
    np.testing.assert_allclose(artifact_outputs(artifact, source, samples)[0], x.reshape(12, 2, 2), atol=1e-3)


def test_the_error_about_another_engine_names_a_workaround(
    digits_tflite: Path, tmp_path: Path, signing_key: SigningKey, digits_calibration: CalibrationSet
) -> None:
    targets = tuple(load_profile(name) for name in ("raspberry-pi-4", "intel-nuc"))
    samples = digits_calibration
    request = BuildRequest(load_source(digits_tflite), samples, samples, targets, "digits", allow_overlap=True)
    with pytest.raises(ConfigInvalid, match=r"target intel-nuc uses openvino.*tf2onnx\.convert.*--tflite digits"):
        build_bundle(request, signing_key, tmp_path / "d.edgert", lambda line: None, lambda choice: None)


@pytest.mark.parametrize("engines", ["all", "first"])
def test_a_target_with_tflite_as_a_later_engine_gets_the_model_for_tflite(
    engines: Literal["all", "first"],
    digits_tflite: Path,
    tmp_path: Path,
    signing_key: SigningKey,
    digits_calibration: CalibrationSet,
    digits_holdout: CalibrationSet,
) -> None:
    """`edgert build --init` proposes the target this-machine. Its first engine is ONNX Runtime."""
    here = (load_profile("this-machine"),)
    request = BuildRequest(
        load_source(digits_tflite), digits_calibration, digits_holdout, here, "digits", engines=engines
    )
    result = build_bundle(request, signing_key, tmp_path / "d.edgert", lambda line: None, lambda choice: None)
    assert [one.artifact.engine for one in candidates_of(result)] == ["tflite"]


def test_a_model_that_is_already_quantized_is_kept_unchanged(
    tmp_path: Path, digits_source: SourceModel, digits_calibration: CalibrationSet
) -> None:
    made = build("tflite", digits_source, digits_calibration, "int8", tmp_path)
    source = load_source(made.path)
    assert source.quantized
    kept = build("tflite", source, digits_calibration, "int8", tmp_path / "out")
    assert kept.path.read_bytes() == made.path.read_bytes()
    want, got = reference_outputs(source, digits_calibration), artifact_outputs(kept, source, digits_calibration)
    np.testing.assert_array_equal(got[0], want[0])
    with pytest.raises(BuildFailed, match=r"is quantized, so it holds no fp16 weights: .* without --with-reference"):
        build("tflite", source, digits_calibration, "fp16", tmp_path / "out")


def test_the_scale_of_an_int8_input_is_read(
    tmp_path: Path, digits_source: SourceModel, digits_calibration: CalibrationSet
) -> None:
    """A preset for images needs this scale. Converters write it with inference_input_type = tf.int8."""
    made = build("tflite", digits_source, digits_calibration, "int8", tmp_path)
    assert load_source(made.path).scales == {}
    model = unpacked(made.path.read_bytes())
    graph = model.subgraphs[0]
    quantize = next(operator for operator in graph.operators if operator.inputs[0] == graph.inputs[0])
    assert model.operatorCodes[quantize.opcodeIndex].builtinCode == schema.BuiltinOperator.QUANTIZE
    graph.operators.remove(quantize)
    inner = graph.tensors[quantize.outputs[0]]
    graph.inputs = [quantize.outputs[0]]
    (tmp_path / "int8.tflite").write_bytes(packed(model))
    source = load_source(tmp_path / "int8.tflite")
    assert [spec.datatype for spec in source.inputs] == ["INT8"]
    scale, zero = float(inner.quantization.scale[0]), int(inner.quantization.zeroPoint[0])
    assert source.scales == {source.inputs[0].name: (scale, zero)}


@pytest.mark.parametrize(
    ("custom", "says"),
    [
        (b"Landmarks2TransformMatrix", r"the custom operator Landmarks2TransformMatrix, which .* or give it as ONNX"),
        (b"FlexErfinv", r"SELECT_TF_OPS.* built-in operators only, or give it as ONNX"),
    ],
)
def test_an_operator_that_the_runtime_lacks_is_named(
    custom: bytes, says: str, digits_tflite: Path, tmp_path: Path
) -> None:
    """Examples: MediaPipe's face landmarks with attention, and files with selected TensorFlow operators."""
    model = unpacked(digits_tflite.read_bytes())
    code = model.operatorCodes[0]
    code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.CUSTOM
    code.customCode = custom
    (tmp_path / "m.tflite").write_bytes(packed(model))
    with pytest.raises(SourceInvalid, match=says):
        load_source(tmp_path / "m.tflite")


def with_a_variable(content: bytes) -> bytes:
    """Return a model that writes its answer to a variable, like a streaming wake word model."""
    model = unpacked(content)
    graph = model.subgraphs[0]
    handle = schema.TensorT()
    handle.name, handle.type, handle.shape = b"handle", schema.TensorType.RESOURCE, []
    graph.tensors.append(handle)
    resource, answer = len(graph.tensors) - 1, int(graph.outputs[0])
    for code, table, reads, writes in (
        ("VAR_HANDLE", schema.VarHandleOptionsT(), [], [resource]),
        ("ASSIGN_VARIABLE", schema.AssignVariableOptionsT(), [resource, answer], []),
    ):
        model.operatorCodes.append(operator_code(code))
        operator = schema.OperatorT()
        operator.opcodeIndex, operator.inputs, operator.outputs = len(model.operatorCodes) - 1, reads, writes
        operator.builtinOptions = table
        operator.builtinOptionsType = getattr(schema.BuiltinOptions, type(table).__name__[:-1])
        graph.operators.append(operator)
    return packed(model)


def with_a_variable_tensor(content: bytes) -> bytes:
    """Return a model in which a tensor keeps its values between runs, as in TFLite's recurrent operators."""
    model = unpacked(content)
    graph = model.subgraphs[0]
    graph.tensors[int(graph.operators[0].outputs[0])].isVariable = True
    return packed(model)


@pytest.mark.parametrize("change", [with_a_variable, with_a_variable_tensor])
def test_a_model_that_keeps_a_state_inside_itself_is_refused(change: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """The answers of such a model would depend on the requests of other clients."""
    path = tmp_path / "streaming.tflite"
    path.write_bytes(change(lower(models.cnn())))
    with pytest.raises(
        SourceInvalid, match=r"keeps a state inside itself.*as an input and an output.*docs/streams\.md.*give the Keras"
    ):
        load_source(path)


def test_a_damaged_tflite_file_gives_a_model_or_one_clear_error(tmp_path: Path) -> None:
    whole = lower(models.cnn())
    random = np.random.default_rng(3)
    damaged: list[Any] = [whole[:length] for length in range(8, len(whole), len(whole) // 8)]
    for _ in range(12):
        flipped = bytearray(whole)
        for at in random.integers(8, len(whole), 4):
            flipped[at] ^= 1 << int(random.integers(0, 8))
        damaged.append(bytes(flipped))
    refused = 0
    for data in damaged:
        (tmp_path / "damaged.tflite").write_bytes(data)
        try:
            load_source(tmp_path / "damaged.tflite")
        except SourceInvalid:
            refused += 1
    assert refused >= 8  # the truncated files
