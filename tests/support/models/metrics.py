"""Known answers, and helpers that return the accuracy gate's result for them."""

from __future__ import annotations

from typing import Any

import numpy as np

from edgert.bundle.manifest import Accuracy
from edgert.tensors import TensorSpec
from edgert_deploy.packager.accuracy import accuracy_gate as gate
from edgert_deploy.packager.accuracy.accuracy_gate import GateResult, Group, Limits
from edgert_deploy.packager.accuracy.metrics import metric_for
from edgert_deploy.packager.accuracy.reference import Reference
from edgert_deploy.packager.samples.samples import CalibrationSet

SCORES = TensorSpec("scores", "FP32", (-1, 3))
BOXES = TensorSpec("boxes", "FP32", (-1, 5, 4))
CLASSES = TensorSpec("classes", "INT64", (-1,))
LIMITS = Limits()
EYE = np.eye(3, dtype=np.float32)


def reference_to(specs: tuple[TensorSpec, ...], reference: list[Any], labels: Any = None, **more: Any) -> Reference:
    image = np.zeros((len(reference[0]), 1, 8, 8), np.float32)
    holdout = {key: more.pop(key) for key in ("slices", "boxes", "transcripts", "recordings") if key in more}
    return Reference(specs, reference, CalibrationSet({"x": reference[0], "image": image}, labels, **holdout), **more)


def result_of(reference: Reference, answers: list[Any], limits: Limits = LIMITS, metric: str = "auto") -> GateResult:
    return gate.judge(metric_for(metric, reference), reference, answers, limits)


def judge(
    specs: tuple[TensorSpec, ...],
    reference: list[Any],
    answers: list[Any],
    labels: Any,
    max_drop: float,
    metric: str = "auto",
    **more: Any,
) -> Accuracy:
    return result_of(reference_to(specs, reference, labels, **more), answers, Limits(max_drop), metric).accuracy


def worst(result: GateResult, kind: str) -> Group:
    """Return the class or slice that lost most accuracy."""
    return max((group for group in result.groups if group.kind == kind), key=lambda group: group.drop)
