"""Recognize and judge a detector's boxes: by the user's rule, or else by shapes and by FP32's values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgert.bundle.rules import Detect, height_and_width
from edgert.processing.answers.classify import softmax
from edgert.processing.answers.detect import candidates
from edgert_deploy.packager.accuracy.fp32_agreement import (
    SCORE_MIN,
    Array,
    Outputs,
    anchor_agreement,
    box_agreement,
    same_in_cells,
    same_oriented,
)
from edgert_deploy.packager.accuracy.grids import ANCHORS_MIN, boxes_and_scores, sigmoid
from edgert_deploy.packager.accuracy.judgement import CLASSES_MAX, Judgement, are_probabilities, within_0_and_1
from edgert_deploy.packager.accuracy.objects import Layout, finds_nothing, object_agreement
from edgert_deploy.packager.accuracy.reference import Reference
from edgert_deploy.packager.samples.processing import MASKS_MIN, SUPPRESSED_VALUES

IMAGE_RANK = 3  # the rank of an image sample
# In boxes after suppression, at least this share of the lefts and tops is not above the rights and bottoms.
ORDERED_MIN = 0.9
SHARE_MARGIN = 0.1  # boxes in shares of the image may exceed it by this share
# The median distance of centres from their own cells, in sides of a cell, is lower. Centres in pixels are larger.
OFFSET_MAX = 4.0
ANYWHERE = (1 << 20, 1 << 20)  # the height and width of an image so large that its border cuts no box


def detector_of(reference: Reference, inputs: Sequence[tuple[int, ...]], left: Sequence[int]) -> Judgement | None:
    """Return the judgement of boxes, by the user's rule or by shapes. Return None if there are no boxes.

    `inputs` has the shape of a sample for each input. Without a rule, only a model with an image input can have boxes.
    """
    names = [spec.name for spec in reference.specs]
    if (rule := reference.detect) is not None:
        chosen = [names.index(name) for name in rule.outputs]
        return _boxes(rule, chosen, reference.image_size or ANYWHERE, reference.answers)
    if inputs and all(len(shape) != IMAGE_RANK for shape in inputs):
        return None
    return _recognized_detector(names, reference.answers, left) or _recognized_objects(
        names, reference.answers, left, reference.image_size or _image_size(inputs)
    )


def _boxes(rule: Detect, chosen: Sequence[int], size: tuple[int, int], reference: Outputs) -> Judgement:
    def score(answers: Outputs, reference: Outputs) -> float:
        return box_agreement(rule, [answers[i] for i in chosen], [reference[i] for i in chosen], size)

    found = (candidates(rule, [reference[i][row] for i in chosen], size) for row in range(len(reference[0])))
    return Judgement("boxes", rule.outputs, score, finds_nothing=not any(len(scores) for _, scores, _ in found))


def _recognized_detector(names: list[str], reference: Outputs, left: Sequence[int]) -> Judgement | None:
    """Return the judgement of boxes and scores that are recognized by shape, in one output or in two."""
    for i in left:
        if (rule := _one_output(names[i], reference[i])) is not None:
            return _boxes_or_anchors(rule, (i,), reference)
        if (rule := _without_angle(names[i], reference[i])) is not None:
            return _of_oriented(rule, i, reference)
    # The logits of fewer than ANCHORS_MIN classes look like boxes, so outputs of four values are tried as boxes first.
    for i in sorted(left, key=lambda i: reference[i].shape[-1:] != (4,)):
        for j in left:
            boxes, scores = reference[i], reference[j]
            pair = i != j and boxes.ndim == scores.ndim == 3 and boxes.shape[1] == scores.shape[1] >= ANCHORS_MIN
            if pair and _are_box_values(boxes, scores) and scores.shape[2] <= CLASSES_MAX:
                logits = not within_0_and_1(scores)
                rule = Detect(names[i], names[j], form="anchors_first", sigmoid=logits, score_threshold=SCORE_MIN)
                return _boxes_or_anchors(rule, (i, j), reference)
    return None


def _one_output(name: str, array: Array) -> Detect | None:
    """Return the rule if one output holds boxes and scores: YOLO's `[N, 4 + C, A]` or `[N, A, 5 + C]`."""
    if array.dtype.kind != "f" or array.ndim != 3 or max(array.shape[1:]) < ANCHORS_MIN:
        return None
    first = array.shape[1] < array.shape[2]
    rows = array if first else array.transpose(0, 2, 1)
    if (
        not 5 <= rows.shape[1] <= CLASSES_MAX
        or rows.shape[1] * 4 > rows.shape[2]
        or not within_0_and_1(rows[:, 4:])
        or (not first and are_suppressed(rows))  # a class of 0 or 1 looks like a score
    ):
        return None
    form = "channels_first" if first else "anchors_first"
    if within_0_and_1(rows[:, :4]):
        return Detect(name, form=form, normalized=True, score_threshold=SCORE_MIN) if _are_shares(rows) else None
    objectness = not first and rows.shape[1] >= 6  # YOLOv5 and YOLOX write objectness
    return Detect(name, form=form, objectness=objectness, score_threshold=SCORE_MIN)


