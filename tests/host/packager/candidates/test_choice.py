"""The choice: the artifacts of a target, the engines without an artifact, and the warnings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.manifest import Manifest
from edgert.bundle.signing import SigningKey
from edgert.errors import BuildFailed
from edgert_deploy.common.file_cache import FileCache
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.packager.accuracy import accuracy_gate
from edgert_deploy.packager.builders import BuildSpec
from edgert_deploy.packager.candidates.candidate import Candidate, CandidateBuilder
from edgert_deploy.packager.candidates.choice import by_preference, choose
from edgert_deploy.packager.candidates.evaluation import Evaluation, evaluate_source
from edgert_deploy.packager.candidates.measure import Measurer, Timings
from edgert_deploy.packager.candidates.mixed_precision import Budget
from edgert_deploy.packager.candidates.recipes import NotBuilt
from edgert_deploy.packager.pack import build_bundle
from edgert_deploy.packager.processes.sandbox import Progress
from edgert_deploy.packager.receipt import read_receipt
from edgert_deploy.packager.request import BuildRequest, target_requests
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models
from tests.support.packs import candidates_of, lossy, pack
from tests.support.profiles import profile


def test_the_option_with_reference_adds_an_fp32_artifact_unless_the_target_has_one(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    targets = (profile("one"), replace(profile("exact"), precision="fp32"))
    request = replace(build_request, targets=targets, with_reference=True)
    result = pack(request, signing_key, tmp_path / "b.edgert")
    assert [one.id for one in candidates_of(result)] == ["onnxruntime-int8", "onnxruntime-fp32"]
    with open_bundle(result.path, None) as bundle:
        manifest = bundle.manifest
        receipt = read_receipt(bundle)
    assert receipt is not None
    assert all(candidate["packed"] for candidate in receipt["candidates"])
    assert [target.reference for target in manifest.targets] == ["onnxruntime-fp32", ""]
    assert sorted(artifact.id for artifact in manifest.artifacts) == ["onnxruntime-fp32", "onnxruntime-int8"]
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_precision_can_be_chosen_for_all_targets(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    request = replace(build_request, precision="fp32", max_drop=0.0)
    result = pack(request, signing_key, tmp_path / "digits.edgert")
    assert {one.artifact.precision for one in candidates_of(result)} == {"fp32"}
    assert all(one.result.accuracy.drop == 0 for one in candidates_of(result))


def test_every_engine_gets_an_artifact_or_is_left_out_with_the_reason(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    source = load_source(
        models.write(models.model("float[N,4] x) => (float[N,4] y", "y = Hardmax(x)"), tmp_path / "m.onnx")
    )
    samples = CalibrationSet({"x": models.random(20, 4)}, None)
    target = profile("box", "onnxruntime", then=("tflite", "tensorrt"))
    request = replace(
        build_request,
        source=source,
        calibration=samples,
        holdout=samples,
        allow_overlap=True,
        targets=(target,),
        preprocess=None,
        classify=None,
    )
    result = pack(replace(request, precision="fp32"), signing_key, tmp_path / "x.edgert")
    assert [one.id for one in candidates_of(result)] == ["onnxruntime-fp32", "tensorrt-fp32"]
    assert any("box gets no tflite artifact" in warning and "Hardmax" in warning for warning in result.warnings)
    with open_bundle(result.path, None) as bundle:
        assert bundle.manifest.targets[0].artifacts == ("onnxruntime-fp32", "tensorrt-fp32")
        receipt = read_receipt(bundle)
    assert receipt is not None
    assert receipt["targets"][0]["left_out"][0]["engine"] == "tflite"
    first = pack(replace(request, precision="fp32", engines="first"), signing_key, tmp_path / "y.edgert")
    assert [one.id for one in candidates_of(first)] == ["onnxruntime-fp32"]


def test_auto_takes_the_precision_that_passes_and_warns_if_it_is_not_int8(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    request = replace(lossy(build_request), precision="auto")
    result = pack(request, signing_key, tmp_path / "x.edgert")
    assert {one.artifact.engine for one in candidates_of(result)} == {"onnxruntime", "tensorrt"}
    assert not any(one.is_int8 for one in candidates_of(result))
    (reason,) = [text for text in result.warnings if "one: onnxruntime gets FP" in text]
    assert re.search(r"not INT8: INT8 \([a-z-]+\): top1 fell by", reason)


def test_an_fp32_artifact_that_answers_unlike_the_source_gets_a_warning(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = replace(build_request, precision="fp32", engines="first")
    assert not any("in FP32 differ" in text for text in pack(request, signing_key, tmp_path / "x.edgert").warnings)
    monkeypatch.setattr(accuracy_gate, "sqnr_db", lambda reference, answers: 26.0)
    warnings = pack(request, signing_key, tmp_path / "y.edgert").warnings
    assert any(
        text.startswith("one: onnxruntime's answers in FP32 differ from the source's by 5 %") for text in warnings
    )


def test_auto_times_the_precisions_that_pass_on_this_machine_and_takes_the_fastest(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    other = replace(profile("other"), machines=("no-such-machine",))
    request = replace(build_request, targets=(profile("here"), other), precision="auto", engines="first")
    lines: list[str] = []
    result = build_bundle(request, signing_key, tmp_path / "x.edgert", lines.append, lambda choice: None)
    here, elsewhere = result.choices
    assert set(here.timings) == {candidate.id for candidate in here.tried}
    fastest_ms = min(timing.p50_ms for timing in here.timings.values())
    assert here.timings[here.packed[0].id].p50_ms * 0.94 <= fastest_ms  # noise of 5 % chooses nothing
    assert not elsewhere.timings
    assert elsewhere.packed[0].is_int8
    assert any("other: not timed, because this machine has another processor" in line for line in lines)


def test_an_int8_artifact_with_little_work_in_int8_is_ranked_behind_fp16(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    plain = candidates_of(pack(build_request, signing_key, tmp_path / "x.edgert"))[0]
    hardly = replace(plain, artifact=replace(plain.artifact, int8_share=0.09))
    half = replace(plain, artifact=replace(plain.artifact, precision="fp16", int8_share=0.0))
    assert by_preference([plain, half]) == [plain, half]
    assert by_preference([hardly, half]) == [half, hardly]
    nothing = replace(plain, artifact=replace(plain.artifact, int8_share=0.0))
    assert by_preference([nothing, half]) == [half], "auto would otherwise pack it if it were timed as the fastest"
    assert by_preference([nothing]) == [nothing]


class WithoutMemory(CandidateBuilder):
    """Builds every precision except INT8 with FP16."""

    def build(self, spec: BuildSpec) -> Candidate:
        if spec.precision == "int8fp16":
            raise BuildFailed("out of memory")
        return super().build(spec)


class WithoutTimes(Measurer):
    def __call__(
        self, profile: DeviceProfile, evaluation: Evaluation, candidates: Sequence[Candidate], progress: Progress
    ) -> Timings:
        return {}


def test_an_extra_precision_that_fails_is_recorded_and_int8_stays(build_request: BuildRequest, tmp_path: Path) -> None:
    lines = list[str]()
    cache = FileCache(tmp_path / "cache")
    builder = WithoutMemory(evaluate_source(build_request), cache, tmp_path, lines.append)
    (target,) = target_requests(replace(build_request, targets=(profile("box", "tensorrt"),)))
    choice = choose(builder, target, Budget(0), WithoutTimes())
    assert [candidate.id for candidate in choice.packed] == ["tensorrt-int8"]
    assert choice.not_built == (NotBuilt("tensorrt", "INT8FP16", "out of memory"),)
    assert "box: no tensorrt int8fp16: out of memory" in lines


def crashes_in_int8(request: BuildRequest, folder: Path) -> BuildRequest:
    """Return a build in which ONNX Runtime crashes in INT8 only, while it answers the hold-out."""
    source = load_source(models.write(models.dividing(), folder / "m.onnx"))
    holdout = models.crashing(models.for_dividing(40, seed=1), in_int8_only=True)
    return replace(
        request,
        source=source,
        calibration=CalibrationSet({"x": models.for_dividing(40)}, None),
        holdout=CalibrationSet({"x": holdout}, None),
        targets=(profile("box"),),
        preprocess=None,
        classify=None,
    )


def test_a_precision_that_crashes_its_engine_is_left_out_and_the_next_precision_is_packed(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    request, lines = replace(crashes_in_int8(build_request, tmp_path), precision="auto"), list[str]()
    result = build_bundle(request, signing_key, tmp_path / "b.edgert", lines.append, lambda choice: None)
    assert [one.artifact.precision for one in candidates_of(result)] in (["fp16"], ["fp32"])
    assert [one.how for one in result.choices[0].not_built] == ["min-max", "heavy-only"]
    for recipe in ("min-max", "heavy-only"):
        says = (
            f"no onnxruntime int8 ({recipe}): onnxruntime crashed (SIGFPE) while it answered the hold-out samples with"
        )
        assert any(says in line and f"INT8 artifact ({recipe}) of box" in line for line in lines)


def test_a_crash_in_the_only_precision_ends_the_build_and_leaves_no_file(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    says = r"onnxruntime crashed \(SIGFPE\) .* INT8 artifact \(min-max\) of box; .* --precision auto"
    with pytest.raises(BuildFailed, match=says):
        pack(crashes_in_int8(build_request, tmp_path), signing_key, tmp_path / "b.edgert")
    assert not (tmp_path / "b.edgert").exists()
    assert not list((tmp_path / "tmp").iterdir())
