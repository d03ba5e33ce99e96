"""Packing: source model + samples + device profiles -> checked artifacts -> one signed bundle.

Each distinct artifact is built once, whichever targets share it, in a temporary folder; the bundle
appears under its name only when every target has passed the gate, so a failure leaves nothing behind.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edgert import __version__
from edgert.bundle.bundle_file import write_bundle
from edgert.bundle.manifest import MODEL_NAME, Accuracy, ArtifactEntry, FileEntry, Manifest, TargetEntry
from edgert.bundle.rules import Classify, Detect, Preprocess
from edgert.bundle.signing import SigningKey
from edgert.errors import (
    AccuracyTooLow,
    BuildFailed,
    ConfigInvalid,
    EdgeRTError,
    EngineMissing,
    OperatorUnsupported,
    SourceInvalid,
)
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.packager import receipt
from edgert_deploy.packager.accuracy import golden_samples as golden
from edgert_deploy.packager.accuracy.accuracy_gate import Limits, Verdict, doubts, reference_outputs
from edgert_deploy.packager.accuracy.activation_ranges import activations
from edgert_deploy.packager.accuracy.metrics import Outputs, Question, metric_for
from edgert_deploy.packager.build_cache import BuildCache
from edgert_deploy.packager.candidates import Brief, Candidate, Order, Progress, Workshop
from edgert_deploy.packager.choice import PRECISIONS_OF, Asked, Choice, choose
from edgert_deploy.packager.measure import Measurer
from edgert_deploy.packager.mixed_precision import Budget
from edgert_deploy.packager.parallel_builds import Job, build_ahead
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import SourceModel, computes_in_fp16

BUDGET_S = 600.0
CALIBRATION_SAMPLES_MIN = 10
HOLDOUT_SAMPLES_MIN = golden.SAMPLES


@dataclass(frozen=True)
class BuildRequest:
    """What the user asked to be packed. `precision` None takes each profile's own.

    `engines` "all" packs an artifact for every engine of a profile's ladder that takes the model, "first" one for
    the first. `with_reference` adds, for each target whose own artifact is not FP32, one of the same engine that is:
    devices can compare their live answers with its (docs/serving.md). `downgrade` lets devices go back to this release.
    `expires` is until when it may be installed, as the manifest states it.
    `licence` and `notes` are the user's words for those who inspect the bundle.
    `metric` is one of metrics.py's names. `budget_s` is how long all fallbacks may look for layers to put into float;
    `measure` times the candidates, so that the fastest that passes is taken. `cache` keeps artifacts for the next build; `jobs` is how many may be built at
    once, 0: as many as fit.
    """

    source: SourceModel
    calibration: CalibrationSet
    holdout: CalibrationSet
    targets: tuple[DeviceProfile, ...]
    model: str
    release: int = 1
    max_drop: float = 0.01
    max_class_drop: float | None = None
    precision: Asked | None = None
    engines: Literal["all", "first"] = "all"
    with_reference: bool = False
    preprocess: Preprocess | None = None
    classify: Classify | None = None
    detect: Detect | None = None
    downgrade: bool = False
    expires: str = ""
    licence: str = ""
    notes: str = ""
    metric: str = "auto"
    budget_s: float = BUDGET_S
    measure: Measurer | None = None
    cache: BuildCache | None = None
    jobs: int = 0

    @property
    def limits(self) -> Limits:
        return Limits(self.max_drop, self.max_class_drop)

    def asked(self, profile: DeviceProfile) -> Asked:
        return self.precision or profile.precision  # type: ignore[return-value]  # profiles.py has checked it


@dataclass(frozen=True)
class BuildRow:
    """One line of the build's table: a target, and an artifact that it gets; `rung` 0 is what it serves with."""

    target: str
    rung: int
    candidate: Candidate
    source_size_bytes: int

    @property
    def artifact(self) -> str:
        return self.candidate.id

    @property
    def engine(self) -> str:
        return self.candidate.artifact.engine

    @property
    def precision(self) -> str:
        """int8, mixed, fp16 or fp32."""
        return self.candidate.artifact.kind

    @property
    def size_bytes(self) -> int:
        return self.candidate.size_bytes

    @property
    def verdict(self) -> Verdict:
        return self.candidate.verdict

    @property
    def accuracy(self) -> Accuracy:
        return self.verdict.accuracy

    @property
    def passed(self) -> bool:
        return self.verdict.passed


