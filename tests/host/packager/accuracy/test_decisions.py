"""Each output is judged by the values that an app reads from it, which shows errors that a cosine hides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from edgert.bundle.rules import Ctc, Detect
from edgert.tensors import TensorSpec
from edgert_deploy.packager.accuracy.decisions import Judgement, judgements
from edgert_deploy.packager.accuracy.fp32_agreement import (
    NEIGHBOUR_BLOCK,
    map_agreement,
    neighbour_agreement,
    same_neighbours,
    unit_vectors,
    value_agreement,
)
from edgert_deploy.packager.accuracy.reference import Reference
from edgert_deploy.packager.samples.samples import CalibrationSet

Array = NDArray[Any]
RANDOM = np.random.default_rng(3)


def judged(*outputs: Array, inputs: Sequence[tuple[int, ...]] = (), **rules: Any) -> tuple[Judgement, ...]:
    specs = tuple(TensorSpec(f"out{i}", "FP32", (-1, *array.shape[1:])) for i, array in enumerate(outputs))
    samples = {f"in{i}": np.zeros((len(outputs[0]), *shape), np.float32) for i, shape in enumerate(inputs)}
    return judgements(Reference(specs, list(outputs), CalibrationSet(samples, None), **rules))


def softmax(logits: Array) -> Array:
    exponents = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(exponents / exponents.sum(-1, keepdims=True), np.float32)


def yolo(images: int = 6, classes: int = 18, anchors: int = 2100) -> Array:
    """A detector's output `[N, 4 + C, A]`: three objects an image, coordinates to 320, scores to 1."""
    boxes = np.concatenate(
        [RANDOM.uniform(40, 280, (images, 2, anchors)), RANDOM.uniform(20, 60, (images, 2, anchors))], 1
    )
    scores = RANDOM.uniform(0, 0.02, (images, classes, anchors))
    for image in range(images):
        for anchor in RANDOM.choice(anchors, 3, replace=False):
            scores[image, RANDOM.integers(classes), anchor] = RANDOM.uniform(0.4, 0.9)
    return np.asarray(np.concatenate([boxes, scores], 1), np.float32)


