"""Judge the decisions that apps make from a model's outputs, without labels of the right answers.

A cosine hides errors: it is always near 1 for a tensor that mixes boxes (0 to 320) with scores (0 to 1), and for an
output of one positive value. So this module recognizes each output by its shape and by FP32's values, and judges the
values that an app reads from it. docs/accuracy-reference.md has the table of judgements, and fp32_agreement.py computes
their scores. FP32 scores 1 in each judgement. The total score is the lowest score.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from edgert.bundle.rules import Ctc, Detect
from edgert.processing.answers.classify import softmax
from edgert.processing.answers.ctc import by_step
from edgert.processing.answers.detect import candidates
from edgert_deploy.packager.accuracy.fp32_agreement import (
    MAP_THRESHOLDS,
    SCORE_MIN,
    Array,
    Outputs,
    anchor_agreement,
    box_agreement,
    cell_agreement,
    map_agreement,
    mask_agreement,
    neighbour_agreement,
    same_decodings,
    same_neighbours,
    same_sides,
    same_steps,
    same_texts,
    same_top1,
    unit_vectors,
    value_agreement,
)
from edgert_deploy.packager.accuracy.objects import Layout, finds_nothing, object_agreement
from edgert_deploy.packager.accuracy.reference import Reference
from edgert_deploy.packager.samples.processing import MASKS_MIN

Score = Callable[[Outputs, Outputs], float]

IMAGE_RANK = 3  # the rank of an image sample
ANCHORS_MIN = 100  # an output with fewer anchors is not treated as a detector's output
CLASSES_MAX = 2000
VECTOR_SIZE_MIN = 16
MAP_POSITIONS_MIN = 64
CONFIDENT_CELLS_MAX = 0.25  # an output is a detector's grid only if at most this share of its cells has an object
CELL_ANCHORS = (3, 5)  # the numbers of anchors of a cell: of YOLOv3 to YOLOv7, and of YOLOv2
BACKGROUND_LOGIT = -2.0  # the objectness of a cell without an object is below this logit
# An output is judged by thresholds only if at least this share of its values is on each side of 0.5.
MINORITY_MIN = 0.01
NEIGHBOUR_SAMPLES_MIN = 8
ALIKE_MAX = 0.7  # vectors whose mean cosine between samples is higher are not treated as embeddings
SERIES_MIN = 0.5  # vectors whose adjacent values correlate more are series, such as a pitch for each moment
CONFIDENT = 0.5  # a value with a lower confidence, such as the pitch of a pause, means nothing
PROBABILITY_TOLERANCE = 1e-3
ANYWHERE = (1 << 20, 1 << 20)  # the height and width of an image so large that its border cuts no box


@dataclass(frozen=True)
class Judgement:
    """A judgement of one or more outputs.

    Attributes:
        name: The kind of decision, such as "boxes".
        outputs: The names of the outputs.
        score: The function that returns the score, 0 to 1, for the artifact's answers and FP32's answers.
        share: The function that returns the share of right decisions in each sample. None if samples have no shares.
        finds_nothing: Whether FP32 finds no object in any sample. Then the score compares nothing.
    """

    name: str
    outputs: tuple[str, ...]
    score: Score
    share: Callable[[Outputs, Outputs], Array] | None = None
    finds_nothing: bool = False


class Grid(NamedTuple):
    """The layout of a detector's grid.

    Attributes:
        axis: The axis of the channels.
        objectness: The channel of the objectness.
        anchors: The number of anchors whose channels follow each other on `axis`.
        logits: Whether the objectness and the classes are before the sigmoid.
    """

    axis: int
    objectness: int
    anchors: int = 1
    logits: bool = False


def judgements(reference: Reference) -> tuple[Judgement, ...]:
    """Return the judgements of all outputs, recognized by shape, FP32's values and the user's rules."""
    names = [spec.name for spec in reference.specs]
    answers = reference.answers
    inputs = [array.shape[1:] for array in reference.holdout.inputs.values()]
    unjudged = [i for i, array in enumerate(answers) if np.issubdtype(array.dtype, np.number) or array.dtype == bool]
    judged: list[Judgement] = []
    detector = _detector(reference, inputs, unjudged)
    if detector is not None:
        judged.append(detector)
        unjudged = [i for i in unjudged if names[i] not in detector.outputs]
    if reference.ctc is not None:
        stated = names.index(reference.ctc.output)
        judged.append(_stated_texts(reference.ctc, stated))
        unjudged = [i for i in unjudged if i != stated]
    steps = {length for shape in inputs if len(shape) < IMAGE_RANK for length in shape}
    has_image = any(len(shape) == IMAGE_RANK for shape in inputs)
    for i in unjudged:
        if has_image and answers[i].shape[1:] not in inputs and (grid := _grid(answers[i])) is not None:
            judged.append(_of_cells(i, names[i], grid))
            continue
        named = reference.classify is not None and _first_scores(answers) == i
        name = _recognized(answers[i], named, steps)
        if name == "neighbours" and _sides(answers[i].shape[1:]) in map(_sides, inputs):
            name = "values"  # an output of an input's shape is a signal: a reconstruction, or a logit for each step
        if name == "values" and (confidence := _confidence_of(i, answers)) is not None:
            judged.append(_of_confident(i, names[i], confidence))
        else:
            judged.append(_of_one(i, names[i], name))
    return tuple(judged)


def _recognized(reference: Array, named: bool, steps: Collection[int]) -> str:
    """Return the name of the judgement of one output.

    Args:
        reference: FP32's answers.
        named: Whether the user names the classes of this output.
        steps: The lengths of the sequences in the inputs.
    """
    shape = reference.shape[1:]
    positions = int(np.prod(shape)) >= MAP_POSITIONS_MIN and len(_sides(shape)) >= 2
    if reference.dtype.kind != "f":
        return "masks" if positions and _are_classes(reference) else "values"
    if len(shape) == 1 and shape[0] >= 2 and (named or rank_classes(reference)):
        return "top1"
    if len(shape) == 2 and min(shape) >= 2 and rank_classes(reference):
        return (
            "steps" if shape[0] in steps else "texts"
        )  # the output of a text recognizer has fewer steps than its input
    within = float(reference.min(initial=0.0)) >= 0.0 and float(reference.max(initial=0.0)) <= 1.0 + 1e-6
    above = float((reference > 0.5).mean()) if reference.size else 0.0
    if within and int(np.prod(shape)) < MAP_POSITIONS_MIN and MINORITY_MIN <= above <= 1 - MINORITY_MIN:
        return "thresholds"
    if within and ((positions and reference.max(initial=0.0) > 0) or _are_many_classes(reference)):
        return "maps"
    if _are_embeddings(reference):
        return "neighbours"
    return "values"


def _are_classes(numbers: Array) -> bool:
    """Return whether whole numbers are classes. Numbers under 32 bits are values of a quantized model."""
    return numbers.dtype.itemsize >= 4 and bool((numbers >= 0).all()) and 2 <= len(np.unique(numbers)) <= CLASSES_MAX


def _are_many_classes(reference: Array) -> bool:
    """Return whether values of 0 to 1 are scores of many classes.

    Most scores of many classes are low. Vectors of length 1 are embeddings. Values that are mostly high are points, in
    shares of the image.
    """
    flat = reference.reshape(len(reference), -1)
    if flat.shape[1] < MAP_POSITIONS_MIN or float(flat.max(initial=0.0)) <= min(MAP_THRESHOLDS):
        return False
    if float(np.median(flat)) > min(MAP_THRESHOLDS):
        return False
    return not np.allclose(np.linalg.norm(flat, axis=1), 1.0, atol=PROBABILITY_TOLERANCE)


def _of_one(i: int, output: str, name: str) -> Judgement:
    share, score = SHARES.get(name), SCORES.get(name) or (lambda a, b: float(SHARES[name](a, b).mean()))
    return Judgement(
        name,
        (output,),
        lambda answers, reference: score(answers[i], reference[i]),
        None if share is None else lambda answers, reference: share(answers[i], reference[i]),
    )


def _confidence_of(i: int, reference: Outputs) -> int | None:
    """Return the number of the output with the confidence of output `i`; None if there is none."""
    sides = _sides(reference[i].shape[1:])
    if reference[i].dtype.kind != "f" or len(sides) != 1 or sides[0] < VECTOR_SIZE_MIN:
        return None
    for j, other in enumerate(reference):
        if j == i or other.shape != reference[i].shape or not _within(other):
            continue
        if MINORITY_MIN <= float((other > CONFIDENT).mean()) <= 1 - MINORITY_MIN:
            return j
    return None


def _of_confident(i: int, output: str, confidence: int) -> Judgement:
    def score(answers: Outputs, reference: Outputs) -> float:
        confident = reference[confidence] > CONFIDENT
        return value_agreement(answers[i][confident], reference[i][confident]) if confident.any() else 1.0

    return Judgement("confident", (output,), score)


def _grid(reference: Array) -> Grid | None:
    """Return the layout of a detector's grid; None for no grid.

    Each anchor of a cell has an objectness, before or after four box values, and then the classes. Maps of one kind of
    value, such as masks, depths, images and features, do not mix scores with other values in this order. Logits of
    classes over positions look like logits of a grid, so logits count only in a shape with an axis of anchors.
    """
    if reference.dtype.kind != "f":
        return None
    return next((layout for layout in _layouts(reference.shape) if _is_grid(reference, layout)), None)


def may_be_grid_of_logits(reference: Array) -> bool:
    """Return whether an output may be a detector's grid of logits; logits of classes may look the same."""
    if reference.dtype.kind != "f" or reference.ndim != 4:
        return False
    layouts = [layout._replace(logits=True) for layout in _layouts(reference.shape) if layout.objectness == 4]
    return any(_is_grid(reference, layout) for layout in layouts)


