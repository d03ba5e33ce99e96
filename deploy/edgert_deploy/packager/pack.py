"""Packing: source model + samples + device profiles -> checked artifacts -> one signed bundle.

`build_bundle` is the sequence of stages; each uses the result of the one before. The build writes everything in a
temporary folder. The bundle appears under its name only after every target has passed, so a failure leaves nothing
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
from edgert.printable import counted
from edgert_deploy.common.quantities import size_text
from edgert_deploy.packager.accuracy import accuracy_gate
from edgert_deploy.packager.accuracy.golden_samples import SAMPLES
from edgert_deploy.packager.accuracy.reference import Reference
from edgert_deploy.packager.build_cache import BuildCache
from edgert_deploy.packager.builders import check_source, first_engine
from edgert_deploy.packager.candidates.candidate import CandidateBuilder
from edgert_deploy.packager.candidates.choice import Choice, certain_specs, check_gate, choose
from edgert_deploy.packager.candidates.evaluation import Evaluation, evaluate_source
from edgert_deploy.packager.candidates.mixed_precision import Budget
from edgert_deploy.packager.contents import golden_samples, write_contents
from edgert_deploy.packager.processes.sandbox import Progress
from edgert_deploy.packager.processes.work_folder import work_folder
from edgert_deploy.packager.receipt import receipt
from edgert_deploy.packager.request import BuildRequest, TargetRequest, check_request, overlap, target_requests
from edgert_deploy.packager.samples.samples import constant_inputs, inputs_apart, inputs_beyond
from edgert_deploy.packager.sources.onnx_graph.classical import classical_operators, is_float_only

# Disk space in units of the model's size: a builder's intermediate files; an artifact and its copy in the bundle.
COPIES_ON_THE_WAY = 4
COPIES_OF_ARTIFACT = 2
SPACE_BYTES_MIN = 16 * 1024**2


@dataclass(frozen=True)
class BuildResult:
    """The written bundle, the choice for each target in order, and the key that signed the bundle.

    `warnings` give the reasons why a passed gate may prove little, and the targets that get less than requested.
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
    """Build, judge and pack every target; `report` gets each target's choice as soon as it is made.

    Raises AccuracyTooLow after all targets were judged, and BuildFailed, OperatorUnsupported or another EdgeRTError;
    `out` is then as it was before.
    """
    check_request(request, out)
    targets = target_requests(request)
    _check_targets(request, targets)
    with work_folder(_space_needed(request, targets)) as work:
        cache = request.cache or BuildCache(work / "cache")
        evaluation = evaluate_source(request)
        warnings = [
            *request.source.remarks,
            *_softmax_warnings(request, evaluation.reference),
            *_classical_warnings(request),
            *_overlap_warnings(request),
            *_constant_warnings(request),
            *_range_warnings(request),
            *accuracy_gate.warnings(evaluation.metric, evaluation.reference, evaluation.limits),
            *_golden_warnings(evaluation),
        ]
        request = replace(request, classify=evaluation.reference.classify, ctc=evaluation.reference.ctc)
        for warning in warnings:
            progress(f"warning: {warning}")
        builder = CandidateBuilder(evaluation, cache, work, progress)
        builder.processes.ahead(certain_specs(evaluation, targets), progress, request.jobs)
        choices = _choose_all(builder, targets, request, report)
        check_gate(choices)
        golden = golden_samples(evaluation, choices, progress)
        ranges = builder.processes.activations(progress)
        receipt_bytes = receipt(choices, builder.built, ranges, request.licence, request.notes)
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
            raise type(error)(_with_advice(request, target, error)) from error


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
            raise type(error)(_with_advice(request, target, error)) from error
        report(choices[-1])
    return tuple(choices)


def _with_advice(request: BuildRequest, target: TargetRequest, error: EdgeRTError) -> str:
    engine = target.engines[0]
    same = [profile.name for profile in request.targets if profile.engines[0] == engine]
    if len(same) < len(request.targets):
        return f"{error.message}. The other targets can be built without it: omit --target {' --target '.join(same)}"
    return error.message


