"""A branch that is known at the build replaces its `If`. Other `If` nodes, Loop and Scan stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.errors import BuildFailed, OperatorUnsupported
from edgert_deploy.packager.accuracy.artifact_runs import artifact_outputs, reference_outputs
from edgert_deploy.packager.builders import Precision
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.onnx_graph.branches import control_flow, inline_known_branches
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support import builders, models
from tests.support.models.exported import FOLDER

SIGNATURE = "float[N,4] x) => (float[N,4] y"
BRANCHES = """<
    then_branch = t () => (float[N,4] a) { m = Relu(h) a = Add(m, bias) },
    else_branch = e () => (float[N,4] b) { m = Tanh(h) b = Sub(m, bias) }>"""
# The conditions: 4 columns; more than 2 rows; positive values.
CONDITIONS = {
    "columns": "s = Shape <start = 1> (x) f = Constant <value = int64[1] {4}> () q = Equal(s, f) c = Squeeze(q)",
    "rows": "s = Shape <end = 1> (x) f = Constant <value = int64[1] {2}> () q = Greater(s, f) c = Squeeze(q)",
    "values": "s = ReduceSum <keepdims = 0> (x) f = Constant <value = float {0.0}> () c = Greater(s, f)",
}


def model(condition: str, then: str = "y = Identity(z)") -> Any:
    weights = {"k": models.random(4, 4), "bias": models.random(4)}
    body = f"{CONDITIONS[condition]} h = MatMul(x, k) z = If (c) {BRANCHES} {then}"
    proto = models.model(SIGNATURE, body, weights)
    for node in proto.graph.node:
        node.name = "choice" if list(node.output) == ["z"] else ""
    return proto


def kinds(proto: Any) -> list[str]:
    return [node.op_type for node in proto.graph.node]


def answers(proto: Any, rows: int) -> Any:
    import onnxruntime

    return onnxruntime.InferenceSession(proto.SerializeToString()).run(None, {"x": models.random(rows, 4)})[0]


def test_a_branch_that_shapes_choose_replaces_the_node_and_its_condition() -> None:
    proto = model("columns")
    assert inline_known_branches(proto)
    assert kinds(proto) == ["MatMul", "Relu", "Add", "Identity", "Identity"]
    for rows in (1, 5):
        np.testing.assert_array_equal(answers(proto, rows), answers(model("columns"), rows))
    assert not inline_known_branches(proto)


@pytest.mark.parametrize("condition", ["rows", "values"])
def test_a_branch_that_the_batch_or_the_data_choose_stays(condition: str) -> None:
    proto = model(condition)
    assert not inline_known_branches(proto)
    assert proto == model(condition)


def test_a_known_branch_is_inlined_although_the_other_branch_cannot_run() -> None:
    """ONNX Runtime crashes when it folds the branches of Silero VAD 5; the condition tests the sampling rate."""
    proto = model("columns")
    other = next(a.g for node in proto.graph.node for a in node.attribute if a.name == "else_branch")
    other.node[0].op_type = "OfNoRuntime"
    assert inline_known_branches(proto)
    np.testing.assert_array_equal(answers(proto, 3), answers(model("columns"), 3))


def test_nested_branches_and_branches_with_equal_names_are_inlined_correctly() -> None:
    """The second node's branches have the names of the first node's branches and read its result."""
    nested = """
        s2 = Shape <start = 1> (z) q2 = Equal(s2, f) c2 = Squeeze(q2)
        y = If (c2) <
            then_branch = t () => (float[N,4] g) {
                m = Sigmoid(z)
                g = If (c2) <then_branch = u () => (float[N,4] i) { i = Mul(m, bias) },
                             else_branch = v () => (float[N,4] j) { j = Neg(m) }>
            },
            else_branch = e () => (float[N,4] b) { b = Neg(z) }>"""
    proto = model("columns", nested)
    assert inline_known_branches(proto)
    assert "If" not in kinds(proto)
    np.testing.assert_array_equal(answers(proto, 3), answers(model("columns", nested), 3))


def test_wrong_shapes_that_an_exporter_wrote_inside_a_branch_are_ignored(tmp_path: Path) -> None:
    """Example: PaddleOCR's SLANet has wrong shapes in a loop, and ONNX Runtime runs the model."""
    proto = model("values")
    then = next(a.g for node in proto.graph.node for a in node.attribute if a.name == "then_branch")
    del then.output[0].type.tensor_type.shape.dim[:]
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    source = load_source(tmp_path / "model.onnx")
    np.testing.assert_array_equal(answers(source.proto, 3), answers(model("values"), 3))


