"""Q/DQ graphs: which operators are quantized, FP16, and the precision of each layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

import onnx
import onnxruntime
from onnx import helper

from edgert.errors import BuildFailed
from edgert_deploy.packager.builders import qdq
from edgert_deploy.packager.builders.onnx_layers import onnx_layers
from edgert_deploy.packager.builders.tensorrt import TensorRTBuilder
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.onnx_graph.structure import opset_of
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support import models
from tests.support.models import classical
from tests.support.profiles import profile


def test_transformers_are_distinguished_from_other_models() -> None:
    assert qdq.is_transformer(models.transformer())
    assert not qdq.is_transformer(models.cnn())
    classifier = models.model("float[N,3] x) => (float[N,3] y", "y = Softmax(x)")
    assert not qdq.is_transformer(classifier)


def test_samples_are_given_to_the_quantizer_one_at_a_time_up_to_a_limit() -> None:
    calibration = CalibrationSet({"x": np.zeros((qdq.CALIBRATION_SAMPLES_MAX + 5, 4), np.float32)}, None)
    feeds = list(qdq.calibration_feeds(calibration))
    assert len(feeds) == qdq.CALIBRATION_SAMPLES_MAX
    assert feeds[0]["x"].shape == (1, 4)


def test_lengths_that_the_data_determine_get_no_formulas(tmp_path: Path) -> None:
    """ONNX Runtime's symbolic shape inference names such a length after its node."""
    body = "p = NonZero(x) t = Transpose(p) g = GatherND(x, t) s = ReduceSum <keepdims = 0> (g) y = Add(x, s)"
    proto = models.model("float[N,4] x) => (float[N,4] y", body)
    prepared = qdq.prepared(load_source(models.write(proto, tmp_path / "m.onnx")))
    (length,) = (v.type.tensor_type.shape.dim[0].dim_param for v in prepared.graph.value_info if v.name == "t")
    assert "NonZero" not in length


def test_a_model_is_raised_to_an_opset_but_never_lowered() -> None:
    proto = models.mlp()
    assert opset_of(qdq.at_least_opset(proto, 19)) == 19
    assert qdq.at_least_opset(proto, 13) is proto


def test_a_model_that_the_fp16_converter_has_made_can_be_converted_again(tmp_path: Path) -> None:
    first: SourceModel = load_source(models.write(models.mlp(), tmp_path / "m.onnx"))
    half = qdq.to_fp16(first.proto, first)
    source = load_source(models.write(half, tmp_path / "half.onnx"))  # in FP32 again
    again: Any = qdq.to_fp16(source.proto, source)
    assert {tensor.data_type for tensor in again.graph.initializer} == {10}  # FP16
    qdq.write_proto(again, tmp_path / "again.onnx")
    load_source(tmp_path / "again.onnx")


def test_a_model_in_fp16_keeps_the_datatypes_of_inputs_and_outputs(tmp_path: Path) -> None:
    source: SourceModel = load_source(models.write(models.mlp(), tmp_path / "m.onnx"))
    half: Any = qdq.to_fp16(source.proto, source)
    types = {value.type.tensor_type.elem_type for value in (*half.graph.input, *half.graph.output)}
    assert types == {1}  # FP32
    assert {tensor.data_type for tensor in half.graph.initializer} == {10}  # FP16
    qdq.write_proto(half, tmp_path / "half.onnx")
    assert {layer[:2] for layer in onnx_layers(tmp_path / "half.onnx")} == {("Gemm", "fp16"), ("Relu", "fp16")}
    qdq.write_proto(source.proto, tmp_path / "full.onnx")
    assert {layer[:2] for layer in onnx_layers(tmp_path / "full.onnx")} == {("Gemm", "fp32"), ("Relu", "fp32")}


def test_the_preparation_of_a_model_leaves_no_file_in_the_working_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If ONNX Runtime's symbolic shape inference does not know an operator, it writes the model to a file."""
    monkeypatch.chdir(tmp_path)
    assert qdq.prepared(load_source(classical.BOOSTING)).graph.node
    assert not list(tmp_path.iterdir())


def test_a_bias_with_a_leading_axis_of_one_is_quantized(tmp_path: Path) -> None:
    weights = {"w": models.random(4, 8), "b": models.random(1, 8)}
    proto = models.model("float[N,4] x) => (float[N,8] y", "y = Gemm(x, w, b)", weights)
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    calibration = CalibrationSet({"x": models.random(12, 4)}, None)
    quantized = qdq.quantize(source, calibration, qdq.Recipe("uint8"))
    assert "QuantizeLinear" in {node.op_type for node in quantized.graph.node}


