"""Word and character error rates of the texts that a model writes. The rates equal jiwer's rates.

A rate is the number of errors, divided by the number of true words or characters, over all samples. The number of
errors is the smallest number of insertions, deletions and substitutions that turn the texts into the true texts. Spaces
separate words. Spaces around a text are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edgert.errors import CalibrationInvalid, ConfigInvalid
from edgert.processing.answers.ctc import CtcReader, text_of
from edgert_deploy.packager.accuracy.reference import Metric, OtherMetric, Outputs, Reference, Rows


class ErrorRate(Metric):
    """1 - the error rate, so a higher score is better. With more errors than true words, it is below 0."""

    def __init__(self, reference: Reference, unit: str) -> None:
        metric = UNITS[unit]
        if reference.ctc is None:
            raise ConfigInvalid(
                f"--metric {metric} needs a model that writes text: give --postprocess with a table [ctc]"
            )
        if reference.holdout.transcripts is None:
            raise CalibrationInvalid(
                f"--metric {metric} needs the true texts: give labels.csv beside the hold-out's files, with a line "
                "`file,text` for each file, or an array `transcript` in the hold-out's .npz"
            )
        self.name = f"1-{metric}"
        self._unit = unit
        self._reference = reference
        self._split: Callable[[str], Sequence[str]] = str.split if unit == "words" else str.strip
        self._truth = [self._split(str(text)) for text in reference.holdout.transcripts]
        self._read = CtcReader(reference.ctc)
        self._at = [spec.name for spec in reference.specs].index(reference.ctc.output)
        self.judged = (self._at,)

    def score(self, answers: Outputs, rows: Rows, of_class: str = "") -> float:
        texts, _ = self._read(answers[self._at][rows])
        answered = [self._split(text_of(text)) for text in texts]
        truth = [self._truth[row] for row in rows]
        errors = sum(edits(one, other) for one, other in zip(answered, truth, strict=True))
        return 1.0 - errors / max(1, sum(map(len, truth)))

    def others(self, answers: Outputs) -> list[OtherMetric]:
        reference, rows = self._reference, self._reference.all_rows
        other = ErrorRate(reference, "characters" if self._unit == "words" else "words")
        return [OtherMetric(other.name, other.score(reference.answers, rows), other.score(answers, rows))]


UNITS = {"words": "wer", "characters": "cer"}


def edits(one: Sequence[str], other: Sequence[str]) -> int:
    """Return the Levenshtein distance between the sequences `one` and `other`."""
    numbers = {unit: i for i, unit in enumerate(dict.fromkeys((*one, *other)))}
    target = np.array([numbers[unit] for unit in other], np.int64)
    places = np.arange(len(other) + 1)
    row = places
    for unit in one:
        changed = np.concatenate(([row[0] + 1], np.minimum(row[1:] + 1, row[:-1] + (target != numbers[unit]))))
        row = np.minimum.accumulate(changed - places) + places  # with insertions
    return int(row[-1])