@dataclass(frozen=True)
class BuildResult:
    """The bundle as written: its path, size, rows in the order of the targets, and who signed it.

    `warnings` say why the gate may prove less than it seems to, and where a target gets less than was asked for.
    """

    path: Path
    size_bytes: int
    digest: str
    key_id: str
    rows: tuple[BuildRow, ...]
    choices: tuple[Choice, ...]
    warnings: tuple[str, ...] = ()


def build_bundle(
    request: BuildRequest, key: SigningKey, out: Path, progress: Progress, report: Callable[[BuildRow], None]
) -> BuildResult:
    """Build, judge and pack every target; `report` is told of each row as soon as it is known.

    Raises AccuracyTooLow after all targets were judged, BuildFailed, OperatorUnsupported and their kin;
    `out` is then as it was before.
    """
    if not out.parent.is_dir() or out.is_dir():
        raise ConfigInvalid(f"cannot write a bundle to {out}: give --out a file name in a folder that exists")
    _check_targets(request)
    with tempfile.TemporaryDirectory(prefix="edgert-build-") as folder:
        work = Path(folder)
        cache = request.cache or BuildCache(work / "cache")
        brief = make_brief(request)
        warnings = doubts(brief.metric, brief.question, request.calibration)
        for warning in warnings:
            progress(f"warning: {warning}")
        build_ahead(request.source, request.calibration, _surely_needed(request), cache, progress, request.jobs)
        shop = Workshop(brief, cache, work, progress)
        budget = Budget(request.budget_s)
        choices, rows = [], list[BuildRow]()
        for profile in request.targets:
            choices.append(_choice(request, shop, profile, budget))
            for rung, candidate in enumerate(choices[-1].ladder):
                rows.append(BuildRow(profile.name, rung, candidate, request.source.size_bytes))
                report(rows[-1])
        _gate(rows, choices)
        manifest, files = _manifest(request, shop, choices, work)
        progress(f"writing {out}")
        write_bundle(out, manifest, files, key)
    digest = hashlib.sha256(manifest.to_bytes()).hexdigest()
    warnings += [remark for choice in choices for remark in choice.remarks]
    return BuildResult(out, out.stat().st_size, digest, key.public.key_id, tuple(rows), tuple(choices), tuple(warnings))


def make_brief(request: BuildRequest) -> Brief:
    """What every candidate is judged by. Raises SourceInvalid, CalibrationInvalid and ConfigInvalid."""
    source, holdout = request.source, request.holdout
    reference = reference_outputs(source, holdout)
    _check_rows_are_independent(request, reference)
    after = request.classify or request.detect
    question = Question(
        source.outputs,
        reference,
        holdout,
        class_names=() if after is None else after.labels,
        classes_named=request.classify is not None,
        detect=request.detect,
        image_size=_image_size(request),
    )
    metric = metric_for(request.metric, question)
    return Brief(source, request.calibration, question, metric, request.limits, golden.golden_rows(reference))


def _choice(request: BuildRequest, shop: Workshop, profile: DeviceProfile, budget: Budget) -> Choice:
    try:
        choice = choose(shop, profile, request.asked(profile), _engines(request, profile), budget, request.measure)
        if reference := _reference(request, choice):
            shop.make(reference)
    except (OperatorUnsupported, BuildFailed, EngineMissing) as error:
        raise type(error)(_with_advice(request, profile, error)) from error
    return choice


