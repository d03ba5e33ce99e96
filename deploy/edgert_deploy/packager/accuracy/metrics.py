"""What the gate counts: a number for the answers to some of the hold-out, higher is better.

    top1, top5   the share of samples whose class is the first, or among the first five; needs labels
    map          mean average precision over IoU 0.5 to 0.95 (COCO's), of a detector; needs boxes
    top1_agreement   how often artifact and FP32 put the same class first; needs class scores, no labels
    cosine       the mean over samples of the outputs' cosine to FP32's (for whole-number outputs the share of
                 equal elements), of the output that fares worst; needs nothing
    module:function   the user's own: `function(outputs, inputs, labels) -> float`, see `user_metric`

An output [N, C] may as well be an embedding or a regression, whose largest element means nothing. It counts as
class scores where the user names its classes, or where FP32's rows are probabilities (none below 0, their sum 1).
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.rules import Detect
from edgert.errors import CalibrationInvalid, ConfigInvalid
from edgert.tensors import TensorSpec
from edgert_deploy.packager.samples.samples import CalibrationSet

Outputs = list[NDArray[Any]]
Rows = NDArray[np.intp]
NAMES = ("auto", "top1", "top5", "map", "cosine")
USERS_OWN = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
PROBABILITY_TOLERANCE = 1e-3
SQNR_DB_MAX = 200.0  # of answers that are equal


class Metric(Protocol):
    """`name` is what the receipt calls it."""

    name: str

    def score(self, answers: Outputs, rows: Rows, of_class: str = "") -> float:
        """The number for the samples `rows`. `of_class`: only what is of this class counts, where a sample has several."""
        ...

    def classes(self) -> dict[str, Rows]:
        """The samples of each class, by its name; empty where the metric knows no classes."""
        ...


@dataclass(frozen=True)
class Question:
    """What a metric may look at: the contract, FP32's answers, the hold-out, and what the user said of the outputs."""

    specs: tuple[TensorSpec, ...]
    reference: Outputs
    holdout: CalibrationSet
    class_names: tuple[str, ...] = ()
    classes_named: bool = False
    detect: Detect | None = None
    image_size: tuple[int, int] | None = None  # height, width of what a detector is shown


def metric_for(name: str, question: Question) -> Metric:
    """The metric called `name`; "auto" is the first that fits: map, top1, top1_agreement, cosine.

    Raises CalibrationInvalid where the hold-out or the outputs do not hold what it needs, ConfigInvalid for a
    name that is none.
    """
    labels, holdout = question.holdout.labels, question.holdout
    if USERS_OWN.fullmatch(name):
        return UserMetric(name, user_metric(name), question)
    if name not in NAMES:
        raise ConfigInvalid(f"--metric {name[:80]!r}: give one of {', '.join(NAMES)}, or your own as module:function")
    if name == "map" or (name == "auto" and question.detect is not None and holdout.boxes is not None):
        from edgert_deploy.packager.accuracy.detection_metric import MeanAveragePrecision

        return MeanAveragePrecision(question)
    if name == "top5" or (labels is not None and name in ("auto", "top1")):
        if labels is None:
            raise CalibrationInvalid("--metric top5 needs `labels` in the hold-out, one class a sample")
        return TopK(question, labels, 5 if name == "top5" else 1)
    if name == "top1" or (name == "auto" and _are_class_scores(question)):
        return Agreement(question)
    return Cosine(question)


def scores_index(specs: tuple[TensorSpec, ...], labels: NDArray[Any]) -> int:
    """Which output holds the class scores that `labels` are about: the first [N, C]."""
    for i, spec in enumerate(specs):
        if not _holds_scores(spec):
            continue
        if labels.size and int(labels.max()) >= spec.shape[1]:
            raise CalibrationInvalid(
                f"a label is {int(labels.max())}, output {spec.name!r} has classes 0 to {spec.shape[1] - 1}; correct the labels"
            )
        return i
    raise CalibrationInvalid(
        "no output of the model holds class scores [N, classes], which top-1 needs (as do labels in the hold-out); "
        "compare the answers themselves with FP32: --metric cosine"
    )


class TopK:
    def __init__(self, question: Question, labels: NDArray[Any], k: int) -> None:
        self.name, self._k, self._labels = f"top{k}", k, labels
        self._index, self._names = scores_index(question.specs, labels), question.class_names

    def score(self, answers: Outputs, rows: Rows, of_class: str = "") -> float:
        scores, labels = answers[self._index][rows], self._labels[rows]
        if self._k == 1:
            right = scores.argmax(axis=1) == labels
        else:
            # How many classes come before the right one; a tie counts against it, as argmax's may.
            own = np.take_along_axis(scores, labels[:, None], axis=1)
            right = (scores >= own).sum(axis=1) <= self._k
        # A row with NaN has no winner: argmax would name the NaN.
        return float((right & np.isfinite(scores).all(axis=1)).mean())

    def classes(self) -> dict[str, Rows]:
        return by_value(self._labels, self._names)


