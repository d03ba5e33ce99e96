"""Models with floats of 16 or 64 bits are built in FP32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgert.errors import BuildFailed, OperatorUnsupported, SourceInvalid
from edgert_deploy.packager.accuracy.artifact_runs import artifact_outputs, reference_outputs
from edgert_deploy.packager.builders import check_source, first_engine
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.onnx_graph.rewrites.single_precision import widen_half
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models
from tests.support.builders import build

onnx: Any = pytest.importorskip("onnx")


def with_weights_in(kind: str, weights: Any) -> Any:
    """Return a network that widens its weights itself, like exports of language models."""
    helper, element = onnx.helper, getattr(onnx.TensorProto, kind)
    stored = helper.make_tensor("stored", element, weights.shape, weights.ravel().tolist())
    nodes = [helper.make_node("Cast", ["stored"], ["w"], to=1), helper.make_node("MatMul", ["x", "w"], ["y"])]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [value("x", 1, ["N", 4])], [value("y", 1, ["N", 8])], [stored])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime", "tflite"])
@pytest.mark.parametrize(("kind", "name"), [("FLOAT16", "FP16"), ("BFLOAT16", "BF16")])
def test_weights_of_16_bits_have_the_same_values_in_every_engine(
    tmp_path: Path, engine: str, kind: str, name: str
) -> None:
    weights = np.round(8 * models.random(4, 8)) / 8  # exact in both precisions
    source = load_source(models.write(with_weights_in(kind, weights), tmp_path / "m.onnx"))
    assert source.remarks[0].startswith(f"the model computes in {name};")
    samples = CalibrationSet({"x": models.random(24, 4)}, None)
    answers = artifact_outputs(build(engine, source, samples, "fp32", tmp_path), source, samples)
    want = samples.inputs["x"] @ weights
    np.testing.assert_allclose(answers[0], want, atol=1e-5)
    quantized = artifact_outputs(build(engine, source, samples, "int8", tmp_path / "int8"), source, samples)
    assert np.abs(quantized[0] - want).max() < 0.05 * np.abs(want).max()


def test_each_input_is_reported_with_its_own_precision() -> None:
    body = "wide = Cast <to = 1> (a)  other = Cast <to = 1> (b)  y = Add (wide, other)"
    proto = models.model("float16[N,4] a, bfloat16[N,4] b) => (float[N,4] y", body, {})
    assert widen_half(proto) == (
        "the model computes in FP16 and BF16; it is built from the same weights in FP32",
        "'a' is FP32, not FP16: send and read it as float32",
        "'b' is FP32, not BF16: send and read it as float32",
    )


def in_double(nodes: str, weights: dict[str, Any], signature: str = "double[N,3,8,8] x) => (double[N,4] y") -> Any:
    return models.model(signature, nodes, {name: np.asarray(value, np.float64) for name, value in weights.items()})


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime", "tflite"])
def test_a_model_in_fp64_is_built_in_fp32(tmp_path: Path, engine: str) -> None:
    """OpenVINO fails on FP64, TFLite lacks FP64, and ONNX Runtime has no Conv in FP64."""
    body = "c = Conv (x, w)  r = Relu (c)  p = GlobalAveragePool (r)  y = Flatten (p)"
    source = load_source(models.write(in_double(body, {"w": models.random(4, 3, 3, 3)}), tmp_path / "m.onnx"))
    assert source.remarks[0].startswith("the model computes in FP64; it is built in FP32")
    assert [spec.datatype for spec in (*source.inputs, *source.outputs)] == ["FP32", "FP32"]
    samples = CalibrationSet({"x": models.random(24, 3, 8, 8)}, None)
    want = reference_outputs(source, samples)[0]
    for precision in ("fp32", "int8"):
        artifact = build(engine, source, samples, precision, tmp_path / precision)
        got = artifact_outputs(artifact, source, samples)[0]
        assert np.abs(got - want).max() < 0.05 * np.abs(want).max()


def test_a_step_in_fp64_inside_a_model_is_computed_in_fp32(tmp_path: Path) -> None:
    body = "d = Cast <to = 11> (x)  m = Mul (d, s)  e = Max (m, low)  y = Cast <to = 1> (e)"
    proto = in_double(body, {"s": [2.0] * 4, "low": -1e308}, "float[N,4] x) => (float[N,4] y")
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    samples = CalibrationSet({"x": models.random(24, 4)}, None)
    got = artifact_outputs(build("tflite", source, samples, "fp32", tmp_path / "a"), source, samples)
    np.testing.assert_allclose(got[0], 2 * samples.inputs["x"], rtol=1e-6)


def test_a_model_that_needs_fp64_stays_in_fp64_and_is_only_for_onnx_runtime(tmp_path: Path) -> None:
    proto = in_double("b = Add (x, large)  y = Sub (b, large)", {"large": 1e12}, "double[N,4] x) => (double[N,4] y")
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    assert source.inputs[0].datatype == "FP64"
    assert source.remarks == (
        "the model stays in FP64, because its answers differ in FP32: only onnxruntime supports FP64",
    )
    with pytest.raises(OperatorUnsupported, match="openvino does not support FP64, and the model stays in FP64"):
        check_source(source, "openvino", "intel-nuc")
    assert first_engine(source, ["openvino", "onnxruntime"]) == "onnxruntime"
    samples = CalibrationSet({"x": models.random(24, 4).astype(np.float64)}, None)
    with pytest.raises(BuildFailed, match="FP64, which cannot be converted to FP16: build it with --precision fp32"):
        build("onnxruntime", source, samples, "fp16", tmp_path / "fp16")


def test_half_weights_that_are_too_large_in_fp32_are_refused_before_they_are_widened() -> None:
    proto = with_weights_in("FLOAT16", models.random(4, 8))
    proto.graph.initializer[0].dims[:] = [30_000, 30_000]  # 1.8 GB, and 3.6 GB in FP32; the bytes are not read
    with pytest.raises(SourceInvalid, match=r"in FP32, which need 3600000000 bytes.* use a smaller variant"):
        widen_half(proto)
