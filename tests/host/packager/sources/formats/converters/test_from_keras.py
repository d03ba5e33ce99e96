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
from edgert_deploy.packager.sources.formats.converters.from_keras import (
    Advised,
    check_converted,
    distinct,
    keep_constants,
    known_reason,
    main,
    short,
    unknown_nodes,
)
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
    code = "The `function` of this `Lambda` layer is a Python lambda. This carries a potential risk"
    assert "a Lambda layer" in known_reason(ValueError(code))
    changed = "Input 0 of node AssignAddVariableOp was passed float incompatible with expected resource."
    assert "docs/streams.md" in known_reason(ValueError(changed))
    unknown = ValueError("one\ntwo " + 400 * "x")
    assert (known_reason(unknown), short(unknown)) == ("", "ValueError: " + 300 * "x")


def test_the_backend_that_the_user_chose_for_keras_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TF_CPP_MIN_LOG_LEVEL", "CUDA_VISIBLE_DEVICES", "KERAS_BACKEND"):
        monkeypatch.setenv(name, "jax")
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    monkeypatch.setattr(sys, "argv", ["from_keras.py", json.dumps({"model": "", "out": "", "inputs": {}})])
    assert main() == 4  # TensorFlow is missing
    assert os.environ["KERAS_BACKEND"] == "tensorflow"


def test_an_operator_that_tf2onnx_did_not_convert_is_named_with_the_next_step() -> None:
    proto = models.model("float[N,4] x) => (float[N,4] y", "e = Erf(x) s = Relu(e) y = Neg(s)")
    assert unknown_nodes(proto.graph) == []
    for node, operator in zip(proto.graph.node, ("Erfc", "StatelessRandomUniformV2", "Neg"), strict=True):
        node.op_type, node.name = operator, f"net/{operator}"
    found = unknown_nodes(proto.graph)  # the build replaces Erfc
    assert found == [("StatelessRandomUniformV2", "net/StatelessRandomUniformV2")]
    with pytest.raises(Advised, match=r"StatelessRandomUniformV2 .* augment images .*model\.keras"):
        check_converted(found)
    with pytest.raises(Advised, match=r"Bucketize of TensorFlow \(net/b\): remove its layer"):
        check_converted([("Bucketize", "net/b")])
    check_converted([("ResizeBilinear", "net/r")], ("ResizeArea",))
    with pytest.raises(Advised, match="bilinear"):
        check_converted([("ResizeArea", "net/r")], ("ResizeArea",))


def test_outputs_of_one_layer_get_names_of_their_own() -> None:
    assert distinct(["lstm", "scores", "lstm"]) == ["lstm_0", "scores", "lstm_1"]
    assert distinct(["lstm_0", "lstm", "lstm"]) == ["lstm_0", "lstm_1", "lstm_2"]
