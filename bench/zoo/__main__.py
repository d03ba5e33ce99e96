"""Quantize trained models with `edgert build` and with the vendors' own recipes, and compare.

A row is a model on an engine: the metric of the FP32 source in ONNX Runtime (or in LiteRT for a .tflite source), of
our artifact, and of the best vendor recipe, on the same held-out data; how much faster and smaller our artifact is
than the same engine's FP32. Artifacts run in the vendor's runtime, without our code. TensorRT's graph is judged in
ONNX Runtime and not timed: no GPU is needed.

Each row is appended to a file (`--results`) as soon as it is known. A later run takes the rows from this file and makes
the missing rows. `--again` makes the requested rows again, but keeps the vendors' figures, which our code does not
change. `--only-print` makes no rows. The tables of bench/trained-models.md and README.md are printed as Markdown.

    python -m bench.zoo                                         # the tables; about two hours
    python -m bench.zoo --only-print                            # the tables of what is measured
    python -m bench.zoo --models nudenet,magika --engines openvino --again --json
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from bench.support.processes import children_cpu_s
from bench.zoo import models, table
from bench.zoo.models import ZooModel
from bench.zoo.packages import folder as zoo_folder
from bench.zoo.packages import missing_modules
from bench.zoo.runners import RUNS, Run, Sample, answers, samples_of, times_ms
from bench.zoo.vendors import RECIPES
from edgert.bundle.bundle_file import open_bundle
from edgert.cli.command import EXIT_INTERRUPTED

PROFILES = {
    "tflite": "raspberry-pi-4",
    "openvino": "intel-nuc",
    "onnxruntime": "generic-x86-64",
    "tensorrt": "jetson-orin-nano",
}
REASON_LETTERS_MAX = 600
RUN_SAMPLES_MAX = 300  # for the vendors' calibration
ENDED = (EXIT_INTERRUPTED, -signal.SIGTERM, -signal.SIGKILL)  # exit codes of a build that was ended from outside
GO_ON = "the rows so far are kept: run it again to go on"


@dataclass(frozen=True)
class Built:
    """The result of `edgert build`: the artifact, the same engine's FP32 and the receipt; or the refusal."""

    artifact: Path | None = None
    reference: Path | None = None
    recipe: str = ""
    int8_share: float | None = None
    refused: str | None = None
    build_cpu_s: float = 0.0
    tried: str = ""