def _are_shares(rows: Array) -> bool:
    """Return whether rows `[N, 4 + C, A]` of 0 to 1 are boxes in shares of the image, and scores.

    RT-DETR and Ultralytics' TFLite files have such rows. Nearly all boxes are inside the image, their centres are all
    over it, and most scores are low. In a mask, a depth or probabilities, the first four values are like the others.
    """
    centres, halves = rows[:, :2], rows[:, 2:4] / 2
    inside = (centres - halves >= -SHARE_MARGIN) & (centres + halves <= 1 + SHARE_MARGIN) & (halves > 0)
    spread = float(np.median(centres)) > SHARE_MARGIN > float(np.median(rows[:, 4:]))
    return spread and float(inside.mean()) >= ORDERED_MIN and not are_probabilities(rows.transpose(0, 2, 1))


def confident_boxes(rule: Detect, array: Array) -> Array:
    """Return the box values `[n, 4]` of all samples whose score is at least SCORE_MIN, from one output."""
    boxes, scores = _parts(rule, [array])
    return np.asarray(boxes[scores.max(axis=2) >= SCORE_MIN])


def are_in_cells(rule: Detect, confident: Array) -> bool:
    """Return whether `confident` boxes with an objectness are relative to the cells of a grid.

    YOLOX exports such boxes by default. A centre is at most a few cells from its own cell, wherever this cell is in the
    image, and the sides are logarithms. So the values are too small for pixels, but too large for shares of the image.
    """
    if rule.scores or not rule.objectness or rule.sigmoid or rule.box_format != "cxcywh":
        return False
    if len(confident) == 0 or float(np.median(np.abs(confident[:, :2]))) >= OFFSET_MAX:
        return False
    shares = (confident >= -SHARE_MARGIN) & (confident <= 1 + SHARE_MARGIN)
    return float(shares.all(axis=1).mean()) < ORDERED_MIN


def _without_angle(name: str, array: Array) -> Detect | None:
    """Return the rule for oriented boxes without their last value, an angle in radians.

    Return None if the output does not hold oriented boxes, as YOLO's `[N, 4 + C + 1, A]`.
    """
    if array.ndim != 3 or array.shape[1] > array.shape[2] or not _are_angles(array[:, -1]):
        return None
    return _one_output(name, array[:, :-1])


def _are_angles(values: Array) -> bool:
    """Return whether nearly all values are angles. YOLO26 does not limit angles without an object."""
    return float((np.abs(values) <= np.pi).mean()) >= ORDERED_MIN


