"""Judge what an app decides from a model's outputs, where no labels say what is right.

A cosine hides what matters: boxes of 0 to 320 beside scores of 0 to 1 in one tensor, or one positive value, are
always alike. So each output is recognized by its shape and by FP32's values, and judged by what an app reads from it:

    boxes        a detector: F1 of its boxes against FP32's, same class, IoU of at least 0.5
    anchors      a detector whose boxes count from anchors that are not in the model: F1 of confident anchors whose
                 boxes overlap (an anchor is the same in both), or else whose values differ by little
    top1         class probabilities: how often both put the same class first
    texts        probabilities along a sequence (CTC): how often both read the same
    decisions    values of 0 to 1, some on either side of 0.5: how often both are on the same side
    maps         values of 0 to 1 over positions: IoU of what is above the threshold
    neighbours   embeddings: how often both have the same nearest other sample, or one that FP32 finds as near within
                 0.01 of cosine and 5 % of its lead over the mean sample (which of two equally near ones comes first is
                 no decision), and the cosine to FP32's
    values       anything else: R squared, 1 - error^2 / spread^2, of the worst channels

FP32 scores 1 in each. The least of them counts. `values` says only how similar two artifacts are, and is strict.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.rules import Ctc, Detect
from edgert.processing.ctc import by_step, greedy
from edgert.processing.detect import detections
from edgert.tensors import TensorSpec

Array = NDArray[Any]
Outputs = list[Array]
Score = Callable[[Outputs, Outputs], float]

IOU_MIN = 0.5
SCORE_MIN = 0.25
ANCHORS_MIN = 100  # fewer rows are no detector's
CLASSES_MAX = 2000
VECTOR_SIZE_MIN = 16
MAP_POSITIONS_MIN = 64
MINORITY_MIN = 0.01  # where fewer values are on one side of 0.5, that side decides nothing
NEIGHBOUR_SAMPLES_MIN = 8
NEIGHBOUR_TOLERANCE = 0.01  # of cosine, and
NEIGHBOUR_SHARE = 0.05  # of how much nearer the nearest sample is than the mean one
ALIKE_MAX = 0.7  # mean cosine between different samples' embeddings
PROBABILITY_TOLERANCE = 1e-3
ANYWHERE = (1 << 20, 1 << 20)  # height and width of an image that cuts no box
ANCHOR_TOLERANCE = 0.15  # of a box value's own spread; of a box's longer side for a point in it
WORST_CHANNELS = 0.1  # the share of channels that `values` averages over


@dataclass(frozen=True)
class Judgement:
    """How some outputs are judged: `score(answers, reference)`, both samples along axis 0, gives 0 to 1.

    If the score is a share of samples, `share` is how much of each is right.
    """

    name: str
    outputs: tuple[str, ...]
    score: Score
    share: Callable[[Outputs, Outputs], Array] | None = None

    @property
    def is_similarity(self) -> bool:
        """Whether it says only how similar the answers are, and nothing of what an app decides."""
        return self.name == "values"


def judgements(
    specs: Sequence[TensorSpec],
    reference: Outputs,
    *,
    classes_named: bool = False,
    detect: Detect | None = None,
    image_size: tuple[int, int] | None = None,
    ctc: Ctc | None = None,
) -> tuple[Judgement, ...]:
    """Recognize each output by its shape, by FP32's values and by what the user stated. One judgement or more."""
    names = [spec.name for spec in specs]
    left = [i for i in range(len(specs)) if np.issubdtype(reference[i].dtype, np.number) or reference[i].dtype == bool]
    found: list[Judgement] = []
    detector = _stated_detector(names, detect, image_size) or _detector(names, reference, left)
    if detector is not None:
        found.append(detector)
        left = [i for i in left if names[i] not in detector.outputs]
    if ctc is not None:
        stated = names.index(ctc.output)
        found.append(_stated_texts(ctc, stated))
        left = [i for i in left if i != stated]
    for i in left:
        name, score = _recognized(reference[i], classes_named and _first_scores(reference) == i)
        found.append(Judgement(name, (names[i],), _of_output(i, score), _share_of(i, name)))
    return tuple(found)


