"""The output of `edgert bundle inspect`."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
from edgert.bundle.signing import SigningKey
from edgert_deploy.cli import main
from tests.support.bundles import make_null_bundle


def test_inspect_shows_the_manifest_where_a_receipt_has_no_candidates(
    signing_key: SigningKey, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = make_null_bundle(tmp_path, signing_key, receipt={"format": 2, "notes": "made by hand"})
    assert main(["bundle", "inspect", str(path)]) == 0
    said = capsys.readouterr().out
    assert "made by hand" in said
    assert "artifact  null: null fp32" in said
