"""Candidates: the forms of the model that could be packed, each built once, run in its engine and judged.

For each engine of a profile's ladder there may be several, simplest and smallest first: INT8, INT8 with the layers
that suffer most in float ("mixed"), FP16, FP32. Which of them is packed says choice.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from edgert.errors import BuildFailed
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.packager.accuracy.accuracy_gate import Limits, Verdict, artifact_outputs, judge
from edgert_deploy.packager.accuracy.metrics import Metric, Outputs, Question, Rows
from edgert_deploy.packager.build_cache import BuildCache, CachedBuilder
from edgert_deploy.packager.builders import Artifact, Precision, builder_for, kind_of
from edgert_deploy.packager.builders.layers import Layer
from edgert_deploy.packager.builders.onnxruntime import is_for_arm
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import SourceModel

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Order:
    """What a builder is asked for. Profiles whose orders have the same `id` share one artifact."""

    engine: str
    precision: Precision
    profile: DeviceProfile
    float_layers: tuple[Layer, ...] = ()

    @property
    def family(self) -> str:
        """The engine, and the processor where its INT8 graph is another one there: only ONNX Runtime's is."""
        arm = self.engine == "onnxruntime" and self.precision == "int8" and is_for_arm(self.profile)
        return f"{self.engine}-arm" if arm else self.engine

    @property
    def id(self) -> str:
        kind = kind_of(self.precision, bool(self.float_layers))
        return f"{self.engine}-{kind}{'-arm' if self.family.endswith('-arm') else ''}"


@dataclass(frozen=True)
class Candidate:
    """An artifact, what the gate says of it, and its answers to the golden samples."""

    order: Order
    artifact: Artifact
    verdict: Verdict
    golden: Outputs
    size_bytes: int
    build_s: float

    @property
    def id(self) -> str:
        return self.order.id


@dataclass(frozen=True)
class Brief:
    """What every candidate is built from and judged by. `golden` are the hold-out's rows that become golden samples."""

    source: SourceModel
    calibration: CalibrationSet
    question: Question
    metric: Metric
    limits: Limits
    golden: Rows


class Workshop:
    """Builds and judges each order once, whichever targets share it, each in a folder of its own under `work`."""

    def __init__(self, brief: Brief, cache: BuildCache, work: Path, progress: Progress) -> None:
        self.brief, self.cache, self.progress, self._work = brief, cache, progress, work
        self._made: dict[tuple[str, tuple[str, ...]], Candidate] = {}

    @property
    def made(self) -> tuple[Candidate, ...]:
        """Every candidate so far, in the order of their ids."""
        return tuple(self._made[key] for key in sorted(self._made))

    def make(self, order: Order) -> Candidate:
        """The candidate of `order`. Raises OperatorUnsupported, BuildFailed, EngineMissing or EngineFailed."""
        key = (order.id, tuple(layer.name for layer in order.float_layers))
        if key not in self._made:
            self._made[key] = self._make(order, self._work / f"{order.id}-{len(self._made)}")
        return self._made[key]

    def _make(self, order: Order, out: Path) -> Candidate:
        brief = self.brief
        self.progress(f"{order.profile.name}: building {order.engine} {order.precision}")
        began = time.monotonic()
        out.mkdir()
        artifact = CachedBuilder(builder_for(order.engine), self.cache).build(
            brief.source,
            brief.calibration,
            order.profile,
            order.precision,
            out,
            self.progress,
            float_layers=order.float_layers,
        )
        build_s = time.monotonic() - began
        holdout = brief.question.holdout
        self.progress(f"{order.profile.name}: judging it in {artifact.judged_by} on {len(holdout)} samples")
        answers = artifact_outputs(artifact, brief.source, holdout)
        _check_answers(artifact, brief.question.reference, answers)
        verdict = judge(brief.metric, brief.question, answers, brief.limits)
        return Candidate(
            order, artifact, verdict, [array[brief.golden] for array in answers], artifact.size_bytes(), build_s
        )


def _check_answers(artifact: Artifact, reference: Outputs, answers: Outputs) -> None:
    for want, got in zip(reference, answers, strict=True):
        if want.shape != got.shape or want.dtype != got.dtype:
            raise BuildFailed(
                f"the {artifact.engine} artifact answers {got.dtype} {list(got.shape)} where the source answers "
                f"{want.dtype} {list(want.shape)}; this is a fault of the builder, please report it"
            )
