"""Computes boxes in the sent image from a detector's outputs: pure functions on arrays.

Boxes are left, top, right, bottom in pixels of the source image (FP32), best first. Non-maximum suppression is greedy,
and runs within each class. It removes a box if the box and a better box of its class overlap (intersection over union)
by more than the threshold. Boxes with equal scores keep the order of the model's boxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.rules import Detect
from edgert.errors import EngineFailed
from edgert.processing.images.placement import Placement

CANDIDATES_MAX = 1000  # suppression compares at most this number of an image's best boxes
TOGETHER_MAX = 192  # up to this number, one array operation compares all pairs of boxes

Array = NDArray[Any]


class Detections(NamedTuple):
    """The boxes of N images, up to K each: FP32 [N, K, 4], FP32 [N, K], INT64 [N, K] and INT64 [N].

    Entries after an image's count have a box of zeros, the score 0 and the class -1.
    """

    boxes: NDArray[np.float32]
    scores: NDArray[np.float32]
    classes: NDArray[np.int64]
    counts: NDArray[np.int64]


def detections(
    rule: Detect, outputs: Sequence[Array], size: tuple[int, int], placements: Sequence[Placement] | None
) -> Detections:
    """Return the detections in each image.

    Args:
        outputs: The arrays that `rule` names, in its order.
        size: (height, width) of the model's image.
        placements: The mapping from the model's image to each sent image; with None, boxes stay in the model's image.
    """
    images, room = len(outputs[0]), rule.detections_max
    detected = Detections(
        np.zeros((images, room, 4), np.float32),
        np.zeros((images, room), np.float32),
        np.full((images, room), -1, np.int64),
        np.zeros(images, np.int64),
    )
    for i in range(images):
        boxes, scores, classes = candidates(rule, [array[i] for array in outputs], size)
        placement = Placement(size[1], size[0]) if placements is None else placements[i]
        boxes = in_source(boxes, placement)
        rows = suppress(boxes, classes, rule.iou_threshold, room)
        count = detected.counts[i] = len(rows)
        detected.boxes[i, :count], detected.scores[i, :count] = boxes[rows], scores[rows]
        detected.classes[i, :count] = classes[rows]
    return detected


def candidates(
    rule: Detect, arrays: Sequence[Array], size: tuple[int, int]
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.int64]]:
    """Return corners, score and class of one image's boxes whose best class reaches the threshold.

    Corners are in the model's pixels. The best box comes first. There are at most CANDIDATES_MAX boxes, and none with
    values that are not finite.
    """
    boxes, objectness, scores = _boxes_and_scores(rule, arrays)
    axis = 0 if rule.form == "channels_first" else 1
    with np.errstate(over="ignore", invalid="ignore"):
        best = scores.max(axis=axis)
        if rule.sigmoid:  # the sigmoid is monotonic, so the best class stays the same
            best = _sigmoid(best)
        if objectness is not None:
            best = best * (_sigmoid(objectness) if rule.sigmoid else objectness)
    best = np.asarray(best, np.float32)
    chosen = np.flatnonzero(best >= rule.score_threshold)
    if len(chosen) > CANDIDATES_MAX:
        chosen = np.sort(chosen[np.argsort(-best[chosen], kind="stable")[:CANDIDATES_MAX]])
    corners = _corners(rule, (boxes[:, chosen].T if axis == 0 else boxes[chosen]).astype(np.float32), size)
    classes = (scores[:, chosen] if axis == 0 else scores[chosen]).argmax(axis=axis).astype(np.int64)
    order = np.argsort(-best[chosen], kind="stable")
    finite = np.isfinite(np.column_stack((corners, best[chosen]))).all(axis=1)
    order = order[np.asarray(finite)[order]]
    return corners[order], best[chosen][order], classes[order]


def suppress(boxes: NDArray[np.float32], classes: NDArray[np.int64], iou_threshold: float, most: int) -> NDArray[Any]:
    """Return the indices of at most `most` boxes, best first.

    No returned box is covered by a better returned box of its class.
    """
    corners = boxes.astype(np.float64)
    if len(boxes) > TOGETHER_MAX:
        return _suppress_in_turn(corners, classes, iou_threshold, most)
    covered = _covered(corners[:, None], corners[None], iou_threshold) & (classes[:, None] == classes)
    gone = np.zeros(len(boxes), bool)
    kept: list[int] = []
    for i in range(len(boxes)):
        if not gone[i]:
            kept.append(i)
            if len(kept) == most:
                break
            gone |= covered[i]
    return np.asarray(kept, np.int64)


def _suppress_in_turn(corners: Array, classes: NDArray[np.int64], iou_threshold: float, most: int) -> NDArray[Any]:
    """Do the same as `suppress`, one kept box at a time: faster if there are many boxes and few are kept."""
    rest: NDArray[np.intp] = np.arange(len(corners))
    kept: list[int] = []
    while len(rest) and len(kept) < most:
        i, rest = int(rest[0]), rest[1:]
        kept.append(i)
        covered = _covered(corners[i], corners[rest], iou_threshold)
        rest = rest[~(covered & (classes[rest] == classes[i]))]
    return np.asarray(kept, np.int64)


def _covered(a: Array, b: Array, iou_threshold: float) -> NDArray[np.bool_]:
    """Return whether the overlap of boxes [..., 4] is above the threshold.

    The comparison multiplies instead of dividing, so boxes without area do not cover each other.
    """
    width = np.minimum(a[..., 2], b[..., 2]) - np.maximum(a[..., 0], b[..., 0])
    height = np.minimum(a[..., 3], b[..., 3]) - np.maximum(a[..., 1], b[..., 1])
    shared = np.maximum(width, 0) * np.maximum(height, 0)
    return np.asarray(shared > iou_threshold * (_area(a) + _area(b) - shared))


def _area(boxes: Array) -> Array:
    return np.asarray((boxes[..., 2] - boxes[..., 0]) * (boxes[..., 3] - boxes[..., 1]))


def in_source(boxes: NDArray[np.float32], placement: Placement) -> NDArray[np.float32]:
    """Map corners in the model's image to corners in the sent image, clipped to the sent image."""
    offset = np.array([placement.offset_x, placement.offset_y] * 2, np.float32)
    scale = np.array([placement.scale_x, placement.scale_y] * 2, np.float32)
    limit = np.array([placement.width, placement.height] * 2, np.float32)
    return np.asarray(((boxes - offset) / scale).clip(0, limit), np.float32)