def _image_size(request: BuildRequest) -> tuple[int, int] | None:
    """Height and width of what a detector is shown."""
    before = request.preprocess
    name = before.input if before is not None else request.source.inputs[0].name
    shape = next(spec.shape for spec in request.source.inputs if spec.name == name)
    if request.detect is None or len(shape) != 4:
        return None
    return (shape[1], shape[2]) if before is not None and before.model_layout == "nhwc" else (shape[2], shape[3])


def _check_targets(request: BuildRequest) -> None:
    if not MODEL_NAME.fullmatch(request.model):
        raise ConfigInvalid(
            f"model name {request.model[:80]!r}: give one with --name, a letter and then at most 62 of a-z 0-9 _ -"
        )
    names = [profile.name for profile in request.targets]
    if not names or len(set(names)) != len(names):
        raise ConfigInvalid(f"targets {', '.join(names) or 'none'}: give at least one, each once")


def _check_rows_are_independent(request: BuildRequest, reference: Outputs) -> None:
    """A batch serves many callers: no answer may depend on which other samples share it."""
    if request.source.inputs[0].shape[0] != -1:
        return
    for i in (0, len(request.holdout) - 1):
        one = CalibrationSet({n: a[i : i + 1] for n, a in request.holdout.inputs.items()}, None)
        for spec, want, got in zip(
            request.source.outputs, reference, reference_outputs(request.source, one), strict=True
        ):
            if not np.allclose(want[i], got[0], rtol=1e-2, atol=1e-2 * (_range(want) or 1.0)):
                raise SourceInvalid(
                    f"output {spec.name!r} of a sample depends on the other samples in its batch; "
                    "export the model in inference mode, or with its batch fixed to 1"
                )


def _reference(request: BuildRequest, choice: Choice) -> Order | None:
    """The FP32 artifact that goes along for comparison, where one is asked for and the target's own is another."""
    own = choice.ladder[0]
    if not request.with_reference or own.artifact.precision == "fp32":
        return None
    return Order(own.artifact.engine, "fp32", choice.profile)


def _surely_needed(request: BuildRequest) -> list[Job]:
    """One job for each artifact that is built whatever the gate says, whichever targets share it."""
    wanted: dict[str, Job] = {}
    for profile in request.targets:
        precision = PRECISIONS_OF[request.asked(profile)][0]
        orders = [Order(engine, precision, profile) for engine in _engines(request, profile)]
        if request.with_reference:
            orders.append(Order(profile.engines[0], "fp32", profile))
        for order in orders:
            if request.source.kind == "tflite" and order.engine != "tflite":
                continue  # choice.py says why none is built
            wanted.setdefault(order.id, Job(profile.name, order.engine, profile, order.precision))
    return list(wanted.values())


def _engines(request: BuildRequest, profile: DeviceProfile) -> tuple[str, ...]:
    return profile.engines[:1] if request.engines == "first" else profile.engines


def _with_advice(request: BuildRequest, profile: DeviceProfile, error: EdgeRTError) -> str:
    """The builder's message, and what the user can do about it."""
    if computes_in_fp16(request.source):
        return (
            f"the model computes in FP16, which {profile.engines[0]} artifacts are not built from: "
            "export it in FP32 (in PyTorch: model.float() before the export) and build that"
        )
    same = [other.name for other in request.targets if other.engines[0] == profile.engines[0]]
    if len(same) < len(request.targets):
        return (
            f"{error.message}. The other targets can be built without it: leave out --target {' --target '.join(same)}"
        )
    return error.message


def _gate(rows: Sequence[BuildRow], choices: Sequence[Choice]) -> None:
    failed = [row for row in rows if not row.passed]
    if not failed:
        return
    parts = [f"target {row.target}: {row.candidate.artifact.engine} {row.verdict.complaint()}" for row in failed]
    parts += [remark for choice in choices if not choice.ladder[0].verdict.passed for remark in choice.remarks]
    limits = failed[0].verdict.limits
    allowed = f"{limits.max_drop:.4f}"
    if limits.max_class_drop is not None:
        allowed += f", {limits.max_class_drop:.4f} of any class or slice"
    offer = (
        ""
        if not failed[0].candidate.artifact.precision.startswith("int8")
        else "let it take FP16 or FP32 with --precision auto, "
    )
    raise AccuracyTooLow(
        f"{'; '.join(parts)}; allowed is {allowed} and no bundle was written. Give calibration "
        f"samples closer to the field's, {offer}or allow more with --max-drop"
    )


