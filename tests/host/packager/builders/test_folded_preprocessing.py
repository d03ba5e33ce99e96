"""A model with folded-in preprocessing gives the same answers for frames."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("PIL")
pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

from edgert.bundle.rules import Preprocess
from edgert.errors import ConfigInvalid
from edgert_deploy.packager.accuracy.artifact_runs import artifact_outputs, reference_outputs
from edgert_deploy.packager.builders import Precision, builder_for, check_source
from edgert_deploy.packager.builders.folded_preprocessing import folded
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support import models
from tests.support.builders import ENGINE_NAMES, build
from tests.support.models.colours import LABELS, MEAN, STD, bgr_model, tinted

PLAIN_RULE = Preprocess("image", 1 / 255, MEAN, STD, layout="nhwc", colour="bgr", frame_colour="rgb")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> SourceModel:
    return load_source(models.write(bgr_model(), tmp_path_factory.mktemp("fold") / "m.onnx"))


@pytest.mark.parametrize("precision", ["int8", "fp32"])
@pytest.mark.parametrize("engine", [name for name in ENGINE_NAMES if builder_for(name).accepts_folded_preprocessing])
def test_folding_does_not_change_the_answers(
    engine: str, precision: Precision, source: SourceModel, tmp_path: Path
) -> None:
    taken, left = folded(source, PLAIN_RULE)
    assert (taken.inputs[0].datatype, taken.inputs[0].shape) == ("UINT8", (-1, 24, 32, 3))
    assert (left.scale, left.mean, left.std, left.colour) == (1.0, (0.0,), (1.0,), "rgb")
    pictures = np.stack([tinted(LABELS[i % 3], 24, 32, i) for i in range(24)])
    floats = np.ascontiguousarray(((pictures[..., ::-1] / 255 - MEAN) / STD).astype(np.float32).transpose(0, 3, 1, 2))
    plain, given = (CalibrationSet({"image": array}, None) for array in (floats, pictures))
    want = reference_outputs(source, plain)[0]
    np.testing.assert_allclose(reference_outputs(taken, given)[0], want, rtol=1e-4, atol=1e-5)
    artifact = build(engine, taken, given, precision, tmp_path / "out")
    got = artifact_outputs(artifact, taken, given)[0]
    cosine = (want * got).sum(axis=1) / np.linalg.norm(want, axis=1) / np.linalg.norm(got, axis=1)
    assert cosine.min() > (0.9995 if precision == "int8" else 0.999999)
    assert np.array_equal(got.argmax(axis=1), want.argmax(axis=1))


def test_a_folded_model_is_refused_for_tflite(source: SourceModel) -> None:
    with pytest.raises(ConfigInvalid, match="--fold-preprocess makes tflite slower"):
        check_source(folded(source, PLAIN_RULE)[0], "tflite", "raspberry-pi-4")


def test_rules_that_cannot_be_folded_are_refused(tmp_path: Path) -> None:
    vector = load_source(models.write(models.mlp(), tmp_path / "m.onnx"))
    with pytest.raises(ConfigInvalid, match="FP32 input of 4 axes"):
        folded(vector, Preprocess("x"))
