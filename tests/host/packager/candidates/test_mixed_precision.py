"""If plain INT8 loses too much, harmful layers stay in float, in every engine. A search can be resumed."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.signing import SigningKey
from edgert.errors import AccuracyTooLow, BuildFailed
from edgert_deploy.common.file_cache import FileCache
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.packager.builders import BuildSpec
from edgert_deploy.packager.candidates.candidate import CandidateBuilder
from edgert_deploy.packager.candidates.choice import choose
from edgert_deploy.packager.candidates.evaluation import evaluate_source
from edgert_deploy.packager.candidates.mixed_precision import Budget, search_float_layers
from edgert_deploy.packager.pack import build_bundle
from edgert_deploy.packager.receipt import read_receipt
from edgert_deploy.packager.request import BuildRequest, target_requests
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support import models
from tests.support.packs import candidates_of
from tests.support.profiles import profile

MODULES = {"openvino": "nncf", "tflite": "ai_edge_litert", "tensorrt": "onnxruntime"}
OTHERS = tuple(engine for engine, module in MODULES.items() if importlib.util.find_spec(module))


@pytest.fixture(scope="module")
def outlier(digits_source: SourceModel, tmp_path_factory: pytest.TempPathFactory) -> SourceModel:
    path = tmp_path_factory.mktemp("outlier") / "outlier.onnx"
    return load_source(models.write(models.with_outlier(digits_source.proto), path))


@pytest.fixture
def build_request(
    outlier: SourceModel, digits_calibration: CalibrationSet, digits_holdout: CalibrationSet, tmp_path: Path
) -> BuildRequest:
    box = profile("box", "onnxruntime", then=OTHERS)
    cache = FileCache(tmp_path / "cache")
    return BuildRequest(outlier, digits_calibration, digits_holdout, (box,), "outlier", cache=cache)


def test_in_every_engine_only_the_layers_around_an_outlier_stay_in_float(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    result = build_bundle(build_request, signing_key, tmp_path / "x.edgert", lambda line: None, lambda choice: None)
    assert [one.artifact.engine for one in candidates_of(result)] == ["onnxruntime", *OTHERS]
    for one in candidates_of(result):
        assert one.artifact.kind == "mixed"
        assert one.passed
        # The answers of conv1 hold the outlier, too. TensorRT uses these answers before it quantizes them.
        assert one.artifact.float_layers == (("conv2",) if one.artifact.engine == "tensorrt" else ("conv2", "conv1"))
        assert (
            one.size_bytes < build_request.source.size_bytes * 1.1
        )  # the classifier, most of the weights, is still INT8
    with open_bundle(result.path, None) as bundle:
        receipt = read_receipt(bundle)
        assert {artifact.precision for artifact in bundle.manifest.artifacts} == {"mixed"}
    # Little of the work is in INT8, but users may expect that an artifact named INT8 is fast.
    assert any(
        "left in INT8, so --precision auto packs it only if it is the fastest" in warning for warning in result.warnings
    )
    assert receipt is not None
    search = receipt["targets"][0]["mixed_precision"][0]
    assert [attempt["passed"] for attempt in search["attempts"]] == [False, True]
    harms = {layer["name"]: layer["sqnr_db"] for layer in search["layers"]}
    assert harms["conv2"] < harms["conv1"] < harms["classify"]
    plain = [one for one in receipt["candidates"] if one["kind"] == "int8"]
    assert {one["engine"] for one in plain} == {one["engine"] for one in receipt["candidates"] if one["packed"]}
    assert len({(one["engine"], one["recipe"]) for one in plain}) > len(
        candidates_of(result)
    )  # several recipes were tried
    assert not any(one["passed"] or one["packed"] for one in plain)


def test_without_a_budget_the_gate_fails_and_offers_another_precision(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    request = replace(build_request, budget=0, engines="first")
    with pytest.raises(AccuracyTooLow, match="--precision auto"):
        build_bundle(request, signing_key, tmp_path / "x.edgert", lambda line: None, lambda choice: None)
    auto = replace(request, precision="auto")
    result = build_bundle(auto, signing_key, tmp_path / "x.edgert", lambda line: None, lambda choice: None)
    assert not any(one.is_int8 for one in candidates_of(result))


def a_builder(request: BuildRequest, folder: Path, lines: list[str]) -> CandidateBuilder:
    folder.mkdir()
    assert request.cache is not None
    return CandidateBuilder(evaluate_source(request), request.cache, folder, lines.append)


def test_a_search_that_ended_with_its_budget_continues_where_it_stopped(
    build_request: BuildRequest, tmp_path: Path
) -> None:
    box: DeviceProfile = build_request.targets[0]
    lines: list[str] = []
    found, rounds = None, 0
    while found is None:
        builder = a_builder(build_request, tmp_path / f"work-{rounds}", lines)
        plain = builder.build(BuildSpec("onnxruntime", "int8", box))
        result = search_float_layers(builder, plain, Budget(1))
        assert result is not None
        assert result.budget_spent is (result.found is None)
        found, rounds = result.found, rounds + 1
        assert rounds < 10
    assert rounds == 2
    tries = {line.partition(": onnxruntime ")[2] for line in lines if " in float (conv" in line}
    assert len(tries) == 2  # the second search judges the first artifact again, and does not build it again
    again = search_float_layers(a_builder(build_request, tmp_path / "again", lines), plain, Budget(0))
    assert again is not None
    assert again.found is not None  # all artifacts are in the cache, so the search needs no budget
    assert result is not None
    assert again.attempts == result.attempts


def test_a_search_that_fails_is_reported_and_the_int8_artifact_stays(
    build_request: BuildRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    builder = a_builder(build_request, tmp_path / "work", lines)

    def out_of_memory() -> NoReturn:
        raise BuildFailed("out of memory")

    monkeypatch.setattr(builder.processes, "layers", out_of_memory)
    (target,) = target_requests(replace(build_request, engines="first"))
    choice = choose(builder, target, Budget(12))
    failed = "box: onnxruntime INT8 does not pass, and the search for layers in float failed: out of memory"
    assert choice.warnings == (failed,)
    assert not any("no onnxruntime int8" in line for line in lines)
    assert [(one.is_int8, one.passed) for one in choice.packed] == [(True, False)]


def test_an_engine_without_a_search_because_the_budget_is_spent_is_reported(
    build_request: BuildRequest, tmp_path: Path
) -> None:
    builder = a_builder(build_request, tmp_path / "work", [])
    (target,) = target_requests(replace(build_request, engines="first"))
    assert choose(builder, target, Budget(0)).warnings == ()  # the user turned the search off
    budget = Budget(1)
    budget.builds -= 1
    (warning,) = choose(builder, target, budget).warnings
    assert warning.startswith("box: onnxruntime INT8 does not pass, and earlier searches spent the budget")
    assert warning.endswith("Repeat the build to continue, or give a larger --budget")


def test_a_budget_that_is_too_small_for_the_number_of_layers_measures_none(
    build_request: BuildRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgert_deploy.packager.candidates.mixed_precision.LAYERS_PER_BUILD", 1)
    lines: list[str] = []
    builder = a_builder(build_request, tmp_path / "work", lines)
    plain = builder.build(BuildSpec("onnxruntime", "int8", build_request.targets[0]))
    layers = len(builder.processes.layers())
    budget = Budget(layers + 1)
    budget.builds = layers - 1  # an earlier search made two builds
    with pytest.raises(
        BuildFailed,
        match=f"{layers} layers, and the rest of the budget allows {layers - 1}. Give --budget {layers + 2} or more",
    ):
        search_float_layers(builder, plain, budget)
    assert not any("measur" in line for line in lines)
    assert search_float_layers(builder, plain, Budget(layers)) is not None


def test_a_search_in_a_tflite_model_is_refused_with_the_next_step() -> None:
    source = SourceModel(Path("m.tflite"), None, "0" * 64, 1, (), (), kind="tflite")
    builder: Any = SimpleNamespace(evaluation=SimpleNamespace(source=source))
    plain: Any = None
    with pytest.raises(BuildFailed, match=r"m\.tflite is a TFLite model\. Give the ONNX or Keras model"):
        search_float_layers(builder, plain, Budget(1))


def test_a_search_ends_when_too_little_of_the_work_is_left_in_int8(build_request: BuildRequest, tmp_path: Path) -> None:
    builder = a_builder(build_request, tmp_path / "work", [])
    plain = builder.build(BuildSpec("onnxruntime", "int8", build_request.targets[0]))
    result = search_float_layers(builder, plain, Budget(12), share_min=0.95)
    assert result is not None
    assert (result.found, result.budget_spent) == (None, False)
    (attempt,) = result.attempts  # a second layer in float would pass, but the search ends before
    assert attempt.share is not None
    assert attempt.share < 0.95


def test_what_a_search_finds_is_not_packed_if_nothing_in_it_is_int8(
    build_request: BuildRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgert_deploy.packager.candidates.candidate.SHOWN_SHARE_MIN", 1.1)
    builder = a_builder(build_request, tmp_path / "work", [])
    (target,) = target_requests(replace(build_request, engines="first"))
    choice = choose(builder, target, Budget(12))
    assert [(one.is_int8, one.passed) for one in choice.packed] == [(True, False)]
    assert choice.warnings[0].endswith("; nothing is left in INT8, so this artifact is not packed")
