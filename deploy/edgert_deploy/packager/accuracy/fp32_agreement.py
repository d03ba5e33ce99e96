"""The agreement of answers with FP32's answers, 0 to 1: one function for each kind of output."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.rules import Detect
from edgert.processing.answers.ctc import greedy
from edgert.processing.answers.detect import detections

Array = NDArray[Any]
Outputs = list[Array]
SameBoxes = Callable[[Array, Array], Array]

IOU_MIN = 0.5
SCORE_MIN = 0.25
MAP_THRESHOLDS = (0.3, 0.5, 0.7)  # apps of text detectors use 0.3, most others use 0.5
# A class is ignored if a smaller share of the positions has it. A threshold is ignored if a smaller share is above it.
SHARE_OF_POSITIONS_MIN = 1e-4
# The cosine of the artifact's neighbour, in FP32, may be lower than the cosine of FP32's nearest neighbour. It may be
# lower by the smaller of two tolerances: NEIGHBOUR_TOLERANCE, and NEIGHBOUR_SHARE of the difference between the nearest
# neighbour's cosine and the mean cosine.
NEIGHBOUR_TOLERANCE = 0.01
NEIGHBOUR_SHARE = 0.05
NEIGHBOUR_BLOCK = 512  # the number of samples that are compared with all samples at once
ITSELF = -2.0  # replaces the cosine of a sample with itself; it is below every cosine
# The largest difference of an anchor's value from FP32's value, as a share of the value's standard deviation. For a
# point, it is a share of the longer side of the box.
ANCHOR_TOLERANCE = 0.15
LOG_SIDE_MAX = 10.0  # limits the logarithm of a side in cells, because its exponential would overflow
WORST_CHANNELS = 0.1  # `value_agreement` is the mean over this share of the channels, the worst ones


def map_agreement(answers: Array, reference: Array) -> float:
    """Return the mean IoU of the positions above a threshold, for the worst one of MAP_THRESHOLDS.

    The mean is over the samples, and two empty maps agree. A threshold is ignored if almost none of FP32's values is
    above it. If all thresholds are ignored, the threshold is half of FP32's largest value.
    """
    thresholds = [each for each in MAP_THRESHOLDS if float((reference > each).mean()) > SHARE_OF_POSITIONS_MIN]
    return min(_map_iou(answers, reference, each) for each in thresholds or [float(reference.max()) / 2])


def _map_iou(answers: Array, reference: Array, threshold: float) -> float:
    a, b = (array.reshape(len(array), -1) > threshold for array in (answers, reference))
    union = (a | b).sum(axis=1)
    return float(np.where(union == 0, 1.0, (a & b).sum(axis=1) / np.maximum(union, 1)).mean())


def mask_agreement(answers: Array, reference: Array) -> float:
    """Return the mean IoU of the classes in masks of class numbers, without the background.

    The background is the most frequent of FP32's classes. A class is ignored if almost no position has this class. If
    all classes are ignored, the score is the share of equal positions.
    """
    classes, places, counts = np.unique(reference, return_inverse=True, return_counts=True)
    same = answers == reference
    counts_both = np.bincount(places.reshape(-1)[same.reshape(-1)], minlength=len(classes))
    nearest = np.searchsorted(classes, answers).clip(max=len(classes) - 1)
    answered = np.bincount(nearest[classes[nearest] == answers], minlength=len(classes))
    ious = counts_both / (counts + answered - counts_both)
    judged = (counts > SHARE_OF_POSITIONS_MIN * reference.size) & (np.arange(len(classes)) != counts.argmax())
    return float(ious[judged].mean() if judged.any() else same.mean())


def neighbour_agreement(answers: Array, reference: Array) -> float:
    """Return the share of vectors that keep their nearest neighbour, or the mean cosine if it is lower."""
    cosines = (unit_vectors(answers) * unit_vectors(reference)).sum(axis=1)
    return min(float(same_neighbours(answers, reference).mean()), float(cosines.mean()))


def value_agreement(answers: Array, reference: Array) -> float:
    """Return R squared of the worst channels: 1 - mean squared error / variance, at least 0.

    The channels are the elements along one axis: the shortest axis that is longer than 1, except the axis of samples.
    If a channel is almost constant, the variance of all values replaces its own variance. For whole numbers, the result
    is the share of equal values.
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
    """Return the F1 score of the boxes against FP32's boxes.

    A box is a hit if its IoU with one of FP32's boxes of the same class is at least 0.5.
    """
    boxes, true_boxes = (detections(rule, outputs, size, None) for outputs in (answers, reference))
    hits = answered = expected = 0
    for i in range(len(true_boxes.counts)):
        g, w = int(boxes.counts[i]), int(true_boxes.counts[i])
        ious = box_ious(boxes.boxes[i, :g], true_boxes.boxes[i, :w])
        ious[boxes.classes[i, :g, None] != true_boxes.classes[i, None, :w]] = 0.0
        hits += matched(ious)
        answered, expected = answered + g, expected + w
    if answered + expected == 0:  # boxes of NaN are no answers
        return float(all(np.isfinite(array).all() for array in answers))
    return 2 * hits / (answered + expected)


