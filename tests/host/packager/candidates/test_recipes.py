"""The recipes of INT8: one that is pinned, and those that a refusal names."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.signing import SigningKey
from edgert.errors import AccuracyTooLow
from edgert_deploy.packager.receipt import read_receipt
from edgert_deploy.packager.request import BuildRequest
from tests.support.packs import lossy, pack
from tests.support.profiles import profile


def test_one_recipe_can_be_pinned_and_the_receipt_names_it(
    request_: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    request = replace(request_, targets=(profile("one", "onnxruntime", then=("tensorrt",)),))
    for recipe in ("entropy", "min-max"):
        out = tmp_path / f"{recipe}.edgert"
        result = pack(replace(request, recipe=recipe), signing_key, out)
        assert [one.recipe for _, one in result.packed] == [recipe, recipe]
        with open_bundle(out, None) as bundle:
            told = read_receipt(bundle)
        assert told is not None
        assert {one["recipe"] for one in told["candidates"]} == {recipe}


def test_a_refusal_says_what_was_tried_and_what_it_scored(
    request_: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    request = replace(lossy(request_), targets=(profile("one"),), budget=2)
    with pytest.raises(AccuracyTooLow) as refusal:
        pack(request, signing_key, tmp_path / "x.edgert")
    for recipe in ("min-max", "heavy-only"):
        assert re.search(rf"{recipe} (0\.\d{{4}} \(fails\)|\(not built\))", refusal.value.message), recipe