def test_tflite_accepts_a_known_branch_and_the_refusal_of_another_branch_names_its_node(tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert")
    source = load_source(models.write(model("columns"), tmp_path / "known.onnx"))
    samples = builders.samples_for(source)
    assert builders.build("tflite", source, samples, "fp32", tmp_path / "known").kind == "fp32"
    other = load_source(models.write(model("values"), tmp_path / "other.onnx"))
    with pytest.raises(
        OperatorUnsupported, match=r"If \(node 'choice'\): it depends on the data.*onnxruntime or openvino"
    ):
        builders.build("tflite", other, samples, "fp32", tmp_path / "other")


def scan() -> Any:
    """Return a model with a layer before a Scan over five steps, and a layer inside the Scan."""
    body = """
        h = Gemm (x, w)
        last, all = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1],
            body = step (float[N,4] before, float[N,4] one) => (float[N,4] after, float[N,4] copy) {
                m = MatMul (before, w) s = Add (m, one) after = Tanh (s) copy = Identity (after) }> (h, steps)
        y = Identity (last)
    """
    return models.model("float[N,4] x, float[N,5,4] steps) => (float[N,4] y", body, {"w": models.random(4, 4)})


CASES = {"If": FOLDER / "chooses.onnx", "Loop": FOLDER / "repeats.onnx", "Scan": None}


@pytest.fixture(scope="module", params=list(CASES))
def stays(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, SourceModel]:
    """Return a model whose data decides which branch runs, like an export of PyTorch."""
    path = CASES[request.param] or models.write(scan(), tmp_path_factory.mktemp("scan") / "scan.onnx")
    return request.param, load_source(path)


def inputs_of(source: SourceModel) -> CalibrationSet:
    arrays = {
        spec.name: models.random(32, *spec.item_shape, seed=i) if spec.datatype == "FP32" else np.full((32, 1), 2)
        for i, spec in enumerate(source.inputs)
    }
    return CalibrationSet(arrays, None)


def test_the_control_flow_that_stays_in_a_model_is_listed_by_its_nodes(stays: tuple[str, SourceModel]) -> None:
    kind, source = stays
    (found,) = control_flow(source.proto)
    assert found.startswith(f"{kind} node '")
    assert control_flow(None) == control_flow(models.mlp()) == ()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "tensorrt"])
def test_engines_that_have_the_operator_run_it_in_float(
    engine: str, precision: Precision, stays: tuple[str, SourceModel], tmp_path: Path
) -> None:
    _, source = stays
    samples = inputs_of(source)
    artifact = builders.build(engine, source, samples, precision, tmp_path / "out")
    want, got = reference_outputs(source, samples), artifact_outputs(artifact, source, samples)
    for one, other in zip(want, got, strict=True):
        np.testing.assert_allclose(other, one, atol=1e-5 if precision == "fp32" else 0.02)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "tensorrt"])
def test_a_model_whose_work_is_inside_a_branch_or_loop_is_never_called_int8(
    engine: str, stays: tuple[str, SourceModel], tmp_path: Path
) -> None:
    kind, source = stays
    if kind == "Scan" and engine != "openvino":  # the layer before it is quantized
        assert builders.build(engine, source, inputs_of(source), "int8", tmp_path / "out").kind == "mixed"
        return
    with pytest.raises(BuildFailed, match=rf"cannot be quantized: {kind} node '.*--precision auto"):
        builders.build(engine, source, inputs_of(source), "int8", tmp_path / "out")


def test_tflite_refuses_control_flow_and_names_the_engines_that_support_it(
    stays: tuple[str, SourceModel], tmp_path: Path
) -> None:
    pytest.importorskip("ai_edge_litert")
    kind, source = stays
    with pytest.raises(OperatorUnsupported, match=rf"{kind} \(node '.*depends on the data.*onnxruntime or openvino"):
        builders.build("tflite", source, inputs_of(source), "fp32", tmp_path / "out")


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_a_condition_with_two_axes_of_length_1_is_accepted(tmp_path: Path, engine: str) -> None:
    """OpenVINO accepts a condition with one axis at most. A comparison of scores may be [1, 1]."""
    condition = "s = ReduceSum <keepdims = 1> (x) f = Constant <value = float {0.0}> () c = Greater(s, f)"
    body = f"{condition} h = MatMul(x, k) z = If (c) {BRANCHES} y = Identity(z)"
    signature = "float[1,4] x) => (float[1,4] y"
    proto = models.model(signature, body, {"k": models.random(4, 4), "bias": models.random(4)})
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    samples = CalibrationSet({"x": models.random(16, 4)}, None)
    got = artifact_outputs(builders.build(engine, source, samples, "fp32", tmp_path), source, samples)
    np.testing.assert_allclose(got[0], reference_outputs(source, samples)[0], atol=1e-5)
