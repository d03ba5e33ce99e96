"""Quantize trained models with `edgert build` and with the vendors' own recipes, and compare the task's metric.

A row is a model on an engine: the metric of the FP32 source in ONNX Runtime (or in LiteRT for a .tflite source), of
our artifact, and of the best vendor recipe, on the same held-out data; how much faster and smaller our artifact is
than the same engine's FP32. Artifacts run in the vendor's runtime, without our code. TensorRT's graph is judged in
ONNX Runtime and not timed: no GPU is needed.

    python -m bench.zoo                                         # a table; about an hour
    python -m bench.zoo --models nudenet,magika --engines openvino --json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from bench.common import emit
from bench.zoo import models
from bench.zoo.models import ZooModel
from bench.zoo.runners import RUNS, Run, Sample, answers, samples_of, times_ms
from bench.zoo.vendors import RECIPES
from edgert.bundle.bundle_file import open_bundle

PROFILES = {
    "tflite": "raspberry-pi-4",
    "openvino": "intel-nuc",
    "onnxruntime": "generic-x86-64",
    "tensorrt": "jetson-orin-nano",
}
COLUMNS = (
    "model", "kind", "engine", "metric", "fp32", "ours", "recipe", "vendor", "vendor_recipe", "refused", "faster",
    "smaller", "int8_share", "build_s",
)  # fmt: skip
RUN_SAMPLES_MAX = 300  # for the vendors' calibration
CLI = "import sys; from edgert_deploy.cli import main; sys.exit(main())"


@dataclass(frozen=True)
class Built:
    """The result of `edgert build`: the artifact, the same engine's FP32 and the receipt; or the refusal."""

    artifact: Path | None = None
    reference: Path | None = None
    recipe: str = ""
    int8_share: float | None = None
    refused: str | None = None
    build_s: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(models.names()), help=f"of {', '.join(models.names())}")
    parser.add_argument("--engines", default=",".join(PROFILES), help=f"of {', '.join(PROFILES)}")
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout")
    parser.add_argument("--no-vendors", action="store_true", help="our own artifacts only")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long a model's artifacts are timed")
    parser.add_argument("--precision", default="auto", help="given to edgert build")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="edgert-zoo-") as folder:
        for name in options.models.split(","):
            if name not in models.names():
                sys.exit(f"error: no model {name!r}; known: {', '.join(models.names())}")
            model = models.make(name)
            for row in rows_of(model, options, Path(folder) / name):
                print(json.dumps(row), file=sys.stderr, flush=True)
                rows.append(row)
    if not options.json:  # a tenth is too coarse for these
        rows = [
            {key: f"{value:g}" if isinstance(value, float) else value for key, value in row.items()} for row in rows
        ]
    emit(rows, COLUMNS, options.json)


