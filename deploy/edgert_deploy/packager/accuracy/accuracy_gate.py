"""The accuracy gate: an artifact, run in its own engine on the hold-out, against its FP32 source.

The mean hides what happens to a part of the samples, so a verdict also holds what each class and each slice of
the hold-out lost. What is counted stands in metrics.py.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.manifest import Accuracy
from edgert.engines import EngineOptions, LocalArtifact, Session, engine_by_name
from edgert_deploy.packager.accuracy.metrics import (
    Agreement,
    Cosine,
    Metric,
    Outputs,
    Question,
    TopK,
    by_value,
    chance,
    scores_index,
    sqnr_db,
)
from edgert_deploy.packager.builders import Artifact
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import SourceModel, reference_artifact
from edgert_deploy.packager.vendor_output import quiet

BATCH = 32  # samples a run, where the batch is open
GROUP_SAMPLES_MIN = 10  # a smaller class or slice is shown, but stops no build: one sample of it is 10 % and more


@dataclass(frozen=True)
class Limits:
    """How much an artifact may lose, absolutely: on the whole, and in any class or slice (None: not judged)."""

    max_drop: float = 0.01
    max_class_drop: float | None = None


@dataclass(frozen=True)
class Group:
    """What a part of the hold-out says: `kind` is "class" or "slice"."""

    kind: str
    name: str
    samples: int
    fp32: float
    artifact: float

    @property
    def drop(self) -> float:
        return self.fp32 - self.artifact


@dataclass(frozen=True)
class Verdict:
    """The gate's word on one artifact. `also` holds what else was counted: name -> (FP32 or None, artifact)."""

    accuracy: Accuracy
    limits: Limits
    groups: tuple[Group, ...] = ()
    also: tuple[tuple[str, float | None, float], ...] = ()

    @property
    def passed(self) -> bool:
        return self.accuracy.passed and not self.groups_lost

    @property
    def groups_lost(self) -> tuple[Group, ...]:
        """The classes and slices, of GROUP_SAMPLES_MIN samples or more, that lost more than any may."""
        limit = self.limits.max_class_drop
        if limit is None:
            return ()
        return tuple(g for g in self.groups if g.samples >= GROUP_SAMPLES_MIN and g.drop > limit + 1e-9)

    def worst(self, kind: str) -> Group | None:
        """The class or slice that lost most."""
        return max((g for g in self.groups if g.kind == kind), key=lambda g: g.drop, default=None)

    def complaint(self) -> str:
        """What the artifact lost, in one line."""
        a = self.accuracy
        said = f"{a.metric} fell by {a.drop:.4f} ({a.fp32:.4f} -> {a.artifact:.4f} on {a.samples} samples)"
        if a.passed and self.groups_lost:
            g = max(self.groups_lost, key=lambda g: g.drop)
            said = (
                f"{g.kind} {g.name!r} lost {g.drop:.4f} of {a.metric} ({g.fp32:.4f} -> {g.artifact:.4f} on {g.samples})"
            )
        return said


def reference_outputs(source: SourceModel, samples: CalibrationSet) -> Outputs:
    """What the source itself answers, in the engine that reads it: one array an output, samples along axis 0."""
    with tempfile.TemporaryDirectory(prefix="edgert-reference-") as folder:
        return _run(reference_artifact(source, Path(folder)), samples)


def artifact_outputs(artifact: Artifact, source: SourceModel, samples: CalibrationSet) -> Outputs:
    """What `artifact` answers in the engine that judges it. Raises EngineMissing or EngineFailed."""
    return _run(local_artifact(artifact, source), samples)


def local_artifact(artifact: Artifact, source: SourceModel) -> LocalArtifact:
    """The artifact as the engine that judges it on this host opens it."""
    digest = hashlib.sha256(artifact.path.read_bytes()).hexdigest()
    return LocalArtifact(artifact.judged_by, artifact.path, source.inputs, source.outputs, digest)


def run_samples(session: Session, inputs: Sequence[NDArray[Any]]) -> Outputs:
    """All samples through `session`, in batches where it takes them, the answers one after the other."""
    batch = BATCH if session.inputs[0].shape[0] == -1 else 1
    count = len(inputs[0])
    runs = [session.run([array[i : i + batch] for array in inputs]) for i in range(0, count, batch)]
    return [np.concatenate(parts) for parts in zip(*runs, strict=True)]


def judge(metric: Metric, question: Question, answers: Outputs, limits: Limits) -> Verdict:
    """The verdict on `answers` beside FP32's."""
    reference, count = question.reference, len(question.reference[0])
    everything = np.arange(count)
    # What FP32 agrees with itself is known, also where its own answers hold a NaN.
    fp32 = 1.0 if isinstance(metric, Agreement | Cosine) else metric.score(reference, everything)
    accuracy = Accuracy(metric.name, count, fp32, metric.score(answers, everything), limits.max_drop)
    groups = [("class", name, rows) for name, rows in metric.classes().items()]
    if question.holdout.slices is not None:
        groups += [("slice", name, rows) for name, rows in by_value(question.holdout.slices).items()]
    compared = []
    for kind, name, rows in groups:
        fp32, artifact = (metric.score(a, rows, name if kind == "class" else "") for a in (reference, answers))
        compared.append(Group(kind, name, len(rows), fp32, artifact))
    return Verdict(accuracy, limits, tuple(compared), _also(metric, question, answers))


def doubts(metric: Metric, question: Question, calibration: CalibrationSet) -> list[str]:
    """Why the gate may prove less than it seems to, one sentence each; none where all is well."""
    found, holdout = [], question.holdout
    if all(np.array_equal(calibration.inputs[name], array) for name, array in holdout.inputs.items()):
        found.append("calibration and hold-out are the same samples: give hold-out samples of their own")
    if holdout.labels is not None and metric.name == "top1":
        i = scores_index(question.specs, holdout.labels)
        fp32 = metric.score(question.reference, np.arange(len(holdout)))
        by_chance = chance(holdout.labels, question.specs[i].shape[1])
        if fp32 <= by_chance:
            found.append(
                f"the FP32 source's own top-1 is {fp32:.4f} on the hold-out, chance is {by_chance:.4f}: are the samples "
                "prepared as for training, and do the labels count from 0 in the model's order?"
            )
    return found


def _also(metric: Metric, question: Question, answers: Outputs) -> tuple[tuple[str, float | None, float], ...]:
    """What the gate did not ask for, and a reader of the receipt does."""
    everything, reference = np.arange(len(answers[0])), question.reference
    others: list[tuple[str, float | None, float]] = []
    if isinstance(metric, TopK) and question.holdout.labels is not None:
        other = TopK(question, question.holdout.labels, 1 if metric.name == "top5" else 5)
        others.append((other.name, other.score(reference, everything), other.score(answers, everything)))
        others.append((Agreement.name, None, Agreement(question).score(answers, everything)))
    if not isinstance(metric, Cosine):
        others.append((Cosine.name, None, Cosine(question).score(answers, everything)))
    return (*others, ("sqnr_db", None, sqnr_db(reference, answers)))


def _run(artifact: LocalArtifact, samples: CalibrationSet) -> Outputs:
    with quiet():  # TFLite says which delegate it made
        session = engine_by_name(artifact.engine).load(artifact, EngineOptions(threads=0))
    try:
        return run_samples(session, [samples.inputs[spec.name] for spec in artifact.inputs])
    finally:
        session.close()
