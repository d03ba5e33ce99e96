"""OpenVINO's artifacts: an IR without notes, whose INT8 layers are found."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")

from edgert.errors import BuildFailed
from edgert_deploy.devices.profiles import load_profile
from edgert_deploy.packager.builders import BuildSpec, builder_for
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.formats.convert import Conversion
from edgert_deploy.packager.sources.onnx_graph.bucket_axis import read_buckets
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models
from tests.support.builders import build, samples_for
from tests.support.needed import needed

needed("nncf")
onnx: Any = needed("onnx")


def test_the_ir_contains_no_notes_of_the_tools(tmp_path: Path) -> None:
    source = load_source(models.write(models.cnn(), tmp_path / "m.onnx"))
    artifact = build("openvino", source, samples_for(source), "int8", tmp_path / "out")
    root = ElementTree.parse(artifact.path).getroot()
    assert root.get("name") == "model"
    assert root.find("rt_info") is None
    assert artifact.companions == (tmp_path / "out" / "model.bin",)
    found = _precisions(artifact.path)
    assert found["Convolution"] == found["MatMul"] == "int8"
    again = build("openvino", source, samples_for(source), "int8", tmp_path / "again")
    assert again.path.read_bytes() == artifact.path.read_bytes(), "no number counts the operators of earlier builds"


def test_fp16_halves_the_size_of_the_weights_and_fp32_keeps_the_size(tmp_path: Path) -> None:
    source = load_source(models.write(models.cnn(), tmp_path / "m.onnx"))
    half = build("openvino", source, samples_for(source), "fp16", tmp_path / "fp16")
    full = build("openvino", source, samples_for(source), "fp32", tmp_path / "fp32")
    assert _precisions(half.path)["Convolution"] == "fp16"
    assert _precisions(full.path)["Convolution"] == "fp32"


def _precisions(path: Path) -> dict[str, str]:
    return {layer.kind: layer.precision for layer in builder_for("openvino").layers(path)}


def test_the_recipe_float_tail_leaves_recurrent_layers_in_float(tmp_path: Path) -> None:
    """In INT8, a single sample is inaccurate, because OpenVINO uses other kernels for it than for a batch."""
    body = (
        "v = Gather(e, x) t = Transpose<perm = [1, 0, 2]>(v) s, h, c = LSTM<hidden_size = 24>(t, w, r) "
        "a = Constant<value_ints = [1]>() q = Squeeze(s, a) b = Transpose<perm = [1, 0, 2]>(q) y = MatMul(b, o)"
    )
    shapes = {"e": (50, 16), "w": (1, 96, 16), "r": (1, 96, 24), "o": (24, 5)}
    weights = {name: models.random(*shape, seed=i) - 0.5 for i, (name, shape) in enumerate(shapes.items())}
    proto = models.model("int64[N,12] x) => (float[N,12,5] y", body, weights)
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    samples = CalibrationSet({"x": np.random.default_rng(0).integers(0, 50, (20, 12))}, None)
    found = {}
    for recipe in ("min-max", "float-tail"):
        (tmp_path / recipe).mkdir()
        spec = BuildSpec("openvino", "int8", load_profile("intel-nuc"), (), recipe)
        artifact = builder_for("openvino").build(spec, source, samples, tmp_path / recipe, lambda line: None)
        found[recipe] = {layer.kind: layer.precision for layer in builder_for("openvino").layers(artifact.path)}
    assert found["min-max"]["LSTMSequence"] == "int8"
    assert found["float-tail"]["LSTMSequence"] == "fp32"
    assert found["float-tail"]["MatMul"] == "int8"


def test_the_error_names_a_node_that_openvino_does_not_know_and_not_the_next_nodes(tmp_path: Path) -> None:
    helper, value = onnx.helper, onnx.helper.make_tensor_value_info
    weights = [onnx.numpy_helper.from_array(models.random(4, 3, 3, 3), "w")]
    weights.append(onnx.numpy_helper.from_array(np.array([0, 0, 1, 1, 0, 0, 1, 1]), "pads"))
    nodes = [
        helper.make_node("Pad", ["x", "pads"], ["p"], mode="wrap", name="around"),
        helper.make_node("Conv", ["p", "w"], ["y"], name="conv"),
    ]
    graph = helper.make_graph(nodes, "g", [value("x", 1, ["N", 3, 8, 8])], [value("y", 1, ["N", 4, 8, 8])], weights)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    with pytest.raises(BuildFailed, match=r"Pad 'around': Unsupported padding mode: \[wrap\]; export") as raised:
        build("openvino", source, CalibrationSet({"x": models.random(12, 3, 8, 8)}, None), "fp32", tmp_path)
    assert "conv" not in raised.value.message


def test_a_resize_of_open_lengths_is_refused_if_openvino_ignores_its_antialiasing(tmp_path: Path) -> None:
    scales = {"scales": np.array([1, 1, 0.5, 0.5], np.float32)}
    body = 'z = Resize<mode="linear", antialias=1>(x, , scales) y = GlobalAveragePool(z)'
    proto = models.model("float[N,2,side,8] x) => (float[N,2,1,1] y", body, scales, opset=18)
    source = load_source(models.write(proto, tmp_path / "m.onnx"), Conversion(buckets=read_buckets("side=8,16", [])))
    samples = CalibrationSet({"x": models.random(12, 2, 8, 8)}, None)
    with pytest.raises(BuildFailed, match=r"ignores options of Resize 'z'.*with fixed lengths"):
        build("openvino", source, samples, "fp32", tmp_path)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="ONNX Runtime 1.23, the last for Python 3.10, lacks it, too")
def test_the_error_names_an_operator_that_openvino_lacks(tmp_path: Path) -> None:
    weights = {"w": models.random(1, 1, 2, 2), "offset": np.zeros((1, 8, 3, 3), np.float32)}
    proto = models.model("float[1,1,4,4] x) => (float[1,1,3,3] y", "y = DeformConv(x, w, offset)", weights, opset=19)
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    with pytest.raises(BuildFailed, match=r"m\.onnx: RuntimeError: it does not know DeformConv-19; export the model"):
        build("openvino", source, CalibrationSet({"x": models.random(12, 1, 4, 4)}, None), "fp32", tmp_path)


def test_the_error_about_a_branch_that_openvino_cannot_read_gives_the_reason(tmp_path: Path) -> None:
    helper, value = onnx.helper, onnx.helper.make_tensor_value_info
    branches = [
        helper.make_graph([helper.make_node(op, ["y"], [op])], op, [], [value(op, 1, None)]) for op in ("Relu", "Neg")
    ]
    nodes = [
        helper.make_node("Pad", ["x", "pads"], ["y"], mode="wrap", name="around"),
        helper.make_node("ReduceSum", ["x"], ["sum"], keepdims=0),
        helper.make_node("Greater", ["sum", "zero"], ["positive"]),
        helper.make_node("If", ["positive"], ["z"], then_branch=branches[0], else_branch=branches[1]),
    ]
    weights = [onnx.numpy_helper.from_array(np.array([0, 1, 0, 1]), "pads")]
    weights.append(onnx.numpy_helper.from_array(np.float32(0), "zero"))
    graph = helper.make_graph(nodes, "g", [value("x", 1, ["N", 8])], [value("z", 1, ["N", 10])], weights)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)], ir_version=9)
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    with pytest.raises(BuildFailed, match=r"openvino cannot read .*Pad 'around': Unsupported padding mode"):
        build("openvino", source, CalibrationSet({"x": models.random(12, 8)}, None), "int8", tmp_path)
