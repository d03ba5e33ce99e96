"""The results that the manifest's rules add to a model's outputs, and the selection for an answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.bundle.manifest import Manifest
from edgert.bundle.rules import Classify, Detect, Smooth
from edgert.bundle.signal_rules import Series
from edgert.processing.postprocess import Postprocessor
from edgert.tensors import TensorSpec
from tests.support.stand_ins.loaded_models import installed


@pytest.fixture
def manifest(tmp_path: Path) -> Manifest:
    return installed(tmp_path)[0].manifest


def scored(manifest: Manifest, datatype: str = "FP32", **rule: Any) -> Postprocessor:
    """Return the postprocessor of a model with four class scores."""
    outputs = (TensorSpec("y", datatype, (-1, 4)),)
    return Postprocessor(replace(manifest, outputs=outputs, classify=Classify("y", **rule)))


def test_a_model_without_rules_keeps_its_outputs(manifest: Manifest) -> None:
    plain = Postprocessor(manifest)
    array = np.ones((2, 4), np.float32)
    assert plain([array], None, [array], 0) == [array]
    assert (plain.outputs, plain.labels, plain.sent(raw=True)) == (manifest.outputs, (), [0])


def test_added_outputs_have_the_described_datatypes_and_shapes(manifest: Manifest) -> None:
    added = scored(manifest, labels=("a", "b", "c", "d"), top_k=9)
    scores = np.array([[0.1, 0.4, 0.2, 0.3]], np.float32)
    answer = added([scores], None, [scores], 0)
    assert [(spec.name, spec.shape) for spec in added.outputs[1:]] == [
        ("y_classes", (-1, 4)),
        ("y_probabilities", (-1, 4)),
    ]
    assert [array.dtype for array in answer] == [spec.dtype for spec in added.outputs]
    assert answer[1].tolist() == [[1, 3, 2, 0]]
    assert added.labels == ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("datatype", "scores"), [("UINT8", [0, 5, 255, 7]), ("INT8", [-128, 5, 127, 7]), ("INT16", [-32768, 5, 32767, 7])]
)
def test_the_extreme_scores_of_a_quantized_model_keep_their_places(
    manifest: Manifest, datatype: str, scores: list[int]
) -> None:
    added = scored(manifest, datatype, top_k=4, softmax=False)
    given = np.array([scores], added.outputs[0].dtype)
    assert added([given], None, [given], 0)[1].tolist() == [[2, 3, 1, 0]]


@pytest.mark.parametrize("shape", [(1, 64, 96, 3), (1, 3, 64, 96)])
def test_boxes_stay_in_the_models_image_whatever_its_layout(manifest: Manifest, shape: tuple[int, ...]) -> None:
    """Without preprocessing, no rule states the layout. Earlier code took NHWC for NCHW: here, for a width of 3."""
    boxes = np.array([[[50, 30, 20, 10, 0.9]]], np.float32)
    rule = Detect("y", form="anchors_first")
    inputs, outputs = (TensorSpec("x", "FP32", shape),), (TensorSpec("y", "FP32", (1, 1, 5)),)
    added = Postprocessor(replace(manifest, inputs=inputs, outputs=outputs, detect=rule))
    answer = added([boxes], None, [np.zeros(shape, np.float32)], 0)
    assert answer[1][0, 0].tolist() == [40, 25, 60, 35]


def test_smoothing_keeps_one_window_less_than_it_averages(manifest: Manifest) -> None:
    manifest = replace(manifest, series=Series("x", channels=1, length=4, step=4))
    for windows, kept in ((2, 1), (3, 2)):
        added = scored(manifest, softmax=False, smooth=Smooth("mean", windows))
        before: NDArray[np.float32] = np.zeros((0, 4), np.float32)
        for _ in range(4):
            before = added.last_shares([np.ones((1, 4), np.float32)], before)
        assert before.shape == (kept, 4)
