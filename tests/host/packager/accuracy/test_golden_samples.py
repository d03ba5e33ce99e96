"""Golden samples cover the range of the model's answers; a tolerance covers the differences on this host."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert_deploy.packager.accuracy.artifact_runs import artifact_outputs, reference_outputs
from edgert_deploy.packager.accuracy.golden_samples import (
    BYTES_MAX,
    FLOORS,
    MARGIN,
    SAMPLES,
    golden_rows,
    tolerances,
)
from edgert_deploy.packager.builders import Precision
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import SourceModel
from tests.support import models
from tests.support.builders import build


def test_golden_samples_have_the_extremes_and_as_many_classes_as_samples(
    digits_source: SourceModel, digits_holdout: CalibrationSet
) -> None:
    reference = reference_outputs(digits_source, digits_holdout)
    rows = golden_rows(reference)
    scores = reference[0]
    assert len(rows) == len(set(rows.tolist())) == SAMPLES
    assert (scores[rows].min(), scores[rows].max()) == (scores.min(), scores.max())
    assert len(set(scores[rows].argmax(axis=1).tolist())) >= SAMPLES - 1  # both extremes may be of one class
    assert (
        len(set(scores[:SAMPLES].argmax(axis=1).tolist())) < SAMPLES - 1
    )  # the first SAMPLES samples have fewer classes
    np.testing.assert_array_equal(rows, golden_rows(reference))


def test_answers_that_are_equal_or_not_finite_give_the_usual_number_of_golden_samples() -> None:
    assert len(golden_rows([np.zeros((20, 3), np.float32)])) == SAMPLES
    assert len(golden_rows([np.full((20, 5, 4), np.nan, np.float32), np.arange(20)])) == SAMPLES
    far = models.random(40, 6, 5)
    far[33, 2, 2] = 99.0
    assert 33 in golden_rows([far])


def test_there_are_fewer_golden_samples_of_large_inputs_and_they_include_the_extreme_answers() -> None:
    answers = models.random(40, 1)
    assert len(golden_rows([answers], BYTES_MAX // SAMPLES - 4)) == SAMPLES
    assert len(golden_rows([answers], BYTES_MAX // 4 - 4)) == 4
    extremes = sorted((int(answers.argmin()), int(answers.argmax())))
    assert golden_rows([answers], BYTES_MAX).tolist() == extremes


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino", "tflite", "tensorrt"])
def test_a_tolerance_covers_every_way_of_computing_and_is_wider_for_int8_and_tensorrt(
    engine: str,
    digits_source: SourceModel,
    digits_calibration: CalibrationSet,
    digits_holdout: CalibrationSet,
    tmp_path: Path,
) -> None:
    pytest.importorskip({"openvino": "nncf", "tflite": "ai_edge_litert"}.get(engine, "onnx"))
    reference = reference_outputs(digits_source, digits_holdout)
    rows = golden_rows(reference)
    span = float(np.ptp(reference[0]))
    found = {}
    precisions: tuple[Precision, ...] = ("int8", "fp32")
    for precision in precisions:
        artifact = build(engine, digits_source, digits_calibration, precision, tmp_path / precision)
        golden = [array[rows] for array in artifact_outputs(artifact, digits_source, digits_holdout)]
        samples = digits_holdout.rows(rows)
        (found[precision],) = tolerances(artifact, digits_source, samples, golden, reference)
        assert FLOORS[precision] * span <= found[precision] < 0.1 * span
    assert found["fp32"] < found["int8"]
    if engine == "tensorrt":
        assert found["fp32"] >= 0.02 * span
    else:
        assert found["fp32"] < 0.001 * span


def test_a_larger_difference_on_the_host_widens_the_tolerance(
    digits_source: SourceModel, digits_calibration: CalibrationSet, digits_holdout: CalibrationSet, tmp_path: Path
) -> None:
    artifact = build("onnxruntime", digits_source, digits_calibration, "fp32", tmp_path)
    reference = reference_outputs(digits_source, digits_holdout)
    samples, golden = digits_holdout.rows(slice(0, 8)), [reference[0][:8]]
    (usual,) = tolerances(artifact, digits_source, samples, golden, reference)
    (wide,) = tolerances(artifact, digits_source, samples, [golden[0] + 0.5], reference)
    assert usual < 0.1
    assert wide == pytest.approx(0.5 * MARGIN, rel=0.1)
