"""Artifacts for tests: each engine's builder, with the profile of a device that takes its artifacts."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from edgert_deploy.devices.profiles import load_profile
from edgert_deploy.packager.builders import BUILDERS, Artifact, BuildSpec, Precision, builder_for
from edgert_deploy.packager.builders.layers import Layer
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import SourceModel
from tests.support import models

ENGINE_NAMES = [name for name, where in BUILDERS.items() if importlib.util.find_spec(where.partition(":")[0])]
PROFILES = {
    "tflite": "raspberry-pi-4",
    "openvino": "intel-nuc",
    "onnxruntime": "this-machine",
    "tensorrt": "jetson-orin-nano",
}


def build(
    engine: str,
    source: SourceModel,
    samples: CalibrationSet,
    precision: Precision,
    out: Path,
    layers: tuple[Layer, ...] = (),
) -> Artifact:
    """Build the artifact in this process into the folder `out`; make a missing folder."""
    out.mkdir(exist_ok=True)
    spec = BuildSpec(engine, precision, load_profile(PROFILES[engine]), layers)
    return builder_for(engine).build(spec, source, samples, out, lambda line: None)


def samples_for(source: SourceModel, count: int = 32) -> CalibrationSet:
    return CalibrationSet(
        {spec.name: models.random(count, *spec.item_shape, seed=i) for i, spec in enumerate(source.inputs)}, None
    )
