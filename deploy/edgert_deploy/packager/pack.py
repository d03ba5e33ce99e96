"""Packing: source model + samples + device profiles -> checked artifacts -> one signed bundle.

`build_bundle` is the sequence of stages. Each stage uses the result of the previous stage. The build writes all files
in a temporary folder. The bundle appears under its name only after every target has passed, so a failure leaves no file
behind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from edgert.bundle.bundle_file import write_bundle
from edgert.bundle.signing import SigningKey
from edgert.errors import BuildFailed, ConfigInvalid, EdgeRTError, EngineMissing, OperatorUnsupported
from edgert_deploy.common.file_cache import FileCache
from edgert_deploy.packager.build_warnings import build_warnings
from edgert_deploy.packager.builders import check_source, first_engine
from edgert_deploy.packager.candidates.candidate import CandidateBuilder
from edgert_deploy.packager.candidates.choice import Choice, check_gate, choose, specs_to_prebuild
from edgert_deploy.packager.candidates.evaluation import evaluate_source
from edgert_deploy.packager.candidates.mixed_precision import Budget
from edgert_deploy.packager.contents import golden_samples, write_contents
from edgert_deploy.packager.processes.sandbox import Progress
from edgert_deploy.packager.processes.work_folder import work_folder
from edgert_deploy.packager.receipt import receipt
from edgert_deploy.packager.request import BuildRequest, TargetRequest, check_request, target_requests

# Disk space, in units of the model's size.
COPIES_OF_INTERMEDIATES = 4  # for the intermediate files of a builder
COPIES_OF_ARTIFACT = 2  # for an artifact and its copy in the bundle
SPACE_BYTES_MIN = 16 * 1024**2


@dataclass(frozen=True)
class BuildResult:
    """The result of a build.

    Attributes:
        digest: The SHA-256 of the manifest.
        key_id: The key that signed the bundle.
        choices: The choice for each target, in the order of the request.
        warnings: The reasons why a passed gate may prove little, and what targets do not get.
    """

    path: Path
    size_bytes: int
    digest: str
    key_id: str
    choices: tuple[Choice, ...]
    warnings: tuple[str, ...] = ()


def build_bundle(
    request: BuildRequest, key: SigningKey, out: Path, progress: Progress, report: Callable[[Choice], None]
) -> BuildResult:
    """Build, judge and pack every target. `report` gets each choice as soon as it is made.

    Raises AccuracyTooLow after all targets are judged. Raises BuildFailed, OperatorUnsupported or another EdgeRTError
    at once. An error leaves the file `out` unchanged.
    """
    check_request(request, out)
    targets = target_requests(request)
    _check_targets(request, targets)
    with work_folder(_space_needed(request, targets)) as work:
        cache = request.cache or FileCache(work / "cache")
        evaluation = evaluate_source(request)
        warnings = build_warnings(request, targets, evaluation)
        request = replace(request, classify=evaluation.reference.classify, ctc=evaluation.reference.ctc)
        for warning in warnings:
            progress(f"warning: {warning}")
        builder = CandidateBuilder(evaluation, cache, work, progress)
        builder.processes.prebuild(specs_to_prebuild(evaluation, targets), progress, request.jobs)
        choices = _choose_all(builder, targets, request, report)
        check_gate(choices, evaluation.source)
        golden = golden_samples(evaluation, choices, progress)
        ranges = builder.processes.activations(progress)
        receipt_bytes = receipt(request, choices, builder.built, ranges)
        contents = write_contents(request, choices, golden, receipt_bytes, work)
        progress(f"writing {out}")
        write_bundle(out, contents.manifest, contents.files, key)
    digest = hashlib.sha256(contents.manifest.to_bytes()).hexdigest()
    warnings += [warning for choice in choices for warning in choice.warnings]
    return BuildResult(out, out.stat().st_size, digest, key.public.key_id, choices, tuple(warnings))


def _check_targets(request: BuildRequest, targets: tuple[TargetRequest, ...]) -> None:
    """Raise ConfigInvalid or OperatorUnsupported for a target that cannot be built from the source."""
    for target in targets:
        try:
            check_source(request.source, first_engine(request.source, target.engines), target.profile.name)
        except (ConfigInvalid, OperatorUnsupported) as error:
            raise error.with_message(_with_advice(request, target, error)) from error


def _choose_all(
    builder: CandidateBuilder,
    targets: tuple[TargetRequest, ...],
    request: BuildRequest,
    report: Callable[[Choice], None],
) -> tuple[Choice, ...]:
    budget = Budget(request.budget)
    choices = []
    for target in targets:
        try:
            choices.append(choose(builder, target, budget, request.measure))
        except (OperatorUnsupported, BuildFailed, EngineMissing) as error:
            raise error.with_message(_with_advice(request, target, error)) from error
        report(choices[-1])
    return tuple(choices)


def _with_advice(request: BuildRequest, target: TargetRequest, error: EdgeRTError) -> str:
    engine = target.engines[0]
    same = [profile.name for profile in request.targets if profile.engines[0] == engine]
    if len(same) < len(request.targets):
        return f"{error.message}. To build the other targets, omit --target {' --target '.join(same)}"
    return error.message


def _space_needed(request: BuildRequest, targets: tuple[TargetRequest, ...]) -> int:
    """Return an estimate of the bytes that a build writes to its temporary folder."""
    artifacts = sum(len(target.engines) + target.with_reference for target in targets)
    samples = sum(array.nbytes for arrays in (request.calibration, request.holdout) for array in arrays.inputs.values())
    copies = COPIES_OF_INTERMEDIATES + COPIES_OF_ARTIFACT * artifacts
    return max(SPACE_BYTES_MIN, samples + copies * request.source.size_bytes)
