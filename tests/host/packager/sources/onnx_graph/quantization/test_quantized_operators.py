"""Models that other tools quantized are built for every engine, in each format and width."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert_deploy.packager.accuracy.artifact_runs import artifact_outputs, reference_outputs
from edgert_deploy.packager.builders.qdq import calibration_feeds, calibration_reader
from edgert_deploy.packager.sources.onnx_graph.quantization.qat import float_of
from edgert_deploy.packager.sources.onnx_graph.quantization.quantized_operators import as_qdq
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support import models
from tests.support.builders import build, samples_for

KINDS = ["operators", "operators-per-channel", "16-bit activations"]
if sys.version_info >= (3, 11):  # the quantizer of ONNX Runtime 1.23, the last for Python 3.10, fails on them
    KINDS.append("4-bit weights")
ENGINES = ("onnxruntime", "openvino", "tflite")


def quantized(kind: str, folder: Path) -> tuple[SourceModel, Any]:
    """Return a small network that ONNX Runtime's `quantize_static` quantized, and samples."""
    from onnxruntime.quantization import QuantFormat, QuantType, quantize_static

    how = {
        "operators": {"quant_format": QuantFormat.QOperator},
        "operators-per-channel": {"quant_format": QuantFormat.QOperator, "per_channel": True},
        "16-bit activations": {"activation_type": QuantType.QInt16},
        "4-bit weights": {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt4},
    }
    path = models.write(models.cnn(), folder / "float.onnx")
    samples = samples_for(load_source(path))
    quantize_static(path, folder / "m.onnx", calibration_reader(calibration_feeds(samples)), **how[kind])
    return load_source(folder / "m.onnx"), samples


@pytest.mark.parametrize("kind", KINDS)
def test_every_engine_runs_models_that_onnxruntime_quantized(kind: str, tmp_path: Path) -> None:
    """onnxruntime removes a Relu if the range of its result begins at 0. In float, engines need this Relu."""
    source, samples = quantized(kind, tmp_path)
    assert source.quantized
    want = reference_outputs(source, samples)[0]
    for engine in ENGINES:
        for precision in ("int8", "fp32"):
            artifact = build(engine, source, samples, precision, tmp_path / f"{engine}-{precision}")
            widened = (
                engine == "openvino" and kind == "16-bit activations"
            )  # this engine computes these operators wrongly
            assert artifact.qat == (precision == "int8" and not widened)
            got = artifact_outputs(artifact, source, samples)[0]
            assert np.corrcoef(got.ravel(), want.ravel())[0, 1] > 0.99, (engine, precision)


def answer(model: Any, samples: Any) -> Any:
    import onnxruntime

    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"x": samples})[0]


def with_own_operators(signature: str, body: str, constants: dict[str, Any], opset: int) -> Any:
    proto = models.model(signature, body, {name: np.asarray(value) for name, value in constants.items()}, opset=opset)
    proto.opset_import.add(domain="com.microsoft", version=1)
    return proto


def test_quantized_operators_are_converted_to_qdq_with_the_same_numbers() -> None:
    one = {"s": np.float32(0.05), "t": np.float32(0.04), "z": np.uint8(100), "v": np.uint8(110)}
    body = """
        q = QuantizeLinear (x, s, z)
        a = com.microsoft.QLinearAdd (q, s, z, q, s, z, t, v)
        l = com.microsoft.QLinearLeakyRelu <alpha = 0.1> (a, t, v, s, z)
        c = com.microsoft.QLinearConcat <axis = 1> (t, v, l, s, z, q, s, z)
        p = com.microsoft.QLinearGlobalAveragePool (c, t, v, s, z)
        y = DequantizeLinear (p, s, z)
    """
    proto = with_own_operators("float[1,3,4,4] x) => (float[1,6,1,1] y", body, one, 17)
    samples = models.random(1, 3, 4, 4)
    rewritten = as_qdq(proto)
    assert not any(node.domain for node in rewritten.graph.node)
    np.testing.assert_allclose(
        answer(rewritten, samples), answer(proto, samples), atol=0.051
    )  # one step, for a sum in the middle between two steps
    np.testing.assert_allclose(answer(float_of(proto), samples), answer(proto, samples), atol=0.15)


@pytest.mark.parametrize("axis", ["axis = 1, ", "axis = 2, ", ""])
@pytest.mark.parametrize("opset", [11, 13])
def test_a_softmax_from_before_opset_13_runs_over_several_axes(opset: int, axis: str, tmp_path: Path) -> None:
    constants = {"s": np.float32(0.05), "t": np.float32(1 / 256), "z": np.uint8(100), "v": np.uint8(0)}
    body = f"""
        q = QuantizeLinear (x, s, z)
        p = com.microsoft.QLinearSoftmax <{axis}opset = {opset}> (q, s, z, t, v)
        y = DequantizeLinear (p, t, v)
    """
    proto = with_own_operators("float[N,3,4] x) => (float[N,3,4] y", body, constants, opset)
    source, samples = load_source(models.write(proto, tmp_path / "m.onnx")), models.random(2, 3, 4)
    rewritten = as_qdq(source.proto)
    assert not any(node.domain for node in rewritten.graph.node)
    np.testing.assert_allclose(answer(rewritten, samples), answer(proto, samples), atol=0.004)


def test_the_factor_of_a_quantized_gemm_scales_its_bias() -> None:
    weights, bias = np.arange(-8, 12, dtype=np.int8).reshape(5, 4), np.array([1.0, 2.0, 3.0, -1.0, -2.0])
    scales: dict[str, Any] = {"s": np.float32(0.05), "z": np.uint8(100), "t": np.float32(0.1), "v": np.uint8(120)}
    scales |= {"w": weights, "sw": np.float32(0.1), "zw": np.int8(0), "b": np.round(bias / 0.0025).astype(np.int32)}
    body = """
        q = QuantizeLinear (x, s, z)
        p = com.microsoft.QGemm <alpha = 0.5, transB = 1> (q, s, z, w, sw, zw, b, t, v)
        y = DequantizeLinear (p, t, v)
    """
    proto, samples = with_own_operators("float[N,4] x) => (float[N,5] y", body, scales, 13), models.random(3, 4)
    want = 0.5 * samples @ (0.1 * weights.T) + bias
    np.testing.assert_allclose(answer(proto, samples), want, atol=0.15)
    np.testing.assert_allclose(answer(as_qdq(proto), samples), want, atol=0.15)


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
