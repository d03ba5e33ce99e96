"""Warnings of a build: each warning names its reason and the next step, and the build still passes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.signing import SigningKey
from edgert_deploy.packager.build_warnings import build_warnings
from edgert_deploy.packager.builders.tflite import ONE_BY_ONE
from edgert_deploy.packager.candidates.evaluation import evaluate_source
from edgert_deploy.packager.receipt import read_receipt
from edgert_deploy.packager.request import BuildRequest, target_requests
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.settings import RequestedPrecision
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models
from tests.support.packs import lossy, pack
from tests.support.profiles import profile


def test_an_input_that_is_the_same_in_all_samples_is_named(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    dark = replace(lossy(build_request), targets=(profile("one"),), precision="fp32")
    warnings = pack(dark, signing_key, tmp_path / "b.edgert").warnings
    (text,) = [text for text in warnings if "input 'image' is 0.0 everywhere in all " in text]
    assert text.endswith("Give samples that vary like the data on your devices")
    assert not [text for text in warnings if "hold-out samples, so" in text]


def test_few_golden_samples_of_large_inputs_are_reported(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgert_deploy.packager.accuracy.golden_samples.BYTES_MAX", 1000)  # three digits
    one = replace(build_request, targets=(profile("one"),), precision="fp32")
    result = pack(one, signing_key, tmp_path / "b.edgert")
    assert [text for text in result.warnings if "the bundle has 3 golden samples instead of 8" in text]
    with open_bundle(result.path, None) as bundle:
        (entry,) = [file for file in bundle.manifest.files if file.path == bundle.manifest.golden_inputs[0]]
        assert entry.size_bytes < 1000


@pytest.mark.parametrize(("precision", "expected"), [("int8", 1), ("fp32", 0)])
def test_a_calibration_with_a_narrower_range_is_reported_if_a_target_gets_int8(
    build_request: BuildRequest, precision: RequestedPrecision, expected: int
) -> None:
    narrow = CalibrationSet({"image": build_request.calibration.inputs["image"].clip(max=0.5)}, None)
    request = replace(build_request, calibration=narrow, precision=precision)
    warnings = build_warnings(request, target_requests(request), evaluate_source(request))
    clipped = [text for text in warnings if "INT8 clips values outside the calibration range. Give" in text]
    assert len(clipped) == expected


def test_an_artifact_that_runs_the_items_of_a_batch_one_by_one_is_reported(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    pytest.importorskip("ai_edge_litert")
    body = "a = Transpose<perm=[1,2,3,0]>(x)  b = Conv(a, w)  c = Transpose<perm=[3,0,1,2]>(b)  y = Flatten(c)"
    model = models.model("float[N,4,2,2] x) => (float[N,24] y", body, {"w": models.random(3, 2, 1, 1)})
    source = load_source(models.write(model, tmp_path / "m.onnx"))
    inputs = models.random(20, 4, 2, 2)
    request = replace(
        build_request,
        source=source,
        calibration=CalibrationSet({"x": inputs[:10]}, None),
        holdout=CalibrationSet({"x": inputs[10:]}, None),
        targets=(profile("one", "tflite"),),
        precision="fp32",
        preprocess=None,
        classify=None,
    )
    result = pack(request, signing_key, tmp_path / "b.edgert")
    assert f"one: {ONE_BY_ONE}" in result.warnings
    with open_bundle(result.path, None) as bundle:
        assert f"one: {ONE_BY_ONE}" in (read_receipt(bundle) or {})["targets"][0]["warnings"]
