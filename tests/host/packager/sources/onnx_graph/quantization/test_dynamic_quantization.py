"""A model that quantizes activations at run time becomes float for an engine that needs this."""

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
from edgert_deploy.packager.sources.onnx_graph.quantization.qat import float_of
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models
from tests.support.builders import ENGINE_NAMES, build, samples_for


def dynamic(kind: str) -> tuple[Any, Any]:
    """Return a float model, and the model that ONNX Runtime's `quantize_dynamic` makes of it."""
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
def test_a_dynamically_quantized_model_becomes_float_again_if_an_engine_needs_this(kind: str, tmp_path: Path) -> None:
    """Packages often ship only such a file: a `model.int8.onnx` with DynamicQuantizeLinear or -LSTM."""
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


def test_a_bias_that_is_rounded_to_the_scale_of_the_sums_becomes_float(tmp_path: Path) -> None:
    """Quantizers of 2020 wrote such a bias."""
    import onnxruntime

    body = """
        q, s, z = DynamicQuantizeLinear (x)
        i = ConvInteger (q, w, z)
        m = Mul (s, ws)  d = Div (bias, m)  r = Floor (d)  n = Cast <to = 6> (r)  b = Reshape (n, shape)
        sum = Add (i, b)  f = Cast <to = 1> (sum)  y = Mul (f, m)
    """
    weights: dict[str, Any] = {
        "w": np.random.default_rng(0).integers(0, 255, (4, 3, 1, 1)).astype(np.uint8),
        "ws": np.array(0.01, np.float32),
        "bias": np.array([3, -4, 5, 0.5], np.float32),
        "shape": np.array([1, -1, 1, 1]),
    }
    old = models.model("float[N,3,6,6] x) => (float[N,4,6,6] y", body, weights)
    undone = float_of(old)
    assert [node.op_type for node in undone.graph.node] == ["Conv", "Add", "Cast", "Mul"]
    x = models.random(1, 3, 6, 6)
    want, got = (
        onnxruntime.InferenceSession(each.SerializeToString()).run(None, {"x": x})[0] for each in (old, undone)
    )
    np.testing.assert_allclose(got, want, atol=0.02 * float(np.abs(want).max()))
    source = load_source(models.write(old, tmp_path / "m.onnx"))
    samples = samples_for(source, count=40)
    for engine in ENGINE_NAMES:
        artifact = build(engine, source, samples, "int8", tmp_path / engine)
        answers, exact = artifact_outputs(artifact, source, samples)[0], reference_outputs(source, samples)[0]
        assert np.corrcoef(answers.ravel(), exact.ravel())[0, 1] > 0.99, engine


def test_a_constant_bias_that_is_added_to_sums_in_int32_is_refused() -> None:
    """Its scale depends on the activations."""
    body = """
        q, s, z = DynamicQuantizeLinear (x)
        i = MatMulInteger (q, w, z)  b = Add (i, bias)  f = Cast <to = 1> (b)  y = Mul (f, s)
    """
    weights: dict[str, Any] = {"w": np.ones((4, 3), np.uint8), "bias": np.ones(3, np.int32)}
    with pytest.raises(BuildFailed, match=r"Add 'b' computes with sums in INT32.*build for onnxruntime"):
        float_of(models.model("float[N,4] x) => (float[N,3] y", body, weights))


def test_a_fused_operator_of_onnx_runtime_is_refused() -> None:
    """ONNX Runtime writes such operators when it saves an optimized model."""
    fused = models.model("float[N,4] x) => (float[N,3] y", "y = MatMul (x, w)", {"w": np.ones((4, 3), np.float32)})
    fused.graph.node[0].op_type = "DynamicQuantizeMatMul"
    with pytest.raises(BuildFailed, match="holds DynamicQuantizeMatMul, which EdgeRT cannot convert to float"):
        float_of(fused)
