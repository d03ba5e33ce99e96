"""The contents of a bundle: its files, and the golden answers of its artifacts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.signing import SigningKey
from edgert.engines import EngineOptions, LocalArtifact, engine_by_name
from edgert_deploy.packager.accuracy.artifact_runs import reference_outputs
from edgert_deploy.packager.accuracy.golden_samples import golden_rows
from edgert_deploy.packager.request import BuildRequest
from tests.support.packs import pack


def test_a_bundle_has_the_requested_parts_and_the_golden_answers_of_its_artifacts(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    result = pack(build_request, signing_key, tmp_path / "digits.edgert")
    assert [(choice.profile.name, one.id, one.passed) for choice in result.choices for one in choice.packed] == [
        ("one", "onnxruntime-int8", True),
        ("two", "onnxruntime-int8", True),
        ("jetson", "tensorrt-int8", True),
    ]
    (tmp_path / "out").mkdir()
    with open_bundle(result.path, (signing_key.public,)) as bundle:
        manifest = bundle.manifest
        bundle.unpack(tmp_path / "out", frozenset(file.path for file in manifest.files))
        assert (result.digest, result.size_bytes) == (bundle.digest, result.path.stat().st_size)
    assert (manifest.preprocess, manifest.classify) == (build_request.preprocess, build_request.classify)
    assert manifest.source_sha256 == build_request.source.sha256
    reference = reference_outputs(build_request.source, build_request.holdout)
    given = np.load(tmp_path / "out" / manifest.golden_inputs[0])
    np.testing.assert_array_equal(given, build_request.holdout.inputs["image"][golden_rows(reference)])
    for entry in manifest.artifacts:
        # The engine that judged TensorRT's graph runs it here.
        path, sha256 = tmp_path / "out" / entry.entry, manifest.file(entry.entry).sha256
        local = LocalArtifact("onnxruntime", path, manifest.inputs, manifest.outputs, sha256)
        session = engine_by_name("onnxruntime").load(local, EngineOptions())
        answer = session.run([given])[0]
        session.close()
        golden = np.load(tmp_path / "out" / entry.golden_outputs[0])
        assert 0 < entry.golden_atol[0] < 0.1 * np.ptp(golden)
        np.testing.assert_allclose(answer, golden, atol=entry.golden_atol[0])
        assert entry.accuracy.samples == len(build_request.holdout)
        assert {"edgert", "onnxruntime"} <= set(entry.tools)