def _softmax_warnings(request: BuildRequest, reference: Reference) -> list[str]:
    """Return a sentence for each rule whose softmax the build omitted because the scores need none."""
    pairs = ((request.classify, reference.classify), (request.ctc, reference.ctc))
    return [
        f"output {after.output!r} holds no logits, so devices take its scores as they are, without softmax"
        for before, after in pairs
        if before is not None and after is not None and before.softmax != after.softmax
    ]


def _classical_warnings(request: BuildRequest) -> list[str]:
    if not (operators := classical_operators(request.source.proto)):
        return []
    precision = ", in FP32: there is nothing to quantize" if is_float_only(request.source.proto) else ""
    return [
        f"the model uses {', '.join(operators)} of ai.onnx.ml (scikit-learn, XGBoost, LightGBM), which of all engines "
        f"only onnxruntime computes: targets get it for onnxruntime alone{precision}"
    ]


def _golden_warnings(evaluation: Evaluation) -> list[str]:
    count = len(evaluation.golden)
    if count >= min(SAMPLES, len(evaluation.reference.holdout)):
        return []
    each = sum(array[:1].nbytes for array in (*evaluation.golden_inputs(), *evaluation.answers))
    return [
        f"one sample with its answers takes {size_text(each)}, so the bundle has {counted(count, 'golden sample')} instead of {SAMPLES}: "
        "a device's check of its answers proves less"
    ]


def _overlap_warnings(request: BuildRequest) -> list[str]:
    if not request.allow_overlap or not (shared := overlap(request.calibration, request.holdout)):
        return []
    return [
        f"calibration has {len(shared)} of {counted(len(request.holdout), 'hold-out sample')} too: the gate proves less "
        "than with separate samples"
    ]


def _constant_warnings(request: BuildRequest) -> list[str]:
    """Return a sentence for each input whose samples are all the same: they prove no more than one sample."""
    texts = []
    for kind, samples in (("calibration", request.calibration), ("hold-out", request.holdout)):
        for name in constant_inputs(samples):
            values = samples.inputs[name][0]
            same = f"is {values.flat[0]} everywhere" if values.size and values.min() == values.max() else "is the same"
            texts.append(
                f"input {name!r} {same} in all {len(samples)} {kind} samples, which prove no more than one: "
                "check how they are made, and give samples that differ as the field's do"
            )
    return texts


def _range_warnings(request: BuildRequest) -> list[str]:
    """Return a sentence for each input whose hold-out values are of another size or range."""
    apart = inputs_apart(request.calibration, request.holdout)
    beyond = [name for name in inputs_beyond(request.calibration, request.holdout) if name not in apart]
    precisions = {precision for target in target_requests(request) for precision in target.precisions}
    if "int8" not in precisions or request.source.quantized:
        beyond = []  # the calibration samples determine no scale
    texts = []
    for name in (*apart, *beyond):
        one, other = (
            f"{samples.inputs[name].min():.4g} to {samples.inputs[name].max():.4g}"
            for samples in (request.calibration, request.holdout)
        )
        effect = (
            ", so INT8 has the wrong ranges: prepare both in the same way, as the app does"
            if name in apart
            else ". INT8 cuts off what lies outside the first range: give calibration samples that reach as far as the "
            "field's values do"
        )
        texts.append(f"input {name!r} is {one} in the calibration samples and {other} in the hold-out samples{effect}")
    return texts


def _space_needed(request: BuildRequest, targets: tuple[TargetRequest, ...]) -> int:
    """Return an estimate of the bytes that a build writes to its temporary folder."""
    artifacts = sum(len(target.engines) + target.with_reference for target in targets)
    samples = sum(array.nbytes for arrays in (request.calibration, request.holdout) for array in arrays.inputs.values())
    copies = COPIES_ON_THE_WAY + COPIES_OF_ARTIFACT * artifacts
    return max(SPACE_BYTES_MIN, samples + copies * request.source.size_bytes)
