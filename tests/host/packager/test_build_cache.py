"""The build cache: an artifact is built once, and a damaged entry is never used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.environment import code_digest
from edgert.errors import ConfigInvalid
from edgert_deploy.devices.profiles import DeviceProfile, load_profile
from edgert_deploy.packager.build_cache import CODE, BuildCache, cache_key, default_cache
from edgert_deploy.packager.builders import BuildSpec, builder_for
from edgert_deploy.packager.builders.layers import Layer
from edgert_deploy.packager.builders.qdq import Recipe
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support import models

PI, THIS = load_profile("raspberry-pi-4"), load_profile("this-machine")


class Builds:
    """Builds ONNX Runtime's FP32 artifacts through a cache; `count` is the number of real builds."""

    def __init__(self, folder: Path) -> None:
        self.cache = BuildCache(folder / "cache")
        self.count = 0
        self._folder = folder

    def __call__(self, source: SourceModel, calibration: CalibrationSet, profile: DeviceProfile = THIS) -> bytes:
        out = self._folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        spec = BuildSpec("onnxruntime", "fp32", profile)
        key = cache_key(spec, source, calibration)
        built = self.cache.get(key, out)
        if built is None:
            self.count += 1
            built = builder_for(spec.engine).build(spec, source, calibration, out, lambda line: None)
            self.cache.put(key, built)
        assert built.path.parent == out
        assert built.tools
        return built.path.read_bytes()


@pytest.fixture
def builds(tmp_path: Path) -> Builds:
    return Builds(tmp_path)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> SourceModel:
    return load_source(models.write(models.mlp(), tmp_path_factory.mktemp("source") / "model.onnx"))


SAMPLES = CalibrationSet({"x": models.random(16, 4)}, None)


def test_the_same_artifact_is_built_once(builds: Builds, source: SourceModel) -> None:
    first = builds(source, SAMPLES)
    assert builds(source, SAMPLES) == first
    # The file's folder and the profile's facts about the device do not change an artifact.
    moved = replace(source, path=Path("elsewhere.onnx"))
    assert builds(moved, SAMPLES, replace(THIS, memory_mb=7)) == first
    assert builds.count == 1


def test_everything_that_influences_an_artifact_changes_the_key(source: SourceModel, tmp_path: Path) -> None:
    other_source = load_source(models.write(models.cnn(), tmp_path / "other.onnx"))
    other_samples = CalibrationSet({"x": SAMPLES.inputs["x"] + np.float32(1)}, None)
    spec = BuildSpec("tflite", "int8", PI)
    layer = Layer("head", "Gemm", ("head",), ("scores",))
    keys = {
        cache_key(spec, source, SAMPLES),
        cache_key(replace(spec, engine="openvino"), source, SAMPLES),
        cache_key(spec, other_source, SAMPLES),
        cache_key(spec, source, other_samples),
        cache_key(replace(spec, profile=THIS), source, SAMPLES),
        cache_key(replace(spec, precision="fp32"), source, SAMPLES),
        cache_key(replace(spec, float_layers=(layer,)), source, SAMPLES),
        cache_key(spec, source, SAMPLES, Recipe("uint8")),
    }
    assert len(keys) == 8


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?"),
        lambda path: path.unlink(),
        lambda path: path.with_name("entry.json").write_text("{"),
        lambda path: path.with_name("entry.json").write_text('{"files": {"../x": "0"}, "artifact": {}}'),
        lambda path: path.with_name("entry.json").write_text('{"files": {}, "artifact": {"path": "model.onnx"}}'),
    ],
)
def test_a_damaged_entry_is_built_again(builds: Builds, source: SourceModel, damage: Callable[[Path], Any]) -> None:
    first = builds(source, SAMPLES)
    (kept,) = builds.cache.folder.glob("*/model.onnx")
    damage(kept)
    assert builds(source, SAMPLES) == first
    assert builds.count == 2
    assert builds(source, SAMPLES) == first
    assert builds.count == 2


def test_the_least_recently_used_entry_is_evicted_first(builds: Builds, source: SourceModel) -> None:
    sets = [CalibrationSet({"x": SAMPLES.inputs["x"] * np.float32(n)}, None) for n in (1, 2, 3)]
    builds(source, sets[0])
    size = sum(path.stat().st_size for path in builds.cache.folder.glob("*/*"))
    builds(source, sets[1])
    for age, path in enumerate(sorted(builds.cache.folder.iterdir(), key=lambda p: p.stat().st_mtime)):
        os.utime(path / "entry.json", (1000 + age, 1000 + age))
    builds(source, sets[0])  # used: now the second is the oldest
    builds.cache = replace(builds.cache, bytes_max=int(size * 2.5))
    builds(source, sets[2])
    assert len(list(builds.cache.folder.iterdir())) == 2
    assert builds.count == 3
    builds(source, sets[0])
    assert builds.count == 3
    builds(source, sets[1])
    assert builds.count == 4


def test_a_build_succeeds_although_the_cache_cannot_be_written(
    builds: Builds, source: SourceModel, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    builds.cache = BuildCache(tmp_path / "file" / "cache")
    assert builds(source, SAMPLES) == builds(source, SAMPLES)
    assert builds.count == 2


def test_the_environment_sets_the_folder_and_the_limit_of_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("EDGERT_CACHE", "3MB")
    assert default_cache() == BuildCache(tmp_path / "edgert" / "build", 3_000_000)
    monkeypatch.setenv("EDGERT_CACHE", "4096")
    with pytest.raises(ConfigInvalid, match="EDGERT_CACHE: '4096' is not a size"):
        default_cache()


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
