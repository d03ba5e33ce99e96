"""The recipes of INT8: a pinned recipe, and the list of recipes in an error."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import ArrayLike

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.bundle.bundle_file import open_bundle
from edgert.bundle.signing import SigningKey
from edgert.errors import AccuracyTooLow, OperatorUnsupported
from edgert_deploy.packager.candidates.choice import Choice
from edgert_deploy.packager.pack import build_bundle
from edgert_deploy.packager.receipt import read_receipt
from edgert_deploy.packager.request import BuildRequest
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import load_source
from tests.support import models
from tests.support.packs import candidates_of, lossy, pack
from tests.support.profiles import profile


def test_one_recipe_can_be_pinned_and_the_receipt_names_it(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    request = replace(build_request, targets=(profile("one", "onnxruntime", then=("tensorrt",)),))
    for recipe in ("entropy", "min-max"):
        out = tmp_path / f"{recipe}.edgert"
        result = pack(replace(request, recipe=recipe), signing_key, out)
        assert [one.recipe for one in candidates_of(result)] == [recipe, recipe]
        with open_bundle(out, None) as bundle:
            receipt = read_receipt(bundle)
        assert receipt is not None
        assert {one["recipe"] for one in receipt["candidates"]} == {recipe}


def test_before_a_refusal_the_recipes_that_were_tried_are_reported_with_their_scores(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    request = replace(lossy(build_request), targets=(profile("one"),), budget=2)
    reported: list[Choice] = []
    with pytest.raises(AccuracyTooLow):
        build_bundle(request, signing_key, tmp_path / "x.edgert", lambda line: None, reported.append)
    tried = reported[0].tried_text("onnxruntime")
    for recipe in ("min-max", "heavy-only"):
        assert re.search(rf"{recipe} (0\.\d{{4}} \(fails\)|\(not built\))", tried), recipe


def test_a_recipe_that_leaves_nearly_all_layers_in_float_does_not_end_the_search(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    """For attention, `dynamic-range` is the first recipe. It left a detector's convolutions in float, without loss."""
    body = """
        a = Conv <pads = [1, 1, 1, 1]> (x, first)  b = Relu (a)  c = Conv <pads = [1, 1, 1, 1]> (b, second)  d = Relu (c)
        rows = Reshape (d, flat)  columns = Transpose <perm = [0, 2, 1]> (rows)
        likeness = MatMul (rows, columns)  small = Mul (likeness, factor)  shares = Softmax <axis = -1> (small)
        mixed = MatMul (shares, rows)  mean = ReduceMean <axes = [2], keepdims = 0> (mixed)  y = MatMul (mean, last)
    """
    weights: dict[str, ArrayLike] = {"first": models.random(8, 3, 3, 3), "second": 0.2 * models.random(8, 8, 3, 3)}
    weights |= {"flat": np.array([0, 8, 64]), "factor": np.float32(0.001), "last": np.eye(8, dtype=np.float32)}
    proto = models.model("float[N,3,8,8] x) => (float[N,8] y", body, {k: np.asarray(v) for k, v in weights.items()})
    samples = [CalibrationSet({"x": models.random(60, 3, 8, 8, seed=seed)}, None) for seed in (1, 2)]
    request = replace(
        build_request,
        source=load_source(models.write(proto, tmp_path / "m.onnx")),
        calibration=samples[0],
        holdout=samples[1],
        targets=(profile("one"),),
        preprocess=None,
        classify=None,
        max_drop=0.1,
    )
    (packed,) = candidates_of(pack(request, signing_key, tmp_path / "x.edgert"))
    assert packed.recipe == "min-max"
    assert packed.artifact.int8_share is not None
    assert packed.artifact.int8_share > 0.9


def test_a_reason_that_every_recipe_shares_is_reported_once(tmp_path: Path, signing_key: SigningKey) -> None:
    source = load_source(
        models.write(models.model("float[N,4] x) => (float[N,4] y", "y = Hardmax (x)"), tmp_path / "m.onnx")
    )
    samples = CalibrationSet({"x": models.random(20, 4)}, None)
    pi = profile("pi", "tflite", "aarch64", then=("onnxruntime",))
    request = BuildRequest(source, samples, samples, (pi,), "m", precision="auto", allow_overlap=True)
    lines: list[str] = []
    with pytest.raises(OperatorUnsupported):
        build_bundle(request, signing_key, tmp_path / "m.edgert", lines.append, lambda choice: None)
    reasons = [line for line in lines if line.startswith("pi: no tflite ")]
    assert len(reasons) > 2
    assert [line.endswith(": for the same reason") for line in reasons] == [False, *[True] * (len(reasons) - 1)]
