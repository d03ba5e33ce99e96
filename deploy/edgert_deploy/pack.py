"""Packing: source model + samples + device profiles -> checked artifacts -> one signed bundle.

Each distinct artifact is built once, whichever targets share it, in a temporary folder; the bundle
appears under its name only when every target has passed the gate, so a failure leaves nothing behind.

Golden samples: the first 8 of the hold-out, with the answers of each artifact on this host. A device
may differ from them, per output, by the larger of 3 quantisation steps (a step is the range of the
FP32 hold-out answers / 255) and 2 % of the golden answers' range; twice that for TensorRT, whose
kernels this host cannot run. FP32 artifacts: 0.1 % of the range (TensorRT 2 %: it may use TF32).
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert import __version__
from edgert.bundle import write_bundle
from edgert.errors import AccuracyTooLow, BuildFailed, ConfigInvalid, EdgeRTError, OperatorUnsupported, SourceInvalid
from edgert.manifest import (
    MODEL_NAME,
    Accuracy,
    ArtifactEntry,
    Classify,
    Detect,
    FileEntry,
    Manifest,
    Preprocess,
    TargetEntry,
)
from edgert.signing import SigningKey
from edgert_deploy.accuracy import Metric, Outputs, artifact_outputs, doubts, judge, reference_outputs
from edgert_deploy.build_ahead import Job, build_ahead
from edgert_deploy.build_cache import BuildCache, CachedBuilder
from edgert_deploy.builders import Artifact, Precision, builder_for
from edgert_deploy.builders.onnxruntime import is_for_arm
from edgert_deploy.calibration import CalibrationSet
from edgert_deploy.profiles import DeviceProfile
from edgert_deploy.source import SourceModel, check_engine, computes_in_fp16

GOLDEN_SAMPLES = 8
CALIBRATION_SAMPLES_MIN = 10
HOLDOUT_SAMPLES_MIN = GOLDEN_SAMPLES
QUANTISATION_STEPS = 3
GOLDEN_RANGE_SHARE = {"int8": 0.02, "fp32": 0.001}
TENSORRT_FP32_RANGE_SHARE = 0.02
ATOL_MIN = 1e-5

Progress = Callable[[str], None]


@dataclass(frozen=True)
class BuildRequest:
    """What the user asked to be packed. `precision` None takes each profile's own.

    `with_reference` adds, for each target whose own artifact is not FP32, one of the same engine that is: devices can
    compare their live answers with its (docs/serving.md). `downgrade` lets devices go back to this release. `cache`
    keeps artifacts for the next build; `jobs` is how many may be built at once, 0: as many as fit.
    """

    source: SourceModel
    calibration: CalibrationSet
    holdout: CalibrationSet
    targets: tuple[DeviceProfile, ...]
    model: str
    release: int = 1
    max_drop: float = 0.01
    precision: Precision | None = None
    with_reference: bool = False
    preprocess: Preprocess | None = None
    classify: Classify | None = None
    detect: Detect | None = None
    downgrade: bool = False
    metric: Metric = "auto"
    cache: BuildCache | None = None
    jobs: int = 0


@dataclass(frozen=True)
class BuildRow:
    """One line of the build's table: a target, and what it gets."""

    target: str
    artifact: str
    engine: str
    precision: str
    size_bytes: int
    source_size_bytes: int
    accuracy: Accuracy
    judged_by: str
    build_s: float

    @property
    def passed(self) -> bool:
        return self.accuracy.passed


@dataclass(frozen=True)
class BuildResult:
    """The bundle as written: its path, size, rows in the order of the targets, and who signed it.

    `warnings` say why the gate may prove less than it seems to.
    """

    path: Path
    size_bytes: int
    digest: str
    key_id: str
    rows: tuple[BuildRow, ...]
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
        request = replace(request, cache=cache)
        reference = reference_outputs(request.source, request.holdout)
        _check_rows_are_independent(request, reference)
        warnings = doubts(request.source.outputs, reference, request.calibration, request.holdout, request.metric)
        for warning in warnings:
            progress(f"warning: {warning}")
        build_ahead(request.source, request.calibration, _surely_needed(request), cache, progress, request.jobs)
        made: dict[str, _Made] = {}
        rows = []
        for profile in request.targets:
            rows.append(_row(request, profile, made, reference, work, progress))
            report(rows[-1])
            _make_reference(request, profile, made, reference, work, progress)
        _gate(rows)
        manifest, files = _manifest(request, made, reference, work)
        progress(f"writing {out}")
        write_bundle(out, manifest, files, key)
    digest = hashlib.sha256(manifest.to_bytes()).hexdigest()
    return BuildResult(out, out.stat().st_size, digest, key.public.key_id, tuple(rows), tuple(warnings))


