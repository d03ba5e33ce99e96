"""The builder seam: a builder makes an artifact of one engine from a source model.

Each builder has a file.

To add an engine, write its builder in a file here, name it in `BUILDERS`, and give it a profile in
`tests/support/builders.py` for the contract test.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, cast

from edgert.errors import ConfigInvalid, OperatorUnsupported
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.packager.builders.artifact_layers import SHARE_MIN, ArtifactLayer, int8_share
from edgert_deploy.packager.builders.layers import Layer
from edgert_deploy.packager.processes.sandbox import Progress
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.onnx_graph.classical import classical_operators
from edgert_deploy.packager.sources.onnx_graph.quantization.dynamic_quantization import is_dynamic
from edgert_deploy.packager.sources.onnx_graph.quantization.qat import float_of, has_wide_activations
from edgert_deploy.packager.sources.onnx_graph.quantization.quantized_operators import as_qdq
from edgert_deploy.packager.sources.onnx_graph.rewrites.single_precision import has_double
from edgert_deploy.packager.sources.source_model import Kind, SourceModel

if TYPE_CHECKING:
    from edgert_deploy.packager.builders.qdq import Recipe

# engine name -> "module:Class"; each module imports its vendor's tools only when it builds.
BUILDERS = {
    "tflite": "edgert_deploy.packager.builders.tflite:TFLiteBuilder",
    "openvino": "edgert_deploy.packager.builders.openvino:OpenVINOBuilder",
    "onnxruntime": "edgert_deploy.packager.builders.onnxruntime:ONNXRuntimeBuilder",
    "tensorrt": "edgert_deploy.packager.builders.tensorrt:TensorRTBuilder",
}

FIRST_RECIPE = "min-max"  # every builder has this recipe

# "int8fp16", for TensorRT alone: the layers that INT8 leaves in float are FP16, not FP32.
Precision = Literal["int8", "int8fp16", "fp16", "fp32"]


@dataclass(frozen=True)
class BuildSpec:
    """An artifact to build. Profiles whose specs have the same `id` share the artifact."""

    engine: str
    precision: Precision
    profile: DeviceProfile
    float_layers: tuple[Layer, ...] = ()
    recipe: str = ""  # one of the builder's `all_recipes`; "" is FIRST_RECIPE

    @property
    def id(self) -> str:
        kind = kind_of(self.precision, bool(self.float_layers))
        recipe = f"-{self.recipe}" if self.recipe else ""
        return f"{self.engine}-{kind}{builder_for(self.engine).variant(self)}{recipe}"


@dataclass(frozen=True)
class Artifact:
    """A model in the form that one engine opens.

    Attributes:
        path: The file that the engine opens.
        companions: The other files that the engine needs beside `path`.
        judged_by: The engine that measures the artifact's accuracy on this host.
        tools: The tools that made the artifact, with their versions, for the receipt.
        float_layers: The names of the layers that an INT8 artifact computes in float for its accuracy.
        qat: Whether the artifact keeps the source's own scales.
        int8_share: The share of multiply-accumulates that run in INT8. None if the file does not show it.
        remarks: Sentences for the user about the artifact.
    """

    engine: str
    precision: Precision
    path: Path
    companions: tuple[Path, ...]
    judged_by: str
    tools: dict[str, str]
    float_layers: tuple[str, ...] = ()
    qat: bool = False
    int8_share: float | None = None
    remarks: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        """The precision in tables. "mixed" is "int8" with some layers, or much of the work, in float."""
        return kind_of(self.precision, bool(self.float_layers) or self.is_partly_float)

    @property
    def is_partly_float(self) -> bool:
        """Whether more of the work is in float than SHARE_MIN allows for an INT8 artifact."""
        return self.int8_share is not None and self.int8_share < SHARE_MIN

    def size_bytes(self) -> int:
        return sum(path.stat().st_size for path in (self.path, *self.companions))

    def as_json(self) -> dict[str, Any]:
        """Return the artifact as JSON, without the folder of its files."""
        return {**vars(self), "path": self.path.name, "companions": [path.name for path in self.companions]}

    @classmethod
    def from_json(cls, value: dict[str, Any], folder: Path) -> Artifact:
        """Return the artifact whose files are in `folder`."""
        values = {key: tuple(entry) if isinstance(entry, list) else entry for key, entry in value.items()}
        companions = tuple(folder / name for name in values["companions"])
        return cls(**{**values, "path": folder / value["path"], "companions": companions})


def kind_of(precision: Precision, mixed: bool) -> str:
    """Return the name of a precision in tables. `mixed` tells whether INT8 leaves some layers in float."""
    return precision.replace("int8", "mixed") if mixed else precision


class Builder(Protocol):
    """Makes the artifacts of one engine and knows the special features of this engine."""

    engine: ClassVar[str]
    # The Python packages whose versions determine an artifact.
    libraries: ClassVar[tuple[str, ...]]
    # The engine that measures the accuracy of artifacts on this host: the builder's own engine if it runs here, else an
    # engine that reads the same file.
    judged_by: ClassVar[str]
    source_kinds: ClassVar[frozenset[Kind]] = frozenset({"onnx"})
    accepts_any_onnx: ClassVar[bool] = False  # also FP64 and the operators of ai.onnx.ml
    accepts_dynamic_ranges: ClassVar[bool] = False  # sources that compute the ranges of activations in each run
    accepts_wide_activations: ClassVar[bool] = False  # sources that quantize activations to 16 bits
    # False for an engine in which folded-in preprocessing is slower (docs/decisions/0011).
    accepts_folded_preprocessing: ClassVar[bool] = True
    # Precisions that are built in addition to "int8" if candidates are timed.
    timed_beside_int8: ClassVar[tuple[Precision, ...]] = ()
    all_recipes: ClassVar[tuple[str, ...]] = (FIRST_RECIPE,)
    # The configurations in which the engine may compute the same model, as (threads, options). With 0 threads, the
    # engine chooses the number.
    ways: ClassVar[tuple[tuple[int, dict[str, Any]], ...]] = ()
    # The tolerance of the golden samples is multiplied by this factor.
    tolerance_times: ClassVar[float] = 1.0
    # The smallest tolerance of the golden samples, as a share of the range of the answers.
    tolerance_floor: ClassVar[float] = 0.0

    def build(
        self, spec: BuildSpec, source: SourceModel, calibration: CalibrationSet, out_dir: Path, progress: Progress
    ) -> Artifact:
        """Write the artifact into the empty `out_dir`. Equal arguments give equal bytes. Raises BuildFailed."""
        ...

    def recipe(self, source: SourceModel, profile: DeviceProfile) -> Recipe:
        """Return the engine's quantization, as closely as a Q/DQ graph can describe it."""
        ...

    def recipes(self, source: SourceModel, profile: DeviceProfile) -> tuple[str, ...]:
        """Return the recipes to try for `source` on `profile`: the cheapest and most promising first."""
        return self.all_recipes

    def variant(self, spec: BuildSpec) -> str:
        """Return a suffix of the artifact's id that separates profiles which need different artifacts."""
        return ""

    def layers(self, path: Path) -> Iterator[ArtifactLayer]:
        """Yield the layers of the artifact at `path`."""
        ...