@dataclass(frozen=True)
class Results:
    """The rows so far, one line of JSON each in `path`. The last line of a cell is used."""

    path: Path

    def row(self, model: str, engine: str) -> dict[str, Any] | None:
        return self._rows().get((model, engine))

    def add(self, row: dict[str, Any]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row), file=sys.stderr, flush=True)

    def _rows(self) -> dict[tuple[str, str], dict[str, Any]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        rows = [json.loads(line) for line in lines]
        return {(row["model"], row["engine"]): row for row in rows}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(models.names()), help=f"of {', '.join(models.names())}")
    parser.add_argument("--engines", default=",".join(PROFILES), help=f"of {', '.join(PROFILES)}")
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout")
    parser.add_argument("--results", type=Path, default=zoo_folder() / "results.jsonl", help="the rows so far")
    parser.add_argument("--again", action="store_true", help="make rows anew, all but the vendors' figures")
    parser.add_argument("--only-print", action="store_true", help="make no row")
    parser.add_argument("--no-vendors", action="store_true", help="our own artifacts only")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long a model's artifacts are timed")
    parser.add_argument("--precision", default="auto", help="given to edgert build")
    options = parser.parse_args(words)
    names = _chosen("model", options.models, models.names())
    engines = _chosen("engine", options.engines, PROFILES)
    results = Results(options.results)
    cells = [(name, engine) for name in names for engine in models.engines_of(name) if engine in engines]
    missing = [] if options.only_print else [one for one in cells if options.again or results.row(*one) is None]
    if missing and (modules := missing_modules()):
        sys.exit(f"error: {', '.join(modules)} missing: run make zoo, or install with pip install -e '.[zoo]'")
    for name in dict.fromkeys(name for name, _ in missing):
        print(f"{name}: its model and samples", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(prefix="edgert-zoo-") as folder:
            subject = Subject(models.make(name), options, Path(folder))
            for engine in (engine for model, engine in missing if model == name):
                print(f"{name}: edgert build for {PROFILES[engine]}", file=sys.stderr, flush=True)
                results.add(subject.row(engine, results.row(name, engine)))
    rows = [row for cell in cells if (row := results.row(*cell)) is not None]
    print(
        "\n".join(map(json.dumps, rows) if options.json else table.markdown(rows, cells, table.measured_by()["code"]))
    )


def _chosen(kind: str, names: str, known: Collection[str]) -> list[str]:
    """Return the names in a list with commas. Exits if one is unknown."""
    chosen = names.split(",")
    if unknown := [name for name in chosen if name not in known]:
        sys.exit(f"error: no {kind} {', '.join(unknown)}; known: {', '.join(known)}")
    return chosen


class Subject:
    """A model with its samples and FP32's answers, from which the row of each engine is made."""

    def __init__(self, model: ZooModel, options: argparse.Namespace, folder: Path) -> None:
        self.model, self.options, self.folder = model, options, folder
        source = RUNS["tflite" if model.path.suffix == ".tflite" else "onnxruntime"](model.path)
        ranks = _ranks(model)
        self.calibration, self.holdout = samples_of(model.calibration, ranks), samples_of(model.holdout, ranks)
        self.exact = answers(source, self.holdout, model.state)
        labels = {} if model.labels is None else {"labels": model.labels}
        self.own_holdout = self._saved("holdout", model.holdout, ranks, labels)
        self._saved("calibration", model.calibration, ranks)

    def row(self, engine: str, before: dict[str, Any] | None) -> dict[str, Any]:
        """Return the row of `engine`, with the vendors' figures of `before` where there is one."""
        model, folder = self.model, self.folder / engine
        folder.mkdir()
        built = build(model, engine, folder, self.options.precision)
        row: dict[str, Any] = {"model": model.name, "kind": model.kind, "engine": engine, "metric": model.metric}
        row |= {"fp32": round(model.score(self.exact, self.exact), 4), "ours": None, "recipe": built.recipe}
        row |= {"vendor": None, "vendor_recipe": None, "refused": built.refused, "faster": None, "smaller": None}
        row |= {"int8_share": built.int8_share, "build_cpu_s": round(built.build_cpu_s, 1), "tried": built.tried}
        row |= table.measured_by()
        if built.artifact is not None and built.reference is not None:
            runs = [RUNS[engine](path) for path in (built.reference, built.artifact)]
            row["ours"] = round(model.score(answers(runs[1], self.own_holdout, model.state), self.exact), 4)
            row["smaller"] = round(_size(built.reference) / _size(built.artifact), 2)
            if engine != "tensorrt":
                slow, fast = times_ms(runs, self.own_holdout[0], self.options.seconds)
                row["faster"] = round(slow / fast, 2)
        if before is not None and before["vendor_recipe"] is not None:
            row |= {key: before[key] for key in ("vendor", "vendor_recipe")}
        elif not self.options.no_vendors:
            row |= _best_vendor(self, engine, built.reference, folder)
        return row

    def _saved(
        self,
        name: str,
        data: Mapping[str, NDArray[Any]],
        ranks: Mapping[str, int],
        labels: Mapping[str, NDArray[Any]] | None = None,
    ) -> list[Sample]:
        """Write the samples in the form for `edgert build`; return them in the form for its artifacts."""
        ours = {name: _batch_first(array, ranks[name]) for name, array in data.items()}
        np.savez(self.folder / f"{name}.npz", allow_pickle=False, **ours, **(labels or {}))
        return samples_of(ours, {name: array.ndim for name, array in ours.items()})


def build(model: ZooModel, engine: str, folder: Path, precision: str) -> Built:
    """Run `edgert build` for one engine and unpack the bundle."""
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
    began = children_cpu_s()
    result = _edgert(*words, *model.options)
    took = children_cpu_s() - began
    if result.returncode in ENDED:  # no verdict on the model: it must not become a row
        sys.exit(f"error: edgert build was ended from outside (exit code {result.returncode}); {GO_ON}")
    if result.returncode != 0:
        return Built(refused=_reason(result), build_cpu_s=took)
    answer = json.loads(result.stdout)
    with open_bundle(bundle, None) as opened:
        manifest = opened.manifest
        opened.unpack(folder / "unpacked", frozenset(entry.path for entry in manifest.files))
        target = manifest.targets[0]
        entries = {one.id: folder / "unpacked" / one.entry for one in manifest.artifacts}
    found = answer["targets"][0]
    recipe = found["recipe"] or found["precision"]
    if found["float_layers"]:
        recipe += f" + {len(found['float_layers'])} in float"
    why = next((text for text in answer["warnings"] if "not INT8" in text), "")
    reference = entries.get(target.reference, entries[target.artifacts[0]])
    refused = why.partition("not INT8: ")[2][:REASON_LETTERS_MAX] or None
    return Built(entries[target.artifacts[0]], reference, recipe, found["int8_share"], refused, took, _tried(found))


def _tried(found: dict[str, Any]) -> str:
    """Return each candidate with its score and time, which explain the choice."""
    words = [
        f"{one['artifact']}{'+' + str(len(one['float_layers'])) if one['float_layers'] else ''} {one['score']:.4f}"
        + (f" {one['p50_ms']:.3f} ms" if one.get("p50_ms") else "")
        for one in found["candidates"]
    ]
    return "; ".join([*words, *(f"{one['how']}: {one['reason'][:150]}" for one in found["not_built"])])


def _best_vendor(subject: Subject, engine: str, reference: Path | None, folder: Path) -> dict[str, Any]:
    """Try each of the vendor's recipes; the best of them by the task's metric."""
    model = subject.model
    source = reference if engine == "tflite" else model.path
    recipes = {} if source is None else RECIPES[engine]
    best: dict[str, Any] = {"vendor": None, "vendor_recipe": None}
    failed = []
    for name, recipe in recipes.items():
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                run: Run = RUNS[engine](recipe(source or model.path, subject.calibration[:RUN_SAMPLES_MAX], folder))
                score = round(model.score(answers(run, subject.holdout, model.state), subject.exact), 4)
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
    return subprocess.run(
        [sys.executable, "-m", "edgert_deploy.cli", *words], capture_output=True, text=True, check=False
    )


def _reason(result: subprocess.CompletedProcess[str]) -> str:
    try:
        return str(json.loads(result.stdout)["error"]["message"])[:REASON_LETTERS_MAX]
    except (ValueError, KeyError, TypeError):
        lines = (result.stderr or result.stdout).strip().splitlines()
        return f"exit {result.returncode}: {lines[-1] if lines else ''}"[:REASON_LETTERS_MAX]


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # temporary folders go
    try:
        main()
    except KeyboardInterrupt:
        print(f"interrupted; {GO_ON}", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