def _of_oriented(rule: Detect, i: int, reference: Outputs) -> Judgement:
    """Return the judgement of the oriented boxes in output `i`; `rule` describes it without the angles."""

    def parts(outputs: Outputs) -> tuple[Array, Array]:
        boxes, scores = _parts(rule, [outputs[i][:, :-1]])
        return np.concatenate([boxes, outputs[i][:, -1, :, None]], axis=2), scores

    def score(answers: Outputs, reference: Outputs) -> float:
        return anchor_agreement(*parts(answers), *parts(reference), same_oriented)

    return Judgement("anchors", rule.outputs, score, finds_nothing=not (parts(reference)[1] >= SCORE_MIN).any())


def _are_box_values(boxes: Array, scores: Array) -> bool:
    """Return whether `boxes` may hold box values. Box values in shares of the image look like scores."""
    if within_0_and_1(boxes):
        return bool(boxes.shape[2] == 4 != scores.shape[2]) and not are_probabilities(boxes)
    return bool(4 <= boxes.shape[2] < ANCHORS_MIN)


def _boxes_or_anchors(rule: Detect, chosen: tuple[int, ...], reference: Outputs) -> Judgement:
    """Return the judgement of boxes or, if the values are no boxes, the judgement of the anchors' values.

    The values are boxes if they are in one output with the scores, and if FP32's boxes have positive sides. Boxes
    relative to cells are compared cell by cell, even if all logarithms of their sides are positive.
    """
    boxes, scores = _parts(rule, [reference[i] for i in chosen])
    confident = boxes[scores.max(axis=2) >= SCORE_MIN]
    in_cells = are_in_cells(rule, confident)
    positive = len(confident) > 0 and float((confident[:, 2:4] > 0).all(axis=1).mean()) > 0.99
    if rule.scores == "" and positive and not in_cells:
        return _boxes(rule, chosen, ANYWHERE, reference)
    background = _background(scores)

    def score(answers: Outputs, reference: Outputs) -> float:
        got, want = (_parts(rule, [outputs[i] for i in chosen], background) for outputs in (answers, reference))
        return anchor_agreement(*got, *want, same_in_cells if in_cells else None)

    objects = _parts(rule, [reference[i] for i in chosen], background)[1] >= SCORE_MIN
    return Judgement("anchors", rule.outputs, score, finds_nothing=not objects.any())


def _background(scores: Array) -> int | None:
    """Return the class of anchors without an object (SSD has one): the best class of most anchors."""
    if scores.shape[2] < 2:
        return None
    counts = np.bincount(scores.argmax(axis=2)[scores.max(axis=2) >= SCORE_MIN], minlength=scores.shape[2])
    return int(counts.argmax()) if counts.max() > scores[..., 0].size / 2 else None


def _parts(rule: Detect, arrays: Outputs, background: int | None = None) -> tuple[Array, Array]:
    """Return box values `[N, A, k]` and scores `[N, A, C]`, 0 to 1, without the class `background`."""
    if rule.scores:
        boxes, scores = arrays
        if rule.sigmoid:
            scores = sigmoid(scores) if background is None else softmax(scores)
    else:
        rows = arrays[0].transpose(0, 2, 1) if rule.form == "channels_first" else arrays[0]
        boxes, scores = boxes_and_scores(rows, 4) if rule.objectness else (rows[..., :4], rows[..., 4:])
    return boxes, scores if background is None else np.delete(scores, background, axis=2)


def _recognized_objects(
    names: list[str], reference: Outputs, left: Sequence[int], image: tuple[int, int]
) -> Judgement | None:
    """Return the judgement of boxes with masks or key points, or of boxes after suppression.

    Return None if there are no such boxes.
    """
    for i in left:
        boxes = reference[i]
        if boxes.ndim != 3 or boxes.dtype.kind != "f":
            continue
        for j in left:
            masks = reference[j]
            extras = min(masks.shape[1], masks.shape[3]) if masks.ndim == 4 else 0
            if extras >= MASKS_MIN and (layout := _layout(names[i], boxes, extras, image)) is not None:
                return _of_objects(layout, reference, i, (names[j], j))
        if _are_oriented(boxes):
            return _of_objects(Layout(names[i], "oriented", False, 1, image), reference, i, None)
        values = min(boxes.shape[1:])
        for extras in (0, values - 5, values - 6):  # key points have boxes of one class
            if extras % 3 or extras < 0:
                continue
            if (layout := _layout(names[i], boxes, extras, image, points=True)) is not None:
                return _of_objects(layout, reference, i, None)
    return None


