"""The metrics of the accuracy gate: each gives one number for the answers to hold-out samples.

A higher number is better. docs/accuracy-reference.md lists the metrics with their requirements. "auto" may choose
`top1_agreement`: the share of samples for which the artifact and FP32 give the highest score to the same class.

An output [N, C] may hold class scores, an embedding or a regression. The largest element has a meaning only in class
scores. An output is treated as class scores if the user names its classes, or if FP32's rows are probabilities (no
value below 0, sum 1) or their logarithms.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.errors import CalibrationInvalid, ConfigInvalid
from edgert.printable import in_short
from edgert_deploy.packager.accuracy.decisions import judgements, rank_classes
from edgert_deploy.packager.accuracy.judgement import Judgement
from edgert_deploy.packager.accuracy.mean_average_precision import MeanAveragePrecision
from edgert_deploy.packager.accuracy.reference import Metric, OtherMetric, Outputs, Reference, Rows
from edgert_deploy.packager.accuracy.text_metrics import ErrorRate
from edgert_deploy.packager.accuracy.window_metrics import AnswerF1
from edgert_deploy.packager.settings import METRICS
from edgert_deploy.packager.user_function import is_function, plain_name, user_function

SQNR_DB_MAX = 200.0  # the value for equal answers


def metric_for(name: str, reference: Reference) -> Metric:
    """Return the metric `name`. "auto" is the first that fits: map, cer, top1, top1_agreement, decisions.

    With "auto", the gate also judges the float outputs that the metric does not read (`other_outputs`). Raises
    ConfigInvalid if the name is unknown or an option that the metric needs is missing. Raises CalibrationInvalid if the
    hold-out or the outputs do not meet the requirements of the metric.
    """
    metric = _metric(name, reference)
    if name == "auto" and metric.judged:
        metric.other_outputs = _other_outputs(reference, metric.judged)
    return metric


def _metric(name: str, reference: Reference) -> Metric:
    labels, holdout = reference.holdout.labels, reference.holdout
    if is_function(name):
        return UserMetric(plain_name(name), user_metric(name), reference)
    if name not in METRICS:
        raise ConfigInvalid(f"unknown metric {name[:80]!r}: give {', '.join(METRICS)}, or your own as module:function")
    if name == "map" or (name == "auto" and reference.detect is not None and holdout.boxes is not None):
        return MeanAveragePrecision(reference)
    if name in ("wer", "cer") or (name == "auto" and reference.ctc is not None and holdout.transcripts is not None):
        return ErrorRate(reference, "words" if name == "wer" else "characters")
    if name in ("window_f1", "event_f1"):
        return AnswerF1(reference, name == "event_f1")
    if name == "top5" or (
        labels is not None and (name == "top1" or (name == "auto" and not no_better_than_chance(reference)))
    ):
        if labels is None:
            raise CalibrationInvalid("--metric top5 needs `labels` in the hold-out, one class for each sample")
        return TopK(reference, labels, 5 if name == "top5" else 1)
    if name == "top1" or (name == "auto" and _has_class_scores(reference)):
        return Top1Agreement(reference)
    return Cosine(reference) if name == "cosine" else Decisions(reference)


class _Ranking(Metric):
    """The share of samples whose class in `labels` has one of the `k` highest scores."""

    counts_samples = True

    def __init__(self, reference: Reference, labels: NDArray[Any], k: int = 1) -> None:
        self._reference = reference
        self._labels = labels
        self._k = k
        self._index = scores_index(reference, labels)

    def score(self, answers: Outputs, rows: Rows, of_class: str = "") -> float:
        return float(self._right(answers, rows).mean())

    def classes(self) -> dict[str, Rows]:
        return by_value(self._labels, self._reference.class_names)

    def drops(self, answers: Outputs) -> NDArray[np.float64]:
        rows = self._reference.all_rows
        fp32, artifact = (
            self._right(outputs, rows).astype(np.float64) for outputs in (self._reference.answers, answers)
        )
        return fp32 - artifact

    def _right(self, answers: Outputs, rows: Rows) -> NDArray[np.bool_]:
        scores, labels = answers[self._index][rows], self._labels[rows]
        if self._k == 1:
            right = scores.argmax(axis=1) == labels
        else:
            # Count the classes whose score is at least the score of the right class, and the right class itself. A tie
            # counts against the right class, because argmax may choose another class of the tie.
            own = np.take_along_axis(scores, labels[:, None], axis=1)
            right = (scores >= own).sum(axis=1) <= self._k
        return _finite(right, scores)


class TopK(_Ranking):
    """The share of samples whose label has one of the `k` highest scores."""

    def __init__(self, reference: Reference, labels: NDArray[Any], k: int) -> None:
        super().__init__(reference, labels, k)
        self.name = f"top{k}"
        self.judged = (self._index,)
        self.checks_labels = k == 1

    def others(self, answers: Outputs) -> list[OtherMetric]:
        reference, rows = self._reference, self._reference.all_rows
        other = TopK(reference, self._labels, 1 if self._k == 5 else 5)
        agreement = Top1Agreement(reference)
        return [
            OtherMetric(other.name, other.score(reference.answers, rows), other.score(answers, rows)),
            OtherMetric(agreement.name, None, agreement.score(answers, rows)),
        ]


class Top1Agreement(_Ranking):
    """The share of samples for which the artifact and FP32 give the highest score to the same class."""

    name = "top1_agreement"
    is_agreement = True
    checks_labels = True

    def __init__(self, reference: Reference) -> None:
        super().__init__(reference, reference.answers[scores_index(reference)].argmax(axis=1))


class Decisions(Metric):
    """The decisions that apps read from each output. The score is the worst output's score.

    The name lists the judgements, such as `boxes+values`.
    """

    is_agreement = True
    checks_labels = True

    def __init__(self, reference: Reference) -> None:
        self.judgements = judgements(reference)
        self.name = "+".join(dict.fromkeys(judgement.name for judgement in self.judgements))
        self.counts_samples = any(judgement.share is not None for judgement in self.judgements)
        self.is_similarity = all(judgement.name == "values" for judgement in self.judgements)
        self.without_objects = tuple(_name(each) for each in self.judgements if each.finds_nothing)
        self._reference = reference

    def score(self, answers: Outputs, rows: Rows, of_class: str = "") -> float:
        return min(score for _, score in self.parts(answers, rows))

    def drops(self, answers: Outputs) -> NDArray[np.float64] | None:
        """Return the drop in each sample, by the judgement with the lowest score."""
        if not self.counts_samples:
            return None
        reference = self._reference.answers
        share = min(self.judgements, key=lambda judgement: judgement.score(answers, reference)).share
        return None if share is None else 1.0 - share(answers, reference)

    def parts(self, answers: Outputs, rows: Rows) -> list[tuple[str, float]]:
        """Return the name and score of each judgement. A name looks like `boxes of output0`."""
        got, want = ([array[rows] for array in arrays] for arrays in (answers, self._reference.answers))
        return [(_name(judgement), judgement.score(got, want)) for judgement in self.judgements]

    def others(self, answers: Outputs) -> list[OtherMetric]:
        if len(self.judgements) == 1:
            return []
        parts = self.parts(answers, self._reference.all_rows)
        return [OtherMetric(name, 1.0, score, of_output=True) for name, score in parts]


def _name(judgement: Judgement) -> str:
    return f"{judgement.name} of {', '.join(judgement.outputs)}"


class _OtherOutputs(Decisions):
    """The decisions that apps read from the outputs at the positions `numbers`."""

    def __init__(self, reference: Reference, numbers: list[int]) -> None:
        specs, answers = tuple(reference.specs[i] for i in numbers), [reference.answers[i] for i in numbers]
        super().__init__(replace(reference, specs=specs, answers=answers, classify=None, detect=None, ctc=None))
        self._numbers = numbers

    def parts(self, answers: Outputs, rows: Rows) -> list[tuple[str, float]]:
        return super().parts([answers[i] for i in self._numbers], rows)


class Cosine(Metric):
    """The mean cosine between the answers of the artifact and of FP32, in the worst output."""

    name = "cosine"
    is_agreement = True

    def __init__(self, reference: Reference) -> None:
        self._reference = reference.answers

    def score(self, answers: Outputs, rows: Rows, of_class: str = "") -> float:
        return min(_similarity(want[rows], got[rows]) for want, got in zip(self._reference, answers, strict=True))


class UserMetric(Metric):
    """The user's own function. If the hold-out has labels, the score of each class is computed, too."""

    has_own_unit = True

    def __init__(self, name: str, function: Callable[..., Any], reference: Reference) -> None:
        self.name = name
        self._function = function
        self._reference = reference

    def score(self, answers: Outputs, rows: Rows, of_class: str = "") -> float:
        holdout = self._reference.holdout
        outputs = {spec.name: array[rows] for spec, array in zip(self._reference.specs, answers, strict=True)}
        inputs = {name: array[rows] for name, array in holdout.inputs.items()}
        labels = None if holdout.labels is None else holdout.labels[rows]
        try:
            value = float(self._function(outputs, inputs, labels))
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            raise ConfigInvalid(
                f"metric {self.name} failed: {in_short(error)}; it is called as "
                f"function(outputs, inputs, labels) and returns a number (outputs: {', '.join(outputs)}; inputs: "
                f"{', '.join(inputs)}; labels: {'none' if labels is None else 'one for each sample'})"
            ) from error
        if not np.isfinite(value):
            raise ConfigInvalid(f"metric {self.name} returned {value}; return a finite number, higher is better")
        return value

    def classes(self) -> dict[str, Rows]:
        labels = self._reference.holdout.labels
        return {} if labels is None else by_value(labels, self._reference.class_names)


