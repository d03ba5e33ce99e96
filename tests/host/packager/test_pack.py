"""Packing: what the gate lets through is one signed file, the same each time; what it stops leaves nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.manifest import Manifest
from edgert.bundle.rules import Classify, Preprocess
from edgert.bundle.signing import SigningKey
from edgert.engines import EngineOptions, LocalArtifact, engine_by_name
from edgert.errors import (
    AccuracyTooLow,
    CalibrationInvalid,
    ConfigInvalid,
    EdgeRTError,
    OperatorUnsupported,
    SourceInvalid,
)
from edgert_deploy.devices.profiles import load_profile
from edgert_deploy.packager import receipt
from edgert_deploy.packager.accuracy.accuracy_gate import reference_outputs
from edgert_deploy.packager.accuracy.golden_samples import golden_rows
from edgert_deploy.packager.builders import Order
from edgert_deploy.packager.pack import BuildResult, build_bundle
from edgert_deploy.packager.receipt import read_receipt
from edgert_deploy.packager.request import BuildRequest
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support import models
from tests.support.profiles import profile


@pytest.fixture
def request_(
    digits_source: SourceModel, digits_calibration: CalibrationSet, digits_holdout: CalibrationSet
) -> BuildRequest:
    return BuildRequest(
        source=digits_source,
        calibration=digits_calibration,
        holdout=digits_holdout,
        targets=(profile("one"), profile("two"), profile("jetson", "tensorrt", "aarch64")),
        model="digits",
        preprocess=Preprocess("image", 0.0625),
        classify=Classify("scores", tuple("0123456789")),
    )


def pack(request: BuildRequest, key: SigningKey, out: Path) -> BuildResult:
    return build_bundle(request, key, out, lambda line: None, lambda choice: None)


def test_a_bundle_holds_what_was_asked_for_and_its_golden_answers_are_its_own(
    request_: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    result = pack(request_, signing_key, tmp_path / "digits.edgert")
    assert [(target, one.id, one.passed) for target, one in result.packed] == [
        ("one", "onnxruntime-int8", True),
        ("two", "onnxruntime-int8", True),
        ("jetson", "tensorrt-int8", True),
    ]
    (tmp_path / "out").mkdir()
    with open_bundle(result.path, (signing_key.public,)) as bundle:
        manifest = bundle.manifest
        bundle.unpack(tmp_path / "out", frozenset(file.path for file in manifest.files))
        assert (result.digest, result.size_bytes) == (bundle.digest, result.path.stat().st_size)
    assert (manifest.preprocess, manifest.classify) == (request_.preprocess, request_.classify)
    assert manifest.source_sha256 == request_.source.sha256
    reference = reference_outputs(request_.source, request_.holdout)
    given = np.load(tmp_path / "out" / manifest.golden_inputs[0])
    np.testing.assert_array_equal(given, request_.holdout.inputs["image"][golden_rows(reference)])
    for entry in manifest.artifacts:
        # TensorRT's graph is run by the engine that judged it.
        path, sha256 = tmp_path / "out" / entry.entry, manifest.file(entry.entry).sha256
        local = LocalArtifact("onnxruntime", path, manifest.inputs, manifest.outputs, sha256)
        session = engine_by_name("onnxruntime").load(local, EngineOptions())
        answer = session.run([given])[0]
        session.close()
        golden = np.load(tmp_path / "out" / entry.golden_outputs[0])
        assert 0 < entry.golden_atol[0] < 0.1 * np.ptp(golden)
        np.testing.assert_allclose(answer, golden, atol=entry.golden_atol[0])
        assert entry.accuracy.samples == len(request_.holdout)
        assert {"edgert", "onnxruntime"} <= set(entry.tools)


def test_targets_that_share_an_artifact_have_it_built_once(
    request_: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    lines: list[str] = []
    result = build_bundle(request_, signing_key, tmp_path / "b.edgert", lines.append, lambda choice: None)
    assert len([line for line in lines if "building onnxruntime" in line]) == 1
    with open_bundle(result.path, None) as bundle:
        assert [target.artifacts for target in bundle.manifest.targets][:2] == [("onnxruntime-int8",)] * 2


def test_a_reference_goes_along_where_it_is_asked_for_and_is_not_the_artifact_itself(
    request_: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    targets = (profile("one"), replace(profile("exact"), precision="fp32"))
    request = replace(request_, targets=targets, with_reference=True)
    result = pack(request, signing_key, tmp_path / "b.edgert")
    assert [one.id for _, one in result.packed] == ["onnxruntime-int8", "onnxruntime-fp32"]
    with open_bundle(result.path, None) as bundle:
        manifest = bundle.manifest
        told = read_receipt(bundle)
    assert told is not None
    assert all(candidate["packed"] for candidate in told["candidates"])
    assert [target.reference for target in manifest.targets] == ["onnxruntime-fp32", ""]
    assert sorted(artifact.id for artifact in manifest.artifacts) == ["onnxruntime-fp32", "onnxruntime-int8"]
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def test_two_builds_in_different_folders_are_the_same_bytes(
    request_: BuildRequest, signing_key: SigningKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for name in ("a", "b/c"):
        folder = tmp_path / name
        (folder / "tmp").mkdir(parents=True)
        monkeypatch.setattr("tempfile.tempdir", str(folder / "tmp"))
        results.append(pack(request_, signing_key, folder / "digits.edgert").path.read_bytes())
        assert not list((folder / "tmp").iterdir())
    assert results[0] == results[1]


def lossy(request: BuildRequest) -> BuildRequest:
    """Calibrated on one pixel's worth of light: every activation is clipped, and most answers are lost."""
    dark = {"image": np.zeros_like(request.calibration.inputs["image"])}
    return replace(request, calibration=CalibrationSet(dark, None))


