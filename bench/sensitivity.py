"""A comparison of sensitivity measures, which find the layers to keep in float: `python -m bench.sensitivity [--json]`.

The model is digits with outlier channels, which INT8 breaks. Each measure sorts the layers on the same calibration
samples. "alone" has one layer in INT8 and the others in float, like the packager. "all but one" has one layer in float
and the others in INT8. Then the worst 1, 2, ... layers return to float until the top-1 accuracy on the hold-out samples
is within 0.01 of the accuracy of FP32. A measure is better if fewer layers must return. The time is the time of the
measurement, divided by the time of the first measure.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgert.engines.onnxruntime import sdk
from edgert_deploy.devices.profiles import load_profile
from edgert_deploy.packager.accuracy.artifact_runs import artifact_outputs, reference_outputs
from edgert_deploy.packager.accuracy.metrics import sqnr_db
from edgert_deploy.packager.accuracy.sensitivity import SAMPLES_MAX, Sensitivity
from edgert_deploy.packager.builders import BuildSpec, builder_for
from edgert_deploy.packager.builders.layers import Layer, layers_of
from edgert_deploy.packager.builders.qdq import prepared, quantize
from edgert_deploy.packager.samples.samples import CalibrationSet, load_samples
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support import models
from tests.support.paths import DIGITS

MAX_DROP = 0.01


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    with tempfile.TemporaryDirectory(prefix="edgert-bench-") as folder:
        rows = measure(Path(folder))
    if as_json:
        print(json.dumps(rows))
        return
    for row in rows:
        harms = ", ".join(f"{name} {db:.1f} dB" for name, db in row["sqnr_db"].items())
        print(
            f"{row['measure']:12} {row['layers_in_float']} of {row['layers']} in float, time {row['time']:.2f}: {harms}"
        )


def measure(folder: Path) -> list[dict[str, Any]]:
    digits = load_source(DIGITS / "digits.onnx")
    source = load_source(models.write(models.with_outlier(digits.proto), folder / "outlier.onnx"))
    calibration = load_samples(DIGITS / "calibration.npz", source, at_least=10)
    holdout = load_samples(DIGITS / "holdout.npz", source, at_least=10)
    layers = layers_of(prepared(source))
    rows, first_s = [], 0.0
    for name, harm in (("alone", _alone), ("all but one", _all_but_one)):
        began = time.perf_counter()
        harms = harm(source, calibration, layers)
        spent_s = time.perf_counter() - began
        first_s = first_s or spent_s
        worst = sorted(layers, key=lambda layer: harms[layer.name], reverse=name != "alone")
        rows.append(
            {
                "measure": name,
                "layers_in_float": _needed(source, calibration, holdout, worst, folder / name.replace(" ", "-")),
                "layers": len(layers),
                "time": round(spent_s / first_s, 2),
                "sqnr_db": {layer.name: round(harms[layer.name], 1) for layer in layers},
            }
        )
    return rows


def _alone(source: SourceModel, calibration: CalibrationSet, layers: Sequence[Layer]) -> dict[str, float]:
    recipe = builder_for("onnxruntime").recipe(source, load_profile("this-machine"))
    sensitivity = Sensitivity(prepared(source), calibration, recipe)
    return {layer.name: sensitivity.of(layer).sqnr_db for layer in layers}


def _all_but_one(source: SourceModel, calibration: CalibrationSet, layers: Sequence[Layer]) -> dict[str, float]:
    recipe = builder_for("onnxruntime").recipe(source, load_profile("this-machine"))
    few = CalibrationSet({name: array[:SAMPLES_MAX] for name, array in calibration.inputs.items()}, None)
    reference = reference_outputs(source, few)

    def left(layer: Layer) -> float:
        proto = quantize(source, few, recipe, [layer])
        session = sdk().InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        return sqnr_db(reference, session.run(None, few.inputs))

    return {layer.name: left(layer) for layer in layers}


def _needed(
    source: SourceModel, calibration: CalibrationSet, holdout: CalibrationSet, worst: Sequence[Layer], folder: Path
) -> int:
    """Return how many of the worst layers must be float for the gate to pass."""

    def top1(scores: Any) -> float:
        return float((scores.argmax(axis=1) == holdout.labels).mean())

    fp32 = top1(reference_outputs(source, holdout)[0])
    for count in range(len(worst) + 1):
        out = folder / str(count)
        out.mkdir(parents=True)
        spec = BuildSpec("onnxruntime", "int8", load_profile("this-machine"), tuple(worst[:count]))
        artifact = builder_for("onnxruntime").build(spec, source, calibration, out, lambda line: None)
        if fp32 - top1(artifact_outputs(artifact, source, holdout)[0]) <= MAX_DROP + 1e-9:
            return count
    return len(worst)


if __name__ == "__main__":
    main()
