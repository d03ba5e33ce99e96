"""A detector's boxes and anchors are recognized, and judged by the objects that they show."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.bundle.rules import Detect
from tests.support.models.outputs import judged, softmax, yolo, yolox

Array = NDArray[Any]
RANDOM = np.random.default_rng(3)


def test_small_scores_beside_large_coordinates_are_judged() -> None:
    """One INT8 scale of 0 to 320 destroys scores of 0 to 1, but the cosine is still .999."""
    reference = yolo()
    scale = reference.max() / 255
    coarse = (np.round(reference / scale) * scale).astype(np.float32)
    a, b = coarse.reshape(6, -1), reference.reshape(6, -1)
    cosine = ((a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)).mean()
    (judgement,) = judged(reference)
    assert cosine > 0.999
    assert judgement.score([coarse], [reference]) < 0.9


def test_anchors_with_offsets_are_compared_where_both_answers_are_confident() -> None:
    boxes = RANDOM.normal(0, 30, (8, 896, 16)).astype(np.float32)
    logits = np.full((8, 896, 1), -6, np.float32)
    logits[:, 100:104] = 3
    (judgement,) = judged(boxes, logits)
    assert (judgement.name, judgement.outputs) == ("anchors", ("out0", "out1"))
    assert judgement.score([boxes, logits], [boxes, logits]) == 1.0
    moved = boxes.copy()
    moved[:, 100:102] += 40
    assert judgement.score([moved, logits], [boxes, logits]) == pytest.approx(0.5)


def test_anchors_are_compared_by_the_overlap_of_boxes_and_by_points_relative_to_the_box() -> None:
    boxes = RANDOM.normal(0, 0.3, (8, 896, 6)).astype(np.float32)  # all alike: an error is large beside their spread
    boxes[..., 2:4] += 30
    logits = np.full((8, 896, 1), -6, np.float32)
    logits[:, 100:104] = 3
    (judgement,) = judged(boxes, logits)
    for moved, score in (((1, 1, 1, 1, 1, 1), 1.0), ((25, 0, 0, 0, 0, 0), 0.5), ((0, 0, 0, 0, 9, 0), 0.5)):
        answers = boxes.copy()
        answers[:, 100:102] += np.array(moved, np.float32)
        assert judgement.score([answers, logits], [boxes, logits]) == pytest.approx(score), moved


def test_anchors_with_corners_are_compared_by_the_overlap_of_their_boxes() -> None:
    boxes = np.tile(np.array([100, 100, 120, 120], np.float32), (8, 896, 1))
    logits = np.full((8, 896, 1), 3, np.float32)
    (judgement,) = judged(boxes, logits)
    assert judgement.score([boxes + 2, logits], [boxes, logits]) == 1.0
    assert judgement.score([boxes + 20, logits], [boxes, logits]) == 0.0


@pytest.mark.parametrize("form", ["probabilities", "logits"])
def test_anchors_of_the_background_do_not_hide_lost_objects(form: str) -> None:
    """Detectors with a softmax score the background, too: nearly all anchors are confident of it."""
    boxes = np.tile(np.array([0.1, 0.1, 0.4, 0.5], np.float32), (8, 896, 1))
    boxes += RANDOM.uniform(-0.05, 0.05, boxes.shape).astype(np.float32)
    logits = np.tile(np.array([4, -4, -4], np.float32), (8, 896, 1))
    logits[:, 100:104] = [-4, 4, -4]
    scores = {"logits": logits, "probabilities": softmax(logits)}[form]
    for outputs in ([boxes, scores], [scores, boxes], [boxes * 300, scores]):
        (judgement,) = judged(*outputs)
        at = 0 if outputs[0] is scores else 1
        assert (judgement.name, judgement.score(outputs, outputs)) == ("anchors", 1.0)
        for seen, score in (((4, -4, -4), 2 / 3), ((-4, -4, 4), 0.5)):  # two of four objects get another class
            changed = logits.copy()
            changed[:, 100:102] = seen
            answers = [*outputs]
            answers[at] = changed if form == "logits" else softmax(changed)
            assert judgement.score(answers, outputs) == pytest.approx(score), (at, seen)


@pytest.mark.parametrize("size", [1, 300], ids=["shares of the image", "pixels"])
def test_boxes_are_recognized_by_their_four_values_after_or_before_the_logits(size: int) -> None:
    """RT-DETR and DETR, as Hugging Face exports them, write the logits first."""
    boxes = RANDOM.uniform(0, size, (8, 300, 4)).astype(np.float32)
    logits = np.full((8, 300, 80), -6, np.float32)
    logits[:, 10:14, 3] = 3
    lost = np.full_like(logits, -6)
    for outputs, answers in (([boxes, logits], [boxes, lost]), ([logits, boxes], [lost, boxes])):
        (judgement,) = judged(*outputs)
        assert (judgement.name, judgement.score(outputs, outputs)) == ("anchors", 1.0)
        assert judgement.score(answers, outputs) == 0.0


def test_answers_of_nan_do_not_pass_if_fp32_finds_no_object() -> None:
    boxes, logits = RANDOM.normal(0, 1, (8, 300, 4)).astype(np.float32), np.full((8, 300, 80), -6, np.float32)
    (judgement,) = judged(boxes, logits)
    assert judgement.score([boxes, logits], [boxes, logits]) == 1.0
    assert judgement.score([boxes, np.full_like(logits, np.nan)], [boxes, logits]) == 0.0
    empty = yolo()
    empty[:, 4:] = 0
    (judgement,) = judged(empty, detect=Detect("out0"), image_size=(320, 320))
    assert judgement.score([empty], [empty]) == 1.0
    assert judgement.score([np.full_like(empty, np.nan)], [empty]) == 0.0


@pytest.mark.parametrize("classes", [1, 3, 15])
def test_oriented_boxes_are_judged_by_their_overlap_whatever_the_order_of_their_sides(classes: int) -> None:
    """YOLO's OBB. With 3 or 15 classes, earlier code took the scores and the angle for key points."""
    angles = RANDOM.uniform(-np.pi / 4, 3 * np.pi / 4, (6, 1, 2100)).astype(np.float32)
    reference = np.concatenate([yolo(classes=classes), angles], axis=1)
    reference[:, 2:4] = [[60], [12]]  # long and narrow
    (found,) = judged(reference, inputs=[(3, 320, 320)])
    assert (found.name, found.finds_nothing) == ("anchors", False)
    turned = reference.copy()
    turned[:, 2:4], turned[:, -1] = reference[:, [3, 2]], reference[:, -1] - np.pi / 2
    for same in (reference, turned):
        assert found.score([same], [reference]) == 1.0
    for row, other in ((-1, 0.5), (0, 30), (2, -50)):
        moved = reference.copy()
        moved[:, row] += other
        assert found.score([moved], [reference]) == 0.0, row
    assert found.score([np.full_like(reference, np.nan)], [reference]) == 0.0