def top1_agreement(answers: Array, reference: Array) -> float:
    """Return the share of rows whose largest element is FP32's. A row with NaN has no largest."""
    return float(_same_top1(answers, reference).mean())


def text_agreement(answers: Array, reference: Array) -> float:
    """Return the share of sequences `[T, C]` that CTC reads the same; the most frequent class is the blank."""
    return float(_same_texts(answers, reference).mean())


def decision_agreement(answers: Array, reference: Array) -> float:
    """Return the share of values on the same side of 0.5."""
    return float(_same_sides(answers, reference).mean())


def map_agreement(answers: Array, reference: Array) -> float:
    """Return the mean IoU over samples of the positions above the threshold; two empty maps agree.

    The threshold is 0.5, or half of FP32's largest value where hardly anything is above 0.5.
    """
    threshold = 0.5 if float((reference > 0.5).mean()) > 1e-4 else float(reference.max()) / 2
    a, b = (array.reshape(len(array), -1) > threshold for array in (answers, reference))
    union = (a | b).sum(axis=1)
    return float(np.where(union == 0, 1.0, (a & b).sum(axis=1) / np.maximum(union, 1)).mean())


def neighbour_agreement(answers: Array, reference: Array) -> float:
    """Return the share of vectors whose nearest other vector is as near in FP32, or the mean cosine to FP32's if less."""
    cosines = (_unit(answers) * _unit(reference)).sum(axis=1)
    return min(float(_same_neighbours(answers, reference).mean()), float(cosines.mean()))


def value_agreement(answers: Array, reference: Array) -> float:
    """Return R squared of the worst channels: 1 - mean squared error / variance, at least 0.

    A channel is an element along the shortest axis behind the samples that is longer than 1. Channels that hardly
    vary are measured by the variance of all.
    """
    if reference.dtype.kind != "f":
        return float((answers == reference).mean())
    a, b = _channels(answers), _channels(reference)
    error = np.square(a - b).mean(axis=0)
    spread = b.var(axis=0)
    overall = max(float(b.var()), 1e-30)
    spread = np.where(spread < 1e-6 * overall, overall, spread)
    scores = np.sort(np.nan_to_num(1 - error / spread, nan=0.0, neginf=0.0).clip(0, 1))
    return float(scores[: max(1, round(WORST_CHANNELS * len(scores)))].mean())


def box_agreement(rule: Detect, answers: Outputs, reference: Outputs, size: tuple[int, int]) -> float:
    """Return the F1 score of the boxes that `rule` decodes against FP32's: same class, IoU of at least 0.5."""
    got, want = (detections(rule, outputs, size, None) for outputs in (answers, reference))
    hits = found = wanted = 0
    for i in range(len(want.counts)):
        g, w = int(got.counts[i]), int(want.counts[i])
        ious = _ious(got.boxes[i, :g], want.boxes[i, :w])
        ious[got.classes[i, :g, None] != want.classes[i, None, :w]] = 0.0
        hits += _matched(ious)
        found, wanted = found + g, wanted + w
    return 2 * hits / (found + wanted) if found + wanted else 1.0


def anchor_agreement(boxes: Array, scores: Array, true_boxes: Array, true_scores: Array) -> float:
    """Return the F1 score of anchors `[N, A, ...]` that are confident in both and stand for nearly the same box."""
    got, want = scores >= SCORE_MIN, true_scores >= SCORE_MIN
    if not want.any():
        return 1.0 if not got.any() else 0.0
    both = got & want
    sides = true_boxes[want][:, 2:4]
    same = _same_boxes if float((sides > 0).all(axis=1).mean()) > 0.99 else _same_values
    hits = int(same(boxes[both], true_boxes[both], true_boxes[want]).sum())
    return 2 * hits / int(got.sum() + want.sum())


