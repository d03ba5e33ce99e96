"""Boxes with masks or key points, and boxes after suppression, are judged by their objects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert_deploy.packager.accuracy.judgement import Judgement
from tests.support.models import outputs

Array = NDArray[Any]
RANDOM = np.random.default_rng(4)


def judged(arrays: list[Array]) -> Judgement:
    (found,) = outputs.judged(*arrays, inputs=[(3, 320, 320)])
    return found


def yolo_with_extras(kind: str, images: int = 4) -> list[Array]:
    """Make the outputs of YOLO with masks (also in YOLOv5's form, and in shares of the image) or with key points."""
    anchors, classes = 2100, 1 if kind.startswith("points") else 2
    scores = RANDOM.uniform(0, 0.02, (images, classes, anchors))
    scores[:, 0, ::700] = 0.8
    boxes = np.concatenate(
        [RANDOM.uniform(40, 280, (images, 2, anchors)), RANDOM.uniform(20, 60, (images, 2, anchors)), scores], 1
    )
    if kind.startswith("points"):
        places = boxes[:, None, :2] + RANDOM.uniform(-0.5, 0.5, (images, 17, 2, anchors)) * boxes[:, None, 2:4]
        points = np.concatenate([places, RANDOM.uniform(0.6, 1, (images, 17, 1, anchors))], 2)
        if kind == "points in shares":
            boxes[:, :4] /= 320
            points[:, :, :2] /= 320
        return [np.concatenate([boxes, points.reshape(images, -1, anchors)], 1).astype(np.float32)]
    masks, factors = RANDOM.normal(0, 1, (images, 32, 80, 80)), RANDOM.normal(0, 1, (images, 32, anchors))
    rows = np.concatenate([boxes, factors], 1).astype(np.float32)
    if kind == "masks in shares":
        rows[:, :4] /= 320
    if kind == "masks and objectness":
        rows = np.insert(rows, 4, 1.0, axis=1).transpose(0, 2, 1)
    return [rows, masks.astype(np.float32)]


@pytest.mark.parametrize("kind", ["masks", "masks and objectness", "masks in shares", "points", "points in shares"])
def test_masks_and_points_of_a_detector_are_judged_for_its_objects_only(kind: str) -> None:
    reference = yolo_with_extras(kind)
    found = judged(reference)
    assert (found.name, len(found.outputs)) == ("objects", len(reference))
    assert found.score(reference, reference) == 1.0
    anchors_first = kind == "masks and objectness"
    rows = reference[0].transpose(0, 2, 1) if anchors_first else reference[0]
    confident = rows[:, 5 if anchors_first else 4 :][:, : 1 if kind.startswith("points") else 2].max(axis=1) >= 0.25

    def changed(where: Array) -> list[Array]:
        """FP32's answers with other factors or points in the anchors `where`."""
        points = kind.startswith("points")
        extras = rows[:, -51:] if points else rows[:, -32:]
        other = np.where(where[:, None], np.roll(extras, 7, axis=1) if points else -extras, extras)
        new = np.concatenate([rows[:, : -extras.shape[1]], other], 1)
        return [new.transpose(0, 2, 1) if anchors_first else new, *reference[1:]]

    assert found.score(changed(~confident), reference) == 1.0
    assert found.score(changed(confident), reference) < 0.1
    assert found.score([np.full_like(each, np.nan) for each in reference], reference) == 0.0
    assert found.finds_nothing is False


@pytest.mark.parametrize("classes", [1, 2, 3])
@pytest.mark.parametrize("boxes", [20, 300])
def test_boxes_that_the_model_suppresses_itself_are_judged_in_any_order(boxes: int, classes: int) -> None:
    """YOLO26 writes its boxes as two corners, a falling score and a class. With one class, it is always 0."""
    corners = np.sort(RANDOM.uniform(0, 320, (4, boxes, 2, 2)), axis=2).reshape(4, boxes, 4)
    scores = -np.sort(-(RANDOM.uniform(0, 1, (4, boxes, 1)) ** 4), axis=1)
    numbers = RANDOM.integers(0, classes, (4, boxes, 1))
    reference = np.concatenate([corners, scores, numbers], axis=2).astype(np.float32)
    found = judged([reference])
    assert found.name == "objects"
    assert found.score([reference[:, ::-1]], [reference]) == 1.0
    other_class = reference.copy()
    other_class[..., 5] += 1
    assert found.score([other_class], [reference]) < 0.2


def test_boxes_after_suppression_may_be_shares_of_the_image() -> None:
    """RT-DETR writes a centre, two sides, a falling score and a class."""
    centres, sides = RANDOM.uniform(0.2, 0.8, (4, 300, 2)), RANDOM.uniform(0.05, 0.3, (4, 300, 2))
    scores = -np.sort(-(RANDOM.uniform(0, 1, (4, 300, 1)) ** 6), axis=1)
    numbers = RANDOM.integers(0, 80, (4, 300, 1))
    reference = np.concatenate([centres, sides, scores, numbers], axis=2).astype(np.float32)
    found = judged([reference])
    assert (found.name, found.score([reference[:, ::-1]], [reference])) == ("objects", 1.0)
    moved = reference.copy()
    moved[..., :2] += 0.3
    assert found.score([moved], [reference]) < 0.2


def test_oriented_boxes_after_suppression_are_judged_by_their_overlap_in_any_order() -> None:
    """YOLO26's oriented boxes have a centre, two sides, a falling score, a class and an angle."""
    boxes = np.concatenate([RANDOM.uniform(20, 300, (4, 300, 2)), RANDOM.uniform(10, 60, (4, 300, 2))], axis=2)
    scores = -np.sort(-(RANDOM.uniform(0, 1, (4, 300, 1)) ** 6), axis=1)
    numbers, angles = RANDOM.integers(0, 15, (4, 300, 1)), RANDOM.uniform(-0.7, 2.3, (4, 300, 1))
    boxes[..., 2:] = [60, 12]  # long and narrow
    reference = np.concatenate([boxes, scores, numbers, angles], axis=2).astype(np.float32)
    found = judged([reference])
    assert found.name == "objects"
    turned = reference[:, ::-1].copy()
    turned[..., [2, 3]], turned[..., 6] = turned[..., [3, 2]], turned[..., 6] - np.pi / 2
    assert found.score([turned], [reference]) == 1.0
    for column, other in ((6, 0.7), (0, 40), (5, 1)):
        changed = reference.copy()
        changed[..., column] += other
        assert found.score([changed], [reference]) < 0.2, column
    assert found.score([np.full_like(reference, np.nan)], [reference]) == 0.0


def test_other_outputs_of_six_values_are_not_taken_for_boxes_after_suppression() -> None:
    features = RANDOM.normal(0, 1, (8, 200, 6)).astype(np.float32)
    unordered = features.copy()  # their first four values are no corners
    unordered[..., 4], unordered[..., 5] = np.linspace(1, 0, 200), RANDOM.integers(0, 4, (8, 200))
    for values in (features, unordered):
        assert judged([values]).name == "values"
