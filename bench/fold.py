"""A comparison of preprocessing by the device with preprocessing folded into the model, for each engine.

A UINT8 frame of the model's size is normalized, and an FP32 model runs on it with one thread. Both ways take turns, and
a figure is the median. The network is little more than a first convolution, so the share of preprocessing is as large
as possible.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.support.tables import emit
from edgert.bundle.rules import Preprocess
from edgert.engines import EngineOptions, LocalArtifact, Session, engine_by_name
from edgert.processing.images.preprocess import Preprocessor
from edgert_deploy.devices.profiles import load_profile
from edgert_deploy.packager.builders import BuildSpec, builder_for
from edgert_deploy.packager.builders.folded_preprocessing import folded
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import SourceModel, load_source
from tests.support import models

COLUMNS = ("engine", "side", "on_device_us", "folded_us", "times")
ENGINES = {"onnxruntime": "this-machine", "openvino": "intel-nuc"}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = [
            _measured(engine, side, options.rounds, Path(folder) / f"{engine}-{side}")
            for engine in ENGINES
            for side in (224, 640)
        ]
    emit(rows, COLUMNS, options.json)


def _measured(engine: str, side: int, rounds: int, folder: Path) -> dict[str, Any]:
    folder.mkdir()
    source = load_source(models.write(_network(side), folder / "m.onnx"))
    rule = Preprocess("image", 1 / 255, MEAN, STD, layout="nhwc")
    taken, left = folded(source, rule)
    frame = np.random.default_rng(0).integers(0, 256, (1, side, side, 3), np.uint8)
    ways = {}
    for name, model, what in (("on_device", source, rule), ("folded", taken, left)):
        session = _session(engine, model, folder / name)
        ways[name] = (Preprocessor(what, model.inputs[0]), session)
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds + 3):
        for name, (preprocess, session) in ways.items():
            began = time.perf_counter_ns()
            session.run([preprocess(frame)[0]])
            times[name].append((time.perf_counter_ns() - began) / 1000)
    medians = {name: statistics.median(values[3:]) for name, values in times.items()}
    return {
        "engine": engine,
        "side": side,
        "on_device_us": round(medians["on_device"]),
        "folded_us": round(medians["folded"]),
        "times": round(medians["folded"] / medians["on_device"], 2),
    }


def _session(engine: str, source: SourceModel, folder: Path) -> Session:
    folder.mkdir()
    samples = CalibrationSet({spec.name: np.zeros((1, *spec.item_shape), spec.dtype) for spec in source.inputs}, None)
    spec = BuildSpec(engine, "fp32", load_profile(ENGINES[engine]))
    made = builder_for(engine).build(spec, source, samples, folder, lambda line: None)
    local = LocalArtifact(engine, made.path, source.inputs, source.outputs, "")
    return engine_by_name(engine).load(local, EngineOptions(threads=1))


def _network(side: int) -> Any:
    body = """
        c = Conv <kernel_shape = [3, 3], strides = [2, 2]> (image, w1, b1) r = Relu (c)
        g = GlobalAveragePool (r) f = Flatten (g) scores = Gemm (f, w2, b2)
    """
    weights = {"w1": models.random(16, 3, 3, 3), "b1": models.random(16), "w2": models.random(16, 10)}
    return models.model(
        f"float[N,3,{side},{side}] image) => (float[N,10] scores", body, {**weights, "b2": models.random(10)}
    )


if __name__ == "__main__":
    main()