def _same_boxes(boxes: Array, true: Array, every: Array) -> Array:
    """Which boxes `[n, 4 + points]` overlap by IOU_MIN, with their points near.

    An anchor moves the boxes of both by the same distance, so the overlap is known without it. Whether the four values
    are corners, or a centre and sides, is not known: the boxes must overlap in both readings.
    """
    ious = [[_ious(a[None], b[None])[0, 0] for a, b in zip(read(boxes), read(true), strict=True)] for read in READINGS]
    side = true[:, 2:4].max(axis=1, keepdims=True)
    near = (np.abs(boxes[:, 4:] - true[:, 4:]) <= ANCHOR_TOLERANCE * side).all(axis=1)
    return np.asarray((np.array(ious).reshape(len(READINGS), -1) >= IOU_MIN).all(axis=0) & near)


def _same_values(values: Array, true: Array, every: Array) -> Array:
    """Which rows differ from FP32's by little of each value's spread over `every` row."""
    spread = np.maximum(every.std(axis=0), 1e-2 * np.abs(every).max() + 1e-12)
    return np.asarray((np.abs(values - true) <= ANCHOR_TOLERANCE * spread).mean(axis=-1) >= 0.9)


def _recognized(reference: Array, named: bool) -> tuple[str, Callable[[Array, Array], float]]:
    """The judgement of one output."""
    shape = reference.shape[1:]
    if reference.dtype.kind != "f":
        return "values", value_agreement
    if len(shape) == 1 and shape[0] >= 2 and (named or _are_probabilities(reference)):
        return "top1", top1_agreement
    if (
        len(shape) == 2
        and min(shape) >= 2
        and (_are_probabilities(reference) or _are_probabilities(np.exp(reference.clip(-80, 1))))
    ):
        return "texts", text_agreement
    within = float(reference.min(initial=0.0)) >= 0.0 and float(reference.max(initial=0.0)) <= 1.0 + 1e-6
    above = float((reference > 0.5).mean()) if reference.size else 0.0
    if within and int(np.prod(shape)) < MAP_POSITIONS_MIN and MINORITY_MIN <= above <= 1 - MINORITY_MIN:
        return "decisions", decision_agreement
    positions = int(np.prod(shape)) >= MAP_POSITIONS_MIN and len([side for side in shape if side > 1]) >= 2
    if within and positions and reference.max(initial=0.0) > 0:
        return "maps", map_agreement
    if _are_embeddings(reference):
        return "neighbours", neighbour_agreement
    return "values", value_agreement


def _of_output(i: int, score: Callable[[Array, Array], float]) -> Score:
    return lambda answers, reference: score(answers[i], reference[i])


def _share_of(i: int, name: str) -> Callable[[Outputs, Outputs], Array] | None:
    share = SHARES.get(name)
    return None if share is None else lambda answers, reference: share(answers[i], reference[i])


def _same_top1(answers: Array, reference: Array) -> Array:
    return np.asarray((answers.argmax(-1) == reference.argmax(-1)) & np.isfinite(answers).all(-1))


def _same_texts(answers: Array, reference: Array) -> Array:
    return _read_alike(answers, reference, int(np.bincount(reference.argmax(-1).ravel()).argmax()))


def _read_alike(answers: Array, reference: Array, blank: int) -> Array:
    pairs = zip(answers, reference, strict=True)
    return np.array(
        [np.isfinite(a).all() and np.array_equal(greedy(a, blank)[0], greedy(b, blank)[0]) for a, b in pairs]
    )


def _stated_texts(rule: Ctc, i: int) -> Judgement:
    def share(answers: Outputs, reference: Outputs) -> Array:
        return _read_alike(by_step(answers[i], rule), by_step(reference[i], rule), rule.blank)

    return Judgement("texts", (rule.output,), lambda a, b: float(share(a, b).mean()), share)