def artifact_id(profile: DeviceProfile, precision: str) -> str:
    """Profiles with the same id share one artifact."""
    engine = profile.engines[0]
    # ONNX Runtime alone wants another INT8 graph on ARM than on x86.
    variant = "-arm" if engine == "onnxruntime" and precision == "int8" and is_for_arm(profile) else ""
    return f"{engine}-{precision}{variant}"


@dataclass(frozen=True)
class _Made:
    """An artifact, its receipt and its answers to the golden samples."""

    artifact: Artifact
    accuracy: Accuracy
    golden: Outputs
    build_s: float


def _check_targets(request: BuildRequest) -> None:
    if not MODEL_NAME.fullmatch(request.model):
        raise ConfigInvalid(
            f"model name {request.model[:80]!r}: give one with --name, a letter and then at most 62 of a-z 0-9 _ -"
        )
    names = [profile.name for profile in request.targets]
    if not names or len(set(names)) != len(names):
        raise ConfigInvalid(f"targets {', '.join(names) or 'none'}: give at least one, each once")
    for profile in request.targets:
        check_engine(request.source, profile.engines[0], profile.name)


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


def _surely_needed(request: BuildRequest) -> list[Job]:
    """One job an artifact, whichever targets share it."""
    wanted: dict[str, Job] = {}
    for profile in request.targets:
        precision = request.precision or _precision(profile)
        wanted.setdefault(artifact_id(profile, precision), Job(profile.name, profile.engines[0], profile, precision))
        if name := _reference_id(request, profile):
            wanted.setdefault(name, Job(profile.name, profile.engines[0], profile, "fp32"))
    return list(wanted.values())


def _row(
    request: BuildRequest,
    profile: DeviceProfile,
    made: dict[str, _Made],
    reference: Outputs,
    work: Path,
    progress: Progress,
) -> BuildRow:
    precision = request.precision or _precision(profile)
    name = artifact_id(profile, precision)
    if name not in made:
        made[name] = _make(request, profile, precision, reference, work / name, progress)
    artifact = made[name].artifact
    return BuildRow(
        target=profile.name,
        artifact=name,
        engine=artifact.engine,
        precision=artifact.precision,
        size_bytes=sum(path.stat().st_size for path in (artifact.path, *artifact.companions)),
        source_size_bytes=request.source.size_bytes,
        accuracy=made[name].accuracy,
        judged_by=artifact.judged_by,
        build_s=made[name].build_s,
    )


def _reference_id(request: BuildRequest, profile: DeviceProfile) -> str:
    """The FP32 artifact that goes along for comparison, or "" where none is asked for or the target's own is FP32."""
    if not request.with_reference or (request.precision or _precision(profile)) == "fp32":
        return ""
    return artifact_id(profile, "fp32")


def _make_reference(
    request: BuildRequest,
    profile: DeviceProfile,
    made: dict[str, _Made],
    reference: Outputs,
    work: Path,
    progress: Progress,
) -> None:
    name = _reference_id(request, profile)
    if name and name not in made:
        made[name] = _make(request, profile, "fp32", reference, work / name, progress)


def _precision(profile: DeviceProfile) -> Precision:
    return "fp32" if profile.precision == "fp32" else "int8"


def _make(
    request: BuildRequest,
    profile: DeviceProfile,
    precision: Precision,
    reference: Outputs,
    out: Path,
    progress: Progress,
) -> _Made:
    progress(f"{profile.name}: building {profile.engines[0]} {precision}")
    start = time.monotonic()
    out.mkdir()
    assert request.cache is not None
    try:
        artifact = CachedBuilder(builder_for(profile.engines[0]), request.cache).build(
            request.source, request.calibration, profile, precision, out, progress
        )
    except (OperatorUnsupported, BuildFailed) as error:
        raise type(error)(_with_advice(request, profile, error)) from error
    build_s = time.monotonic() - start
    progress(f"{profile.name}: judging it in {artifact.judged_by} on {len(request.holdout)} samples")
    answers = artifact_outputs(artifact, request.source, request.holdout)
    _check_answers(artifact, reference, answers)
    accuracy = judge(
        request.source.outputs,
        reference,
        answers,
        request.holdout.labels,
        request.max_drop,
        request.metric,
        classes_named=request.classify is not None,
    )
    return _Made(artifact, accuracy, [array[:GOLDEN_SAMPLES] for array in answers], build_s)


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