def _layout(name: str, boxes: Array, extras: int, image: tuple[int, int], *, points: bool = False) -> Layout | None:
    """Return the layout of boxes that end with `extras` values; None if they do not.

    The values are factors of masks or, with `points`, key points: x, y and a visibility of 0 to 1.
    """
    axis = 1 if boxes.shape[1] < boxes.shape[2] else 2
    rows = np.moveaxis(boxes, axis, 1)
    rows, behind = rows[:, : rows.shape[1] - extras], rows[:, rows.shape[1] - extras :]
    if points and not within_0_and_1(behind[:, 2::3]):
        return None
    if axis == 2 and are_suppressed(rows):
        return Layout(name, "centres" if within_0_and_1(rows[:, :4]) else "suppressed", False, extras, image)
    if extras and (rule := _one_output(name, np.moveaxis(rows, 1, axis))) is not None:
        return Layout(name, rule.form, rule.objectness, extras, (1, 1) if in_shares(rows[:, :4]) else image)
    return None


def in_shares(boxes: Array) -> bool:
    """Return whether box values are shares of the image, not pixels. Some boxes may exceed the image."""
    return float(np.median(np.abs(boxes[boxes != 0]))) <= 1 if boxes.any() else False


def are_suppressed(rows: Array) -> bool:
    """Return whether rows `[N, 6, K]` are boxes after suppression: two corners, a score and a class.

    RT-DETR has a centre and two sides in shares of the image instead of the corners, and sorts the boxes by score.
    """
    if rows.shape[1] != SUPPRESSED_VALUES or not within_0_and_1(rows[:, 4]) or not _are_numbers(rows[:, 5]):
        return False
    if within_0_and_1(rows[:, :4]):
        return _are_shares(rows[:, :5]) and bool((np.diff(rows[:, 4], axis=1) <= 0).all())
    return float((rows[:, 2:4] >= rows[:, :2]).mean()) >= ORDERED_MIN


def _are_oriented(boxes: Array) -> bool:
    """Return whether `[N, K, 7]` are YOLO's oriented boxes after suppression.

    Such a box has a centre, two sides, a score, a class and an angle in radians.
    """
    if boxes.shape[2] != SUPPRESSED_VALUES + 1 or not within_0_and_1(boxes[..., 4]) or not _are_numbers(boxes[..., 5]):
        return False
    sides = float((boxes[..., 2:4] >= 0).mean())
    return not within_0_and_1(boxes[..., :4]) and sides >= ORDERED_MIN and _are_angles(boxes[..., 6])


def _are_numbers(classes: Array) -> bool:
    return bool((classes >= 0).all()) and bool((classes == np.rint(classes)).all())


def _of_objects(layout: Layout, reference: Outputs, i: int, masks: tuple[str, int] | None) -> Judgement:
    """Return the judgement of the boxes in output `i`.

    `masks` has the name and the number of the output with masks.
    """

    def score(answers: Outputs, reference: Outputs) -> float:
        maps = None if masks is None else (answers[masks[1]], reference[masks[1]])
        return object_agreement(layout, answers[i], reference[i], maps)

    outputs = (layout.boxes,) if masks is None else (layout.boxes, masks[0])
    return Judgement("objects", outputs, score, finds_nothing=finds_nothing(layout, reference[i]))


def _image_size(inputs: Sequence[tuple[int, ...]]) -> tuple[int, int]:
    """Return the height and width of the first image: `[C, H, W]` or `[H, W, C]`."""
    return height_and_width((1, *next((shape for shape in inputs if len(shape) == IMAGE_RANK), (1, *ANYWHERE))))
