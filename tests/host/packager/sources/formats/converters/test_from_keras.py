"""The parts of the Keras converter that work without TensorFlow: captured constants and error messages.

test_convert.py runs the whole converter if TensorFlow is installed.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
from edgert_deploy.packager.accuracy.artifact_runs import reference_outputs
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.formats.converters.from_keras import keep_constants, known_reason, main, short
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models


def test_values_that_tensorflow_captured_become_constants_and_not_inputs(tmp_path: Path) -> None:
    @dataclass
    class Tensor:
        """A stand-in for a tensor of TensorFlow, with the parts that the converter reads."""

        value: Any

        def numpy(self) -> Any:
            return self.value

    proto = models.model("float[N,4] x, float[1,4] mean) => (float[N,4] y", "y = Sub(x, mean)")
    mean = models.random(1, 4)
    keep_constants(proto.graph, {"mean": Tensor(mean), "variable": Tensor(None)})
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    assert [spec.name for spec in source.inputs] == ["x"]
    samples = CalibrationSet({"x": models.random(12, 4, seed=1)}, None)
    np.testing.assert_allclose(reference_outputs(source, samples)[0], samples.inputs["x"] - mean, atol=1e-6)


def test_the_reason_of_a_failed_conversion_is_short() -> None:
    message = "<class 'Sequential'> could not be deserialized. config={} Exception encountered: Could not locate class 'Scale'. "
    for text in (message, message.replace("'Scale'", "'Custom>Scale'")):
        assert known_reason(TypeError(text)).startswith("Scale is not a part of Keras")
    old = "config={} Exception encountered: Unrecognized keyword arguments passed to DepthwiseConv2D: {'groups': 1}"
    assert known_reason(TypeError(old)).startswith("Keras 3 does not know {'groups': 1} of the layer DepthwiseConv2D")
    whole = "Could not locate class 'Functional'. Make sure. Full object config: {'module': 'tf_keras.src.engine.functional'}"
    assert known_reason(TypeError(whole)).startswith("Keras 2 wrote the file")
    unknown = ValueError("one\ntwo " + 400 * "x")
    assert (known_reason(unknown), short(unknown)) == ("", "ValueError: " + 300 * "x")


def test_the_backend_that_the_user_chose_for_keras_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TF_CPP_MIN_LOG_LEVEL", "CUDA_VISIBLE_DEVICES", "KERAS_BACKEND"):
        monkeypatch.setenv(name, "jax")
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    monkeypatch.setattr(sys, "argv", ["from_keras.py", json.dumps({"model": "", "out": "", "inputs": {}})])
    assert main() == 4  # TensorFlow is missing
    assert os.environ["KERAS_BACKEND"] == "tensorflow"
