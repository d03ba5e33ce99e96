"""INT8 against FP32: time of one inference, size and accuracy, for each engine that runs on this machine.

EdgeRT's builders make both artifacts of an engine, and EdgeRT's sessions run them with one sample and one thread. The
two artifacts take turns, so that noise affects both. A figure is the median of all runs. The output also has the usual
published claim: 2x to 4x faster, 4x smaller, a loss of accuracy under 1 %.

Digits is a trained model; its accuracy is top-1 on hold-out samples. The other models have the usual architectures and
random weights, so that no download is needed. Their times and sizes are realistic, but their accuracy only shows how
similar the answers of INT8 and FP32 are. Trained networks tolerate more noise than networks with random weights.
`cosine` is the cosine of the answers after the mean answer is subtracted (`support/architectures.py`).

    python -m bench.int8                                  # a table
    python -m bench.int8 --models digits,encoder --json   # JSON lines
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.support.architectures import ARCHITECTURES, write_model
from bench.support.tables import emit
from edgert.engines import EngineOptions, Session, engine_by_name
from edgert_deploy.devices.profiles import load_profile
from edgert_deploy.packager.accuracy.artifact_runs import local_artifact, run_samples
from edgert_deploy.packager.accuracy.metrics import metric_for
from edgert_deploy.packager.accuracy.reference import Metric, Reference
from edgert_deploy.packager.builders import Artifact, BuildSpec, Precision, builder_for
from edgert_deploy.packager.samples.samples import CalibrationSet, load_samples
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support.paths import DIGITS

MODELS = ("digits", "mobilenet_v2", "resnet_50", "encoder")
ENGINES = {"tflite": "raspberry-pi-4", "openvino": "intel-nuc", "onnxruntime": "generic-x86-64"}
PUBLISHED = "2x to 4x, 4x, under 1 %"
COLUMNS = (
    "model",
    "engine",
    "fp32_ms",
    "int8_ms",
    "faster",
    "fp32_mb",
    "int8_mb",
    "smaller",
    "metric",
    "fp32",
    "int8",
    "lost_percent",
    "published",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout")
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--engines", default=",".join(ENGINES), help=f"some of {', '.join(ENGINES)}")
    parser.add_argument("--seconds", type=float, default=6.0, help="how long both artifacts of an engine run in turn")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="edgert-int8-") as folder:
        for model in options.models.split(","):
            source, calibration, holdout = _model(model, Path(folder))
            for engine in options.engines.split(","):
                print(f"{model}, {engine}", file=sys.stderr)
                out = Path(folder) / f"{model}-{engine}"
                rows.append(
                    {
                        "model": model,
                        "engine": engine,
                        **compare(source, calibration, holdout, engine, out, options.seconds),
                    }
                )
    rows = [{**row, "published": PUBLISHED} for row in rows]
    if not options.json:  # the table needs more decimals than one
        rows = [
            {name: f"{value:g}" if isinstance(value, float) else value for name, value in row.items()} for row in rows
        ]
    emit(rows, COLUMNS, options.json)


def compare(
    source: SourceModel, calibration: CalibrationSet, holdout: CalibrationSet, engine: str, out: Path, seconds: float
) -> dict[str, Any]:
    """Build both precisions for `engine` and run them in turn."""
    artifacts = [_build(source, calibration, engine, precision, out) for precision in ("fp32", "int8")]
    sessions = [_open(artifact, source) for artifact in artifacts]
    sample = [holdout.inputs[spec.name][:1] for spec in source.inputs]
    fp32_ms, int8_ms = _in_turn(sessions, sample, seconds)
    samples = [holdout.inputs[spec.name] for spec in source.inputs]
    answers = [run_samples(session, samples) for session in sessions]
    reference = Reference(source.outputs, answers[0], holdout)
    metric: Metric = metric_for("auto" if holdout.labels is not None else "cosine", reference)
    everything = np.arange(len(holdout))
    fp32, int8 = (metric.score(one, everything) for one in answers)
    for session in sessions:
        session.close()
    sizes = [artifact.size_bytes() / 1e6 for artifact in artifacts]
    return {
        "fp32_ms": float(f"{fp32_ms:.3g}"),
        "int8_ms": float(f"{int8_ms:.3g}"),
        "faster": f"{fp32_ms / int8_ms:.2f}x",
        "fp32_mb": float(f"{sizes[0]:.3g}"),
        "int8_mb": float(f"{sizes[1]:.3g}"),
        "smaller": f"{sizes[0] / sizes[1]:.2f}x",
        "metric": metric.name,
        "fp32": f"{fp32:.4f}",
        "int8": f"{int8:.4f}",
        "lost_percent": f"{100 * (fp32 - int8):.2f}",
    }


def _model(name: str, folder: Path) -> tuple[SourceModel, CalibrationSet, CalibrationSet]:
    if name == "digits":
        paths = DIGITS / "digits.onnx", DIGITS / "calibration.npz", DIGITS / "holdout.npz"
    elif name in ARCHITECTURES:
        paths = write_model(name, folder, calibration=16, holdout=32)
    else:
        sys.exit(f"no model {name!r}; known: {', '.join(MODELS)}")
    source = load_source(paths[0])
    calibration, holdout = (load_samples(path, source, at_least=10) for path in paths[1:])
    return source, calibration, holdout


def _build(source: SourceModel, calibration: CalibrationSet, engine: str, precision: Precision, out: Path) -> Artifact:
    if engine not in ENGINES:
        sys.exit(f"no engine {engine!r}; those that run here: {', '.join(ENGINES)}")
    folder = out / precision
    folder.mkdir(parents=True)
    spec = BuildSpec(engine, precision, load_profile(ENGINES[engine]))
    return builder_for(engine).build(spec, source, calibration, folder, lambda line: None)


def _open(artifact: Artifact, source: SourceModel) -> Session:
    return engine_by_name(artifact.engine).load(
        local_artifact(artifact, source), EngineOptions(threads=1, buckets=(1,))
    )


def _in_turn(sessions: list[Session], sample: list[Any], seconds: float) -> list[float]:
    """Return the median time of a run of each session in milliseconds."""
    times: list[list[float]] = [[] for _ in sessions]
    for session in sessions:
        session.run(sample)
    until = time.perf_counter() + seconds
    while time.perf_counter() < until or len(times[0]) < 5:
        for session, own in zip(sessions, times, strict=True):
            began = time.perf_counter()
            session.run(sample)
            own.append((time.perf_counter() - began) * 1e3)
    return [statistics.median(own) for own in times]


if __name__ == "__main__":
    main()