def user_metric(name: str) -> Callable[..., Any]:
    """Return the user's function `name` (user_function.py). Raises ConfigInvalid.

    The call is `function(outputs, inputs, labels)`. `outputs` and `inputs` are {name: array}, with samples along axis
    0. `labels` holds one class per sample, or is None. The function returns one finite number; a higher number is
    better.
    """
    try:
        return user_function(name)
    except ConfigInvalid as error:
        raise ConfigInvalid(f"--metric {error.message}") from error
    except Exception as error:  # an import runs the user's code
        raise ConfigInvalid(f"cannot import metric {name}: {in_short(error)}") from error


def scores_index(reference: Reference, labels: NDArray[Any] | None = None) -> int:
    """Return the index of the output with the class scores that `labels` refer to.

    This is the output of the rule `classify`. Without the rule, it is the output [N, C] in which FP32 is most often
    right. Without the rule and without labels, it is the first output [N, C]. Raises CalibrationInvalid if no output
    holds class scores, or no output has enough classes.
    """
    found = [i for i, spec in enumerate(reference.specs) if spec.ranks_classes]
    stated = [
        i for i in found if reference.classify is not None and reference.specs[i].name == reference.classify.output
    ]
    found = stated or found
    if not found:
        raise CalibrationInvalid(
            "no output of the model holds class scores [N, classes], which top-1 and labels need; "
            "compare the answers themselves with FP32: --metric cosine"
        )
    if labels is None or not labels.size:
        return found[0]
    fit = [i for i in found if reference.specs[i].shape[1] > int(labels.max())]
    if not fit:
        most = max((reference.specs[i] for i in found), key=lambda spec: spec.shape[1])
        raise CalibrationInvalid(
            f"a label is {int(labels.max())}, but output {most.name!r} has classes 0 to {most.shape[1] - 1}; "
            "correct the labels"
        )
    return max(fit, key=lambda i: float((reference.answers[i].argmax(axis=1) == labels).mean()))


