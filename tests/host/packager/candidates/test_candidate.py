"""Candidates: each candidate is built and judged once."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.signing import SigningKey
from edgert.errors import BuildFailed
from edgert_deploy.common.file_cache import FileCache
from edgert_deploy.packager.builders import BuildSpec
from edgert_deploy.packager.candidates.candidate import CandidateBuilder
from edgert_deploy.packager.candidates.evaluation import evaluate_source
from edgert_deploy.packager.pack import build_bundle
from edgert_deploy.packager.request import BuildRequest
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models
from tests.support.profiles import profile


def test_an_artifact_that_several_targets_share_is_built_once(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    lines: list[str] = []
    result = build_bundle(build_request, signing_key, tmp_path / "b.edgert", lines.append, lambda choice: None)
    assert len([line for line in lines if "building onnxruntime" in line]) == 1
    with open_bundle(result.path, None) as bundle:
        assert [target.artifacts for target in bundle.manifest.targets][:2] == [("onnxruntime-int8",)] * 2


def test_an_artifact_whose_cached_files_are_damaged_is_not_reported_as_taken_from_the_cache(tmp_path: Path) -> None:
    source = load_source(models.write(models.mlp(), tmp_path / "m.onnx"))
    samples = CalibrationSet({"x": models.random(16, 4)}, None)
    evaluation = evaluate_source(BuildRequest(source, samples, samples, (profile("one"),), "m", allow_overlap=True))
    cache, said = FileCache(tmp_path / "cache"), []
    for number, damage in enumerate((False, False, True)):
        if damage:
            next(cache.folder.glob("*/*.onnx")).write_bytes(b"")
        work = tmp_path / str(number)
        work.mkdir()
        lines: list[str] = []
        CandidateBuilder(evaluation, cache, work, lines.append).build(BuildSpec("onnxruntime", "fp32", profile("one")))
        said.append(any("taken from the build cache" in line for line in lines))
    assert said == [False, True, False]


def test_a_build_that_failed_for_one_target_fails_again_for_the_next(tmp_path: Path) -> None:
    pytest.importorskip("ai_edge_litert")
    source = load_source(models.write(models.mlp(), tmp_path / "m.onnx"))
    samples = CalibrationSet({"x": models.random(16, 4)}, None)
    request = BuildRequest(source, samples, samples, (profile("one"),), "m", allow_overlap=True)
    builder = CandidateBuilder(evaluate_source(request), FileCache(tmp_path / "cache"), tmp_path, lambda line: None)
    for name in ("one", "two"):
        with pytest.raises(BuildFailed, match="1024 weights or more"):
            builder.build(BuildSpec("tflite", "int8", profile(name), recipe="dynamic-range"))