def _same_sides(answers: Array, reference: Array) -> Array:
    same = ((answers > 0.5) == (reference > 0.5)) & np.isfinite(answers)
    return np.asarray(same.reshape(len(same), -1).mean(axis=1))


def _same_neighbours(answers: Array, reference: Array) -> Array:
    alike = _alike(_unit(reference))
    chosen = _alike(_unit(answers)).argmax(axis=1)
    nearest, others = alike.max(axis=1), len(alike) - 1
    mean = (alike.sum(axis=1) - alike.diagonal()) / max(others, 1)
    tolerance = np.minimum(NEIGHBOUR_TOLERANCE, NEIGHBOUR_SHARE * (nearest - mean))
    return np.asarray(alike[np.arange(len(alike)), chosen] >= nearest - tolerance)


# How much of each sample is right, for the judgements whose score is a share of samples.
SHARES = {"top1": _same_top1, "texts": _same_texts, "decisions": _same_sides, "neighbours": _same_neighbours}


def _first_scores(reference: Outputs) -> int:
    return next((i for i, array in enumerate(reference) if array.ndim == 2 and array.shape[1] >= 2), -1)


def _are_probabilities(rows: Array) -> bool:
    return bool(rows.min(initial=0.0) >= 0.0) and bool(
        np.allclose(rows.sum(axis=-1), 1.0, rtol=0.0, atol=PROBABILITY_TOLERANCE)
    )


def _are_embeddings(reference: Array) -> bool:
    """Whether there is one vector a sample, and the samples point in many directions (coordinates all point in one)."""
    sides = [side for side in reference.shape[1:] if side > 1]
    if len(sides) != 1 or sides[0] < VECTOR_SIZE_MIN or len(reference) < NEIGHBOUR_SAMPLES_MIN:
        return False
    unit = _unit(reference)
    return float((unit @ unit.T).mean()) < ALIKE_MAX


def _stated_detector(names: list[str], detect: Detect | None, size: tuple[int, int] | None) -> Judgement | None:
    if detect is None:
        return None
    chosen = [names.index(name) for name in detect.outputs]
    shown = size or ANYWHERE
    return Judgement(
        "boxes",
        detect.outputs,
        lambda a, b: box_agreement(detect, [a[i] for i in chosen], [b[i] for i in chosen], shown),
    )


def _detector(names: list[str], reference: Outputs, left: Sequence[int]) -> Judgement | None:
    """The judgement of a detector that is known by its shapes: boxes and scores in one output, or one each."""
    for i in left:
        if (rule := _one_output(names[i], reference[i])) is not None:
            return _boxes_or_anchors(rule, (i,), reference)
    for i in left:
        for j in left:
            boxes, scores = reference[i], reference[j]
            pair = i != j and boxes.ndim == scores.ndim == 3 and boxes.shape[1] == scores.shape[1] >= ANCHORS_MIN
            if pair and 4 <= boxes.shape[2] < ANCHORS_MIN and scores.shape[2] <= CLASSES_MAX and not _within(boxes):
                logits = not _within(scores)
                rule = Detect(names[i], names[j], form="anchors_first", sigmoid=logits, score_threshold=SCORE_MIN)
                return _boxes_or_anchors(rule, (i, j), reference)
    return None


def _one_output(name: str, array: Array) -> Detect | None:
    """The rule of an output that holds boxes and scores: YOLO's `[N, 4 + C, A]` or `[N, A, 5 + C]`."""
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
    objectness = not first and rows.shape[1] >= 6  # as YOLOv5 and YOLOX write it
    form = "channels_first" if first else "anchors_first"
    return Detect(name, form=form, objectness=objectness, score_threshold=SCORE_MIN)