def anchor_agreement(
    boxes: Array, scores: Array, true_boxes: Array, true_scores: Array, same: SameBoxes | None = None
) -> float:
    """Return the F1 score of the confident anchors `[N, A, ...]` against FP32's confident anchors.

    An anchor is a hit if the artifact and FP32 are both confident in it and give the same class and box. `same` returns
    which boxes are the same as the true ones; it is None if the meaning of the boxes' values is unknown.
    """
    got, want, both = _confident(scores, true_scores)
    if not want.any():
        return float(not got.any() and np.isfinite(scores).all())
    if same is None:
        are_boxes = float((true_boxes[want][:, 2:4] > 0).all(axis=1).mean()) > 0.99
        same = _same_boxes if are_boxes else partial(_same_values, every=true_boxes[want])
    hits = int(same(boxes[both], true_boxes[both]).sum())
    return 2 * hits / int(got.sum() + want.sum())


def cell_agreement(boxes: Array, scores: Array, true_boxes: Array, true_scores: Array) -> float:
    """Return the F1 score of a grid's cells, or the R squared of the box values if it is lower.

    A cell is a hit if the artifact and FP32 are both confident in it and give the same class. The box values may have
    any coding, so they are compared as values, in FP32's confident cells.
    """
    got, want, both = _confident(scores, true_scores)
    if not want.any():
        return float(not got.any() and np.isfinite(scores).all())
    return min(2 * int(both.sum()) / int(got.sum() + want.sum()), value_agreement(boxes[want], true_boxes[want]))


def _confident(scores: Array, true_scores: Array) -> tuple[Array, Array, Array]:
    """Return three masks of the anchors.

    In the first, the artifact is confident. In the second, FP32 is confident. In the third, both are confident of the
    same class.
    """
    got, want = scores.max(axis=2) >= SCORE_MIN, true_scores.max(axis=2) >= SCORE_MIN
    return got, want, got & want & (scores.argmax(axis=2) == true_scores.argmax(axis=2))


def _same_boxes(boxes: Array, true: Array) -> Array:
    """Return which boxes `[n, 4 + points]` have an IoU of at least IOU_MIN, and points near the true ones.

    An anchor moves both boxes by the same distance, so the overlap does not depend on the anchor. The four values may
    be two corners, or a centre and two sides. So the boxes must overlap in both readings.
    """
    side = true[:, 2:4].max(axis=1, keepdims=True)
    near = (np.abs(boxes[:, 4:] - true[:, 4:]) <= ANCHOR_TOLERANCE * side).all(axis=1)
    return np.asarray(_overlap(_from_centres, boxes, true) & _overlap(_from_corners, boxes, true) & near)


def same_in_cells(boxes: Array, true: Array) -> Array:
    """Return which boxes `[n, 4]` have an IoU of at least IOU_MIN.

    The values are a centre relative to a cell of a grid and the logarithms of two sides, all in sides of the cell.
    """
    return _overlap(_from_cells, boxes, true)


def _overlap(read: Callable[[Array], Array], boxes: Array, true: Array) -> Array:
    """Return which boxes have an IoU of at least IOU_MIN. `read` converts boxes `[n, 4 + ...]` to corners."""
    ious = [box_ious(a[None], b[None])[0, 0] for a, b in zip(read(boxes), read(true), strict=True)]
    return np.array(ious) >= IOU_MIN