def artifact_of(
    builder: Builder,
    spec: BuildSpec,
    source: SourceModel,
    path: Path,
    tools: dict[str, str],
    companions: tuple[Path, ...] = (),
) -> Artifact:
    return Artifact(
        builder.engine,
        spec.precision,
        path,
        companions,
        builder.judged_by,
        tools,
        tuple(layer.name for layer in spec.float_layers),
        qat=keeps_quantization(spec, source),
        int8_share=_int8_share(builder, path),
    )


def _int8_share(builder: Builder, path: Path) -> float | None:
    try:
        share = int8_share(builder.layers(path))
    except Exception:  # noqa: BLE001 - an operator that the reader does not know must not fail a build
        return None
    return None if share is None else round(share, 3)


def keeps_quantization(spec: BuildSpec, source: SourceModel) -> bool:
    """Whether the artifact keeps the source's own scales."""
    return accepts_quantization(source, spec.engine) and spec.precision.startswith("int8")


def accepts_quantization(source: SourceModel, engine: str) -> bool:
    """Whether `engine` can run the source with the source's own quantization."""
    builder = builder_for(engine)
    if not source.quantized or builder.accepts_dynamic_ranges or source.proto is None:
        return source.quantized
    return not is_dynamic(source.proto) and (builder.accepts_wide_activations or not has_wide_activations(source.proto))