OUTPUTS = {
    "boxes": yolo(),
    "top1": softmax(RANDOM.normal(0, 3, (20, 7))),
    "texts": softmax(RANDOM.normal(0, 3, (20, 40, 30))),
    "thresholds": RANDOM.uniform(0, 1, (30, 1)).astype(np.float32),
    "maps": (RANDOM.uniform(0, 1, (5, 1, 32, 32)) ** 4).astype(np.float32),
    "masks": RANDOM.integers(0, 3, (5, 32, 32)),
    "neighbours": RANDOM.normal(0, 1, (12, 64)).astype(np.float32),
    "values": (RANDOM.normal(0, 1, (12, 42)) + 50).astype(np.float32),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_each_kind_of_output_is_recognized_and_fp32_agrees_with_itself(name: str) -> None:
    reference = OUTPUTS[name]
    (judgement,) = judged(reference)
    assert judgement.name == name
    assert judgement.score([reference], [reference]) == pytest.approx(1.0)


@pytest.mark.parametrize("name", OUTPUTS)
def test_answers_of_noise_do_not_pass(name: str) -> None:
    reference = OUTPUTS[name]
    (judgement,) = judged(reference)
    noise = RANDOM.permuted(reference, axis=None).reshape(reference.shape)
    assert judgement.score([noise], [reference]) < 0.8


@pytest.mark.parametrize("name", [name for name in OUTPUTS if name != "masks"])
def test_answers_that_are_not_finite_do_not_pass(name: str) -> None:
    reference = OUTPUTS[name]
    (judgement,) = judged(reference)
    assert judgement.score([np.full_like(reference, np.nan)], [reference]) < 0.8


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


def test_a_constant_answer_does_not_agree_with_positive_single_values() -> None:
    reference = RANDOM.uniform(20, 30, (50, 1)).astype(np.float32)
    (judgement,) = judged(reference)
    assert judgement.score([np.full_like(reference, 25.0)], [reference]) < 0.1


def test_one_bad_channel_among_many_good_channels_is_noticed() -> None:
    reference = RANDOM.normal(0, 1, (40, 10, 300)).astype(np.float32)
    answers = reference.copy()
    answers[:, 3] = 0
    assert value_agreement(answers, reference) < 0.1


def test_a_channel_that_never_varies_is_measured_with_the_scale_of_the_others() -> None:
    reference = RANDOM.normal(0, 1, (40, 10)).astype(np.float32)
    reference[:, 0] = 1.0
    answers = reference.copy()
    answers[:, 0] += 1e-4
    assert value_agreement(answers, reference) > 0.999


def test_a_pitch_for_each_moment_is_judged_by_its_values_and_not_by_its_direction() -> None:
    """Half of each pitch is one octave too low, but its cosine is 1. Example: SwiftF0."""
    times, starts = np.arange(62), RANDOM.uniform(0, 6, (20, 1))
    pitch = (440 * np.maximum(0, np.sin(times / 5 + starts))).astype(np.float32)  # 0 if nobody sings
    (judgement,) = judged(pitch)
    assert judgement.name == "values"
    assert judgement.score([pitch / 2], [pitch]) < 0.9


def test_a_pitch_of_pauses_does_not_count_if_another_output_has_its_confidence() -> None:
    """Between words, a model of pitch answers any pitch, with a low confidence."""
    voiced = np.tile(np.arange(60) % 20 < 8, (12, 1))
    pitch = np.where(voiced, RANDOM.uniform(100, 300, (12, 60)), RANDOM.uniform(50, 2000, (12, 60))).astype(np.float32)
    confidence = np.where(voiced, 0.9, 0.1).astype(np.float32)
    found, other = judged(pitch, confidence)
    assert (found.name, other.name) == ("confident", "thresholds")
    changed = {where: np.where(voiced == where, pitch.mean(), pitch).astype(np.float32) for where in (True, False)}
    assert found.score([changed[False], confidence], [pitch, confidence]) == 1.0
    assert found.score([changed[True], confidence], [pitch, confidence]) < 0.1


def test_neighbours_are_found_across_blocks_of_samples() -> None:
    """A table of all pairs of 30,000 samples has 7 GB."""
    count = 2 * NEIGHBOUR_BLOCK + 3
    reference = RANDOM.normal(0, 1, (count, 16)).astype(np.float32)
    answers = reference + RANDOM.normal(0, 0.2, reference.shape).astype(np.float32)
    cosines = unit_vectors(reference) @ unit_vectors(reference).T
    seen = unit_vectors(answers) @ unit_vectors(answers).T
    others = ~np.eye(count, dtype=bool)
    nearest = cosines.max(axis=1, initial=-2, where=others)
    tolerance = np.minimum(0.01, 0.05 * (nearest - cosines.mean(axis=1, where=others)))
    chosen = np.where(others, seen, -2).argmax(axis=1)
    want = cosines[np.arange(count), chosen] >= nearest - tolerance
    np.testing.assert_array_equal(same_neighbours(answers, reference), want)
    assert 0.1 < want.mean() < 0.9


def test_an_equally_near_neighbour_counts_as_the_same_only_where_cosines_differ() -> None:
    ring = np.eye(12, dtype=np.float32) + np.roll(np.eye(12, dtype=np.float32), 1, axis=1)  # two equal neighbours each
    noise = RANDOM.normal(0, 1, ring.shape).astype(np.float32)
    assert neighbour_agreement(ring + 0.002 * noise, ring + 0.001 * noise[::-1]) > 0.99
    close = np.eye(12, dtype=np.float32) + 0.004 * noise  # all cosines within 0.03
    noisy = close + 0.004 * noise[::-1]
    assert neighbour_agreement(noisy, close) < 0.9


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


def grid(objectness: int = 0, classes: int = 8, images: int = 6, side: int = 16) -> Array:
    """A detector's grid `[N, 5 + C, side, side]`: an objectness, four box values and classes, with five objects."""
    boxes = RANDOM.normal(0, 1, (images, 4, side, side))
    scores = softmax(RANDOM.normal(0, 4, (images, side, side, classes))).transpose(0, 3, 1, 2)
    found = RANDOM.uniform(0, 0.02, (images, 1, side, side))
    found[:, 0, 3, 3:8], scores[:, :, 3, 3:8], scores[:, 2, 3, 3:8] = 0.8, 0.01, 0.9
    front = [found, boxes] if objectness == 0 else [boxes, found]
    answer: Array = np.concatenate([*front, scores], 1)
    return answer.astype(np.float32)


@pytest.mark.parametrize("axis", [1, 3])
@pytest.mark.parametrize("objectness", [0, 4])
def test_a_grid_of_cells_is_judged_by_its_objects_their_classes_and_their_boxes(axis: int, objectness: int) -> None:
    """R squared hides lost objects, because most cells have none."""
    reference = grid(objectness)
    lost, renamed, moved = reference.copy(), reference.copy(), reference.copy()
    lost[:, objectness, 3, 3] = 0.1
    renamed[:, [7, 8], 3, 3] = renamed[:, [8, 7], 3, 3]
    moved[:, 1 if objectness == 0 else 0, 3] += 1
    reference, lost, renamed, moved = (np.moveaxis(each, 1, axis) for each in (reference, lost, renamed, moved))
    (judgement,) = judged(reference, inputs=[(3, 128, 128)])
    assert (judgement.name, judgement.score([reference], [reference])) == ("cells", 1.0)
    assert judgement.score([lost], [reference]) == pytest.approx(8 / 9)
    assert judgement.score([renamed], [reference]) == pytest.approx(4 / 5)
    assert judgement.score([moved], [reference]) < 0.5
    assert judgement.score([np.full_like(reference, np.nan)], [reference]) == 0.0


def logit(scores: Array) -> Array:
    clipped = scores.clip(1e-4, 1 - 1e-4)
    return np.asarray(np.log(clipped / (1 - clipped)), np.float32)


@pytest.mark.parametrize("logits", [False, True])
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("joined", [False, True])
def test_a_grid_with_several_anchors_in_each_cell_is_judged_by_its_objects(
    joined: bool, channels_last: bool, logits: bool
) -> None:
    """YOLOv3 and YOLOv5 write three anchors for each cell. Here the second one has the objects."""
    empty = grid(4)
    empty[:, 4] = 0.01
    reference = np.stack([empty, grid(4), empty], 1)  # [N, A, 5 + C, H, W]
    lost = reference.copy()
    lost[:, 1, 4, 3, 3] = 0.01
    outputs = []
    for each in (lost, reference):
        array = np.concatenate([each[:, :, :4], logit(each[:, :, 4:])], 2) if logits else each
        if joined:
            array = array.reshape(len(array), -1, *array.shape[3:])
            outputs.append(np.moveaxis(array, 1, 3) if channels_last else array)
        else:
            outputs.append(array.transpose(0, 3, 4, 1, 2) if channels_last else np.moveaxis(array, 2, 4))
    answers, expected = outputs
    (judgement,) = judged(expected, inputs=[(3, 128, 128)])
    if joined and logits:  # such a grid looks like logits of classes
        assert judgement.name == "values"
        return
    assert (judgement.name, judgement.score([expected], [expected])) == ("cells", 1.0)
    assert judgement.score([answers], [expected]) == pytest.approx(8 / 9)
    assert judgement.score([np.full_like(expected, np.nan)], [expected]) == 0.0


NO_GRIDS = {
    "maps": [softmax(RANDOM.normal(0, 3, (6, 16, 16, 12))), RANDOM.uniform(0, 1, (6, 12, 16, 16)) ** 4],
    "values": [
        RANDOM.normal(0, 3, (6, 12, 16, 16)),  # classes of each position before a softmax
        RANDOM.normal(0, 3, (6, 12, 16, 16)).clip(0),  # features
        RANDOM.normal(0, 1, (6, 12, 16, 16)).clip(0, 6) * 0.9,
        RANDOM.uniform(0, 9, (6, 1, 16, 16)),  # a depth
        RANDOM.normal(0, 1, (6, 3, 32, 32)),  # an image
        grid()[:, :5],  # no classes
    ],
}


def test_maps_images_and_features_are_no_grids_of_a_detector() -> None:
    for name, outputs in NO_GRIDS.items():
        for output in outputs:
            reference = output.astype(np.float32)
            assert judged(reference, inputs=[(3, 128, 128)])[0].name == name, reference.shape
    rare_classes = RANDOM.normal(0, 4, (6, 21, 16, 16)) - 6
    for output in (rare_classes, rare_classes.reshape(6, 3, 7, 16, 16).transpose(0, 1, 3, 4, 2)):
        assert judged(output.astype(np.float32), inputs=[(3, 128, 128)])[0].name == "values"
    assert judged(grid(), inputs=[grid().shape[1:]])[0].name == "values"  # a reconstruction of the input
    assert judged(grid(), inputs=[(100, 64)])[0].name == "values"  # no image


def test_a_detector_that_the_user_stated_is_judged_by_its_boxes() -> None:
    reference = yolo()
    (judgement,) = judged(reference, detect=Detect("out0", score_threshold=0.3), image_size=(320, 320))
    assert judgement.name == "boxes"
    silent = reference.copy()
    silent[:, 4:] = 0
    assert judgement.score([silent], [reference]) == 0.0


def test_every_output_of_a_model_is_judged() -> None:
    found = judged(OUTPUTS["thresholds"], OUTPUTS["values"])
    assert [(one.name, one.outputs) for one in found] == [("thresholds", ("out0",)), ("values", ("out1",))]


def test_whole_numbers_are_compared_for_equality() -> None:
    reference = RANDOM.integers(0, 5, (10, 8))
    (judgement,) = judged(reference)
    answers = reference.copy()
    answers[:5] += 1
    assert judgement.score([answers], [reference]) == pytest.approx(0.5)


def test_a_class_that_is_lost_from_a_mask_is_not_hidden_by_the_background() -> None:
    reference = np.zeros((6, 1, 32, 32), np.int64)
    reference[:, :, 4:14, 4:14] = 7
    reference[:, :, 20:23, 20:23] = 2
    (judgement,) = judged(reference)
    lost = np.where(reference == 2, 0, reference)
    assert (lost == reference).mean() > 0.99
    assert judgement.score([lost], [reference]) == pytest.approx(0.5)
    assert judgement.score([np.where(reference == 2, 3, reference)], [reference]) == pytest.approx(0.5)
    assert judgement.score([np.full_like(reference, 9)], [reference]) == 0.0
    assert judgement.score([np.zeros_like(reference)], [np.zeros_like(reference)]) == 1.0


def test_the_bytes_of_a_quantized_output_are_not_taken_for_classes() -> None:
    (judgement,) = judged(RANDOM.integers(0, 255, (5, 32, 32)).astype(np.uint8))
    assert judgement.name == "values"


def test_texts_are_read_with_the_stated_blank_and_axis() -> None:
    steps = np.eye(3, dtype=np.float32)[[[2, 2, 0, 2, 1, 1], [1, 2, 1, 0, 0, 0]]]
    rule = Ctc("out0", ("", "a", "b"), time_axis="last")
    scores = steps.transpose(0, 2, 1)
    other = scores.copy()
    other[1, :, 2] = [1, 0, 0]  # "ab" instead of "aba"
    (one,) = judged(scores, ctc=rule)
    assert (one.name, one.score([scores], [scores]), one.score([other], [scores])) == ("texts", 1.0, 0.5)
    later = scores.copy()
    later[0, :, 1] = [1, 0, 0]  # a shorter run decodes to the same text
    assert one.score([later], [scores]) == 1.0


def test_a_map_is_judged_at_each_threshold_that_apps_take() -> None:
    """Half of the positions above a threshold of 0.3 are lost, but no position above 0.5 is lost."""
    reference = np.zeros((2, 1, 16, 16), np.float32)
    reference[:, :, :8], reference[:, :, 8:] = 0.9, 0.35
    answers = np.where(reference == 0.9, reference, np.float32(0.25))
    assert map_agreement(answers, reference) == 0.5
    assert map_agreement(reference, reference) == 1.0


@pytest.mark.parametrize("name", ["top1", "texts"])
def test_logarithms_of_probabilities_rank_classes_like_the_probabilities(name: str) -> None:
    """Example: a classifier of PyTorch that ends with log_softmax."""
    (found,) = judged(np.log(OUTPUTS[name]))
    assert found.name == name


def test_classes_of_each_step_of_an_input_are_not_taken_for_text() -> None:
    """A text recognizer has fewer steps than its input. One wrong letter makes a wrong text; one wrong tag does not."""
    scores = softmax(RANDOM.normal(0, 3, (20, 40, 5)))
    (one,) = judged(scores, inputs=[(40,)])
    assert (one.name, judged(scores, inputs=[(1, 32, 160)])[0].name) == ("steps", "texts")
    other = scores.copy()
    other[0, 0] = np.roll(scores[0, 0], 1)
    assert 0.995 < one.score([other], [scores]) < 1.0
    assert one.score([scores], [scores]) == 1.0
    assert one.score([softmax(RANDOM.normal(0, 3, (20, 40, 5)))], [scores]) < 0.4
    assert one.score([np.full_like(scores, np.nan)], [scores]) == 0.0


def test_steps_of_the_background_do_not_hide_losses_in_other_steps() -> None:
    """Half of the few steps outside the background are lost, although nearly all steps agree."""
    classes = np.zeros((8, 100), int)
    classes[:, 10:14] = 1
    lost = classes.copy()
    lost[:, 12:14] = 0
    one_hot = np.eye(3, dtype=np.float32)
    (one,) = judged(one_hot[classes], inputs=[(100, 16)])
    assert one.score([one_hot[lost]], [one_hot[classes]]) == pytest.approx(0.5)


def test_scores_of_the_steps_of_a_series_are_not_taken_for_boxes() -> None:
    """Logits and probabilities of 4 classes for 120 steps have the shapes of a detector's boxes and scores."""
    logits = RANDOM.normal(0, 3, (10, 120, 4)).astype(np.float32)
    assert [one.name for one in judged(logits, softmax(logits), inputs=[(100, 120)])] == ["values", "steps"]
    assert judged(logits, softmax(logits), inputs=[(3, 96, 96)])[0].name == "anchors"


def test_scores_of_many_classes_are_not_taken_for_an_embedding() -> None:
    """Models of sounds have many classes. A score under the threshold is lost, but the vector hardly changes."""
    scores = RANDOM.uniform(0, 0.05, (12, 500)).astype(np.float32)
    scores[np.arange(12), RANDOM.integers(0, 500, 12)] = 0.8
    (one,) = judged(scores)
    assert one.name == "maps"
    assert one.score([scores * 0.5], [scores]) < 0.5
    rows = np.abs(RANDOM.normal(0, 1, (12, 500))) ** 8
    vectors = (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float32)  # of length 1, after a ReLU
    assert judged(vectors)[0].name == "neighbours"


def test_points_in_shares_of_an_image_are_not_taken_for_classes() -> None:
    """68 points of a face: a small error moves many of them across a threshold of scores."""
    points = (RANDOM.uniform(0.1, 0.9, 136) + RANDOM.normal(0, 0.03, (40, 136))).clip(0, 1).astype(np.float32)
    assert [one.name for one in judged(points)] == ["values"]


def test_an_output_with_the_form_of_an_input_is_a_signal_and_not_an_embedding() -> None:
    signal = RANDOM.normal(0, 1, (12, 48)).astype(np.float32)
    assert judged(signal, inputs=[(48,)])[0].name == "values"
    assert judged(signal[..., None], inputs=[(1, 48)])[0].name == "values"  # a logit for each step
    assert judged(signal, inputs=[(3, 48)])[0].name == "neighbours"
