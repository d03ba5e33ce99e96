"""Packing: a build that passes writes one signed file, always the same bytes; a failed build leaves no file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.signing import SigningKey
from edgert.errors import (
    AccuracyTooLow,
    OperatorUnsupported,
)
from edgert_deploy.packager.candidates.choice import check_gate
from edgert_deploy.packager.pack import build_bundle
from edgert_deploy.packager.request import BuildRequest
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models
from tests.support.packs import candidates_of, lossy, pack
from tests.support.profiles import profile


def test_two_builds_in_different_folders_give_the_same_bytes(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for name in ("a", "b/c"):
        folder = tmp_path / name
        (folder / "tmp").mkdir(parents=True)
        monkeypatch.setattr("tempfile.tempdir", str(folder / "tmp"))
        results.append(pack(build_request, signing_key, folder / "digits.edgert").path.read_bytes())
        # An idle child keeps its folder until this process ends.
        assert [path for path in (folder / "tmp").iterdir() if not path.name.startswith("edgert-child-")] == []
    assert results[0] == results[1]


def test_an_artifact_that_lost_too_much_accuracy_fails_the_build_and_is_named(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    choices: list[Any] = []
    out = tmp_path / "digits.edgert"
    with pytest.raises(AccuracyTooLow, match=r"target one: onnxruntime top1 fell by 0\.\d{4}") as caught:
        build_bundle(lossy(build_request), signing_key, out, lambda line: None, choices.append)
    assert "target jetson" in caught.value.message
    assert caught.value.exit_code == 3
    assert [choice.packed[0].passed for choice in choices] == [False, False, False]
    assert not list(tmp_path.iterdir())
    assert "Use calibration samples" in caught.value.message
    with pytest.raises(AccuracyTooLow, match=r"keeps the quantization of .*: build from the float model"):
        check_gate(choices, replace(build_request.source, quantized=True))
    (nearest,) = choices[0].packed
    in_fp32 = replace(nearest, artifact=replace(nearest.artifact, precision="fp32"))
    failed = [replace(choices[0], tried=(nearest, in_fp32))]
    with pytest.raises(AccuracyTooLow, match=r"fails in FP32 too, so this engine computes the model wrongly"):
        check_gate(failed, build_request.source)
    with pytest.raises(
        AccuracyTooLow, match=r"FP32 too, because the answers of .* depend on its quantized activations"
    ):
        check_gate(failed, replace(build_request.source, quantized=True))


def test_the_error_about_an_operator_names_the_target_that_does_not_support_it(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    source = load_source(
        models.write(models.model("float[N,4] x) => (float[N,4] y", "y = Hardmax(x)"), tmp_path / "m.onnx")
    )
    samples = CalibrationSet({"x": models.random(20, 4)}, None)
    pi = profile("pi", "tflite", "aarch64")
    request = replace(
        build_request,
        source=source,
        calibration=samples,
        holdout=samples,
        allow_overlap=True,
        preprocess=None,
        classify=None,
    )
    with pytest.raises(OperatorUnsupported, match=r"Hardmax .* omit --target pi$"):
        pack(replace(request, targets=(pi, profile("one"))), signing_key, tmp_path / "x.edgert")
    with pytest.raises(OperatorUnsupported) as caught:
        pack(replace(request, targets=(pi,)), signing_key, tmp_path / "x.edgert")
    assert "--target" not in caught.value.message


def test_a_failed_build_leaves_an_earlier_bundle_unchanged(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    out = tmp_path / "digits.edgert"
    out.write_text("the bundle before")
    with pytest.raises(AccuracyTooLow):
        pack(lossy(build_request), signing_key, out)
    assert out.read_text() == "the bundle before"
    assert list(tmp_path.iterdir()) == [out]


def test_without_labels_the_values_of_several_outputs_are_compared(signing_key: SigningKey, tmp_path: Path) -> None:
    source = load_source(models.write(models.two_by_two(), tmp_path / "m.onnx"))
    samples = CalibrationSet({"a": models.random(16, 3), "b": models.random(16, 3, seed=1)}, None)
    request = BuildRequest(source, samples, samples, (profile("one"),), "m", max_drop=0.02, allow_overlap=True)
    result = pack(request, signing_key, tmp_path / "m.edgert")
    assert candidates_of(result)[0].result.accuracy.metric == "values"
    with open_bundle(result.path, (signing_key.public,)) as bundle:
        bundle.verify_files()
        assert len(bundle.manifest.golden_inputs) == len(bundle.manifest.artifacts[0].golden_outputs) == 2
