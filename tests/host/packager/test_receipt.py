"""The receipt: the findings of a build, in the bundle."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.signing import SigningKey
from edgert.errors import (
    BundleError,
)
from edgert_deploy.packager.receipt import PATH, read_receipt
from edgert_deploy.packager.request import BuildRequest
from tests.support.packs import pack


def test_the_receipt_lists_the_classes_and_slices_of_each_candidate(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    half = len(build_request.holdout) // 2
    slices = np.array(["day"] * half + ["night"] * (len(build_request.holdout) - half))
    request = replace(build_request, holdout=replace(build_request.holdout, slices=slices), max_class_drop=0.2)
    result = pack(request, signing_key, tmp_path / "x.edgert")
    with open_bundle(result.path, (signing_key.public,)) as bundle:
        receipt = read_receipt(bundle)
        assert PATH in {file.path for file in bundle.manifest.files}
    assert receipt is not None
    assert (receipt["gate"]["metric"], receipt["gate"]["max_class_drop"]) == ("top1", 0.2)
    one = receipt["candidates"][0]
    assert (one["id"], one["packed"], one["kind"], one["passed"]) == ("onnxruntime-int8", True, "int8", True)
    assert one["int8_share"] == 1.0
    assert one["accuracy"]["drop_low"] < one["accuracy"]["drop"] < one["accuracy"]["drop_high"] < 0.03
    assert [group["name"] for group in one["classes"]] == list("0123456789")
    assert [group["name"] for group in one["slices"]] == ["day", "night"]
    assert sum(group["samples"] for group in one["slices"]) == len(request.holdout)
    assert {"top5", "top1_agreement", "cosine", "sqnr_db"} == set(one["other_metrics"])


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"format": 1}'])
def test_an_invalid_receipt_is_refused(content: bytes) -> None:
    class Bundle:
        manifest = type("Manifest", (), {"files": [type("File", (), {"path": PATH})]})

        def read_file(self, path: str, bytes_max: int) -> bytes:
            return content

    with pytest.raises(BundleError, match="receipt"):
        read_receipt(Bundle())  # type: ignore[arg-type]  # the method that reads a bundle's receipt
