"""A request: an invalid request is refused before the first build; a valid one gives each target's engines."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.bundle.signing import SigningKey
from edgert.errors import (
    CalibrationInvalid,
    ConfigInvalid,
    EdgeRTError,
)
from edgert_deploy.packager.request import BuildRequest, overlap, target_requests
from edgert_deploy.packager.samples.samples import CalibrationSet
from tests.support import models
from tests.support.accounts import as_nobody
from tests.support.packs import pack
from tests.support.profiles import profile


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
def test_a_request_that_cannot_be_built_leaves_no_file(
    changes: dict[str, Any],
    error: type[EdgeRTError],
    build_request: BuildRequest,
    signing_key: SigningKey,
    tmp_path: Path,
) -> None:
    with pytest.raises(error):
        pack(replace(build_request, **changes), signing_key, tmp_path / "digits.edgert")
    assert not list(tmp_path.iterdir())


def test_an_unknown_recipe_is_refused_with_the_recipes_of_each_engine(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    request = replace(build_request, recipe="magic", targets=(profile("one", "openvino", then=("onnxruntime",)),))
    with pytest.raises(ConfigInvalid, match=r"openvino: min-max, nncf.*; onnxruntime: min-max, heavy-only"):
        pack(request, signing_key, tmp_path / "digits.edgert")


def test_a_folder_that_does_not_exist_is_named_before_anything_is_built(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    with pytest.raises(ConfigInvalid, match="missing"):
        pack(build_request, signing_key, tmp_path / "missing" / "digits.edgert")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigInvalid, match=r"cannot write a bundle to .*pipe: give --out a file name"):
        pack(build_request, signing_key, tmp_path / "pipe")
    (tmp_path / "model.onnx").touch()
    with pytest.raises(ConfigInvalid, match=r"model.onnx exists and is not an .edgert file, so it is not replaced"):
        pack(build_request, signing_key, tmp_path / "model.onnx")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user")
def test_a_folder_that_may_not_be_written_is_named_before_anything_is_built() -> None:
    imported = "from pathlib import Path; from edgert_deploy.packager.request import check_out"
    message = as_nobody(imported, "(lambda: check_out(Path('/new.edgert')))")
    assert message == (
        "ConfigInvalid: cannot write a bundle to /new.edgert: you may not write in its folder. Give --out another folder"
    )


def test_a_sample_in_both_sets_is_found_and_refused(
    build_request: BuildRequest, signing_key: SigningKey, tmp_path: Path
) -> None:
    shared = build_request.calibration.inputs["image"].copy()
    shared[[3, 9]] = build_request.holdout.inputs["image"][[5, 5]]
    calibration = CalibrationSet({"image": shared}, None)
    assert overlap(calibration, build_request.holdout) == [(5, 3)]
    request = replace(build_request, calibration=calibration)
    words = r"hold-out sample 5 is also calibration sample 3 \(1 of 400 hold-out .* --allow-overlap"
    with pytest.raises(CalibrationInvalid, match=words):
        pack(request, signing_key, tmp_path / "x.edgert")


def test_samples_overlap_if_all_of_their_inputs_are_equal() -> None:
    a, b = models.random(4, 3), models.random(4, 2)
    one = CalibrationSet({"a": a, "b": b}, None)
    assert overlap(one, CalibrationSet({"b": b, "a": a}, None)) == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert overlap(one, CalibrationSet({"a": a, "b": b + 1}, None)) == []


def test_a_target_gets_its_engines_and_the_requested_precisions(build_request: BuildRequest) -> None:
    box = replace(profile("box", "onnxruntime", then=("tflite",)), precision="auto")
    request = replace(build_request, targets=(box,))
    (own,) = target_requests(request)
    (fixed,) = target_requests(replace(request, precision="fp16", engines="first"))
    assert (own.engines, own.precisions, own.is_auto) == (("onnxruntime", "tflite"), ("int8", "fp16", "fp32"), True)
    assert (fixed.engines, fixed.precisions, fixed.is_auto) == (("onnxruntime",), ("fp16",), False)