def test_layers_that_share_a_bias_are_quantized_whatever_the_names_of_other_values(tmp_path: Path) -> None:
    """ONNX Runtime's quantizer gives the second copy of the bias the name `b0`, which another value has."""
    import onnxruntime

    body = "b0 = Conv(x, v, b) n = Neg(b0) y = Conv(n, w, b)"
    weights = {"v": models.random(4, 3, 1, 1), "w": models.random(4, 4, 1, 1), "b": models.random(4)}
    source = load_source(
        models.write(models.model("float[1,3,8,8] x) => (float[1,4,8,8] y", body, weights), tmp_path / "m.onnx")
    )
    calibration = CalibrationSet({"x": models.random(16, 3, 8, 8)}, None)
    qdq.write_proto(qdq.quantize(source, calibration, qdq.Recipe("uint8")), tmp_path / "int8.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "int8.onnx", providers=["CPUExecutionProvider"])
    exact = onnxruntime.InferenceSession(source.path, providers=["CPUExecutionProvider"])
    sample = calibration.served(0)
    got, want = session.run(None, sample)[0], exact.run(None, sample)[0]
    assert np.abs(got - want).max() < 0.05 * np.abs(want).max()


def test_layers_behind_an_operator_of_another_domain_become_int8(tmp_path: Path) -> None:
    """ONNX's shape inference stops at scikit-learn's Scaler, so the quantizer failed at a Softmax."""
    body = """
        s = ai.onnx.ml.Scaler <offset = [0.5, 0.5, 0.5, 0.5], scale = [2.0, 2.0, 2.0, 2.0]> (x)
        a = MatMul (s, w1) r = Relu (a) b = MatMul (r, w2) y = Softmax (b)
    """
    weights = {"w1": models.random(4, 8), "w2": models.random(8, 3)}
    proto = models.model("float[N,4] x) => (float[N,3] y", body, weights)
    proto.opset_import.append(helper.make_opsetid("ai.onnx.ml", 1))
    made = quantized(proto, tmp_path)
    readers = {node.op_type for node in made.graph.node if any("Dequantize" in name for name in node.input)}
    assert {"MatMul", "Softmax"} <= readers


def test_a_softmax_in_fp64_stays_in_float(tmp_path: Path) -> None:
    body = """
        a = MatMul (x, w) d = Cast <to = 11> (a) e = Softmax (d) y = Cast <to = 1> (e)
    """
    made = quantized(models.model("float[N,4] x) => (float[N,3] y", body, {"w": models.random(4, 3)}), tmp_path)
    assert [node.op_type for node in made.graph.node].count("Softmax") == 1
    assert "QuantizeLinear" in {node.op_type for node in made.graph.node}


def quantized(proto: Any, folder: Path) -> Any:
    source = load_source(models.write(proto, folder / "m.onnx"))
    return qdq.quantize(source, CalibrationSet({"x": models.random(20, 4)}, None), qdq.Recipe("uint8"), ())


def test_arithmetic_of_lengths_stays_exact(tmp_path: Path) -> None:
    """PyTorch's TorchScript exporter computes the pads of TensorFlow's padding "SAME" in FP32."""
    body = """
        s = Shape (x)  n = Gather (s, axis)  f = Cast <to = 1> (n)  one = Sub (whole, f)  two = Add (one, one)
        both = Concat <axis = 0> (one, two)  ends = Cast <to = 7> (both)  pads = Concat <axis = 0> (zeros, ends)
        a = Pad (x, pads)  y = Conv <strides = [2, 2]> (a, w)
    """
    weights = {"axis": np.array([2]), "whole": np.array([11], np.float32), "zeros": np.zeros(6, np.int64)}
    proto = models.model("float[N,3,10,9] x) => (float[N,4,h,v] y", body, {**weights, "w": models.random(4, 3, 3, 3)})
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    samples = models.random(20, 3, 10, 9)
    made = qdq.quantize(source, CalibrationSet({"x": samples}, None), qdq.Recipe("uint8"))
    sessions = [onnxruntime.InferenceSession(model.SerializeToString()) for model in (source.proto, made)]
    exact, answer = (session.run(None, {"x": samples})[0] for session in sessions)
    assert np.corrcoef(exact.ravel(), answer.ravel())[0, 1] > 0.99


def test_dynamic_ranges_are_refused_if_they_leave_all_layers_in_float(tmp_path: Path) -> None:
    """An example is a detector whose attention multiplies only activations."""
    proto = models.model("float[N,3,8,8] x) => (float[N,h,w,d] y", "y = Conv (x, w)", {"w": models.random(4, 3, 3, 3)})
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    samples = CalibrationSet({"x": models.random(10, 3, 8, 8)}, None)
    with pytest.raises(BuildFailed, match=r"only Gemm and MatMul .* m\.onnx has none: use another --recipe"):
        qdq.quantize(source, samples, qdq.recipe_variant(qdq.Recipe("uint8"), qdq.DYNAMIC_RANGE))


def test_onnx_runtime_loads_a_quantized_transformer_of_a_fixed_batch(tmp_path: Path) -> None:
    """ONNX Runtime fuses one MatMul with its Add before the quantization, and the other pairs when it loads the result.

    Both times, it adds constants for the shapes.
    """
    body = """
        n = LayerNormalization(x, g, o)
        q0 = MatMul(n, wq) q1 = Add(q0, b) q2 = Reshape(q1, s) q = Transpose<perm = [0, 2, 1, 3]>(q2)
        k0 = MatMul(n, wk) k1 = Add(k0, b) k2 = Reshape(k1, s) k = Transpose<perm = [0, 2, 3, 1]>(k2)
        v0 = MatMul(n, wv) v1 = Add(v0, b) v2 = Reshape(v1, s) v = Transpose<perm = [0, 2, 1, 3]>(v2)
        a = MatMul(q, k) p = Softmax(a) c = MatMul(p, v) t = Transpose<perm = [0, 2, 1, 3]>(c) m = Reshape(t, r)
        h = MatMul(m, wh) i = Add(h, b) j = Add(i, n) l = LayerNormalization(j, g, o)
        d = MatMul(l, wd) y = Add(d, b)
    """
    weights = {f"w{name}": models.random(8, 8, seed=i) for i, name in enumerate("qkvhd")}
    weights |= {"g": np.ones(8, np.float32), "o": np.zeros(8, np.float32), "b": models.random(8)}
    weights |= {"s": np.array([-1, 4, 2, 4]), "r": np.array([-1, 4, 8])}
    proto = models.model("float[1,4,8] x) => (float[1,4,8] y", body, weights)
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    calibration = CalibrationSet({"x": models.random(10, 4, 8)}, None)
    quantized: Any = qdq.quantize(source, calibration, TensorRTBuilder().recipe(source, profile("x", "tensorrt")), ())
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    onnxruntime.InferenceSession(quantized.SerializeToString(), options, providers=["CPUExecutionProvider"])


def test_onnx_runtime_computes_a_model_exactly_whose_additions_share_a_constant(tmp_path: Path) -> None:
    proto = models.model(
        "float[N,4] x) => (float[N,4] y",
        "a = Add(x, h) b = MatMul(a, w) y = Add(b, h)",
        {"w": models.random(4, 4), "h": np.float32(0.5)},
    )
    quantized = quantized_as_for_tensorrt(proto, tmp_path)
    load_with_exact_products(quantized)


def test_onnx_runtime_computes_a_model_exactly_whose_layers_share_weights(tmp_path: Path) -> None:
    """Examples: a detector's head for several sizes, and the steps of an unrolled LSTM."""
    proto = models.model(
        "float[N,64] x) => (float[N,64] y",
        "a = MatMul(x, w) b = Relu(a) y = MatMul(b, w)",
        {"w": models.random(64, 64)},
    )
    quantized = quantized_as_for_tensorrt(proto, tmp_path)
    load_with_exact_products(quantized)


def test_weights_that_many_layers_share_stay_in_float_with_these_layers(tmp_path: Path) -> None:
    """The copies for four layers would have three times the size of the weights."""
    proto = models.model(
        "float[N,64] x) => (float[N,8] y",
        "a = MatMul(x, w) b = MatMul(a, w) c = MatMul(b, w) d = MatMul(c, w) y = MatMul(d, v)",
        {"w": models.random(64, 64), "v": models.random(64, 8)},
    )
    quantized = quantized_as_for_tensorrt(proto, tmp_path)
    load_with_exact_products(quantized)
    matrices = [tensor for tensor in quantized.graph.initializer if len(tensor.dims) == 2]
    kinds = {tuple(tensor.dims): tensor.data_type for tensor in matrices}
    assert len(matrices) == 2
    assert kinds == {(64, 64): onnx.TensorProto.FLOAT, (64, 8): onnx.TensorProto.INT8}


def quantized_as_for_tensorrt(proto: Any, tmp_path: Path) -> Any:
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    calibration = CalibrationSet({"x": models.random(10, *source.inputs[0].item_shape)}, None)
    return qdq.quantize(source, calibration, TensorRTBuilder().recipe(source, profile("x", "tensorrt")), ())


def load_with_exact_products(quantized: Any) -> None:
    """Load a model as on a processor without VNNI.

    For exact products, ONNX Runtime converts a quantized constant again for each node that reads it.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.x64quantprecision", "1")
    onnxruntime.InferenceSession(quantized.SerializeToString(), options, providers=["CPUExecutionProvider"])
