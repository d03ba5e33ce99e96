"""Candidates: each is built and judged once."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.signing import SigningKey
from edgert_deploy.packager.pack import build_bundle
from edgert_deploy.packager.request import BuildRequest


def test_targets_that_share_an_artifact_have_it_built_once(
    request_: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    lines: list[str] = []
    result = build_bundle(request_, signing_key, tmp_path / "b.edgert", lines.append, lambda choice: None)
    assert len([line for line in lines if "building onnxruntime" in line]) == 1
    with open_bundle(result.path, None) as bundle:
        assert [target.artifacts for target in bundle.manifest.targets][:2] == [("onnxruntime-int8",)] * 2
