"""A quantized model keeps its scales in each engine's artifact; integer arithmetic is for ONNX Runtime."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.bundle.signing import SigningKey
from edgert.errors import BuildFailed, OperatorUnsupported
from edgert_deploy.packager.accuracy.artifact_runs import artifact_outputs, reference_outputs
from edgert_deploy.packager.builders.qdq import calibration_feeds, calibration_reader
from edgert_deploy.packager.request import BuildRequest
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.onnx_graph.qat import float_of, integer_operators, ranges_of
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support import models
from tests.support.builders import ENGINE_NAMES, build, samples_for
from tests.support.packs import candidates_of, pack
from tests.support.profiles import profile

SCALES = {"x": 0.05, "r": 0.04}
WIDTHS = ["16-bit activations"]
if sys.version_info >= (3, 11):  # the quantizer of ONNX Runtime 1.23, the last for Python 3.10, fails on them
    WIDTHS.append("4-bit weights")


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


def quantized(folder: Path, **how: Any) -> tuple[SourceModel, CalibrationSet]:
    """Return a small network that ONNX Runtime's `quantize_static` quantized, and samples."""
    from onnxruntime.quantization import quantize_static

    path = models.write(models.cnn(), folder / "float.onnx")
    samples = samples_for(load_source(path))
    quantize_static(path, folder / "m.onnx", calibration_reader(calibration_feeds(samples)), **how)
    return load_source(folder / "m.onnx"), samples


@pytest.mark.parametrize("width", WIDTHS)
def test_every_engine_runs_models_that_onnxruntime_quantized_to_other_widths(width: str, tmp_path: Path) -> None:
    """onnxruntime removes a Relu if the range of its result begins at 0. In float, engines need this Relu."""
    from onnxruntime.quantization import QuantType

    wide = width == "16-bit activations"
    how = {"activation_type": QuantType.QInt16 if wide else QuantType.QUInt8}
    source, samples = quantized(tmp_path, **how, weight_type=QuantType.QInt8 if wide else QuantType.QInt4)
    assert source.quantized
    want = reference_outputs(source, samples)[0]
    for engine in ("onnxruntime", "openvino", "tflite"):
        for precision in ("int8", "fp32"):
            artifact = build(engine, source, samples, precision, tmp_path / f"{engine}-{precision}")
            # OpenVINO computes 16 bits wrongly, so the build quantizes the model again.
            assert artifact.qat == (precision == "int8" and not (wide and engine == "openvino"))
            got = artifact_outputs(artifact, source, samples)[0]
            assert np.corrcoef(got.ravel(), want.ravel())[0, 1] > 0.99, (engine, precision)


def test_weights_in_blocks_of_4_bits_are_unpacked(tmp_path: Path) -> None:
    """ONNX Runtime's 4-bit quantizer for MatMul writes such weights in Q/DQ."""
    from onnx import TensorProto, helper, numpy_helper

    body = "w = DequantizeLinear <axis = 0, block_size = 4> (wq, s, z)  y = MatMul (x, w)"
    proto = models.model("float[N,10] x) => (float[N,3] y", body, {"s": models.random(3, 3)}, opset=21, ir_version=10)
    numbers = np.random.default_rng(0).integers(-8, 8, (10, 3))
    proto.graph.initializer.append(helper.make_tensor("wq", TensorProto.INT4, [10, 3], numbers.ravel().tolist()))
    proto.graph.initializer.append(helper.make_tensor("z", TensorProto.INT4, [3, 3], [1] * 9))
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    assert [node.op_type for node in source.proto.graph.node] == ["MatMul"]
    got = next(numpy_helper.to_array(tensor) for tensor in source.proto.graph.initializer if tensor.name == "w")
    np.testing.assert_allclose(got, (numbers - 1) * np.repeat(models.random(3, 3), 4, 0)[:10], rtol=1e-6)


def test_a_model_in_the_format_qoperator_is_packed_unchanged_for_onnx_runtime_alone(
    signing_key: SigningKey, tmp_path: Path
) -> None:
    from onnxruntime.quantization import QuantFormat

    source, samples = quantized(tmp_path, quant_format=QuantFormat.QOperator)
    assert source.quantized
    assert "QLinearConv" in integer_operators(source.proto)
    target = profile("box", "tflite", then=("onnxruntime", "openvino"))
    holdout = CalibrationSet({name: array + 0.01 for name, array in samples.inputs.items()}, None)
    result = pack(BuildRequest(source, samples, holdout, (target,), "m"), signing_key, tmp_path / "b.edgert")
    assert [one.id for one in candidates_of(result)] == ["onnxruntime-int8"]
    assert candidates_of(result)[0].artifact.qat
    (warning,) = [text for text in result.warnings if "QLinearConv" in text]
    assert "only onnxruntime computes" in warning
    assert {each.engine for choice in result.choices for each in choice.left_out} == {"tflite", "openvino"}
    request = BuildRequest(source, samples, holdout, (profile("box", "tensorrt"),), "m")
    with pytest.raises(OperatorUnsupported, match=r"tensorrt does not support .*QLinearConv.*Give the float model"):
        pack(request, signing_key, tmp_path / "b.edgert")
    with pytest.raises(BuildFailed, match=r"holds .*QLinearConv.*cannot convert to float"):
        build("onnxruntime", source, samples, "fp32", tmp_path / "out")


def test_a_model_that_quantizes_activations_as_it_runs_gets_a_batch_of_1(tmp_path: Path) -> None:
    """Otherwise, the items of a batch would share a range."""
    from onnxruntime.quantization import quantize_dynamic

    path = models.write(models.mlp(), tmp_path / "float.onnx")
    quantize_dynamic(path, tmp_path / "m.onnx")
    source, samples = load_source(tmp_path / "m.onnx"), samples_for(load_source(path))
    assert source.quantized
    assert source.inputs[0].shape[0] == 1
    assert "quantizes activations as it runs" in source.remarks[0]
    artifact = build("onnxruntime", source, samples, "int8", tmp_path / "out")
    assert artifact.qat
    want, got = reference_outputs(source, samples), artifact_outputs(artifact, source, samples)
    np.testing.assert_array_equal(got[0], want[0])
