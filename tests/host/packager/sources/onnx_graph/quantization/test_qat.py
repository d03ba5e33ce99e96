"""A model that is already quantized keeps its scales in the artifact of every engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.errors import BuildFailed
from edgert_deploy.packager.accuracy.artifact_runs import artifact_outputs, reference_outputs
from edgert_deploy.packager.sources.onnx_graph.quantization.qat import float_of, ranges_of
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support import models
from tests.support.builders import ENGINE_NAMES, build, samples_for

SCALES = {"x": 0.05, "r": 0.04}


def trained(zero_point: int = 0, dtype: Any = np.int8) -> Any:
    """Return a model like a QAT export of PyTorch: Q/DQ on activations, and on float weights per channel."""
    body = """
        xq = QuantizeLinear (x, sx, z)  xd = DequantizeLinear (xq, sx, z)
        wq = QuantizeLinear <axis = 0> (w1, sw, zw)  wd = DequantizeLinear <axis = 0> (wq, sw, zw)
        c = Conv <kernel_shape = [3, 3], pads = [1, 1, 1, 1]> (xd, wd, b1)
        r = Relu (c)
        rq = QuantizeLinear (r, sr, z)  rd = DequantizeLinear (rq, sr, z)
        g = GlobalAveragePool (rd) f = Flatten (g) scores = Gemm (f, w2, b2)
    """
    weights: dict[str, Any] = {"w1": models.random(8, 2, 3, 3), "b1": models.random(8), "b2": models.random(4)}
    weights |= {"w2": models.random(8, 4), "z": np.array(zero_point, dtype), "zw": np.zeros(8, np.int8)}
    weights |= {"sx": np.float32(SCALES["x"]), "sr": np.float32(SCALES["r"])}
    weights["sw"] = np.abs(weights["w1"]).max(axis=(1, 2, 3)) / 127
    return models.model("float[N,2,6,6] x) => (float[N,4] scores", body, {k: np.asarray(v) for k, v in weights.items()})


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> SourceModel:
    return load_source(models.write(trained(), tmp_path_factory.mktemp("qat") / "qat.onnx"))


def test_a_model_with_qat_is_distinguished_from_float_models_and_from_packed_weights(
    source: SourceModel, tmp_path: Path
) -> None:
    assert source.quantized
    assert not load_source(models.write(models.cnn(), tmp_path / "float.onnx")).quantized
    body = "w = DequantizeLinear <axis = 1> (wq, s, z) scores = Gemm (x, w, b)"
    weights = {"wq": np.arange(12, dtype=np.int8).reshape(4, 3), "s": models.random(3), "z": np.zeros(3, np.int8)}
    packed = models.model("float[N,4] x) => (float[N,3] scores", body, {**weights, "b": models.random(3)})
    unpacked = load_source(models.write(packed, tmp_path / "packed.onnx"))
    assert not unpacked.quantized
    assert [node.op_type for node in unpacked.proto.graph.node] == ["Gemm"]
    samples = samples_for(unpacked)
    want = samples.inputs["x"] @ (weights["wq"] * weights["s"]) + models.random(3)
    np.testing.assert_allclose(reference_outputs(unpacked, samples)[0], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_every_engine_keeps_the_answers_of_a_model_with_qat_and_reports_this(
    engine: str, source: SourceModel, tmp_path: Path
) -> None:
    samples = samples_for(source)
    artifact = build(engine, source, samples, "int8", tmp_path / "out")
    assert artifact.qat
    want, got = reference_outputs(source, samples), artifact_outputs(artifact, source, samples)
    # OpenVINO and TFLite add in another order, so a value in the middle between two steps may round to the other step.
    np.testing.assert_allclose(got[0], want[0], atol=3 * SCALES["r"])
    assert np.abs(got[0] - want[0]).mean() < SCALES["r"]
    if engine == "openvino":
        assert b"FakeQuantize" in artifact.path.read_bytes()
    if engine in ("onnxruntime", "tensorrt"):
        assert artifact.path.read_bytes() == source.proto.SerializeToString(deterministic=True)


@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_a_build_in_fp32_is_the_network_without_its_quantization(
    engine: str, source: SourceModel, tmp_path: Path
) -> None:
    samples = samples_for(source)
    artifact = build(engine, source, samples, "fp32", tmp_path / "out")
    assert not artifact.qat
    plain = load_source(models.write(float_of(source.proto), tmp_path / "plain.onnx"))
    assert not plain.quantized
    want, got = reference_outputs(plain, samples), artifact_outputs(artifact, source, samples)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-3, atol=1e-4)
    assert not np.array_equal(want[0], reference_outputs(source, samples)[0])


def test_tflite_gets_exactly_the_scales_of_the_training(source: SourceModel, tmp_path: Path) -> None:
    interpreter = pytest.importorskip("ai_edge_litert.interpreter")
    artifact = build("tflite", source, samples_for(source), "int8", tmp_path / "out")
    details = interpreter.Interpreter(model_path=str(artifact.path)).get_tensor_details()
    scales = [d["quantization"][0] for d in details if d["dtype"] == np.int8]
    for scale in SCALES.values():
        assert np.isclose(scales, scale, rtol=1e-6).any()
    for name, scale in SCALES.items():
        assert ranges_of(source.proto)[name] == pytest.approx((-128 * scale, 127 * scale))


def test_tensorrt_names_the_node_that_it_would_misread(tmp_path: Path) -> None:
    source = load_source(models.write(trained(3, np.uint8), tmp_path / "u8.onnx"))
    with pytest.raises(BuildFailed, match="QuantizeLinear node 'xq': its zero point is uint8"):
        build("tensorrt", source, samples_for(source), "int8", tmp_path / "out")