def rows_of(model: ZooModel, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return the rows of one model, an engine each."""
    source = RUNS["tflite" if model.path.suffix == ".tflite" else "onnxruntime"](model.path)
    ranks = _ranks(model)
    calibration, holdout = samples_of(model.calibration, ranks), samples_of(model.holdout, ranks)
    exact = answers(source, holdout)
    fp32 = model.score(exact, exact)
    folder.mkdir(parents=True)
    ours = {name: _batch_first(model.holdout[name], ranks[name]) for name in model.holdout}
    own_holdout = samples_of(ours, {name: array.ndim for name, array in ours.items()})
    np.savez(folder / "holdout.npz", allow_pickle=False, **ours)
    ours = {name: _batch_first(model.calibration[name], ranks[name]) for name in model.calibration}
    np.savez(folder / "calibration.npz", allow_pickle=False, **ours)
    rows = []
    for engine in (one for one in options.engines.split(",") if one in model.engines):
        own = folder / engine
        own.mkdir()
        built = build(model, engine, own, options.precision)
        row: dict[str, Any] = {"model": model.name, "kind": model.kind, "engine": engine, "metric": model.metric}
        row |= {"fp32": round(fp32, 4), "ours": None, "recipe": built.recipe, "vendor": None, "vendor_recipe": None}
        row |= {"refused": built.refused, "faster": None, "smaller": None, "int8_share": built.int8_share}
        row["build_s"] = round(built.build_s, 1)
        if built.artifact is not None and built.reference is not None:
            runs = [RUNS[engine](path) for path in (built.reference, built.artifact)]
            row["ours"] = round(model.score(answers(runs[1], own_holdout), exact), 4)
            row["smaller"] = round(_size(built.reference) / _size(built.artifact), 2)
            if engine != "tensorrt":
                slow, fast = times_ms(runs, own_holdout[0], options.seconds)
                row["faster"] = round(slow / fast, 2)
        if not options.no_vendors:
            row |= _best_vendor(model, engine, built.reference, calibration, holdout, exact, own)
        rows.append(row)
    return rows


def build(model: ZooModel, engine: str, folder: Path, precision: str) -> Built:
    """Run `edgert build` for one engine, and take the bundle apart."""
    bundle, key = folder / "model.edgert", folder / "keys/default.key.pem"
    _edgert("keys", "new", "--dir", str(key.parent))
    words = ["build", str(model.path), "--calibration", str(folder.parent / "calibration.npz")]
    words += ["--holdout", str(folder.parent / "holdout.npz"), "--target", PROFILES[engine], "--engines", "first"]
    words += [
        "--with-reference",
        "--precision",
        precision,
        "--key",
        str(key),
        "--out",
        str(bundle),
        "--no-cache",
        "--json",
    ]
    began = time.perf_counter()
    result = _edgert(*words, *model.options)
    took = time.perf_counter() - began
    if result.returncode != 0:
        return Built(refused=_reason(result), build_s=took)
    with open_bundle(bundle, None) as opened:
        manifest = opened.manifest
        opened.unpack(folder / "unpacked", frozenset(entry.path for entry in manifest.files))
        target = manifest.targets[0]
        entries = {one.id: folder / "unpacked" / one.entry for one in manifest.artifacts}
    target_row = json.loads(result.stdout)["targets"][0]
    recipe = target_row.get("recipe") or target_row["precision"] + (" mixed" if target_row["float_layers"] else "")
    reference = entries.get(target.reference, entries[target.artifacts[0]])
    return Built(entries[target.artifacts[0]], reference, recipe, target_row.get("int8_share"), None, took)


def _best_vendor(
    model: ZooModel, engine: str, reference: Path | None, calibration: list[Sample], holdout: list[Sample],
    exact: list[NDArray[Any]], folder: Path,
) -> dict[str, Any]:  # fmt: skip
    """Try each of the vendor's recipes; the best of them by the task's metric."""
    source = reference if engine == "tflite" else model.path
    recipes = {} if source is None else RECIPES[engine]
    best: dict[str, Any] = {"vendor": None, "vendor_recipe": None}
    failed = []
    for name, recipe in recipes.items():
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                run: Run = RUNS[engine](recipe(source or model.path, calibration[:RUN_SAMPLES_MAX], folder))
                score = round(model.score(answers(run, holdout), exact), 4)
        except Exception as error:
            failed.append(f"{name}: {type(error).__name__}")
            continue
        if best["vendor"] is None or score > best["vendor"]:
            best = {"vendor": score, "vendor_recipe": name}
    return best if best["vendor"] is not None or not failed else {**best, "vendor_recipe": "; ".join(failed)}


def _batch_first(array: NDArray[Any], rank: int) -> NDArray[Any]:
    """Samples `[N, ...]` of an input whose batch axis is not the first, as `edgert build` takes them."""
    if array.ndim == rank:
        return array
    shape = list(array.shape)
    shape.remove(1)
    return array.reshape(shape)


def _ranks(model: ZooModel) -> dict[str, int]:
    """The number of axes of each input, as the file states it."""
    if model.path.suffix == ".tflite":
        return {name: array.ndim for name, array in model.holdout.items()}
    import onnx

    graph = onnx.load(model.path, load_external_data=False).graph
    return {one.name: len(one.type.tensor_type.shape.dim) for one in graph.input}


def _size(path: Path) -> int:
    return sum(one.stat().st_size for one in path.parent.iterdir())


def _edgert(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", CLI, *words], capture_output=True, text=True, check=False)


def _reason(result: subprocess.CompletedProcess[str]) -> str:
    try:
        return str(json.loads(result.stdout)["error"]["message"])[:300]
    except (ValueError, KeyError, TypeError):
        lines = (result.stderr or result.stdout).strip().splitlines()
        return f"exit {result.returncode}: {lines[-1] if lines else ''}"[:300]


if __name__ == "__main__":
    main()
