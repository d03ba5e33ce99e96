"""Precision, recall and F1 of the classes that a device answers for the windows of recordings.

docs/accuracy-reference.md defines which windows and events are right. The classes are computed by the rule that devices
use, with its thresholds, its `none` labels, and its smoothing over the windows of each recording.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgert.errors import CalibrationInvalid, ConfigInvalid
from edgert.processing.answers.classify import NONE, Classifier
from edgert_deploy.packager.accuracy.reference import Metric, OtherMetric, Outputs, Reference, Rows


class Counts(NamedTuple):
    """The numbers of windows or events that are answered correctly, that are answered, and that are true."""

    right: int
    answered: int
    true: int

    @property
    def precision(self) -> float:
        return self.right / self.answered if self.answered else 1.0

    @property
    def recall(self) -> float:
        return self.right / self.true if self.true else 1.0

    @property
    def f1(self) -> float:
        return 2 * self.right / (self.answered + self.true) if self.answered + self.true else 1.0


class Event(NamedTuple):
    """A run of windows `[begin, end)` of one recording that have the same class."""

    begin: int
    end: int
    label: int


class AnswerF1(Metric):
    """F1 by window or, with `events`, by event."""

    def __init__(self, reference: Reference, events: bool) -> None:
        self.name = "event_f1" if events else "window_f1"
        rule, labels = reference.classify, reference.holdout.labels
        if rule is None:
            raise ConfigInvalid(
                f"--metric {self.name} needs the classes: give --labels, or --postprocess with [classify]"
            )
        if labels is None:
            raise CalibrationInvalid(f"--metric {self.name} needs `labels` in the hold-out, one class for each window")
        if events and reference.holdout.recordings is None:
            raise CalibrationInvalid(
                f"--metric {self.name} needs recordings in the hold-out: give a folder of recordings, or an array `recording` "
                "in the hold-out's .npz with the number of each window's recording"
            )
        none = [i for i, label in enumerate(rule.labels) if label in rule.none]
        self._reference = reference
        self._truth = np.where(np.isin(labels, none), NONE, labels)
        self._recordings = reference.holdout.recordings
        self._classifier = Classifier(rule)
        self._names = rule.labels
        self._events = events
        self._late = rule.smooth.windows - 1 if rule.smooth is not None else 0
        self._at = [spec.name for spec in reference.specs].index(rule.output)

    def score(self, answers: Outputs, rows: Rows, of_class: str = "") -> float:
        return self.counts(answers, rows, of_class).f1

    def counts(self, answers: Outputs, rows: Rows, of_class: str = "") -> Counts:
        """Return the counts in the windows `rows`. With `of_class`, count only this class, in all windows."""
        rows = np.arange(len(self._truth)) if of_class else rows
        answered, truth = self._answered(answers)[rows], self._truth[rows]
        if of_class:
            number = self._names.index(of_class) if of_class in self._names else int(of_class)
            answered, truth = (np.where(one == number, one, NONE) for one in (answered, truth))
        if not self._events:
            right = (answered == truth) & (truth != NONE)
            return Counts(int(right.sum()), int((answered != NONE).sum()), int((truth != NONE).sum()))
        matches = [matched(events(answered[part]), events(truth[part]), self._late) for part in self._parts(rows)]
        return Counts(*(sum(column) for column in zip(*matches, strict=True)))

    def classes(self) -> dict[str, Rows]:
        """Return the windows of each class."""
        named = {
            int(c): self._names[c] if c < len(self._names) else str(c) for c in np.unique(self._truth) if c != NONE
        }
        return {name: np.flatnonzero(self._truth == number) for number, name in named.items()}

    def others(self, answers: Outputs) -> list[OtherMetric]:
        fp32, artifact = (self.counts(each, self._reference.all_rows) for each in (self._reference.answers, answers))
        return [
            OtherMetric("precision", fp32.precision, artifact.precision),
            OtherMetric("recall", fp32.recall, artifact.recall),
        ]

    def _answered(self, answers: Outputs) -> NDArray[np.int64]:
        lengths = None
        if self._recordings is not None:
            ends = np.flatnonzero(np.diff(self._recordings, append=np.nan))
            lengths = np.diff(ends, prepend=-1).tolist()
        classes, _ = self._classifier(answers[self._at], lengths)
        return classes[:, 0]

    def _parts(self, rows: Rows) -> Iterator[slice]:
        """Yield each part of `rows` that is a run of consecutive windows of one recording."""
        assert self._recordings is not None  # `__init__` has checked it
        apart = (np.diff(rows) != 1) | (np.diff(self._recordings[rows]) != 0)
        ends = [*(np.flatnonzero(apart) + 1).tolist(), len(rows)]
        yield from (slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False))


def events(classes: NDArray[Any]) -> list[Event]:
    """Return the events in the windows of one recording: runs of equal classes, without the class NONE."""
    ends = [*(np.flatnonzero(np.diff(classes)) + 1).tolist(), len(classes)]
    runs = [Event(begin, end, int(classes[begin])) for begin, end in zip([0, *ends], ends, strict=False) if end > begin]
    return [run for run in runs if run.label != NONE]


def matched(answered: list[Event], true: list[Event], late: int) -> Counts:
    """Return the counts of a recording's events. An answer may start within `late` windows after an event."""
    unmatched = list(true)
    for event in answered:
        hit = next(
            (
                one
                for one in unmatched
                if one.label == event.label and event.begin < one.end + late and one.begin < event.end
            ),
            None,
        )
        if hit is not None:
            unmatched.remove(hit)
    return Counts(len(true) - len(unmatched), len(answered), len(true))
