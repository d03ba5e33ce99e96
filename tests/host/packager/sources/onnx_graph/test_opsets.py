"""Models get an opset that every runtime reads correctly."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgert.errors import BuildFailed
from edgert_deploy.packager.accuracy.artifact_runs import artifact_outputs
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.onnx_graph.structure import opset_of
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models
from tests.support.builders import build

onnx: Any = pytest.importorskip("onnx")


def fourier(opset: int, axis: int) -> Any:
    """Return a model that transforms [N, 4, 6, 1] along `axis`.

    From opset 20 on, the axis is an input of DFT.
    """
    helper, value = onnx.helper, onnx.helper.make_tensor_value_info
    old = opset < 20
    node = helper.make_node("DFT", ["x"] if old else ["x", "", "axis"], ["y"], **({"axis": axis} if old else {}))
    constants = [] if old else [helper.make_tensor("axis", onnx.TensorProto.INT64, (), [axis])]
    graph = helper.make_graph([node], "g", [value("x", 1, ["N", 4, 6, 1])], [value("y", 1, ["N", 4, 6, 2])], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


@pytest.mark.parametrize("opset", [17, 20, 21])
@pytest.mark.parametrize("axis", [1, 2, -2])
@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_a_fourier_transform_keeps_its_axis(tmp_path: Path, engine: str, axis: int, opset: int) -> None:
    """OpenVINO ignores an axis that is an input, and misreads a negative axis."""
    source = load_source(models.write(fourier(opset, axis), tmp_path / "m.onnx"))
    assert opset_of(source.proto) == min(opset, 19)
    samples = CalibrationSet({"x": models.random(12, 4, 6, 1)}, None)
    answers = artifact_outputs(build(engine, source, samples, "fp32", tmp_path), source, samples)
    want = np.fft.fft(samples.inputs["x"][..., 0], axis=axis if axis > 0 else 2)
    np.testing.assert_allclose(answers[0], np.stack([want.real, want.imag], -1), atol=1e-4)


@pytest.mark.parametrize("opset", [17, 20])
@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_a_one_sided_fourier_transform_keeps_its_shape(tmp_path: Path, engine: str, axis: int, opset: int) -> None:
    """OpenVINO adds an axis to the result of a one-sided DFT, which torch.fft.rfft becomes."""
    model = fourier(opset, axis)
    model.graph.node[0].attribute.append(onnx.helper.make_attribute("onesided", 1))
    model.graph.output[0].type.tensor_type.shape.dim[axis].dim_value = 6 // 2 + 1 if axis == 2 else 4 // 2 + 1
    source = load_source(models.write(model, tmp_path / "m.onnx"))
    samples = CalibrationSet({"x": models.random(12, 4, 6, 1)}, None)
    answers = artifact_outputs(build(engine, source, samples, "fp32", tmp_path), source, samples)
    want = np.fft.rfft(samples.inputs["x"][..., 0], axis=axis)
    np.testing.assert_allclose(answers[0], np.stack([want.real, want.imag], -1), atol=1e-4)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="ONNX Runtime 1.23, the last for Python 3.10, refuses the model")
@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
def test_the_inverse_of_a_one_sided_fourier_transform_keeps_its_shape(tmp_path: Path, engine: str) -> None:
    """OpenVINO removes the last axis of the result, which torch.fft.irfft becomes."""
    body = "y = DFT<axis=-2, inverse=1, onesided=1>(x)"
    source = load_source(
        models.write(models.model("float[N,5,4,2] x) => (float[N,5,6,1] y", body), tmp_path / "m.onnx")
    )
    samples = CalibrationSet({"x": models.random(12, 5, 4, 2)}, None)
    answers = artifact_outputs(build(engine, source, samples, "fp32", tmp_path), source, samples)
    x = samples.inputs["x"]
    np.testing.assert_allclose(answers[0][..., 0], np.fft.irfft(x[..., 0] + 1j * x[..., 1], 6, axis=2), atol=1e-5)


@pytest.mark.parametrize("opset", [11, 17])
def test_reductions_keep_their_axes_in_openvino(tmp_path: Path, opset: int) -> None:
    """OpenVINO ignores axes that are attributes, and reduces all axes."""
    kinds = ("ReduceL1", "ReduceLogSum", "ReduceLogSumExp")
    nodes = " ".join(f"y{i} = {kind}<axes=[1], keepdims=0>(x)" for i, kind in enumerate(kinds))
    outputs = ", ".join(f"float[N, 3] y{i}" for i in range(len(kinds)))
    text = f'<ir_version: 7, opset_import: ["": {opset}]> g (float[N, 5, 3] x) => ({outputs}) {{ {nodes} }}'
    source = load_source(models.write(onnx.parser.parse_model(text), tmp_path / "m.onnx"))
    samples = CalibrationSet({"x": np.abs(models.random(12, 5, 3)) + 1}, None)
    x = samples.inputs["x"]
    answers = artifact_outputs(build("openvino", source, samples, "fp32", tmp_path), source, samples)
    for got, want in zip(answers, (x.sum(1), np.log(x.sum(1)), np.log(np.exp(x).sum(1))), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4)


def resize(opset: int, mode: str, scale: float, path: Path) -> Path:
    """Write a model that resizes [N, 1, 6, 6], and then convolves it."""
    helper, value = onnx.helper, onnx.helper.make_tensor_value_info
    nodes = [
        helper.make_node("Upsample" if opset < 10 else "Resize", ["x", "scales"], ["u"], mode=mode),
        helper.make_node("Conv", ["u", "w"], ["y"]),
    ]
    constants = {"scales": np.array([1, 1, scale, scale], np.float32), "w": models.random(2, 1, 1, 1)}
    given = [onnx.numpy_helper.from_array(array, name) for name, array in constants.items()]
    side = int(6 * scale)
    graph = helper.make_graph(nodes, "g", [value("x", 1, ["N", 1, 6, 6])], [value("y", 1, ["N", 2, side, side])], given)
    return models.write(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=4), path)


@pytest.mark.parametrize("opset", [9, 10])
@pytest.mark.parametrize("mode", ["linear", "nearest"])
def test_an_old_resize_keeps_its_answers_in_a_newer_opset(opset: int, mode: str, tmp_path: Path) -> None:
    """ONNX's converter omits the modes that old opsets imply, so the answers would differ."""
    assert opset_of(load_source(resize(opset, mode, 1.5, tmp_path / "m.onnx")).proto) == 17


def test_int8_of_an_opset_that_cannot_be_raised_is_refused_with_the_next_step(tmp_path: Path) -> None:
    """In opset 10, ONNX Runtime rounds in another way if an image shrinks."""
    source = load_source(resize(10, "nearest", 0.6, tmp_path / "m.onnx"))
    with pytest.raises(BuildFailed, match=r"has opset 10, .* export the model with opset 17"):
        build("onnxruntime", source, CalibrationSet({"x": models.random(12, 1, 6, 6)}, None), "int8", tmp_path)
