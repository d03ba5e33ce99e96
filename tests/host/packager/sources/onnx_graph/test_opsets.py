"""Models get an opset that every runtime reads correctly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

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