def _other_outputs(reference: Reference, judged: Collection[int]) -> Decisions | None:
    """Return a metric for the float outputs that are not in `judged`. Return None if there are none."""
    numbers = [i for i, answers in enumerate(reference.answers) if i not in judged and answers.dtype.kind == "f"]
    return _OtherOutputs(reference, numbers) if numbers else None


def by_value(values: NDArray[Any], names: Sequence[str] = ()) -> dict[str, Rows]:
    """Return the rows of each value. The key is the name of the value, or the value if `names` lacks it."""
    return {
        str(names[int(value)]) if names and int(value) < len(names) else str(value): np.flatnonzero(values == value)
        for value in np.unique(values)
    }


def sqnr_db(reference: Outputs, answers: Outputs) -> float:
    """Return the signal to noise ratio 10 log10(sum y^2 / sum (y - y')^2) of the worst float output."""
    worst = SQNR_DB_MAX
    for want, got in zip(reference, answers, strict=True):
        if want.dtype.kind == "f":
            noise = float(np.square(want.astype(np.float64) - got).sum())
            worst = min(worst, decibels(float(np.square(want, dtype=np.float64).sum()), noise))
    return worst


def decibels(signal: float, noise: float) -> float:
    """Return 10 log10(signal / noise) within +-SQNR_DB_MAX. NaN or infinite noise gives the lowest value."""
    if not np.isfinite(noise):
        return -SQNR_DB_MAX
    if noise == 0:
        return SQNR_DB_MAX
    return float(np.clip(10 * np.log10(max(signal, 1e-300) / noise), -SQNR_DB_MAX, SQNR_DB_MAX))


