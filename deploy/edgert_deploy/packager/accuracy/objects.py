"""The agreement of objects with FP32's: boxes with masks or key points, and boxes after suppression.

In YOLO's outputs, the extras of a box follow its scores. They are a factor for each of the model's masks, or key points
as x, y and visibility, or an angle in radians. The sum of the masks, each times its factor, is above 0 where the object
is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgert.processing.answers.detect import suppress
from edgert_deploy.packager.accuracy.fp32_agreement import (
    ANCHOR_TOLERANCE,
    IOU_MIN,
    SCORE_MIN,
    Array,
    box_ious,
    matched,
    oriented_ious,
)

OVERLAP_MAX = 0.45  # the overlap (IoU) above which a box suppresses a worse box of its class
CANDIDATES_MAX = 1000  # suppression compares at most this number of an image's best boxes
OBJECTS_MAX = 100  # an image has at most this number of objects, the best ones
SUPPRESSED_FORMS = ("suppressed", "centres", "oriented")  # the forms of `Layout` whose boxes the model suppresses
VISIBLE_MIN = 0.5  # a key point that FP32 sees with less confidence is not compared


@dataclass(frozen=True)
class Layout:
    """The layout of the objects in an output.

    Attributes:
        boxes: The name of the output.
        form: "channels_first" if the output is `[N, 4 + C + extras, A]`, and "anchors_first" if it is `[N, A, 4 + C +
            extras]`. "suppressed" if the model suppresses boxes itself: `[N, K, 6 + extras]`, with two corners, a score
            and the number of a class. "centres" or "oriented" if such a box has a centre and two sides instead of the
            corners. An oriented box has one extra, its angle.
        objectness: Whether one more value between box and scores multiplies every score of the box.
        extras: The number of values after the scores of each box.
        image: The height and width of the model's image, in which boxes are pixels.
    """

    boxes: str
    form: str
    objectness: bool
    extras: int
    image: tuple[int, int]


class _Objects(NamedTuple):
    """The objects of one image: corners `[n, 4]`, classes `[n]` and extras `[n, E]`.

    Oriented boxes `[n, 5]` have a centre, two sides and an angle instead of corners, and no extras.
    """

    corners: NDArray[np.float64]
    classes: NDArray[np.int64]
    extras: NDArray[np.float64]


def object_agreement(layout: Layout, boxes: Array, true_boxes: Array, maps: tuple[Array, Array] | None) -> float:
    """Return the F1 score of objects against FP32's objects.

    A hit has the class of one of FP32's objects, and an IoU of at least 0.5 with its box. It also has an IoU of at
    least 0.5 with its mask, or all visible key points within a share of the longer side of its box. `maps` are the
    artifact's and FP32's masks `[N, M, h, w]` or `[N, h, w, M]`; None for key points or no extras.
    """
    hits = answered = expected = 0
    for i in range(len(true_boxes)):
        got, want = _objects(layout, boxes[i]), _objects(layout, true_boxes[i])
        same = got.classes[:, None] == want.classes
        if layout.form == "oriented":
            ious = oriented_ious(got.corners[:, None], want.corners[None])
        else:
            ious = box_ious(got.corners, want.corners)
            if maps is None:
                same &= _points_alike(got, want)
            else:
                one, other = (_masks(layout, each, of[i]) for each, of in zip((got, want), maps, strict=True))
                same &= _same_masks(one, other)
        hits += matched(np.where(same, ious, 0.0))
        answered, expected = answered + len(got.classes), expected + len(want.classes)
    if answered + expected == 0:  # values of NaN are no answers
        return float(all(np.isfinite(array).all() for array in (boxes, *(maps or ())[:1])))
    return 2 * hits / (answered + expected)


def finds_nothing(layout: Layout, boxes: Array) -> bool:
    """Return whether no image has an object."""
    return not any(len(_objects(layout, each).classes) for each in boxes)


def _objects(layout: Layout, boxes: Array) -> _Objects:
    values = np.nan_to_num(boxes if layout.form == "channels_first" else boxes.T).astype(np.float64)
    values, extras = values[: len(values) - layout.extras], values[len(values) - layout.extras :]
    if layout.form in SUPPRESSED_FORMS:
        found = np.flatnonzero(values[4] >= SCORE_MIN)
        classes = values[5, found].astype(np.int64)
        if layout.form == "oriented":
            return _Objects(np.concatenate([values[:4, found], extras[:, found]]).T, classes, np.empty((len(found), 0)))
        boxes = values[:4, found].T
        return _Objects(_corners(boxes) if layout.form == "centres" else boxes, classes, extras[:, found].T)
    scores = values[5:] * values[4] if layout.objectness else values[4:]
    best = scores.max(axis=0)
    chosen = np.flatnonzero(best >= SCORE_MIN)
    chosen = chosen[np.argsort(-best[chosen], kind="stable")][:CANDIDATES_MAX]
    corners, classes = _corners(values[:4, chosen].T), scores[:, chosen].argmax(axis=0)
    kept = suppress(corners.astype(np.float32), classes, OVERLAP_MAX, OBJECTS_MAX)
    return _Objects(corners[kept], classes[kept], extras[:, chosen[kept]].T)


def _corners(boxes: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the corners `[n, 4]` of boxes `[n, 4]` with a centre and two sides."""
    centres, halves = boxes[:, :2], boxes[:, 2:] / 2
    return np.concatenate([centres - halves, centres + halves], axis=1)


def _masks(layout: Layout, objects: _Objects, maps: Array) -> NDArray[np.bool_]:
    """Return the mask `[n, h * w]` of each object, within its box."""
    if maps.shape[0] != layout.extras:
        maps = np.moveaxis(maps, -1, 0)
    height, width = maps.shape[1:]
    scale = np.array([width / layout.image[1], height / layout.image[0]] * 2)
    left, top, right, bottom = (objects.corners * scale).T[:, :, None, None]
    x, y = np.arange(width)[None, None, :] + 0.5, np.arange(height)[None, :, None] + 0.5
    inside = (x >= left) & (x <= right) & (y >= top) & (y <= bottom)
    sums = np.nan_to_num(objects.extras @ maps.reshape(layout.extras, -1).astype(np.float64))
    return np.asarray((sums > 0) & inside.reshape(sums.shape))


def _same_masks(masks: NDArray[np.bool_], true: NDArray[np.bool_]) -> NDArray[np.bool_]:
    both = masks.astype(np.float32) @ true.astype(np.float32).T
    union = masks.sum(axis=1)[:, None] + true.sum(axis=1) - both
    return np.asarray(both >= IOU_MIN * union)


def _points_alike(got: _Objects, want: _Objects) -> NDArray[np.bool_]:
    points, true = (each.extras.reshape(len(each.extras), each.extras.shape[1] // 3, 3) for each in (got, want))
    far = np.abs(points[:, None, :, :2] - true[None, :, :, :2]).max(axis=-1)
    side = (want.corners[:, 2:] - want.corners[:, :2]).max(axis=1)[:, None]
    near = (far <= ANCHOR_TOLERANCE * side) | (true[..., 2] < VISIBLE_MIN)
    return np.asarray(near.all(axis=-1))