class Agreement:
    name = "top1_agreement"

    def __init__(self, question: Question) -> None:
        self._index, self._names = scores_index(question.specs, np.zeros(0, np.int64)), question.class_names
        self._winners = question.reference[self._index].argmax(axis=1)

    def score(self, answers: Outputs, rows: Rows, of_class: str = "") -> float:
        scores = answers[self._index][rows]
        right = (scores.argmax(axis=1) == self._winners[rows]) & np.isfinite(scores).all(axis=1)
        return float(right.mean())

    def classes(self) -> dict[str, Rows]:
        """By the class that FP32 put first."""
        return by_value(self._winners, self._names)


class Cosine:
    name = "cosine"

    def __init__(self, question: Question) -> None:
        self._reference = question.reference

    def score(self, answers: Outputs, rows: Rows, of_class: str = "") -> float:
        return min(_likeness(want[rows], got[rows]) for want, got in zip(self._reference, answers, strict=True))

    def classes(self) -> dict[str, Rows]:
        return {}


class UserMetric:
    def __init__(self, name: str, function: Callable[..., Any], question: Question) -> None:
        self.name, self._function, self._question = name, function, question

    def score(self, answers: Outputs, rows: Rows, of_class: str = "") -> float:
        holdout = self._question.holdout
        outputs = {spec.name: array[rows] for spec, array in zip(self._question.specs, answers, strict=True)}
        inputs = {name: array[rows] for name, array in holdout.inputs.items()}
        labels = None if holdout.labels is None else holdout.labels[rows]
        try:
            value = float(self._function(outputs, inputs, labels))
        except Exception as error:  # whatever the user's code raises
            raise ConfigInvalid(f"metric {self.name} failed: {type(error).__name__}: {str(error)[:300]}") from error
        if not np.isfinite(value):
            raise ConfigInvalid(f"metric {self.name} gave {value}; it must give a finite number, higher being better")
        return value

    def classes(self) -> dict[str, Rows]:
        labels = self._question.holdout.labels
        return {} if labels is None else by_value(labels, self._question.class_names)


def user_metric(name: str) -> Callable[..., Any]:
    """The function that `module:function` names, looked for in the working folder first.

    It is called as `function(outputs, inputs, labels)`, the first two {name: array} with samples along axis 0,
    `labels` one class a sample or None, and gives one finite number, higher being better. Raises ConfigInvalid.
    """
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        function = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # an import runs the user's code
        raise ConfigInvalid(
            f"--metric {name}: cannot be imported: {type(error).__name__}: {str(error)[:300]}"
        ) from error
    finally:
        sys.path.remove(here)
    if not callable(function):
        raise ConfigInvalid(f"--metric {name}: {attribute} is no function")
    return function  # type: ignore[no-any-return]  # checked just above


def by_value(values: NDArray[Any], names: Sequence[str] = ()) -> dict[str, Rows]:
    """The rows at which each of `values` stands, by its name (or itself, where `names` has none for it)."""
    return {
        str(names[int(value)]) if names and int(value) < len(names) else str(value): np.flatnonzero(values == value)
        for value in np.unique(values)
    }


def sqnr_db(reference: Outputs, answers: Outputs) -> float:
    """Signal to quantisation noise in decibels, 10 log10(sum y^2 / sum (y - y')^2), of the float output that fares worst."""
    worst = SQNR_DB_MAX
    for want, got in zip(reference, answers, strict=True):
        if want.dtype.kind != "f":
            continue
        signal = float(np.square(want, dtype=np.float64).sum())
        noise = float(np.square(want.astype(np.float64) - got).sum())
        if not np.isfinite(noise):
            return -SQNR_DB_MAX
        if noise > 0:
            worst = min(worst, 10 * float(np.log10(max(signal, 1e-300) / noise)))
    return max(worst, -SQNR_DB_MAX)


def chance(labels: NDArray[Any], classes: int) -> float:
    """What always answering the most frequent class would reach."""
    counts = np.bincount(labels)
    return 1.0 / classes if np.count_nonzero(counts) < 2 else max(1.0 / classes, float(counts.max()) / len(labels))


def _holds_scores(spec: TensorSpec) -> bool:
    return len(spec.shape) == 2 and spec.shape[1] >= 2 and spec.dtype.kind == "f"


def _are_class_scores(question: Question) -> bool:
    if len(question.specs) != 1 or not _holds_scores(question.specs[0]):
        return False
    rows = question.reference[0]
    sums_to_one = np.allclose(rows.sum(axis=1), 1.0, rtol=0.0, atol=PROBABILITY_TOLERANCE)
    return question.classes_named or (sums_to_one and float(rows.min(initial=0.0)) >= 0.0)


def _likeness(want: NDArray[Any], got: NDArray[Any]) -> float:
    if want.dtype.kind != "f":
        return float((want == got).mean())
    a, b = (array.reshape(len(array), -1).astype(np.float64) for array in (want, got))
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        cosines = (a * b).sum(axis=1) / lengths
    # Two zero vectors are alike; a zero beside another vector is not, and neither is NaN.
    cosines = np.where(lengths == 0, (a == b).all(axis=1).astype(np.float64), cosines)
    return float(np.nan_to_num(cosines, nan=0.0).mean())
