"""No graph that TensorRT would refuse or misread gets into a bundle.

TensorRT-RTX parses and builds the graphs that pass the audit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.engines.tensorrt import build_plan
from edgert.errors import BuildFailed, OperatorUnsupported
from edgert_deploy.packager.accuracy.artifact_runs import artifact_outputs, reference_outputs
from edgert_deploy.packager.builders.layers import layers_of
from edgert_deploy.packager.builders.qdq import Recipe, prepared, quantize
from edgert_deploy.packager.builders.tensorrt import UNKNOWN, audit
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support import models
from tests.support.builders import build
from tests.support.models.texts import samples_of, source_in, texts


@pytest.fixture
def jetson_graph(digits_source: SourceModel, digits_calibration: CalibrationSet, tmp_path: Path) -> Any:
    import onnx

    artifact = build("tensorrt", digits_source, digits_calibration, "int8", tmp_path)
    assert artifact.judged_by == "onnxruntime"
    return onnx.load(artifact.path)


def weights(graph: Any) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in graph.graph.initializer}


def replace(graph: Any, name: str, array: Any) -> None:
    from onnx import numpy_helper

    weights(graph)[name].CopyFrom(numpy_helper.from_array(array, name))


def first(graph: Any, op_type: str) -> Any:
    return next(node for node in graph.graph.node if node.op_type == op_type)


def test_the_graph_of_the_builder_passes_the_audit_and_has_int8_weights(jetson_graph: Any) -> None:
    audit(jetson_graph)
    int8 = [tensor for tensor in weights(jetson_graph).values() if tensor.data_type == 3 and len(tensor.dims) > 1]
    assert len(int8) == 3  # two convolutions and the classifier
    assert not [tensor for tensor in weights(jetson_graph).values() if tensor.data_type == 6]


def test_an_operator_that_tensorrt_does_not_know_is_refused_with_its_node(jetson_graph: Any) -> None:
    from onnx import helper

    node = helper.make_node("SequenceConstruct", ["a", "b"], ["both"], name="pair")
    jetson_graph.graph.node.append(node)
    with pytest.raises(
        OperatorUnsupported, match=r"does not know 1 operator of this model: SequenceConstruct \(node 'pair'\)"
    ):
        audit(jetson_graph)


def test_tensorrt_rtx_knows_none_of_the_refused_operators() -> None:
    rtx = pytest.importorskip(
        "tensorrt_rtx_bindings", reason="pip install tensorrt_rtx_cu13_libs tensorrt_rtx_cu13_bindings"
    )
    logger = rtx.Logger(rtx.Logger.ERROR)
    network = rtx.Builder(logger).create_network(0)
    parser = rtx.OnnxParser(network, logger)
    assert parser.supports_operator("Conv")
    assert not [name for name in UNKNOWN if parser.supports_operator(name)]


def test_a_uint8_zero_point_is_refused(jetson_graph: Any) -> None:
    replace(jetson_graph, first(jetson_graph, "QuantizeLinear").input[2], np.zeros((), np.uint8))
    with pytest.raises(BuildFailed, match="zero point is uint8"):
        audit(jetson_graph)


def test_a_zero_point_other_than_zero_is_refused(jetson_graph: Any) -> None:
    replace(jetson_graph, first(jetson_graph, "QuantizeLinear").input[2], np.array(7, np.int8))
    with pytest.raises(BuildFailed, match="zero point is 7; it must be 0"):
        audit(jetson_graph)


def test_a_zero_point_of_one_channel_is_refused(jetson_graph: Any) -> None:
    per_channel = next(
        node
        for node in jetson_graph.graph.node
        if node.op_type == "DequantizeLinear" and len(node.input) > 2 and len(weights(jetson_graph)[node.input[2]].dims)
    )
    name = per_channel.input[2]
    zero_points = np.zeros(weights(jetson_graph)[name].dims[0], np.int8)
    zero_points[-1] = -3
    replace(jetson_graph, name, zero_points)
    with pytest.raises(BuildFailed, match="zero point is -3"):
        audit(jetson_graph)


def test_a_missing_zero_point_is_refused_because_it_means_uint8(jetson_graph: Any) -> None:
    del first(jetson_graph, "QuantizeLinear").input[2]
    with pytest.raises(BuildFailed, match="which means uint8"):
        audit(jetson_graph)


def test_a_computed_zero_point_or_scale_is_refused(jetson_graph: Any) -> None:
    for index, says in ((2, "zero point is computed"), (1, "scale is computed")):
        first(jetson_graph, "QuantizeLinear").input[index] = "image"
        with pytest.raises(BuildFailed, match=says):
            audit(jetson_graph)


def test_a_scale_of_zero_is_refused(jetson_graph: Any) -> None:
    replace(jetson_graph, first(jetson_graph, "QuantizeLinear").input[1], np.zeros((), np.float32))
    with pytest.raises(BuildFailed, match="positive"):
        audit(jetson_graph)


def test_an_int32_bias_is_refused_and_becomes_float_in_a_model_that_another_tool_quantized(
    digits_source: SourceModel, digits_calibration: CalibrationSet, digits_holdout: CalibrationSet, tmp_path: Path
) -> None:
    recipe = Recipe("int8", None, {"ActivationSymmetric": True, "WeightSymmetric": True, "AddQDQPairToWeight": False})
    quantized = quantize(digits_source, digits_calibration, recipe)
    with pytest.raises(BuildFailed, match="int32 bias"):
        audit(quantized)
    source = load_source(models.write(quantized, tmp_path / "quantized.onnx"))
    artifact = build("tensorrt", source, digits_calibration, "int8", tmp_path)
    (answers,) = artifact_outputs(artifact, source, digits_holdout)
    (wanted,) = reference_outputs(source, digits_holdout)
    assert (answers.argmax(1) == wanted.argmax(1)).mean() > 0.99


def test_the_graph_for_x86_is_refused(
    digits_source: SourceModel, digits_calibration: CalibrationSet, tmp_path: Path
) -> None:
    import onnx

    artifact = build("onnxruntime", digits_source, digits_calibration, "int8", tmp_path)
    with pytest.raises(BuildFailed, match="TensorRT does not accept"):
        audit(onnx.load(artifact.path))


def test_other_quantized_operators_are_refused() -> None:
    proto = models.model(
        "float[N,4] x) => (float[N,4] y", "q, s, z = DynamicQuantizeLinear(x) y = DequantizeLinear(q, s, z)"
    )
    with pytest.raises(BuildFailed, match="QuantizeLinear and DequantizeLinear only"):
        audit(proto)


def test_layers_that_int8_leaves_in_float_can_be_fp16_without_a_change_of_the_contract(
    digits_source: SourceModel, digits_calibration: CalibrationSet, digits_holdout: CalibrationSet, tmp_path: Path
) -> None:
    import onnx

    layers = layers_of(prepared(digits_source))[:1]
    artifact = build("tensorrt", digits_source, digits_calibration, "int8fp16", tmp_path, layers)
    assert artifact.kind == "mixedfp16"
    graph = onnx.load(artifact.path)
    audit(graph)
    types = {tensor.name: tensor.data_type for tensor in graph.graph.initializer}
    assert (types["w1"], types["w2_quantized"], types["w2_scale"]) == (10, 3, 10)  # FP16, INT8, FP16
    answers = artifact_outputs(artifact, digits_source, digits_holdout)[0]
    assert answers.dtype == np.float32
    assert float((answers.argmax(axis=1) == digits_holdout.labels).mean()) > 0.98


@pytest.mark.parametrize("precision", ["int8", "int8fp16", "fp16", "fp32"])
@pytest.mark.parametrize("make", [models.cnn, models.transformer], ids=["cnn", "transformer"])
def test_tensorrt_rtx_parses_and_builds_the_artifact_without_a_gpu(precision: Any, make: Any, tmp_path: Path) -> None:
    rtx = pytest.importorskip(
        "tensorrt_rtx_bindings", reason="pip install tensorrt_rtx_cu13_libs tensorrt_rtx_cu13_bindings"
    )
    source = load_source(models.write(make(), tmp_path / "m.onnx"))
    samples = CalibrationSet({"x": models.random(16, *source.inputs[0].item_shape)}, None)
    artifact = build("tensorrt", source, samples, precision, tmp_path / "out")

    def for_a_gpu_that_is_not_here(config: Any) -> None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(rtx.ComputeCapability.SM86, 0)

    lines: list[str] = []
    plan = build_plan(rtx, artifact.path.read_bytes(), source.inputs, 8, lines.append, for_a_gpu_that_is_not_here)
    assert len(plan) > 1000
    assert lines


def test_tensorrt_rtx_builds_one_plan_for_all_buckets(tmp_path: Path) -> None:
    rtx = pytest.importorskip(
        "tensorrt_rtx_bindings", reason="pip install tensorrt_rtx_cu13_libs tensorrt_rtx_cu13_bindings"
    )
    source = source_in("tokens=8,16,32")
    artifact = build("tensorrt", source, samples_of(source, texts(24)), "int8", tmp_path / "out")

    def for_a_gpu_that_is_not_here(config: Any) -> None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(rtx.ComputeCapability.SM86, 0)

    content, lines = artifact.path.read_bytes(), list[str]()
    assert build_plan(rtx, content, source.inputs, 4, lines.append, for_a_gpu_that_is_not_here, source.buckets)
