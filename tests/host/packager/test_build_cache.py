"""The key of an artifact changes with everything that influences the artifact, and with nothing else."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.environment import code_digest
from edgert_deploy.devices.profiles import load_profile
from edgert_deploy.packager.build_cache import CODE, cache_key, inputs_digest
from edgert_deploy.packager.builders import BuildSpec
from edgert_deploy.packager.builders.layers import Layer
from edgert_deploy.packager.builders.qdq import Recipe
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support import models

PI, THIS = load_profile("raspberry-pi-4"), load_profile("this-machine")
SAMPLES = CalibrationSet({"x": models.random(16, 4)}, None)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> SourceModel:
    return load_source(models.write(models.mlp(), tmp_path_factory.mktemp("source") / "model.onnx"))


def test_the_folder_of_a_source_and_facts_about_the_device_do_not_change_the_key(source: SourceModel) -> None:
    moved = replace(source, path=Path("elsewhere.onnx"))
    assert inputs_digest(moved, SAMPLES) == inputs_digest(source, SAMPLES)
    key = cache_key("inputs", BuildSpec("onnxruntime", "fp32", THIS))
    assert cache_key("inputs", BuildSpec("onnxruntime", "fp32", replace(THIS, memory_mb=7))) == key


def test_everything_that_influences_an_artifact_changes_the_key(source: SourceModel, tmp_path: Path) -> None:
    other_source = load_source(models.write(models.cnn(), tmp_path / "other.onnx"))
    other_samples = CalibrationSet({"x": SAMPLES.inputs["x"] + np.float32(1)}, None)
    spec = BuildSpec("tflite", "int8", PI)
    layer = Layer("head", "Gemm", ("head",), ("scores",))
    inputs = inputs_digest(source, SAMPLES)
    keys = {
        cache_key(inputs, spec),
        cache_key(inputs, replace(spec, engine="openvino")),
        cache_key(inputs_digest(other_source, SAMPLES), spec),
        cache_key(inputs_digest(source, other_samples), spec),
        cache_key(inputs, replace(spec, profile=THIS)),
        cache_key(inputs, replace(spec, precision="fp32")),
        cache_key(inputs, replace(spec, float_layers=(layer,))),
        cache_key(inputs, spec, Recipe("uint8")),
    }
    assert len(keys) == 8


def test_an_edit_of_the_packager_makes_entries_stale_and_an_edit_of_other_code_does_not(tmp_path: Path) -> None:
    assert CODE.parts[-2:] == ("edgert_deploy", "packager")
    package = tmp_path / "edgert_deploy"
    shutil.copytree(CODE, package / "packager", ignore=shutil.ignore_patterns("__pycache__"))
    before = code_digest(package / "packager")
    assert before == code_digest(CODE)
    (package / "rollout").mkdir()
    (package / "rollout" / "rollout.py").write_text("# edited")
    assert code_digest(package / "packager") == before
    with (package / "packager" / "builders" / "qdq.py").open("a") as file:
        file.write("# edited")
    assert code_digest(package / "packager") != before
