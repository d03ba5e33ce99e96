"""Score answers by the task: each function returns a figure of 0 to 1, higher is better.

`answers` and `exact` map output names to arrays `[N, ...]`; `exact` holds the FP32 source's own answers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
IOU_MIN = 0.5
Boxes = tuple[Array, Array, Array]  # corners [n, 4], scores [n], classes [n]


def labels_agree(answers: Array, exact: Array) -> float:
    """Return the share of samples whose best class is FP32's."""
    return float((answers.argmax(-1) == exact.argmax(-1)).mean())


def decisions_agree(answers: Array, exact: Array, threshold: float = 0.5) -> float:
    """Return the share of probabilities on the same side of `threshold` as FP32's."""
    return float(((answers > threshold) == (exact > threshold)).mean())


def ctc_texts(logits: Array, blank: int = 0) -> list[tuple[int, ...]]:
    """Decode `[N, T, C]` greedily: repeats merge, blanks go."""
    return [
        tuple(int(c) for i, c in enumerate(row) if c != blank and (i == 0 or row[i - 1] != c))
        for row in logits.argmax(-1)
    ]


def texts_agree(answers: Array, exact: Array) -> float:
    """Return the share of lines that read exactly as FP32 reads them."""
    pairs = list(zip(ctc_texts(answers), ctc_texts(exact), strict=True))
    return sum(one == other for one, other in pairs) / len(pairs)


def maps_agree(answers: Array, exact: Array, threshold: float = 0.3) -> float:
    """Return the mean IoU of the maps above `threshold`; two empty maps agree."""
    found, wanted = (array.reshape(len(array), -1) > threshold for array in (answers, exact))
    union = (found | wanted).sum(1)
    return float(np.where(union == 0, 1.0, (found & wanted).sum(1) / np.maximum(union, 1)).mean())


def points_agree(answers: Array, exact: Array, within: float) -> float:
    """Return the share of coordinates that differ by less than `within`."""
    return float((np.abs(answers - exact) < within).mean())


def pitches_agree(answers: list[Array], exact: list[Array], cents: float = 50.0) -> float:
    """Return the share of frames without a pitch in both, or with pitches that differ by less than `cents`.

    The outputs are the pitches in Hz and how sure the model is that there is one.
    """
    (pitch, sure), (want, want_sure) = answers, exact
    voiced, wanted = sure > 0.5, want_sure > 0.5
    near = np.abs(1200 * np.log2(np.maximum(pitch, 1.0) / np.maximum(want, 1.0))) < cents
    return float(np.where(wanted, voiced & near, ~voiced).mean())


def neighbours_agree(answers: Array, exact: Array) -> float:
    """Return the share of embeddings `[N, D]` whose nearest other is FP32's, or as near within 0.01."""
    alike = _alike(exact)
    chosen = _alike(answers).argmax(1)
    return float((alike[np.arange(len(alike)), chosen] >= alike.max(1) - 0.01).mean())


def boxes_agree(answers: list[Boxes], exact: list[Boxes]) -> float:
    """Return the F1 score of boxes against FP32's: same class, IoU of at least 0.5, each counted once."""
    hits = found = wanted = 0
    for (boxes, scores, classes), (true, _, true_classes) in zip(answers, exact, strict=True):
        free = set(range(len(true)))
        for i in np.argsort(-scores):
            same = [j for j in free if true_classes[j] == classes[i] and iou(boxes[i], true[j]) >= IOU_MIN]
            if same:
                free.remove(max(same, key=lambda j: iou(boxes[i], true[j])))
                hits += 1
        found, wanted = found + len(boxes), wanted + len(true)
    return 2 * hits / (found + wanted) if found + wanted else 1.0


def suppress(boxes: Array, scores: Array, classes: Array, score_min: float, iou_max: float = 0.45) -> Boxes:
    """Keep boxes above `score_min`, the best of those that overlap by more than `iou_max`."""
    keep: list[int] = []
    for i in np.argsort(-scores):
        if scores[i] < score_min:
            break
        if all(classes[i] != classes[j] or iou(boxes[i], boxes[j]) <= iou_max for j in keep):
            keep.append(int(i))
    return boxes[keep], scores[keep], classes[keep]


def iou(one: Array, other: Array) -> float:
    """Return the intersection over union of two boxes given by corners."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    if width <= 0 or height <= 0:
        return 0.0
    both = width * height
    areas = (one[2] - one[0]) * (one[3] - one[1]) + (other[2] - other[0]) * (other[3] - other[1])
    return float(both / (areas - both))


def corners(centres: Array) -> Array:
    """Turn centre x, y, width, height into corners."""
    half = centres[..., 2:4] / 2
    return np.concatenate([centres[..., :2] - half, centres[..., :2] + half], -1)


def _alike(vectors: Array) -> Array:
    unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    alike = unit @ unit.T
    np.fill_diagonal(alike, -2)
    return np.asarray(alike)