def adapt_source(source: SourceModel, engine: str) -> SourceModel:
    """Return the source in the form that `engine` accepts: with Q/DQ, or in float. Raises BuildFailed."""
    if not source.quantized or source.proto is None:
        return source
    if accepts_quantization(source, engine):
        return replace(source, proto=as_qdq(source.proto))
    return replace(source, proto=float_of(source.proto), quantized=False)


def builder_for(engine: str) -> Builder:
    """Return the builder of `engine`'s artifacts. Raises ConfigInvalid if the engine has no builder."""
    if engine not in BUILDERS:
        raise ConfigInvalid(f"no builder makes artifacts for engine {engine!r}; give one of {', '.join(BUILDERS)}")
    return cast(Builder, pkgutil.resolve_name(BUILDERS[engine])())


def first_engine(source: SourceModel, engines: Sequence[str]) -> str:
    """Return the engine that must build `source`.

    For an ONNX model, this is the first engine if it supports all operators. Otherwise it is the first engine that
    accepts the source.
    """
    if source.kind == "onnx" and supports_operators(source, engines[0]):
        return engines[0]
    return next((engine for engine in engines if accepts(source, engine)), engines[0])


def accepts(source: SourceModel, engine: str) -> bool:
    """Whether `engine` can build an artifact from `source`. If not, `check_source` raises the reason."""
    return _refusal(source, engine, "") is None


def supports_operators(source: SourceModel, engine: str) -> bool:
    """Whether `engine` supports the source's operators of ai.onnx.ml and its FP64, if it has any."""
    if builder_for(engine).accepts_any_onnx or source.proto is None:
        return True
    return not classical_operators(source.proto) and not has_double(source.proto)


def check_source(source: SourceModel, engine: str, target: str) -> None:
    """Raise ConfigInvalid or OperatorUnsupported if `engine` cannot build an artifact from `source`."""
    if error := _refusal(source, engine, target):
        raise error


def _refusal(source: SourceModel, engine: str, target: str) -> ConfigInvalid | OperatorUnsupported | None:
    """Return the error if `engine` cannot build an artifact from `source`; None if it can."""
    builder = builder_for(engine)
    if (operators := classical_operators(source.proto)) and not builder.accepts_any_onnx:
        return OperatorUnsupported(
            f"{engine} does not support {', '.join(operators)} (ai.onnx.ml): only onnxruntime does. "
            "Build the model for targets with onnxruntime"
        )
    if not supports_operators(source, engine):
        return OperatorUnsupported(
            f"{engine} does not support FP64, and the model stays in FP64: its answers change in FP32, or it is a classical "
            "model. Export it with inputs and weights in FP32, or build it for targets with onnxruntime"
        )
    if source.kind not in builder.source_kinds:
        return ConfigInvalid(
            f"{source.path.name} is a TFLite model, from which only TFLite artifacts are built; target {target} uses "
            f"{engine}. Give the ONNX or Keras model from which it was converted, or convert it to ONNX first: "
            f"python -m tf2onnx.convert --opset 17 --tflite {source.path.name} --output model.onnx"
        )
    if source.fold is not None and not builder.accepts_folded_preprocessing:
        return ConfigInvalid(
            f"--fold-preprocess makes {engine} slower, and target {target} uses {engine}: omit the option, "
            "and the device preprocesses as the manifest describes"
        )
    return None