def same_oriented(boxes: Array, true: Array) -> Array:
    """Return which oriented boxes `[n, 5]` have a ProbIoU of at least IOU_MIN."""
    return np.asarray(oriented_ious(boxes, true) >= IOU_MIN)


def oriented_ious(boxes: Array, true: Array) -> Array:
    """Return the ProbIoU of oriented boxes `[..., 5]`: a centre, two sides and an angle in radians.

    ProbIoU takes each box as a normal distribution, so it does not depend on the order of the two sides. YOLO uses it,
    too. Source: Murrugarra-Llerena et al., "Gaussian Bounding Boxes and Probabilistic Intersection-over-Union for
    Object Detection", 2021.
    """
    (xx, yy, xy, root), (true_xx, true_yy, true_xy, true_root) = _covariance(boxes), _covariance(true)
    xx, yy, xy = xx + true_xx, yy + true_yy, xy + true_xy
    determinant = xx * yy - xy**2
    x, y = np.moveaxis((boxes[..., :2] - true[..., :2]).astype(np.float64), -1, 0)
    apart = (yy * x**2 - 2 * xy * x * y + xx * y**2) / (4 * determinant)
    distance = apart + np.log(determinant / (4 * root * true_root)) / 2
    return np.asarray(1 - np.sqrt(1 - np.exp(-np.maximum(distance, 0))))


def _covariance(boxes: Array) -> tuple[Array, Array, Array, Array]:
    """Return the variances of each box along x and y, their covariance, and the root of the determinant."""
    width, height = np.moveaxis(np.maximum(np.abs(boxes[..., 2:4].astype(np.float64)), 1e-3), -1, 0)
    cos, sin = np.cos(boxes[..., 4]), np.sin(boxes[..., 4])
    a, b = width**2 / 12, height**2 / 12
    return a * cos**2 + b * sin**2, a * sin**2 + b * cos**2, (a - b) * cos * sin, width * height / 12


def _same_values(values: Array, true: Array, every: Array) -> Array:
    """Return which rows have at least 90 % of their values near the true values.

    A value is near if the difference is at most ANCHOR_TOLERANCE times the standard deviation of this value in `every`.
    """
    spread = np.maximum(every.std(axis=0), 1e-2 * np.abs(every).max() + 1e-12)
    return np.asarray((np.abs(values - true) <= ANCHOR_TOLERANCE * spread).mean(axis=-1) >= 0.9)


def same_top1(answers: Array, reference: Array) -> Array:
    """Return which rows have their largest element where FP32 has it. A row with NaN is never one of them."""
    return np.asarray((answers.argmax(-1) == reference.argmax(-1)) & np.isfinite(answers).all(-1))


def same_steps(answers: Array, reference: Array) -> Array:
    """Return, for each sample, the share of steps `[T, C]` that have FP32's class, without the background.

    The background is FP32's most frequent class. A step is ignored if the artifact and FP32 both answer the
    background.
    """
    got, want = answers.argmax(-1), reference.argmax(-1)
    background = np.bincount(want.ravel()).argmax()
    counts = (got != background) | (want != background)
    same = ((got == want) & counts & np.isfinite(answers).all(-1)).sum(axis=1)
    return np.asarray(
        np.where(counts.any(axis=1), same / np.maximum(counts.sum(axis=1), 1), np.isfinite(answers).all((1, 2)))
    )


def same_texts(answers: Array, reference: Array) -> Array:
    """Return which sequences `[T, C]` CTC decodes to FP32's text. The blank is FP32's most frequent class."""
    return same_decodings(answers, reference, int(np.bincount(reference.argmax(-1).ravel()).argmax()))


def same_decodings(answers: Array, reference: Array, blank: int) -> Array:
    """Return which sequences `[T, C]` CTC decodes to FP32's text."""
    pairs = zip(answers, reference, strict=True)
    return np.array(
        [np.isfinite(a).all() and np.array_equal(greedy(a, blank)[0], greedy(b, blank)[0]) for a, b in pairs]
    )


