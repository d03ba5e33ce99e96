"""The accuracy gate: an artifact, run in its own engine on the hold-out, against its FP32 source.

Metrics: `top1` where the hold-out has labels; without labels `top1_agreement` with FP32 where the one
output [N, C] holds class scores; else `cosine`, the mean over samples of the outputs' cosine to FP32's (for
whole-number outputs the share of equal elements), of the output that fares worst.

An output [N, C] may as well be an embedding or a regression, whose largest element means nothing. It counts as
class scores where the user names its classes, or where FP32's rows are probabilities (none below 0, their sum 1).
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgert.engines import EngineOptions, LocalArtifact, Session, engine_by_name
from edgert.errors import CalibrationInvalid
from edgert.manifest import Accuracy
from edgert.tensors import TensorSpec
from edgert_deploy.builders import Artifact
from edgert_deploy.calibration import CalibrationSet
from edgert_deploy.source import SourceModel, reference_artifact

Outputs = list[NDArray[Any]]
Metric = Literal["auto", "top1", "cosine"]
PROBABILITY_TOLERANCE = 1e-3
BATCH = 32  # samples a run, where the batch is open


def reference_outputs(source: SourceModel, samples: CalibrationSet) -> Outputs:
    """What the source itself answers, in the engine that reads it: one array an output, samples along axis 0."""
    with tempfile.TemporaryDirectory(prefix="edgert-reference-") as folder:
        return _run(reference_artifact(source, Path(folder)), samples)


def artifact_outputs(artifact: Artifact, source: SourceModel, samples: CalibrationSet) -> Outputs:
    """What `artifact` answers in the engine that judges it. Raises EngineMissing or EngineFailed."""
    digest = hashlib.sha256(artifact.path.read_bytes()).hexdigest()
    return _run(LocalArtifact(artifact.judged_by, artifact.path, source.inputs, source.outputs, digest), samples)


def run_samples(session: Session, inputs: Sequence[NDArray[Any]]) -> Outputs:
    """All samples through `session`, in batches where it takes them, the answers one after the other."""
    batch = BATCH if session.inputs[0].shape[0] == -1 else 1
    count = len(inputs[0])
    runs = [session.run([array[i : i + batch] for array in inputs]) for i in range(0, count, batch)]
    return [np.concatenate(parts) for parts in zip(*runs, strict=True)]


def judge(
    specs: tuple[TensorSpec, ...],
    reference: Outputs,
    answers: Outputs,
    labels: NDArray[Any] | None,
    max_drop: float,
    metric: Metric = "auto",
    *,
    classes_named: bool = False,
) -> Accuracy:
    """The receipt for `answers` beside `reference`. `classes_named`: the user says that an output is class scores.

    Raises CalibrationInvalid where labels, or `metric` "top1", fit no output.
    """
    count = len(reference[0])
    if labels is not None and metric != "cosine":
        i = scores_index(specs, labels)
        fp32, artifact = _top1(reference[i], labels), _top1(answers[i], labels)
        return Accuracy("top1", count, fp32, artifact, max_drop)
    if metric == "top1" or (metric == "auto" and _are_class_scores(specs, reference, classes_named)):
        i = scores_index(specs, np.zeros(0, np.int64))
        return Accuracy("top1_agreement", count, 1.0, _top1(answers[i], reference[i].argmax(axis=1)), max_drop)
    likeness = min(_likeness(want, got) for want, got in zip(reference, answers, strict=True))
    return Accuracy("cosine", count, 1.0, likeness, max_drop)


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


def doubts(
    specs: tuple[TensorSpec, ...],
    reference: Outputs,
    calibration: CalibrationSet,
    holdout: CalibrationSet,
    metric: Metric = "auto",
) -> list[str]:
    """Why the gate may prove less than it seems to, one sentence each; none where all is well."""
    found = []
    if all(np.array_equal(calibration.inputs[name], array) for name, array in holdout.inputs.items()):
        found.append("calibration and hold-out are the same samples: give hold-out samples of their own")
    if holdout.labels is not None and metric != "cosine":
        i = scores_index(specs, holdout.labels)
        fp32, chance = _top1(reference[i], holdout.labels), _chance(holdout.labels, specs[i].shape[1])
        if fp32 <= chance:
            found.append(
                f"the FP32 source's own top-1 is {fp32:.4f} on the hold-out, chance is {chance:.4f}: are the samples "
                "prepared as for training, and do the labels count from 0 in the model's order?"
            )
    return found


def _run(artifact: LocalArtifact, samples: CalibrationSet) -> Outputs:
    session = engine_by_name(artifact.engine).load(artifact, EngineOptions(threads=0))
    try:
        return run_samples(session, [samples.inputs[spec.name] for spec in artifact.inputs])
    finally:
        session.close()


def _holds_scores(spec: TensorSpec) -> bool:
    return len(spec.shape) == 2 and spec.shape[1] >= 2 and spec.dtype.kind == "f"


def _are_class_scores(specs: tuple[TensorSpec, ...], reference: Outputs, classes_named: bool) -> bool:
    if len(specs) != 1 or not _holds_scores(specs[0]):
        return False
    rows = reference[0]
    sums_to_one = np.allclose(rows.sum(axis=1), 1.0, rtol=0.0, atol=PROBABILITY_TOLERANCE)
    return classes_named or (sums_to_one and float(rows.min(initial=0.0)) >= 0.0)


def _chance(labels: NDArray[Any], classes: int) -> float:
    """What always answering the most frequent class would reach."""
    counts = np.bincount(labels)
    return 1.0 / classes if np.count_nonzero(counts) < 2 else max(1.0 / classes, float(counts.max()) / len(labels))


def _top1(scores: NDArray[Any], labels: NDArray[Any]) -> float:
    # A row with NaN has no winner: argmax would name the NaN.
    right = (scores.argmax(axis=1) == labels) & np.isfinite(scores).all(axis=1)
    return float(right.mean())


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
