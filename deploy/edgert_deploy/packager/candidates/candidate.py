"""Candidates: the possible artifacts of the model. Each candidate is built once, run and judged.

Each engine of a target may have several candidates, the simplest and smallest first: INT8, INT8 with the most harmful
layers in float ("mixed"), FP16, FP32. choice.py chooses the candidate that is packed.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from edgert.errors import BuildFailed, EdgeRTError, EngineFailed
from edgert.printable import counted
from edgert_deploy.common.file_cache import FileCache
from edgert_deploy.packager.accuracy.accuracy_gate import GateResult, judge
from edgert_deploy.packager.accuracy.artifact_runs import judged_outputs
from edgert_deploy.packager.accuracy.reference import Outputs
from edgert_deploy.packager.builders import FIRST_RECIPE, Artifact, BuildSpec
from edgert_deploy.packager.candidates.build_processes import FROM_CACHE, BuildProcesses
from edgert_deploy.packager.candidates.evaluation import Evaluation
from edgert_deploy.packager.processes.children import cause_text
from edgert_deploy.packager.processes.sandbox import ChildFailed, Progress

# With a smaller share of its work in INT8, an artifact saves little. "auto" then prefers FP16, which halves the file.
INT8_SHARE_MIN = 0.25
SHOWN_SHARE_MIN = 0.005  # a smaller share is shown as 0 %: such an artifact is INT8 only by its name


@dataclass(frozen=True)
class Candidate:
    """An artifact, its result in the accuracy gate, and its answers to the golden samples."""

    spec: BuildSpec
    artifact: Artifact
    result: GateResult
    golden: Outputs
    size_bytes: int
    build_s: float

    @property
    def id(self) -> str:
        return self.spec.id

    @property
    def recipe(self) -> str:
        """The recipe of an INT8 artifact; empty for other precisions."""
        return (self.spec.recipe or FIRST_RECIPE) if self.is_int8 else ""

    @property
    def how(self) -> str:
        """A short description: the recipe with the number of layers in float, or the precision."""
        if not self.is_int8:
            return self.artifact.precision.upper()
        layers = len(self.artifact.float_layers)
        return f"{self.recipe} with {layers} layer{'s' if layers > 1 else ''} in float" if layers else self.recipe

    @property
    def passed(self) -> bool:
        return self.result.passed

    @property
    def is_int8(self) -> bool:
        return self.artifact.precision.startswith("int8")

    @property
    def is_barely_int8(self) -> bool:
        """Whether the candidate is called INT8, but computes too little in INT8 to save time."""
        share = self.artifact.int8_share
        return self.is_int8 and share is not None and share < INT8_SHARE_MIN

    @property
    def is_int8_by_name_only(self) -> bool:
        """Whether the candidate is called INT8, and computes nothing in INT8."""
        share = self.artifact.int8_share
        return self.is_int8 and share is not None and share < SHOWN_SHARE_MIN


class CandidateBuilder:
    """Builds and judges each BuildSpec once for all targets. Each build has its own folder under `work`."""

    def __init__(self, evaluation: Evaluation, cache: FileCache, work: Path, progress: Progress) -> None:
        self.evaluation = evaluation
        self.cache = cache
        self.progress = progress
        self._work = work
        self.processes = BuildProcesses(work, evaluation.source, evaluation.calibration, cache)
        self._built: dict[tuple[str, tuple[str, ...]], Candidate] = {}
        self._tried = 0
        self._reason = ""  # the reason of the last failure

    @property
    def built(self) -> tuple[Candidate, ...]:
        """The candidates that are built so far, sorted by id."""
        return tuple(self._built[key] for key in sorted(self._built))

    def build(self, spec: BuildSpec) -> Candidate:
        """Return the candidate of `spec`. Raises OperatorUnsupported, BuildFailed or an engine's error."""
        key = (spec.id, tuple(layer.name for layer in spec.float_layers))
        if key not in self._built:
            self._tried += 1  # a failed build also leaves its folder
            self._built[key] = self._build(spec, self._work / f"{spec.id}-{self._tried}")
        return self._built[key]

    def report_failure(self, what: str, error: EdgeRTError) -> None:
        """Report why `what` was not built, without repeating the reason of the previous failure."""
        self.progress(f"{what}: {'for the same reason' if error.message == self._reason else error.message}")
        self._reason = error.message

    def _build(self, spec: BuildSpec, out: Path) -> Candidate:
        evaluation = self.evaluation
        recipe = f" ({spec.recipe})" if spec.recipe else ""
        described = f"{spec.engine} {spec.precision}{recipe}"
        began = time.monotonic()
        out.mkdir()
        artifact = self.processes.cached(spec, out)
        cached = FROM_CACHE if artifact else ""
        self.progress(f"{spec.profile.name}: building {described}{cached}")
        artifact = artifact or self.processes.build(spec, out, self.progress)
        build_s = time.monotonic() - began
        reference = evaluation.reference
        samples = len(reference.holdout)
        judged = f"{described}{cached}," if cached else "the artifact"
        self.progress(f"{spec.profile.name}: judging {judged} in {artifact.judged_by} on {counted(samples, 'sample')}")
        try:
            ways = judged_outputs(artifact, evaluation.source, reference.holdout)
            for answers in ways:
                _check_answers(artifact, evaluation.answers, answers)
            # The last way runs samples alone, if the answers then differ. A device also checks golden samples alone.
            golden = evaluation.golden_answers(artifact, ways[-1])
        except ChildFailed as error:
            raise BuildFailed(_failure_text(cause_text(error), error.cause, spec, artifact)) from error
        except EngineFailed as error:  # the engine wrote or read a model, but cannot run the model
            reason = " ".join(error.message.split())  # ONNX Runtime ends its texts with a line break
            raise BuildFailed(_failure_text(f"reported '{reason}'", "engine", spec, artifact)) from error
        results = [judge(evaluation.metric, reference, evaluation.app_answers(way), evaluation.limits) for way in ways]
        result = min(results, key=lambda one: (one.passed, -one.accuracy.drop))
        if len(ways) > 1:
            self.progress(
                f"{spec.profile.name}: the artifact's answers to single samples differ from its answers to batches: "
                "the gate uses the worse score"
            )
        return Candidate(spec, artifact, result, golden, artifact.size_bytes(), build_s)


def _failure_text(what: str, cause: str, spec: BuildSpec, artifact: Artifact) -> str:
    recipe = f" ({spec.recipe or FIRST_RECIPE})" if spec.precision == "int8" else ""
    other_form = (
        "try --precision auto, which packs a precision that the engine can run"
        if recipe
        else "try another release of the engine"
    )
    advice = {
        "memory": "free some memory, or give fewer hold-out samples",
        "time": "give fewer hold-out samples",
    }.get(cause, f"this is a fault of the engine: {other_form}")
    return (
        f"{artifact.judged_by} {what} while it answered the hold-out samples with the {artifact.kind.upper()} "
        f"artifact{recipe} of {spec.profile.name}; {advice}, or remove {spec.engine} from the profile's engines"
    )


def _check_answers(artifact: Artifact, reference: Outputs, answers: Outputs) -> None:
    for want, got in zip(reference, answers, strict=True):
        if want.shape != got.shape or want.dtype != got.dtype:
            raise BuildFailed(
                f"the {artifact.engine} artifact answers {got.dtype} {list(got.shape)}, but the source answers "
                f"{want.dtype} {list(want.shape)}; this is a fault of the builder, please report it"
            )