def test_oriented_boxes_are_recognized_if_some_anchors_have_no_angle() -> None:
    """YOLO26 does not limit the angles of anchors without an object."""
    angles = RANDOM.uniform(-np.pi / 4, 3 * np.pi / 4, (6, 1, 2100)).astype(np.float32)
    angles[..., ::50] *= 9
    reference = np.concatenate([yolo(), angles], axis=1)
    (found,) = judged(reference, inputs=[(3, 320, 320)])
    assert (found.name, found.score([reference], [reference])) == ("anchors", 1.0)


@pytest.mark.parametrize("classes", [1, 18])
@pytest.mark.parametrize("first", [False, True], ids=["anchors first", "channels first"])
def test_boxes_in_shares_of_the_image_are_recognized_in_one_output_with_their_scores(first: bool, classes: int) -> None:
    """RT-DETR's `[N, 300, 4 + C]`, and Ultralytics' TFLite files with `[N, 4 + C, A]`."""
    reference = yolo(classes=classes, anchors=300)
    reference[:, :4] /= 320
    reference = reference if first else reference.transpose(0, 2, 1)
    (found,) = judged(reference, inputs=[(3, 320, 320)])
    assert (found.name, found.score([reference], [reference])) == ("boxes", 1.0)
    moved = reference.copy()
    (moved[:, :2] if first else moved[..., :2])[:] += 0.2
    assert found.score([moved], [reference]) < 0.2
    mask = np.zeros((6, 400, 40), np.float32)  # a tall image
    mask[:, 100:300, 10:] = 0.9
    (found,) = judged(mask, inputs=[(3, 400, 40)])
    assert found.name == "maps"


