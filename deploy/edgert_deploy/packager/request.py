"""The request of a build: the user's files and options, and their meaning for each target."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgert.bundle.rules import Classify, Ctc, Detect
from edgert.bundle.text_rules import Embed
from edgert.errors import CalibrationInvalid, ConfigInvalid
from edgert.names import NAME, NAME_RULE
from edgert.printable import counted
from edgert.processing.preprocessors import InputRule
from edgert_deploy.common.file_cache import FileCache
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.packager.accuracy.accuracy_gate import Limits
from edgert_deploy.packager.builders import BUILDERS, Precision, builder_for, first_engine
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.settings import BuildSettings
from edgert_deploy.packager.sources.onnx_graph.classical import classical_operators, is_classical, is_float_only
from edgert_deploy.packager.sources.source_model import SourceModel

if TYPE_CHECKING:
    from edgert_deploy.packager.candidates.measure import Measurer

ALL_PRECISIONS: tuple[Precision, ...] = ("int8", "fp16", "fp32")


@dataclass(frozen=True)
class BuildRequest(BuildSettings):
    """One build: its settings, and the contents of the files that the user names.

    Attributes:
        downgrade_from: A field of the manifest, like `state_id`, `expires` and `signed_at`.
        measure: Times the candidates, so that the build packs the fastest one that passes.
        cache: The build cache. With None, the build uses a cache that it removes at its end.
    """

    source: SourceModel
    calibration: CalibrationSet
    holdout: CalibrationSet
    targets: tuple[DeviceProfile, ...]
    model: str
    preprocess: InputRule | None = None
    classify: Classify | None = None
    detect: Detect | None = None
    ctc: Ctc | None = None
    embed: Embed | None = None
    downgrade_from: int = 0
    state_id: str = ""
    expires: str = ""
    signed_at: str = ""
    measure: Measurer | None = None
    cache: FileCache | None = None

    @property
    def limits(self) -> Limits:
        return Limits(self.max_drop, self.max_class_drop)


@dataclass(frozen=True)
class TargetRequest:
    """The engines of one target, and the precisions to try in each engine, both in order."""

    profile: DeviceProfile
    engines: tuple[str, ...]
    precisions: tuple[Precision, ...]
    with_reference: bool
    recipe: str = ""

    @property
    def is_auto(self) -> bool:
        return len(self.precisions) > 1


def target_requests(request: BuildRequest) -> tuple[TargetRequest, ...]:
    float_only = is_float_only(request.source.proto)
    precision = request.precision or ("auto" if is_classical(request.source.proto) else None)
    return tuple(
        TargetRequest(
            profile,
            (first_engine(request.source, profile.engines),) if request.engines == "first" else profile.engines,
            ("fp32",) if float_only else _precisions(precision or profile.precision),
            request.with_reference,
            request.recipe,
        )
        for profile in request.targets
    )


def _precisions(requested: str) -> tuple[Precision, ...]:
    return tuple(precision for precision in ALL_PRECISIONS if requested in ("auto", precision))


def _check_recipe(request: BuildRequest) -> None:
    engines = dict.fromkeys(engine for target in target_requests(request) for engine in target.engines)
    known = {engine: builder_for(engine).all_recipes for engine in engines if engine in BUILDERS}
    if request.recipe and not any(request.recipe in names for names in known.values()):
        listed = "; ".join(f"{engine}: {', '.join(names)}" for engine, names in known.items())
        raise ConfigInvalid(
            f"--recipe {request.recipe[:80]}: no engine of the targets has this recipe. Known recipes: {listed}"
        )
    if request.recipe and request.source.quantized:
        raise ConfigInvalid(
            f"--recipe {request.recipe}: the model is quantized already and keeps its own scales: omit --recipe"
        )


def check_out(out: Path) -> None:
    """Raise ConfigInvalid if the bundle cannot be written to `out`."""
    if not out.parent.is_dir() or (out.exists() and not out.is_file()):
        raise ConfigInvalid(f"cannot write a bundle to {out}: give --out a file name in a folder that exists")
    if out.exists() and out.suffix != ".edgert":  # it may be the model or samples
        raise ConfigInvalid(f"{out} exists and is not an .edgert file, so it is not replaced: give --out another name")
    if not os.access(out.parent, os.W_OK):
        raise ConfigInvalid(
            f"cannot write a bundle to {out}: you may not write in its folder. Give --out another folder"
        )


def check_request(request: BuildRequest, out: Path) -> None:
    """Raise ConfigInvalid or CalibrationInvalid for a request that cannot be built."""
    check_out(out)
    if not NAME.fullmatch(request.model):
        raise ConfigInvalid(f"model name {request.model[:80]!r}: give one with --name; {NAME_RULE}")
    names = [profile.name for profile in request.targets]
    if not names or len(set(names)) != len(names):
        raise ConfigInvalid(f"targets {', '.join(names) or 'none'}: give at least one target, and each target once")
    if request.precision in ("int8", "fp16") and is_float_only(request.source.proto):
        raise ConfigInvalid(
            f"--precision {request.precision}: the model consists of {', '.join(classical_operators(request.source.proto))} "
            "(scikit-learn, XGBoost, LightGBM), which only compute in FP32: omit --precision, or give fp32"
        )
    drop = max(request.max_drop, request.max_class_drop or 0)
    if drop > 1 and ":" not in request.metric:  # the user's own metric may have any unit
        raise ConfigInvalid(
            f"a drop of {drop:g} would let every artifact pass, because 1 is the whole score: give less, such as 0.05 for 5 %"
        )
    _check_recipe(request)
    shared = overlap(request.calibration, request.holdout)
    if shared and not request.allow_overlap:
        holdout_row, calibration_row = shared[0]
        raise CalibrationInvalid(
            f"hold-out sample {holdout_row} is also calibration sample {calibration_row} ({len(shared)} of "
            f"{counted(len(request.holdout), 'hold-out sample')}): remove the sample from one of the sets. With --allow-overlap the gate accepts shared samples, but it proves less"
        )


def overlap(calibration: CalibrationSet, holdout: CalibrationSet) -> list[tuple[int, int]]:
    """Return (hold-out row, calibration row) for each hold-out sample that is also a calibration sample."""
    known = {digest: row for row, digest in reversed(list(enumerate(_digests(calibration))))}
    return [(row, known[digest]) for row, digest in enumerate(_digests(holdout)) if digest in known]


def _digests(samples: CalibrationSet) -> list[bytes]:
    arrays = [array for _, array in sorted(samples.inputs.items())]
    return [hashlib.sha256(b"".join(array[row].tobytes() for array in arrays)).digest() for row in range(len(samples))]