def _layouts(shape: tuple[int, ...]) -> list[Grid]:
    """Return the layouts that a grid of this shape may have."""
    if len(shape) == 4:
        found = [Grid(axis, objectness) for axis in (1, 3) for objectness in (0, 4)]
        found += [Grid(axis, 4, anchors) for axis in (1, 3) for anchors in CELL_ANCHORS]
        return [layout for layout in found if shape[layout.axis] % layout.anchors == 0]
    if len(shape) == 5 and (shape[1] in CELL_ANCHORS or shape[3] in CELL_ANCHORS):
        return [Grid(4, 4), Grid(4, 4, logits=True)]
    return []


def _is_grid(reference: Array, layout: Grid) -> bool:
    cells = _cells(reference, layout)
    if cells.shape[1] < ANCHORS_MIN or not 6 <= cells.shape[2] <= CLASSES_MAX:
        return False
    if layout.logits:
        low = (cells[..., :5] < BACKGROUND_LOGIT).mean(axis=(0, 1))  # in logits of classes, the first four are low, too
        if float(low[:4].max()) > 0.5 or float(low[4]) < 1 - CONFIDENT_CELLS_MAX:
            return False
    elif not (_within(cells[..., layout.objectness]) and _within(cells[..., 5:])):
        return False  # before the product, because maps may be large
    boxes, scores = _cell_parts(reference, layout)
    confident = float((scores.max(axis=2) >= SCORE_MIN).mean())
    if not 0 < confident <= CONFIDENT_CELLS_MAX:
        return False
    return not any(_within(boxes[:, anchor :: layout.anchors]) for anchor in range(layout.anchors))


