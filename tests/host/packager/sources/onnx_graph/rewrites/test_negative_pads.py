"""tf2onnx writes output_padding as negative pads, which ONNX refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert_deploy.packager.accuracy.artifact_runs import reference_outputs
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models


@pytest.mark.parametrize(
    ("given", "stated"),
    [
        ("pads = [0, 0, -1, -1]", "output_padding = [1, 1]"),
        ("pads = [1, 0, -1, 1], output_padding = [0, 1]", "pads = [1, 0, 0, 1], output_padding = [1, 1]"),
        ("pads = [0, 0, 1, 1]", "pads = [0, 0, 1, 1]"),
    ],
)
def test_negative_pads_mean_output_padding(given: str, stated: str, tmp_path: Path) -> None:
    samples = CalibrationSet({"x": models.random(8, 3, 5, 7)}, None)
    answers = []
    for name, attributes in (("given", given), ("stated", stated)):
        body = f"y = ConvTranspose <strides = [2, 2], {attributes}> (x, w)"
        proto = models.model("float[N,3,5,7] x) => (float[N,4,h,w] y", body, {"w": models.random(3, 4, 3, 3)})
        answers.append(reference_outputs(load_source(models.write(proto, tmp_path / f"{name}.onnx")), samples)[0])
    np.testing.assert_array_equal(answers[0], answers[1])
