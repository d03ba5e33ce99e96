"""The example model: small, accurate, and with a hold-out that was never trained on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.bundle.rules import Preprocess
from edgert_deploy.packager.accuracy.artifact_runs import reference_outputs
from edgert_deploy.packager.samples.processing import read_classify, read_preprocess
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import SourceModel
from tests.support.paths import DIGITS


def test_fp32_reaches_98_percent_on_the_holdout(digits_source: SourceModel, digits_holdout: CalibrationSet) -> None:
    assert len(digits_holdout) >= 350
    scores = reference_outputs(digits_source, digits_holdout)[0]
    assert (scores.argmax(axis=1) == digits_holdout.labels).mean() >= 0.98


def test_no_holdout_sample_is_a_calibration_sample(
    digits_calibration: CalibrationSet, digits_holdout: CalibrationSet
) -> None:
    seen = {image.tobytes() for image in digits_calibration.inputs["image"]}
    assert not [image for image in digits_holdout.inputs["image"] if image.tobytes() in seen]


def test_values_are_pixels_after_preprocessing(digits_source: SourceModel, digits_holdout: CalibrationSet) -> None:
    preprocess = read_preprocess(DIGITS / "preprocess.toml", digits_source)
    assert isinstance(preprocess, Preprocess)
    pixels = digits_holdout.inputs["image"] / preprocess.scale
    np.testing.assert_array_equal(pixels, pixels.round())
    assert (pixels.min(), pixels.max()) == (0, 16)
    assert read_classify(DIGITS / "labels.txt", digits_source).labels == tuple("0123456789")


def test_the_committed_files_stay_small() -> None:
    files = [path for path in DIGITS.iterdir() if path.is_file()]
    assert sum(Path(path).stat().st_size for path in files) < 1_000_000