def _boxes_and_scores(rule: Detect, arrays: Sequence[Array]) -> tuple[Array, Array | None, Array]:
    """Return views of the boxes, objectness and scores of one image."""
    first = rule.form == "channels_first"
    if rule.scores:
        boxes, scores = arrays
        if boxes.shape[0 if first else 1] != 4 or boxes.shape[1 if first else 0] != scores.shape[1 if first else 0]:
            raise EngineFailed(
                f"outputs {rule.boxes!r} and {rule.scores!r} are {list(boxes.shape)} and {list(scores.shape)} an image, "
                f"which is not the manifest's form {rule.form}"
            )
        return boxes, None, scores
    values = arrays[0] if first else arrays[0].T
    first_score = 5 if rule.objectness else 4
    if len(values) <= first_score:
        raise EngineFailed(
            f"output {rule.boxes!r} has {len(values)} values a box, but form {rule.form} needs more than {first_score}"
        )
    boxes, objectness, scores = values[:4], values[4] if rule.objectness else None, values[first_score:]
    return (boxes, objectness, scores) if first else (boxes.T, objectness, scores.T)


def _corners(rule: Detect, boxes: NDArray[np.float32], size: tuple[int, int]) -> NDArray[np.float32]:
    a, b, c, d = boxes.T
    with np.errstate(over="ignore", invalid="ignore"):
        if rule.box_format == "xyxy":
            columns = (a, b, c, d)
        elif rule.box_format == "yxyx":
            columns = (b, a, d, c)
        elif rule.box_format == "xywh":
            columns = (a, b, a + c, b + d)
        else:
            columns = (a - c / 2, b - d / 2, a + c / 2, b + d / 2)
        corners = np.stack(columns, axis=1)
        if rule.normalized:
            corners *= np.array([size[1], size[0]] * 2, np.float32)
    return corners


def _sigmoid(values: Array) -> NDArray[np.float32]:
    return np.asarray(1 / (1 + np.exp(-values.astype(np.float32))), np.float32)