def _check_answers(artifact: Artifact, reference: Outputs, answers: Outputs) -> None:
    for want, got in zip(reference, answers, strict=True):
        if want.shape != got.shape or want.dtype != got.dtype:
            raise BuildFailed(
                f"the {artifact.engine} artifact answers {got.dtype} {list(got.shape)} where the source answers "
                f"{want.dtype} {list(want.shape)}; this is a fault of the builder, please report it"
            )


def _gate(rows: Sequence[BuildRow]) -> None:
    failed = [row for row in rows if not row.passed]
    if not failed:
        return
    parts = [
        f"target {row.target}: {row.accuracy.metric} fell by {row.accuracy.drop:.4f} "
        f"({row.accuracy.fp32:.4f} -> {row.accuracy.artifact:.4f} on {row.accuracy.samples} samples)"
        for row in failed
    ]
    raise AccuracyTooLow(
        f"{'; '.join(parts)}; allowed is {failed[0].accuracy.max_drop:.4f} and no bundle was written. Give calibration "
        "samples closer to the field's, build with --precision fp32, or allow more with --max-drop"
    )


def _manifest(
    request: BuildRequest, made: dict[str, _Made], reference: Outputs, work: Path
) -> tuple[Manifest, dict[str, Path]]:
    """The manifest, and where each file that it names lies now."""
    files: dict[str, Path] = {}
    golden_inputs = tuple(
        _save(files, work, f"golden/inputs/{i}.npy", request.holdout.inputs[spec.name][:GOLDEN_SAMPLES])
        for i, spec in enumerate(request.source.inputs)
    )
    artifacts = tuple(_entry(name, one, reference, files, work) for name, one in sorted(made.items()))
    manifest = Manifest(
        model=request.model,
        release=request.release,
        inputs=request.source.inputs,
        outputs=request.source.outputs,
        files=tuple(_file_entry(name, files[name]) for name in sorted(files)),
        artifacts=artifacts,
        targets=tuple(
            TargetEntry(
                p.name,
                p.machines,
                (artifact_id(p, request.precision or _precision(p)),),
                _reference_id(request, p),
            )
            for p in request.targets
        ),
        golden_inputs=golden_inputs,
        source_sha256=request.source.sha256,
        source_size_bytes=request.source.size_bytes,
        preprocess=request.preprocess,
        classify=request.classify,
        detect=request.detect,
        downgrade=request.downgrade,
    )
    return manifest, files


def _entry(name: str, made: _Made, reference: Outputs, files: dict[str, Path], work: Path) -> ArtifactEntry:
    artifact = made.artifact
    paths = {path: f"artifacts/{name}/{path.name}" for path in (artifact.path, *artifact.companions)}
    files.update({inside: path for path, inside in paths.items()})
    golden = tuple(_save(files, work, f"golden/{name}/{i}.npy", array) for i, array in enumerate(made.golden))
    return ArtifactEntry(
        id=name,
        engine=artifact.engine,
        precision=artifact.precision,
        entry=paths[artifact.path],
        files=tuple(sorted(paths.values())),
        golden_outputs=golden,
        golden_atol=tuple(golden_atol(artifact, r, g) for r, g in zip(reference, made.golden, strict=True)),
        accuracy=made.accuracy,
        tools={"edgert": __version__, **artifact.tools},
    )


def golden_atol(artifact: Artifact, reference: NDArray[Any], golden: NDArray[Any]) -> float:
    """How far a device's answer may lie from the golden one: the rule at the head of this file."""
    share = GOLDEN_RANGE_SHARE[artifact.precision]
    steps = QUANTISATION_STEPS * _range(reference) / 255 if artifact.precision == "int8" else 0.0
    atol = max(steps, share * _range(golden))
    if artifact.engine == "tensorrt":
        atol = 2 * atol if artifact.precision == "int8" else TENSORRT_FP32_RANGE_SHARE * _range(golden)
    return float(f"{max(atol, ATOL_MIN):.6g}")


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
