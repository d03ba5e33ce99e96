"""COCO's mean average precision of a detector, by pycocotools, over IoU 0.5, 0.55 ... 0.95.

The hold-out's array `boxes` [samples, M, 5] holds the true boxes: class, left, top, right, bottom, in pixels of the
model's input. Rows of class -1 are padding. The answers are decoded by the rule that devices use, but with the
threshold SCORE_MIN. With the device's threshold, the precision-recall curve would end too early.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import replace
from typing import Any

import numpy as np

from edgert.errors import CalibrationInvalid, ConfigInvalid
from edgert.processing.answers.detect import Detections, detections
from edgert_deploy.packager.accuracy.reference import Metric, Outputs, Reference, Rows

SCORE_MIN = 0.001
BOXES_MAX = 100  # per image, as in COCO


class MeanAveragePrecision(Metric):
    name = "map"

    def __init__(self, reference: Reference) -> None:
        if reference.detect is None or reference.image_size is None:
            raise ConfigInvalid(
                "--metric map needs the meaning of the outputs: give --postprocess yolo or --postprocess FILE.toml"
            )
        if reference.holdout.boxes is None:
            raise CalibrationInvalid(
                "--metric map needs an array `boxes` [samples, M, 5] in the hold-out: class, left, top, right, bottom "
                "in pixels of the model's input, class -1 for padding"
            )
        self._truth = reference.holdout.boxes
        self._rule = replace(reference.detect, score_threshold=SCORE_MIN, detections_max=BOXES_MAX)
        self._size = reference.image_size
        self._names = reference.class_names
        self._at = [[spec.name for spec in reference.specs].index(name) for name in self._rule.outputs]
        self.judged = tuple(self._at)
        _coco()  # if the package is missing, this raises ConfigInvalid before the first build

    def score(self, answers: Outputs, rows: Rows, of_class: str = "") -> float:
        detected = detections(self._rule, [answers[i][rows] for i in self._at], self._size, None)
        truth = self._truth[rows]
        if of_class:  # the boxes of other classes become padding
            truth = np.where(self._equals_name(truth[..., 0], of_class)[..., None], truth, -1.0)
        return average_precision(truth, detected)

    def classes(self) -> dict[str, Rows]:
        """Return, for each class, the samples that show an object of the class."""
        shown = np.unique(self._truth[..., 0]).astype(int)
        names = [self._names[n] if n < len(self._names) else str(n) for n in shown if n >= 0]
        return {name: np.flatnonzero(self._equals_name(self._truth[..., 0], name).any(axis=1)) for name in names}

    def _equals_name(self, values: Any, name: str) -> Any:
        return values == (self._names.index(name) if name in self._names else int(name))


def average_precision(truth: Any, detected: Detections) -> float:
    """Return COCO's AP over all classes in `truth` [N, M, 5]. Return 0 without true boxes or answers."""
    coco, evaluation = _coco()
    boxes = [(i, row) for i, rows in enumerate(truth) for row in rows.astype(float) if row[0] >= 0]
    answers = [
        {**_annotation(i, detected.classes[i, j], detected.boxes[i, j]), "score": float(detected.scores[i, j])}
        for i in range(len(truth))
        for j in range(int(detected.counts[i]))
    ]
    if not boxes or not answers:
        return 0.0

    def indexed(annotations: list[dict[str, Any]]) -> Any:
        dataset = coco()
        dataset.dataset = {
            "images": [{"id": i} for i in range(len(truth))],
            "annotations": [{**annotation, "id": number} for number, annotation in enumerate(annotations, start=1)],
            "categories": [{"id": c} for c in sorted({int(row[0]) for _, row in boxes})],
        }
        dataset.createIndex()
        return dataset

    with contextlib.redirect_stdout(io.StringIO()):  # pycocotools prints a table
        judged = evaluation(indexed([_annotation(i, row[0], row[1:]) for i, row in boxes]), indexed(answers), "bbox")
        judged.evaluate()
        judged.accumulate()
    precision = judged.eval["precision"][:, :, :, 0, -1]  # IoU, recall, class; boxes of any area; BOXES_MAX boxes
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