def _manifest(
    request: BuildRequest, shop: Workshop, choices: Sequence[Choice], work: Path
) -> tuple[Manifest, dict[str, Path]]:
    """The manifest, and where each file that it names lies now."""
    files: dict[str, Path] = {}
    samples = [request.holdout.inputs[spec.name][shop.brief.golden] for spec in request.source.inputs]
    golden_inputs = tuple(_save(files, work, f"golden/inputs/{i}.npy", array) for i, array in enumerate(samples))
    references = [_reference(request, choice) for choice in choices]
    packed = {candidate.id: candidate for choice in choices for candidate in choice.ladder}
    packed |= {order.id: shop.make(order) for order in references if order is not None}
    artifacts = tuple(_entry(shop, packed[name], samples, files, work) for name in sorted(packed))
    files[receipt.PATH] = work / receipt.PATH
    files[receipt.PATH].write_bytes(
        receipt.receipt(
            request.limits,
            choices,
            shop.made,
            packed,
            activations(request.source, request.calibration),
            request.licence,
            request.notes,
        )
    )
    manifest = Manifest(
        model=request.model,
        release=request.release,
        inputs=request.source.inputs,
        outputs=request.source.outputs,
        files=tuple(_file_entry(name, files[name]) for name in sorted(files)),
        artifacts=artifacts,
        targets=tuple(
            TargetEntry(
                choice.profile.name,
                choice.profile.machines,
                tuple(candidate.id for candidate in choice.ladder),
                "" if reference is None else reference.id,
            )
            for choice, reference in zip(choices, references, strict=True)
        ),
        golden_inputs=golden_inputs,
        source_sha256=request.source.sha256,
        source_size_bytes=request.source.size_bytes,
        preprocess=request.preprocess,
        classify=request.classify,
        detect=request.detect,
        downgrade=request.downgrade,
        expires=request.expires,
    )
    return manifest, files


def _entry(
    shop: Workshop, made: Candidate, samples: Sequence[NDArray[Any]], files: dict[str, Path], work: Path
) -> ArtifactEntry:
    artifact, name = made.artifact, made.id
    paths = {path: f"artifacts/{name}/{path.name}" for path in (artifact.path, *artifact.companions)}
    files.update({inside: path for path, inside in paths.items()})
    answers = tuple(_save(files, work, f"golden/{name}/{i}.npy", array) for i, array in enumerate(made.golden))
    shop.progress(f"{name}: how far its answers differ from one way of computing them to another")
    reference = shop.brief.question.reference
    return ArtifactEntry(
        id=name,
        engine=artifact.engine,
        precision=artifact.kind,
        entry=paths[artifact.path],
        files=tuple(sorted(paths.values())),
        golden_outputs=answers,
        golden_atol=golden.tolerances(artifact, shop.brief.source, samples, made.golden, reference),
        accuracy=made.verdict.accuracy,
        tools={"edgert": __version__, **artifact.tools},
    )


def _range(array: NDArray[Any]) -> float:
    return float(array.max()) - float(array.min()) if array.size else 0.0


def _save(files: dict[str, Path], work: Path, name: str, array: NDArray[Any]) -> str:
    """Write `array` as an .npy file (the same array gives the same bytes) and return its name in the bundle."""
    path = work / "files" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.save(file, np.ascontiguousarray(array), allow_pickle=False)
    files[name] = path
    return name


def _file_entry(name: str, path: Path) -> FileEntry:
    data = path.read_bytes()
    return FileEntry(name, len(data), hashlib.sha256(data).hexdigest())