def _cells(grid: Array, layout: Grid) -> Array:
    """Return the cells `[N, cells, channels]` of a grid, one after the other for each anchor of a cell."""
    return np.moveaxis(grid, layout.axis, -1).reshape(len(grid), -1, grid.shape[layout.axis] // layout.anchors)


def _cell_parts(grid: Array, layout: Grid) -> tuple[Array, Array]:
    cells = _cells(grid, layout)
    if layout.logits:
        cells = np.concatenate([cells[..., :4], _sigmoid(cells[..., 4:])], axis=2)
    return _boxes_and_scores(cells, layout.objectness)


def _boxes_and_scores(cells: Array, objectness: int) -> tuple[Array, Array]:
    """Return the box values `[N, A, 4]` and the scores `[N, A, C]` of cells or anchors with an objectness."""
    boxes = cells[..., :4] if objectness == 4 else cells[..., 1:5]
    return boxes, cells[..., 5:] * cells[..., objectness, None]


def _of_cells(i: int, output: str, layout: Grid) -> Judgement:
    def score(answers: Outputs, reference: Outputs) -> float:
        return cell_agreement(*_cell_parts(answers[i], layout), *_cell_parts(reference[i], layout))

    return Judgement("cells", (output,), score)


def _stated_texts(rule: Ctc, i: int) -> Judgement:
    def share(answers: Outputs, reference: Outputs) -> Array:
        return same_decodings(by_step(answers[i], rule), by_step(reference[i], rule), rule.blank)

    return Judgement("texts", (rule.output,), lambda a, b: float(share(a, b).mean()), share)


# The functions that return the share of right decisions in each sample.
SHARES: dict[str, Callable[[Array, Array], Array]] = {
    "top1": same_top1,
    "steps": same_steps,
    "texts": same_texts,
    "thresholds": same_sides,
    "neighbours": same_neighbours,
}
# The functions that return the score of a judgement, if the score is not the mean of these shares.
SCORES: dict[str, Callable[[Array, Array], float]] = {
    "maps": map_agreement,
    "masks": mask_agreement,
    "neighbours": neighbour_agreement,
    "values": value_agreement,
}


def _first_scores(reference: Outputs) -> int:
    return next((i for i, array in enumerate(reference) if array.ndim == 2 and array.shape[1] >= 2), -1)


def are_probabilities(rows: Array) -> bool:
    """Return whether the values along the last axis are at least 0 and have the sum 1."""
    return bool(rows.min(initial=0.0) >= 0.0) and bool(
        np.allclose(rows.sum(axis=-1), 1.0, rtol=0.0, atol=PROBABILITY_TOLERANCE)
    )


def rank_classes(rows: Array) -> bool:
    """Return whether the values along the last axis are probabilities, or their logarithms."""
    return are_probabilities(rows) or (rows.shape[-1] > 1 and are_probabilities(np.exp(rows.clip(-80, 1))))


def _are_embeddings(reference: Array) -> bool:
    """Return whether each sample has one vector, with many directions and no order of its values.

    Vectors of coordinates have nearly one direction. A series is no embedding: its values count, not its direction, so
    half of each value would be a wrong answer.
    """
    sides = _sides(reference.shape[1:])
    if len(sides) != 1 or sides[0] < VECTOR_SIZE_MIN or len(reference) < NEIGHBOUR_SAMPLES_MIN:
        return False
    mean = unit_vectors(reference).mean(axis=0)
    if float(mean @ mean) >= ALIKE_MAX:  # the mean cosine of all pairs
        return False
    vectors: Array = reference.reshape(len(reference), -1)
    vectors = unit_vectors(vectors - vectors.mean(axis=1, keepdims=True))
    return float((vectors[:, 1:] * vectors[:, :-1]).sum(axis=1).mean()) < SERIES_MIN


def _sides(shape: tuple[int, ...]) -> list[int]:
    """Return the lengths of the axes that are longer than 1."""
    return [side for side in shape if side > 1]


def _boxes(rule: Detect, chosen: Sequence[int], size: tuple[int, int], reference: Outputs) -> Judgement:
    def score(answers: Outputs, reference: Outputs) -> float:
        return box_agreement(rule, [answers[i] for i in chosen], [reference[i] for i in chosen], size)

    found = (candidates(rule, [reference[i][row] for i in chosen], size) for row in range(len(reference[0])))
    return Judgement("boxes", rule.outputs, score, finds_nothing=not any(len(scores) for _, scores, _ in found))


def _detector(reference: Reference, inputs: Sequence[tuple[int, ...]], left: Sequence[int]) -> Judgement | None:
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


def _recognized_detector(names: list[str], reference: Outputs, left: Sequence[int]) -> Judgement | None:
    """Return the judgement of boxes and scores that are recognized by shape, in one output or in two."""
    for i in left:
        if (rule := _one_output(names[i], reference[i])) is not None:
            return _boxes_or_anchors(rule, (i,), reference)
    # The logits of fewer than ANCHORS_MIN classes look like boxes, so outputs of four values are tried as boxes first.
    for i in sorted(left, key=lambda i: reference[i].shape[-1:] != (4,)):
        for j in left:
            boxes, scores = reference[i], reference[j]
            pair = i != j and boxes.ndim == scores.ndim == 3 and boxes.shape[1] == scores.shape[1] >= ANCHORS_MIN
            if pair and _are_box_values(boxes, scores) and scores.shape[2] <= CLASSES_MAX:
                logits = not _within(scores)
                rule = Detect(names[i], names[j], form="anchors_first", sigmoid=logits, score_threshold=SCORE_MIN)
                return _boxes_or_anchors(rule, (i, j), reference)
    return None


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
        values = min(boxes.shape[1:])
        for extras in (0, values - 5, values - 6):  # key points have boxes of one class
            if extras % 3 == 0 and extras >= 0 and (layout := _layout(names[i], boxes, extras, image)) is not None:
                return _of_objects(layout, reference, i, None)
    return None


def _layout(name: str, boxes: Array, extras: int, image: tuple[int, int]) -> Layout | None:
    """Return the layout of boxes that end with `extras` values; None if they do not.

    The values are key points or factors of masks.
    """
    axis = 1 if boxes.shape[1] < boxes.shape[2] else 2
    rows = np.moveaxis(boxes, axis, 1)
    rows, behind = rows[:, : rows.shape[1] - extras], rows[:, rows.shape[1] - extras :]
    if extras and _within(behind):
        return None
    if axis == 2 and _are_suppressed(rows):
        return Layout(name, "suppressed", False, extras, image)
    if extras and (rule := _one_output(name, np.moveaxis(rows, 1, axis))) is not None:
        return Layout(name, rule.form, rule.objectness, extras, image)
    return None


def _are_suppressed(rows: Array) -> bool:
    """Return whether rows `[N, 6, K]` are two corners, a falling score, and the number of a class."""
    if rows.shape[1] != 6 or rows.shape[2] < ANCHORS_MIN or not _within(rows[:, 4]) or _within(rows[:, :4]):
        return False
    classes = rows[:, 5]
    are_numbers = bool((classes >= 0).all()) and bool((classes == np.rint(classes)).all())
    return are_numbers and bool((np.diff(rows[:, 4], axis=1) <= 0).all())


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
    first, second, third = next((shape for shape in inputs if len(shape) == IMAGE_RANK), (1, *ANYWHERE))
    return (second, third) if first < third else (first, second)


def _are_box_values(boxes: Array, scores: Array) -> bool:
    """Return whether `boxes` may hold box values. Box values in shares of the image look like scores."""
    if _within(boxes):
        return bool(boxes.shape[2] == 4 != scores.shape[2]) and not are_probabilities(boxes)
    return bool(4 <= boxes.shape[2] < ANCHORS_MIN)


def _one_output(name: str, array: Array) -> Detect | None:
    """Return the rule if one output holds boxes and scores: YOLO's `[N, 4 + C, A]` or `[N, A, 5 + C]`."""
    if array.dtype.kind != "f" or array.ndim != 3 or max(array.shape[1:]) < ANCHORS_MIN:
        return None
    first = array.shape[1] < array.shape[2]
    rows = array if first else array.transpose(0, 2, 1)
    if (
        not 5 <= rows.shape[1] <= CLASSES_MAX
        or rows.shape[1] * 4 > rows.shape[2]
        or _within(rows[:, :4])
        or not _within(rows[:, 4:])
    ):
        return None
    objectness = not first and rows.shape[1] >= 6  # YOLOv5 and YOLOX write objectness
    form = "channels_first" if first else "anchors_first"
    return Detect(name, form=form, objectness=objectness, score_threshold=SCORE_MIN)


def _boxes_or_anchors(rule: Detect, chosen: tuple[int, ...], reference: Outputs) -> Judgement:
    """Return the judgement of boxes or, if the values are no boxes, the judgement of the anchors' values.

    The values are boxes if they are in one output with the scores, and if FP32's boxes have positive sides.
    """
    boxes, scores = _parts(rule, [reference[i] for i in chosen])
    confident = boxes[scores.max(axis=2) >= SCORE_MIN]
    if rule.scores == "" and len(confident) and float((confident[:, 2:4] > 0).all(axis=1).mean()) > 0.99:
        return _boxes(rule, chosen, ANYWHERE, reference)
    background = _background(scores)

    def score(answers: Outputs, reference: Outputs) -> float:
        got, want = (_parts(rule, [outputs[i] for i in chosen], background) for outputs in (answers, reference))
        return anchor_agreement(*got, *want)

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
            scores = _sigmoid(scores) if background is None else softmax(scores)
    else:
        rows = arrays[0].transpose(0, 2, 1) if rule.form == "channels_first" else arrays[0]
        boxes, scores = _boxes_and_scores(rows, 4) if rule.objectness else (rows[..., :4], rows[..., 4:])
    return boxes, scores if background is None else np.delete(scores, background, axis=2)


def _sigmoid(logits: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-logits.clip(-80, 80))))


def _within(array: Array) -> bool:
    return bool(array.min(initial=0.0) >= 0.0) and bool(array.max(initial=0.0) <= 1.0 + 1e-6)
