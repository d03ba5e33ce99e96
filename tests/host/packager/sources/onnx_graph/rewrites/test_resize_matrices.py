"""A Resize that OpenVINO computes wrongly, or TensorRT refuses, becomes products with matrices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgert_deploy.packager.accuracy.artifact_runs import artifact_outputs
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.onnx_graph.rewrites.resize_matrices import multiply_resizes
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models
from tests.support.builders import build

pytest.importorskip("onnx")
ort: Any = pytest.importorskip("onnxruntime")
IMAGE = "float[N,2,9,14] x) => (float[N,2,h,w] y"
SIZES = {"sizes": np.array([6, 19])}


def resized(options: str, scales: tuple[float, ...] = (), image: str = IMAGE) -> Any:
    """Return a model with a Resize of two channels: to 6 x 19, or by `scales`."""
    if scales:
        return models.model(image, f"y = Resize<{options}>(x, , s)", {"s": np.array(scales, np.float32)}, opset=19)
    return models.model(image, f"y = Resize<{options}, axes=[2,3]>(x, , , sizes)", SIZES, opset=19)


@pytest.mark.parametrize("engine", ["openvino", "tflite"])
@pytest.mark.parametrize(
    ("options", "scales"),
    [
        ('mode="cubic", exclude_outside=1, cubic_coeff_a=-0.5', ()),
        ('mode="cubic", antialias=1', ()),
        ('mode="linear", antialias=1', ()),
        ('mode="linear", antialias=1, coordinate_transformation_mode="align_corners"', (1, 1, 1, 0.5)),
        ('mode="linear", coordinate_transformation_mode="half_pixel_symmetric"', (1, 1, 1.3, 0.7)),
        ('mode="linear", antialias=1', (1, 1, 1, 9 / 14)),  # ONNX's inference finds 8 columns, ONNX Runtime makes 9
    ],
    ids=["exclude-outside", "antialias-cubic", "antialias", "one-axis", "symmetric", "rounded"],
)
def test_each_engine_resizes_as_onnx_runtime(
    options: str, scales: tuple[float, ...], engine: str, tmp_path: Path
) -> None:
    proto = resized(options, scales)
    samples = CalibrationSet({"x": models.random(12, 2, 9, 14)}, None)
    (want,) = ort.InferenceSession(proto.SerializeToString()).run(None, samples.inputs)
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    assert source.outputs[0].shape == (-1, *want.shape[1:])
    (got,) = artifact_outputs(build(engine, source, samples, "fp32", tmp_path), source, samples)
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize(
    "proto",
    [
        resized('mode="cubic"'),
        resized('mode="linear", exclude_outside=1'),
        resized('mode="nearest", coordinate_transformation_mode="half_pixel_symmetric"'),
        resized('mode="linear", antialias=1', (1, 0.5, 1, 1)),
        resized('mode="linear", antialias=1', (1, 1, 0.5, 1), "float[N,2,h,14] x) => (float[N,2,k,14] y"),
        resized('mode="linear", antialias=1, keep_aspect_ratio_policy="not_larger"'),
    ],
    ids=["cubic", "linear", "nearest", "channels", "open", "aspect"],
)
def test_another_resize_stays(proto: Any) -> None:
    assert not multiply_resizes(proto)
    assert [node.op_type for node in proto.graph.node] == ["Resize"]
