"""The builder seam: one source model in, one artifact per engine out. One file a builder.

Adding a target is one file here, one line in `BUILDERS` and one row in `tests/host/packager/builders/test_builders.py`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, cast

from edgert.errors import ConfigInvalid
from edgert_deploy.devices.profiles import DeviceProfile
from edgert_deploy.packager.builders.layers import Layer
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import SourceModel

# engine name -> "module:Class"; each module imports its vendor's tools only when it builds.
BUILDERS = {
    "tflite": "edgert_deploy.packager.builders.tflite:TFLiteBuilder",
    "openvino": "edgert_deploy.packager.builders.openvino:OpenVINOBuilder",
    "onnxruntime": "edgert_deploy.packager.builders.onnxruntime:ONNXRuntimeBuilder",
    "tensorrt": "edgert_deploy.packager.builders.tensorrt:TensorRTBuilder",
}

# "int8fp16", for TensorRT alone: what INT8 leaves in float is FP16, not FP32.
Precision = Literal["int8", "int8fp16", "fp16", "fp32"]


@dataclass(frozen=True)
class Artifact:
    """What a builder made: `path` is what the engine opens, `companions` are files it needs beside it.

    `judged_by` names the engine that measures the artifact's accuracy on this host: the target's own
    where it runs here, else the nearest that reads the same file (TensorRT's Q/DQ graph: onnxruntime).
    `tools` are the versions that had a hand in it, for the receipt. `float_layers` names the layers that an INT8
    artifact computes in float, where accuracy needs it. `qat`: its scales are those that the source came with.
    """

    engine: str
    precision: Precision
    path: Path
    companions: tuple[Path, ...]
    judged_by: str
    tools: dict[str, str]
    float_layers: tuple[str, ...] = ()
    qat: bool = False

    @property
    def kind(self) -> str:
        """What a table calls it: its precision, with "mixed" for "int8" where layers are in float."""
        return kind_of(self.precision, bool(self.float_layers))

    def size_bytes(self) -> int:
        """Of all its files, as they lie now."""
        return sum(path.stat().st_size for path in (self.path, *self.companions))


def kind_of(precision: Precision, mixed: bool) -> str:
    return precision.replace("int8", "mixed") if mixed else precision


class Builder(Protocol):
    """Makes one engine's artifact. Deterministic: the same input and versions give the same bytes."""

    engine: str

    def build(
        self,
        source: SourceModel,
        calibration: CalibrationSet,
        profile: DeviceProfile,
        precision: Precision,
        out_dir: Path,
        progress: Callable[[str], None],
        float_layers: Sequence[Layer] = (),
    ) -> Artifact:
        """Write the artifact into `out_dir` (exists, empty), `float_layers` of an INT8 one in float.

        Raises OperatorUnsupported or BuildFailed.
        """
        ...


def builder_for(engine: str) -> Builder:
    """The builder of `engine`'s artifacts. Raises ConfigInvalid for an engine nothing is built for."""
    if engine not in BUILDERS:
        raise ConfigInvalid(f"nothing is built for engine {engine!r}; known: {', '.join(BUILDERS)}")
    module, _, cls = BUILDERS[engine].partition(":")
    return cast(Builder, getattr(importlib.import_module(module), cls)())