def test_the_scores_of_two_heads_are_not_taken_for_boxes_and_their_scores() -> None:
    heads = [(RANDOM.uniform(0, 1, (6, 196, size)) ** 4).astype(np.float32) for size in (10, 12)]
    assert [found.name for found in judged(*heads, inputs=[(3, 224, 224)])] == ["maps", "maps"]


@pytest.mark.parametrize("sides", [(8, 20), (60, 250)], ids=["negative logarithms", "positive logarithms"])
def test_boxes_relative_to_cells_are_compared_in_each_cell_as_they_overlap_in_the_image(sides: tuple[int, int]) -> None:
    """YOLOX's default export. Earlier code compared the logarithms as if they were sides."""
    raw, decoded = yolox(sides=sides)
    (found,) = judged(raw, inputs=[(3, 320, 320)])
    (of_pixels,) = judged(decoded, inputs=[(3, 320, 320)])
    assert (found.name, of_pixels.name) == ("anchors", "boxes")
    assert found.score([raw], [raw]) == 1.0
    noise = np.zeros_like(raw)
    noise[..., :4] = RANDOM.normal(0, 0.03, noise[..., :4].shape)
    assert found.score([raw + noise], [raw]) > 0.98
    moved, grown, lost = raw.copy(), raw.copy(), raw.copy()
    moved[..., 0] += 40
    grown[..., 2] += 1  # the width is 2.7 times as large
    lost[..., 4] /= 9
    for wrong in (moved, grown, lost, np.full_like(raw, np.nan)):
        assert found.score([wrong], [raw]) == 0.0


@pytest.mark.parametrize("size", [96, 320])
@pytest.mark.parametrize("sides", [(8, 20), (20, 90)])
def test_decoded_boxes_in_pixels_and_in_shares_are_not_taken_for_boxes_in_cells(
    size: int, sides: tuple[int, int]
) -> None:
    """TensorFlow exports of YOLOv5 have shares of the image, and some boxes exceed the image."""
    raw, decoded = yolox(size, sides)
    shares = decoded / np.array([size] * 4 + [1] * 4, np.float32)
    shares[:, 0, 0] = -0.05
    for boxes, name in ((raw, "anchors"), (decoded, "boxes"), (shares, "boxes")):
        assert judged(boxes, inputs=[(3, size, size)])[0].name == name


def test_a_detector_that_the_user_stated_is_judged_by_its_boxes() -> None:
    reference = yolo()
    (judgement,) = judged(reference, detect=Detect("out0", score_threshold=0.3), image_size=(320, 320))
    assert judgement.name == "boxes"
    silent = reference.copy()
    silent[:, 4:] = 0
    assert judgement.score([silent], [reference]) == 0.0


def test_scores_of_the_steps_of_a_series_are_not_taken_for_boxes() -> None:
    """Logits and probabilities of 4 classes for 120 steps have the shapes of a detector's boxes and scores."""
    logits = RANDOM.normal(0, 3, (10, 120, 4)).astype(np.float32)
    assert [one.name for one in judged(logits, softmax(logits), inputs=[(100, 120)])] == ["values", "steps"]
    assert judged(logits, softmax(logits), inputs=[(3, 96, 96)])[0].name == "anchors"