def has_scores(reference: Reference) -> bool:
    """Whether an output may hold class scores."""
    return any(spec.ranks_classes for spec in reference.specs)


def no_better_than_chance(reference: Reference, margin: float = 0.0) -> tuple[float, float] | None:
    """Return FP32's top-1 and the chance level if FP32 is no better than chance, else None.

    The chance level is the score of a model that always answers the most frequent class. Labels that FP32 matches only
    by chance cannot judge an artifact. `margin` is the share of the way from chance to 1 that still counts as chance.
    """
    labels = reference.holdout.labels
    if labels is None or not labels.size:
        return None
    scores, counts = reference.answers[scores_index(reference, labels)], np.bincount(labels)
    least = 1.0 / scores.shape[1]
    chance = least if np.count_nonzero(counts) < 2 else max(least, float(counts.max()) / len(labels))
    fp32 = float(_finite(scores.argmax(axis=1) == labels, scores).mean())
    return None if fp32 > chance + margin * (1 - chance) else (fp32, chance)


def _finite(right: NDArray[np.bool_], scores: NDArray[Any]) -> NDArray[np.bool_]:
    # A row with NaN has no top class: argmax would return the position of the NaN.
    return np.asarray(right & np.isfinite(scores).all(axis=1))


def _has_class_scores(reference: Reference) -> bool:
    if len(reference.specs) != 1 or not reference.specs[0].ranks_classes:
        return False
    named = reference.classify is not None or reference.holdout.labels is not None
    return named or rank_classes(reference.answers[0])


def _similarity(want: NDArray[Any], got: NDArray[Any]) -> float:
    if want.dtype.kind != "f":
        return float((want == got).mean())
    a, b = (array.reshape(len(array), -1).astype(np.float64) for array in (want, got))
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        cosines = (a * b).sum(axis=1) / lengths
    # Two zero vectors have the similarity 1. A zero vector and another vector have the similarity 0. NaN gives 0, too.
    cosines = np.where(lengths == 0, (a == b).all(axis=1).astype(np.float64), cosines)
    return float(np.nan_to_num(cosines, nan=0.0).mean())