def test_an_artifact_that_lost_too_much_stops_the_build_and_is_named(
    request_: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    choices: list[Any] = []
    out = tmp_path / "digits.edgert"
    with pytest.raises(AccuracyTooLow, match=r"target one: onnxruntime top1 fell by 0\.\d{4}") as caught:
        build_bundle(lossy(request_), signing_key, out, lambda line: None, choices.append)
    assert "target jetson" in caught.value.message
    assert caught.value.exit_code == 3
    assert [choice.packed[0].passed for choice in choices] == [False, False, False]
    assert not list(tmp_path.iterdir())


def test_an_operator_that_one_target_cannot_take_names_the_target_to_leave_out(
    request_: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    source = load_source(
        models.write(models.model("float[N,4] x) => (float[N,4] y", "y = Hardmax(x)"), tmp_path / "m.onnx")
    )
    samples = CalibrationSet({"x": models.random(20, 4)}, None)
    pi = profile("pi", "tflite", "aarch64")
    asked = replace(
        request_,
        source=source,
        calibration=samples,
        holdout=samples,
        allow_overlap=True,
        preprocess=None,
        classify=None,
    )
    with pytest.raises(OperatorUnsupported, match=r"Hardmax .* omit --target pi$"):
        pack(replace(asked, targets=(pi, profile("one"))), signing_key, tmp_path / "x.edgert")
    with pytest.raises(OperatorUnsupported) as caught:
        pack(replace(asked, targets=(pi,)), signing_key, tmp_path / "x.edgert")
    assert "--target" not in caught.value.message


def test_a_failed_build_leaves_the_bundle_before_it_as_it_was(
    request_: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    out = tmp_path / "digits.edgert"
    out.write_text("the bundle before")
    with pytest.raises(AccuracyTooLow):
        pack(lossy(request_), signing_key, out)
    assert out.read_text() == "the bundle before"
    assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"model": "Not Allowed"}, ConfigInvalid),
        ({"targets": ()}, ConfigInvalid),
        ({"targets": (profile("one"), profile("one"))}, ConfigInvalid),
        ({"targets": (profile("null", "null"),)}, ConfigInvalid),
        ({"holdout": CalibrationSet({"image": models.random(8, 1, 8, 8)}, np.full(8, 99))}, CalibrationInvalid),
    ],
)
def test_what_cannot_be_built_leaves_nothing(
    changes: dict[str, Any], error: type[EdgeRTError], request_: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    with pytest.raises(error):
        pack(replace(request_, **changes), signing_key, tmp_path / "digits.edgert")
    assert not list(tmp_path.iterdir())


def test_a_folder_that_does_not_exist_is_named_before_anything_is_built(
    request_: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    with pytest.raises(ConfigInvalid, match="missing"):
        pack(request_, signing_key, tmp_path / "missing" / "digits.edgert")


def test_a_model_whose_answers_depend_on_the_rest_of_the_batch_is_refused(
    signing_key: SigningKey, tmp_path: Path
) -> None:
    proto = models.model("float[N,4] x) => (float[N,4] y", "m = ReduceMean <axes = [0]> (x) y = Sub(x, m)")
    source = load_source(models.write(proto, tmp_path / "m.onnx"))
    samples = CalibrationSet({"x": models.random(16, 4)}, None)
    request = BuildRequest(source, samples, samples, (profile("one"),), "m", precision="fp32", allow_overlap=True)
    with pytest.raises(SourceInvalid, match="depends on the other samples"):
        pack(request, signing_key, tmp_path / "m.edgert")


def test_without_labels_and_with_several_outputs_the_answers_are_compared(
    signing_key: SigningKey, tmp_path: Path
) -> None:
    source = load_source(models.write(models.two_by_two(), tmp_path / "m.onnx"))
    samples = CalibrationSet({"a": models.random(16, 3), "b": models.random(16, 3, seed=1)}, None)
    request = BuildRequest(source, samples, samples, (profile("one"),), "m", max_drop=0.02, allow_overlap=True)
    result = pack(request, signing_key, tmp_path / "m.edgert")
    assert result.packed[0][1].result.accuracy.metric == "cosine"
    with open_bundle(result.path, (signing_key.public,)) as bundle:
        bundle.verify_files()
        assert len(bundle.manifest.golden_inputs) == len(bundle.manifest.artifacts[0].golden_outputs) == 2


def test_precision_can_be_chosen_for_all_targets(
    request_: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    request = replace(request_, precision="fp32", max_drop=0.0)
    result = pack(request, signing_key, tmp_path / "digits.edgert")
    assert {one.artifact.precision for _, one in result.packed} == {"fp32"}
    assert all(one.result.accuracy.drop == 0 for _, one in result.packed)


def test_arm_and_x86_share_all_artifacts_but_onnx_runtimes_int8() -> None:
    arm, x86 = profile("a", "onnxruntime", "aarch64"), profile("b", "onnxruntime", "x86_64")
    assert Order("onnxruntime", "int8", arm).id != Order("onnxruntime", "int8", x86).id
    assert Order("onnxruntime", "fp32", arm).id == Order("onnxruntime", "fp32", x86).id
    tflite = [Order("tflite", "int8", load_profile(name)).id for name in ("raspberry-pi-4", "raspberry-pi-5")]
    assert tflite == ["tflite-int8"] * 2


def test_every_engine_of_the_profile_gets_an_artifact_and_one_that_cannot_is_left_out_with_its_reason(
    request_: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    source = load_source(
        models.write(models.model("float[N,4] x) => (float[N,4] y", "y = Hardmax(x)"), tmp_path / "m.onnx")
    )
    samples = CalibrationSet({"x": models.random(20, 4)}, None)
    target = profile("box", "onnxruntime", then=("tflite", "tensorrt"))
    asked = replace(
        request_,
        source=source,
        calibration=samples,
        holdout=samples,
        allow_overlap=True,
        targets=(target,),
        preprocess=None,
        classify=None,
    )
    result = pack(replace(asked, precision="fp32"), signing_key, tmp_path / "x.edgert")
    assert [one.id for _, one in result.packed] == ["onnxruntime-fp32", "tensorrt-fp32"]
    assert any("box goes without tflite" in warning and "Hardmax" in warning for warning in result.warnings)
    with open_bundle(result.path, None) as bundle:
        assert bundle.manifest.targets[0].artifacts == ("onnxruntime-fp32", "tensorrt-fp32")
        told = read_receipt(bundle)
    assert told is not None
    assert told["targets"][0]["left_out"][0]["engine"] == "tflite"
    first = pack(replace(asked, precision="fp32", engines="first"), signing_key, tmp_path / "y.edgert")
    assert [one.id for _, one in first.packed] == ["onnxruntime-fp32"]


def test_the_receipt_tells_each_candidates_classes_and_slices(
    request_: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    half = len(request_.holdout) // 2
    slices = np.array(["day"] * half + ["night"] * (len(request_.holdout) - half))
    request = replace(request_, holdout=replace(request_.holdout, slices=slices), max_class_drop=0.2)
    result = pack(request, signing_key, tmp_path / "x.edgert")
    with open_bundle(result.path, (signing_key.public,)) as bundle:
        told = read_receipt(bundle)
        assert receipt.PATH in {file.path for file in bundle.manifest.files}
    assert told is not None
    assert (told["gate"]["metric"], told["gate"]["max_class_drop"]) == ("top1", 0.2)
    one = told["candidates"][0]
    assert (one["id"], one["packed"], one["kind"], one["passed"]) == ("onnxruntime-int8", True, "int8", True)
    assert [group["name"] for group in one["classes"]] == list("0123456789")
    assert [group["name"] for group in one["slices"]] == ["day", "night"]
    assert sum(group["samples"] for group in one["slices"]) == len(request.holdout)
    assert {"top5", "top1_agreement", "cosine", "sqnr_db"} == set(one["also"])


def test_auto_takes_what_passes_and_says_so_where_it_is_not_int8(
    request_: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    request = replace(lossy(request_), precision="auto")
    result = pack(request, signing_key, tmp_path / "x.edgert")
    assert {one.id for _, one in result.packed} == {"onnxruntime-fp16", "tensorrt-fp16"}
    assert any("one: onnxruntime gets FP16, not INT8: INT8: top1 fell by" in warning for warning in result.warnings)
