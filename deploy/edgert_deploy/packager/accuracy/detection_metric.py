"""Mean average precision of a detector, counted by pycocotools as COCO does: over IoU 0.5, 0.55 ... 0.95.

The hold-out's array `boxes` [samples, M, 5] holds the truth: class, left, top, right, bottom in pixels of what the
model is shown; rows of class -1 are padding. Answers are decoded by the rule that devices decode with, but every
box from a score of SCORE_MIN up counts: a precision-recall curve that ends at the device's threshold would not show
what lies below it.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from typing import Any

import numpy as np

from edgert.errors import CalibrationInvalid, ConfigInvalid
from edgert.processing.detect import Detections, detections
from edgert_deploy.packager.accuracy.metrics import Outputs, Question, Rows

SCORE_MIN = 0.001
BOXES_MAX = 100  # an image, COCO's own limit


class MeanAveragePrecision:
    name = "map"

    def __init__(self, question: Question) -> None:
        if question.detect is None or question.image_size is None:
            raise ConfigInvalid("--metric map needs to know what the outputs mean: give --postprocess yolo or a .toml")
        if question.holdout.boxes is None:
            raise CalibrationInvalid(
                "--metric map needs an array `boxes` [samples, M, 5] in the hold-out: class, left, top, right, bottom "
                "in pixels of what the model is shown, class -1 for padding"
            )
        self._truth = question.holdout.boxes
        self._rule = replace(question.detect, score_threshold=SCORE_MIN, detections_max=BOXES_MAX)
        self._size, self._names = question.image_size, question.class_names
        self._at = [[spec.name for spec in question.specs].index(name) for name in self._rule.outputs]
        _coco()  # said before anything is built

    def score(self, answers: Outputs, rows: Rows, of_class: str = "") -> float:
        found = detections(self._rule, [answers[i][rows] for i in self._at], self._size, None)
        truth = self._truth[rows]
        if of_class:  # other classes' boxes become padding, in the truth as in what was found
            truth = np.where(self._called(truth[..., 0], of_class)[..., None], truth, -1.0)
        return average_precision(truth, found)

    def classes(self) -> dict[str, Rows]:
        """The samples that show an object of each class."""
        shown = np.unique(self._truth[..., 0]).astype(int)
        names = [self._name(value) for value in shown if value >= 0]
        return {name: np.flatnonzero(self._called(self._truth[..., 0], name).any(axis=1)) for name in names}

    def _name(self, value: int) -> str:
        return self._names[value] if value < len(self._names) else str(value)

    def _called(self, values: Any, name: str) -> Any:
        return values == (self._names.index(name) if name in self._names else int(name))


def average_precision(truth: Any, found: Detections) -> float:
    """COCO's AP over all classes that `truth` [N, M, 5] shows; 0 where it shows none."""
    coco, evaluation = _coco()
    annotations = [
        _annotation(i, row[0], row[1:]) for i, rows in enumerate(truth) for row in rows.astype(float) if row[0] >= 0
    ]
    if not annotations:
        return 0.0
    for number, annotation in enumerate(annotations, start=1):
        annotation["id"] = number
    results = [
        {**_annotation(i, found.classes[i, j], found.boxes[i, j]), "score": float(found.scores[i, j])}
        for i in range(len(truth))
        for j in range(int(found.counts[i]))
    ]
    if not results:
        return 0.0
    shown = coco()
    classes = sorted({a["category_id"] for a in annotations})
    shown.dataset = {
        "images": [{"id": i} for i in range(len(truth))],
        "annotations": annotations,
        "categories": [{"id": c} for c in classes],
    }
    with contextlib.redirect_stdout(io.StringIO()):  # it prints a table of its own
        shown.createIndex()
        answered = coco()
        answered.dataset = {**shown.dataset, "annotations": [{**r, "id": i + 1} for i, r in enumerate(results)]}
        answered.createIndex()
        judged = evaluation(shown, answered, "bbox")
        judged.evaluate()
        judged.accumulate()
    precision = judged.eval["precision"][:, :, :, 0, -1]  # thresholds, recalls, classes; any area, BOXES_MAX
    known = precision[precision > -1]
    return float(known.mean()) if known.size else 0.0


def _annotation(image: int, category: float, corners: Any) -> dict[str, Any]:
    left, top, right, bottom = (float(v) for v in corners)
    width, height = max(0.0, right - left), max(0.0, bottom - top)
    return {
        "image_id": image,
        "category_id": int(category),
        "bbox": [left, top, width, height],
        "area": width * height,
        "iscrowd": 0,
    }


def _coco() -> tuple[Any, Any]:
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError as error:
        raise ConfigInvalid(f"--metric map needs pycocotools ({error}): pip install 'edgert[detection]'") from error
    return COCO, COCOeval
