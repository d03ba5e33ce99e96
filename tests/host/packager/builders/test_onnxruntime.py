"""ONNX Runtime's artifacts: one recipe for x86, and another recipe for ARM."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.packager.builders import BuildSpec, builder_for
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support import models
from tests.support.builders import build, samples_for

PROFILE = DeviceProfile("p", "", ("x86_64",), ("onnxruntime",), "int8", "3.10", "2.31", 1, "/s")


def test_arm_gets_signed_activations_and_x86_gets_unsigned_activations(digits_source: SourceModel) -> None:
    def profile(*machines: str) -> DeviceProfile:
        return DeviceProfile("p", "", machines, ("onnxruntime",), "int8", "3.10", "2.31", 1, "/s")

    builder = builder_for("onnxruntime")
    recipes = {m: builder.recipe(digits_source, profile(*m)).activations for m in [("aarch64",), ("x86_64",), ()]}
    assert recipes == {("aarch64",): "int8", ("x86_64",): "uint8", (): "uint8"}


def test_a_recurrent_layer_that_stays_in_float_makes_the_artifact_mixed(tmp_path: Path) -> None:
    body = "h, s = LSTM <hidden_size = 8> (x, w, r) axes = Constant <value_ints = [0, 1]> () z = Squeeze(h, axes) y = MatMul(z, m)"
    weights = {"w": models.random(1, 32, 4), "r": models.random(1, 32, 8), "m": models.random(8, 3)}
    source = load_source(
        models.write(models.model("float[1,1,4] x) => (float[1,3] y", body, weights), tmp_path / "m.onnx")
    )
    artifact = build("onnxruntime", source, samples_for(source), "int8", tmp_path / "out")
    macs = {"LSTM": 32 * (4 + 8), "MatMul": 8 * 3}
    assert artifact.int8_share == round(macs["MatMul"] / sum(macs.values()), 3)
    assert (artifact.precision, artifact.kind) == ("int8", "mixed")


def test_the_products_of_a_transformer_get_their_ranges_at_run_time(tmp_path: Path) -> None:
    import onnx
    import onnxruntime

    source = load_source(models.write(models.transformer(), tmp_path / "m.onnx"))
    builder, samples = builder_for("onnxruntime"), samples_for(source)
    spec = BuildSpec("onnxruntime", "int8", PROFILE, recipe="dynamic-range")
    assert builder.recipes(source, PROFILE)[0] == spec.recipe
    (tmp_path / "out").mkdir()
    artifact = builder.build(spec, source, samples, tmp_path / "out", lambda line: None)
    assert artifact.int8_share is not None
    assert 0.5 < artifact.int8_share < 1  # products of two activations stay in float
    operators = {node.op_type for node in onnx.load(artifact.path).graph.node}
    assert "MatMulInteger" in operators
    assert "QuantizeLinear" not in operators
    (exact,), (answer,) = (
        onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]).run(None, samples.served(0))
        for path in (source.path, artifact.path)
    )
    assert np.corrcoef(exact.ravel(), answer.ravel())[0, 1] > 0.99