def same_sides(answers: Array, reference: Array) -> Array:
    """Return, for each sample, the share of values that are on the same side of 0.5 as FP32's value."""
    same = ((answers > 0.5) == (reference > 0.5)) & np.isfinite(answers)
    return np.asarray(same.reshape(len(same), -1).mean(axis=1))


def same_neighbours(answers: Array, reference: Array) -> Array:
    """Return which samples have a nearest neighbour that is also near in FP32's answers."""
    got, want = unit_vectors(answers), unit_vectors(reference)
    blocks = [_same_neighbours(got, want, begin) for begin in range(0, len(want), NEIGHBOUR_BLOCK)]
    return np.concatenate(blocks) if blocks else np.empty(0, bool)


def _same_neighbours(got: Array, want: Array, begin: int) -> Array:
    """Return `same_neighbours` for a block of samples, because a table of all pairs may exceed the memory."""
    alike, chosen = _alike(want, begin), _alike(got, begin).argmax(axis=1)
    nearest = alike.max(axis=1)
    mean = (alike.sum(axis=1) - ITSELF) / max(len(want) - 1, 1)
    tolerance = np.minimum(NEIGHBOUR_TOLERANCE, NEIGHBOUR_SHARE * (nearest - mean))
    return np.asarray(alike[np.arange(len(alike)), chosen] >= nearest - tolerance)


def unit_vectors(vectors: Array) -> NDArray[np.float64]:
    """Return each sample's values as a vector of length 1."""
    flat = np.nan_to_num(vectors.reshape(len(vectors), -1).astype(np.float64))
    return np.asarray(flat / np.maximum(np.linalg.norm(flat, axis=1, keepdims=True), 1e-12))


def _alike(unit: Array, begin: int) -> Array:
    """Return the cosine of each vector in a block with every vector. A vector with itself gets ITSELF."""
    alike = unit[begin : begin + NEIGHBOUR_BLOCK] @ unit.T
    rows = np.arange(len(alike))
    alike[rows, begin + rows] = ITSELF
    return np.asarray(alike)


def _channels(array: Array) -> NDArray[np.float64]:
    """Return the values as `[positions, channels]`. `value_agreement` defines the channels."""
    sides = [(side, axis) for axis, side in enumerate(array.shape) if axis > 0 and side > 1]
    if not sides:
        return array.reshape(-1, 1).astype(np.float64)
    axis = min(sides)[1]
    return np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis]).astype(np.float64)


def _from_centres(boxes: Array) -> Array:
    half = np.abs(boxes[:, 2:4]) / 2
    return np.concatenate([boxes[:, :2] - half, boxes[:, :2] + half], axis=1)


def _from_cells(boxes: Array) -> Array:
    return _from_centres(np.concatenate([boxes[:, :2], np.exp(np.minimum(boxes[:, 2:], LOG_SIDE_MAX))], axis=1))


def _from_corners(boxes: Array) -> Array:
    return np.concatenate([np.minimum(boxes[:, :2], boxes[:, 2:4]), np.maximum(boxes[:, :2], boxes[:, 2:4])], axis=1)


def box_ious(one: Array, other: Array) -> Array:
    """Return the IoUs `[n, m]` of boxes `[n, 4]` and `[m, 4]`. Each box is given by two corners."""
    low = np.maximum(one[:, None, :2], other[None, :, :2])
    high = np.minimum(one[:, None, 2:], other[None, :, 2:])
    both = np.prod(np.maximum(high - low, 0), axis=2)
    areas = [np.prod(boxes[:, 2:] - boxes[:, :2], axis=1) for boxes in (one, other)]
    union = areas[0][:, None] + areas[1][None] - both
    return np.asarray(np.where(union > 0, both / np.maximum(union, 1e-12), 0.0))


def matched(ious: Array) -> int:
    """Match each row, in order, to its best unmatched column. Count the matches of at least IOU_MIN."""
    free = np.ones(ious.shape[1], bool)
    hits = 0
    for row in ious:
        best = np.where(free, row, 0.0)
        if best.size and best.max() >= IOU_MIN:
            free[best.argmax()] = False
            hits += 1
    return hits
