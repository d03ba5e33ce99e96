"""The reference for an artifact: FP32's answers, the user's statements on outputs, and metrics."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.rules import Classify, Ctc, Detect
from edgert.bundle.text_rules import Embed
from edgert.processing.answers.embedding import embeddings
from edgert.tensors import TensorSpec
from edgert_deploy.packager.samples.samples import CalibrationSet

Outputs = list[NDArray[Any]]  # one array an output, samples along axis 0
Rows = NDArray[np.intp]


@dataclass(frozen=True)
class Reference:
    """The FP32 source's `answers` to the hold-out, and the meaning of its outputs.

    `classify`, `detect` and `ctc` are the rules by which devices make answers. `class_names` are the labels of the
    first two. `image_size` is the height and width of a detector's input.
    With `embed`, the metric judges the embeddings that devices compute from an output.
    """

    specs: tuple[TensorSpec, ...]
    answers: Outputs
    holdout: CalibrationSet
    class_names: tuple[str, ...] = ()
    classify: Classify | None = None
    detect: Detect | None = None
    ctc: Ctc | None = None
    embed: Embed | None = None
    image_size: tuple[int, int] | None = None

    def judged(self, answers: Outputs) -> Outputs:
        """Return answers to the hold-out, with the vectors of `embed` in place of their output."""
        if self.embed is None:
            return answers
        mask, index = self.holdout.inputs.get(self.embed.mask), self._embedded
        return [embeddings(self.embed, array, mask) if i == index else array for i, array in enumerate(answers)]

    def as_judged(self) -> Reference:
        """Return the reference with its own answers `judged`."""
        if self.embed is None:
            return self
        size = self.specs[self._embedded].shape[-1]
        vectors = TensorSpec(self.embed.name, "FP32", (-1, size))
        specs = tuple(vectors if i == self._embedded else spec for i, spec in enumerate(self.specs))
        return replace(self, specs=specs, answers=self.judged(self.answers), embed=None)

    @property
    def _embedded(self) -> int:
        return next(i for i, spec in enumerate(self.specs) if self.embed is not None and spec.name == self.embed.output)

    @property
    def all_rows(self) -> Rows:
        return np.arange(len(self.answers[0]))


class Metric(Protocol):
    """`name` is the metric's name in the receipt; `counts_samples`: its number is a share of samples.

    `is_similarity`: the metric compares the answers with FP32's, not with the right answers. `judged` are the positions
    of the outputs that the metric reads (empty: all); `other_outputs` judges the others.
    """

    name: str
    counts_samples: bool = False
    is_similarity: bool = False
    judged: tuple[int, ...] = ()
    other_outputs: Metric | None = None

    def score(self, answers: Outputs, rows: Rows, of_class: str = "") -> float:
        """Return the score of the samples `rows`; `of_class` counts only that class's objects."""
        ...

    def parts(self, answers: Outputs, rows: Rows) -> list[tuple[str, float]]:
        """Return name and score of each judgement that the metric consists of; FP32's score is 1."""
        return []

    def classes(self) -> dict[str, Rows]:
        """Return the samples of each class by its name; empty if the metric knows no classes."""
        return {}

    def drops(self, answers: Outputs) -> NDArray[np.float64] | None:
        """Return each sample's loss against FP32, -1 to 1; None if the score is not a share of samples."""
        return None