def _boxes_or_anchors(rule: Detect, chosen: tuple[int, ...], reference: Outputs) -> Judgement:
    """Boxes where FP32's are boxes (their sides are positive), else the anchors' own values."""
    boxes, scores = _parts(rule, [reference[i] for i in chosen])
    confident = boxes[scores >= SCORE_MIN]
    if rule.scores == "" and len(confident) and float((confident[:, 2:4] > 0).all(axis=1).mean()) > 0.99:
        return Judgement(
            "boxes",
            rule.outputs,
            lambda a, b: box_agreement(rule, [a[i] for i in chosen], [b[i] for i in chosen], ANYWHERE),
        )

    def score(answers: Outputs, reference: Outputs) -> float:
        got, want = (_parts(rule, [outputs[i] for i in chosen]) for outputs in (answers, reference))
        return anchor_agreement(*got, *want)

    return Judgement("anchors", rule.outputs, score)


def _parts(rule: Detect, arrays: Outputs) -> tuple[Array, Array]:
    """Box values `[N, A, k]` and the best score of each anchor `[N, A]`, 0 to 1."""
    if rule.scores:
        boxes, scores = arrays
        best = scores.max(axis=2)
        return boxes, 1 / (1 + np.exp(-best.clip(-80, 80))) if rule.sigmoid else best
    rows = arrays[0].transpose(0, 2, 1) if rule.form == "channels_first" else arrays[0]
    at = 5 if rule.objectness else 4
    best = rows[..., at:].max(axis=2)
    return rows[..., :4], best * rows[..., 4] if rule.objectness else best


def _within(array: Array) -> bool:
    return bool(array.min(initial=0.0) >= 0.0) and bool(array.max(initial=0.0) <= 1.0 + 1e-6)


def _unit(vectors: Array) -> NDArray[np.float64]:
    flat = np.nan_to_num(vectors.reshape(len(vectors), -1).astype(np.float64))
    return np.asarray(flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-12))


def _alike(unit: Array) -> Array:
    """The cosine of each vector to each other one; -2 to itself."""
    alike = unit @ unit.T
    np.fill_diagonal(alike, -2.0)
    return np.asarray(alike)


def _channels(array: Array) -> NDArray[np.float64]:
    """`[positions, channels]`: channels along the shortest axis behind the samples that is longer than 1."""
    sides = [(side, axis) for axis, side in enumerate(array.shape) if axis > 0 and side > 1]
    if not sides:
        return array.reshape(-1, 1).astype(np.float64)
    axis = min(sides)[1]
    return np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis]).astype(np.float64)


def _from_centres(boxes: Array) -> Array:
    half = np.abs(boxes[:, 2:4]) / 2
    return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)


def _from_corners(boxes: Array) -> Array:
    return np.concatenate([np.minimum(boxes[:, :2], boxes[:, 2:4]), np.maximum(boxes[:, :2], boxes[:, 2:4])], axis=1)


READINGS = (_from_centres, _from_corners)


def _ious(one: Array, other: Array) -> Array:
    """IoU of corners `[n, 4]` with `[m, 4]`: `[n, m]`."""
    low = np.maximum(one[:, None, :2], other[None, :, :2])
    high = np.minimum(one[:, None, 2:], other[None, :, 2:])
    both = np.prod(np.maximum(high - low, 0), axis=2)
    areas = [np.prod(boxes[:, 2:] - boxes[:, :2], axis=1) for boxes in (one, other)]
    union = areas[0][:, None] + areas[1][None] - both
    return np.asarray(np.where(union > 0, both / np.maximum(union, 1e-12), 0.0))


def _matched(ious: Array) -> int:
    """How many rows find a column of their own, best first as the rows stand."""
    free = np.ones(ious.shape[1], bool)
    hits = 0
    for row in ious:
        best = np.where(free, row, 0.0)
        if best.size and best.max() >= IOU_MIN:
            free[best.argmax()] = False
            hits += 1
    return hits
