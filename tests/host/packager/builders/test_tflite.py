"""TFLite's artifacts: the tools that they name, and the models that fail the build."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("ai_edge_litert")

from ai_edge_litert import schema_py_generated as schema

from edgert.errors import BuildFailed
from edgert_deploy.devices.profiles import load_profile
from edgert_deploy.packager.builders import BuildSpec, builder_for, tflite
from edgert_deploy.packager.sources.source_model import load_source
from edgert_deploy.packager.tflite_lowering import lower
from edgert_deploy.packager.tflite_lowering.tables import packed, unpacked
from edgert_deploy.packager.tflite_lowering.weights import with_half_weights
from tests.support import models
from tests.support.builders import build, samples_for
from tests.support.profiles import profile


def test_an_artifact_names_its_tools_and_its_layers(tmp_path: Path) -> None:
    source = load_source(models.write(models.mlp(), tmp_path / "m.onnx"))
    artifact = build("tflite", source, samples_for(source), "int8", tmp_path / "out")
    assert artifact.path == tmp_path / "out" / "model.tflite"
    assert (artifact.engine, artifact.judged_by, artifact.precision) == ("tflite", "tflite", "int8")
    assert set(artifact.tools) == {"ai-edge-litert", "onnx", "onnxruntime"}
    assert ("FULLY_CONNECTED", "int8") in [layer[:2] for layer in builder_for("tflite").layers(artifact.path)]


def test_an_artifact_that_the_interpreter_refuses_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "model.tflite").write_bytes(b"no model")
    with pytest.raises(BuildFailed, match="interpreter refuses the artifact"):
        tflite._run_on_zeros(tmp_path / "model.tflite")


def test_int8_weights_with_float_activations_are_the_first_recipe_of_a_transformer(tmp_path: Path) -> None:
    builder, plain = builder_for("tflite"), load_source(models.write(models.mlp(), tmp_path / "m.onnx"))
    here = profile("here", "tflite")
    assert builder.recipes(plain, here) == ("min-max", "percentile", "dynamic-range")
    body = "s = MatMul(x, x)  p = Softmax(s)  y = MatMul(p, x)"
    attention = load_source(
        models.write(models.model("float[N,4,4] x) => (float[N,4,4] y", body), tmp_path / "attention.onnx")
    )
    assert builder.recipes(attention, here) == ("dynamic-range", "min-max")


def test_an_int8_model_that_old_runtimes_on_32_bit_arm_cannot_load_is_refused(tmp_path: Path) -> None:
    source, old = load_source(models.write(models.mlp(), tmp_path / "m.onnx")), load_profile("raspberry-pi-3")
    assert builder_for("tflite").recipes(source, old) == ("min-max", "percentile")
    spec = BuildSpec("tflite", "int8", old, recipe="dynamic-range")
    with pytest.raises(BuildFailed, match=r"raspberry-pi-3 may run tflite-runtime 2\.14"):
        builder_for("tflite").build(spec, source, samples_for(source), tmp_path, lambda line: None)


def test_a_custom_operator_that_cannot_run_fails_int8_with_the_advice_to_build_in_float(tmp_path: Path) -> None:
    half = with_half_weights(lower(models.mlp()))  # the build runs the model to dequantize its weights
    (tmp_path / "m.tflite").write_bytes(half)
    model = unpacked(half)
    for code in model.operatorCodes:
        if code.builtinCode == schema.BuiltinOperator.FULLY_CONNECTED:
            custom = schema.BuiltinOperator.CUSTOM
            code.builtinCode, code.deprecatedBuiltinCode, code.customCode = custom, custom, "Unknown"
    source = replace(load_source(tmp_path / "m.tflite"), tflite=packed(model))
    with pytest.raises(BuildFailed, match=r"TFLite's tools cannot quantize m\.tflite: .*Unknown.*--precision auto"):
        build("tflite", source, samples_for(source), "int8", tmp_path / "out")


def test_a_model_with_an_open_batch_is_calibrated_once_if_its_samples_are_the_reason_of_the_failure(
    tmp_path: Path,
) -> None:
    source = load_source(models.write(models.mlp(), tmp_path / "m.onnx"))
    samples, lines = samples_for(source), list[str]()
    samples.inputs["x"][0] = np.inf
    spec = BuildSpec("tflite", "int8", load_profile("raspberry-pi-4"))
    with pytest.raises(BuildFailed, match="not finite on a calibration sample"):
        builder_for("tflite").build(spec, source, samples, tmp_path, lines.append)
    assert [line for line in lines if "quantizing" in line] == ["tflite: quantizing with 32 samples"]
