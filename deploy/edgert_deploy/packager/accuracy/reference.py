"""The reference for an artifact (FP32's answers and the user's rules), and the interface of a metric."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.rules import Classify, Ctc, Detect
from edgert.bundle.text_rules import Embed
from edgert.processing.answers.embedding import embeddings
from edgert.tensors import TensorSpec
from edgert_deploy.packager.samples.samples import CalibrationSet

Outputs = list[NDArray[Any]]  # one array for each output, samples along axis 0
Rows = NDArray[np.intp]


@dataclass(frozen=True)
class Reference:
    """The answers of the FP32 source to the hold-out, and the meaning of its outputs.

    Attributes:
        class_names: The labels of `classify` or `detect`.
        embed: The rule by which devices compute embeddings. The metric then judges the embeddings.
        image_size: The height and width of a detector's input.
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

    def with_embeddings(self, answers: Outputs) -> Outputs:
        """Return answers to the hold-out, with embeddings in place of the output of the rule `embed`."""
        if self.embed is None:
            return answers
        mask, index = self.holdout.inputs.get(self.embed.mask), self._embedded
        return [embeddings(self.embed, array, mask) if i == index else array for i, array in enumerate(answers)]

    def as_embeddings(self) -> Reference:
        """Return the reference without the rule `embed` and with embeddings in its own answers."""
        if self.embed is None:
            return self
        size = self.specs[self._embedded].shape[-1]
        vectors = TensorSpec(self.embed.name, "FP32", (-1, size))
        specs = tuple(vectors if i == self._embedded else spec for i, spec in enumerate(self.specs))
        return replace(self, specs=specs, answers=self.with_embeddings(self.answers), embed=None)

    @property
    def _embedded(self) -> int:
        return next(i for i, spec in enumerate(self.specs) if self.embed is not None and spec.name == self.embed.output)

    @property
    def all_rows(self) -> Rows:
        return np.arange(len(self.answers[0]))


class OtherMetric(NamedTuple):
    """A metric that the receipt shows and the gate does not use. `fp32` is None if FP32 has no value.

    `of_output` marks a judgement of one output, such as `boxes of output0`.
    """

    name: str
    fp32: float | None
    artifact: float
    of_output: bool = False


class Metric(Protocol):
    """A metric of the gate: one number for the answers to some samples; a higher number is better.

    Attributes:
        counts_samples: Whether the score is a share of samples.
        is_agreement: Whether the score is the agreement with FP32, so FP32's own score is 1.
        is_similarity: Whether the metric only compares values, because it recognizes no decision in the outputs.
        has_own_unit: Whether the score is in the user's own unit. Then no drop is small or large in itself.
        checks_labels: Whether the gate warns if FP32's top-1 by the labels is no better than chance.
        without_objects: The judgements in which FP32 finds no object in any sample, such as `boxes of output0`.
        judged: The positions of the outputs that the metric reads. If empty, the gate judges no other outputs.
        other_outputs: The metric of the other outputs; None if the gate does not judge them.
    """

    name: str
    counts_samples: bool = False
    is_agreement: bool = False
    is_similarity: bool = False
    has_own_unit: bool = False
    checks_labels: bool = False
    without_objects: tuple[str, ...] = ()
    judged: tuple[int, ...] = ()
    other_outputs: Metric | None = None

    def score(self, answers: Outputs, rows: Rows, of_class: str = "") -> float:
        """Return the score of the samples `rows`. With `of_class`, use only the objects of this class."""
        ...

    def parts(self, answers: Outputs, rows: Rows) -> list[tuple[str, float]]:
        """Return the name and score of each judgement in the metric. FP32's score is 1."""
        return []

    def classes(self) -> dict[str, Rows]:
        """Return the rows of each class by the name of the class; empty if the metric has no classes."""
        return {}

    def drops(self, answers: Outputs) -> NDArray[np.float64] | None:
        """Return the drop in each sample, -1 to 1. Return None if the score is not a share of samples."""
        return None

    def others(self, answers: Outputs) -> list[OtherMetric]:
        """Return the related metrics that the receipt shows beside this one."""
        return []
