"""A model that is quantized already keeps its scales, in every engine's artifact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.errors import BuildFailed
from edgert_deploy.packager.accuracy.artifact_runs import artifact_outputs, reference_outputs
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.onnx_graph.qat import float_of, ranges_of
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support import models
from tests.support.builders import ENGINE_NAMES, build, samples_for

SCALES = {"x": 0.05, "r": 0.04}


def trained(zero_point: int = 0, dtype: Any = np.int8) -> Any:
    """As PyTorch exports QAT: Q/DQ on activations and, one scale a channel, on float weights."""
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


def dynamic(kind: str) -> tuple[Any, Any]:
    """Return a float model, and what ONNX Runtime's `quantize_dynamic` writes for it."""
    if kind == "convolution":
        float_model, ops = models.cnn(), ["Conv"]
    elif kind == "lstm":
        body = """
            t = Transpose <perm = [1, 0, 2]> (x)
            s, h, c = LSTM <hidden_size = 8, direction = "bidirectional"> (t, w, r, b)
            e = Transpose <perm = [2, 0, 1, 3]> (s)  f = Flatten (e)  scores = MatMul (f, v)
        """
        weights = {"w": models.random(2, 32, 6), "r": models.random(2, 32, 8, seed=1), "b": models.random(2, 64)}
        float_model = models.model(
            "float[N,5,6] x) => (float[N,3] scores", body, {**weights, "v": models.random(80, 3)}
        )
        ops = ["LSTM", "MatMul"]
    elif kind == "table":
        body = "e = Gather (table, x)  f = Flatten (e)  scores = MatMul (f, v)"
        weights = {"table": models.random(20, 6), "v": models.random(24, 3)}
        float_model, ops = models.model("int64[N,4] x) => (float[N,3] scores", body, weights), ["Gather", "MatMul"]
    else:
        float_model, ops = models.mlp(), ["MatMul", "Gemm"]
    return float_model, ops


@pytest.mark.parametrize("kind", ["convolution", "lstm", "table", "matrix"])
def test_a_model_quantized_as_it_runs_is_float_again_where_an_engine_needs_that(kind: str, tmp_path: Path) -> None:
    """Packages often ship such a file alone: a `model.int8.onnx` with DynamicQuantizeLinear or -LSTM."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    float_model, ops = dynamic(kind)
    models.write(float_model, tmp_path / "float.onnx")
    own = {"weight_type": QuantType.QUInt8} if kind == "convolution" else {}
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "m.onnx", op_types_to_quantize=ops, **own)
    source = load_source(tmp_path / "m.onnx")
    assert source.quantized
    assert source.inputs[0].shape[0] == 1
    assert "quantizes activations as it runs" in source.remarks[0]
    exact = load_source(tmp_path / "float.onnx")
    samples = samples_for(exact, count=40)
    if kind == "table":
        samples = CalibrationSet({"x": np.random.default_rng(0).integers(0, 20, (40, 4))}, None)
    want = reference_outputs(exact, samples)[0]
    undone = float_of(source.proto)
    assert not {node.op_type for node in undone.graph.node} & {"DequantizeLinear", "MatMulInteger", "ConvInteger"}
    import onnxruntime

    session = onnxruntime.InferenceSession(undone.SerializeToString(), providers=["CPUExecutionProvider"])
    got = np.concatenate([session.run(None, {"x": row[None]})[0] for row in samples.inputs["x"]])
    np.testing.assert_allclose(got, want, atol=0.03 * float(np.abs(want).max()))
    half = build("onnxruntime", source, samples, "fp16", tmp_path / "half")
    np.testing.assert_allclose(artifact_outputs(half, source, samples)[0], got, atol=0.01 * float(np.abs(got).max()))
    for engine in ENGINE_NAMES:
        artifact = build(engine, source, samples, "int8", tmp_path / engine)
        assert artifact.qat == (engine == "onnxruntime")  # the others quantize the float graph
        answers = artifact_outputs(artifact, source, samples)[0]
        assert np.corrcoef(answers.ravel(), want.ravel())[0, 1] > 0.99, engine


def test_a_bias_that_is_added_to_sums_in_int32_is_refused() -> None:
    """Quantizers of 2020 wrote it so; its rounding depends on the scale of the activations."""
    body = """
        q, s, z = DynamicQuantizeLinear (x)
        i = MatMulInteger (q, w, z)  b = Add (i, bias)  f = Cast <to = 1> (b)  y = Mul (f, s)
    """
    weights: dict[str, Any] = {"w": np.ones((4, 3), np.uint8), "bias": np.ones(3, np.int32)}
    with pytest.raises(BuildFailed, match=r"Add 'b' computes with sums in INT32.*build for onnxruntime"):
        float_of(models.model("float[N,4] x) => (float[N,3] y", body, weights))


def test_a_fused_operator_of_onnx_runtimes_own_is_refused() -> None:
    """ONNX Runtime writes such operators where it saves a model that it has optimized."""
    fused = models.model("float[N,4] x) => (float[N,3] y", "y = MatMul (x, w)", {"w": np.ones((4, 3), np.float32)})
    fused.graph.node[0].op_type = "DynamicQuantizeMatMul"
    with pytest.raises(BuildFailed, match="holds DynamicQuantizeMatMul, which cannot be turned into float"):
        float_of(fused)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> SourceModel:
    return load_source(models.write(trained(), tmp_path_factory.mktemp("qat") / "qat.onnx"))


def test_it_is_told_from_a_float_model_and_from_one_with_packed_weights(source: SourceModel, tmp_path: Path) -> None:
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
def test_every_engine_keeps_its_answers_and_says_so(engine: str, source: SourceModel, tmp_path: Path) -> None:
    samples = samples_for(source)
    artifact = build(engine, source, samples, "int8", tmp_path / "out")
    assert artifact.qat
    want, got = reference_outputs(source, samples), artifact_outputs(artifact, source, samples)
    # OpenVINO and TFLite add in another order: a value in the middle of two steps may fall on the other one.
    np.testing.assert_allclose(got[0], want[0], atol=3 * SCALES["r"])
    assert np.abs(got[0] - want[0]).mean() < SCALES["r"]
    if engine == "openvino":
        assert b"FakeQuantize" in artifact.path.read_bytes()
    if engine in ("onnxruntime", "tensorrt"):
        assert artifact.path.read_bytes() == source.proto.SerializeToString(deterministic=True)


@pytest.mark.parametrize("engine", ENGINE_NAMES)
def test_fp32_is_the_network_without_its_quantization(engine: str, source: SourceModel, tmp_path: Path) -> None:
    samples = samples_for(source)
    artifact = build(engine, source, samples, "fp32", tmp_path / "out")
    assert not artifact.qat
    plain = load_source(models.write(float_of(source.proto), tmp_path / "plain.onnx"))
    assert not plain.quantized
    want, got = reference_outputs(plain, samples), artifact_outputs(artifact, source, samples)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-3, atol=1e-4)
    assert not np.array_equal(want[0], reference_outputs(source, samples)[0])


def test_tflite_gets_the_very_scales_of_the_training(source: SourceModel, tmp_path: Path) -> None:
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
