"""The time that `edgert build` takes: digits for four kinds of target, and a model of MobileNetV2's size.

Each figure is for the whole command in its own process: Python's start, reading, probing, evaluating and packing.
`cpu_s` is the processor time of all processes of the command. `cold` means an empty build cache, and `warm` means a
build cache with all artifacts. Rows with the same model use the same samples. MobileNetV2 has random weights and 16
calibration samples.

`--peers` also times onnx2tf (TFLite) and Olive (ONNX Runtime) on the same model. Each peer has its own environment,
which is made at the first use and kept. The peers convert for one target and evaluate nothing, so compare their rows
with our row for that one target. If a peer cannot be installed or cannot convert the model, its row tells this.

    python -m bench.build                   # a table
    python -m bench.build --peers --json    # JSON lines
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.support.architectures import write_model
from bench.support.devices import edgert
from bench.support.peer_servers.environments import default_folder, environment
from bench.support.processes import children_cpu_s
from bench.support.tables import emit
from tests.support.paths import DIGITS

TARGETS = ("raspberry-pi-4", "intel-nuc", "jetson-orin-nano", "generic-x86-64")
SAMPLES = 16
PEER_S_MAX = 600.0
COLUMNS = ("model", "what", "targets", "cache", "seconds", "cpu_s", "note")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="JSON lines on stdout")
    parser.add_argument("--peers", action="store_true", help="time onnx2tf and Olive, too")
    parser.add_argument("--envs", type=Path, default=default_folder(), help="folder of the peers' environments")
    parser.add_argument("--models", default="digits,mobilenet_v2", help="some of digits, mobilenet_v2")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="edgert-build-bench-") as name:
        folder = Path(name)
        edgert("keys", "new", "--dir", str(folder / "keys"))
        for model in options.models.split(","):
            paths = _model(model, folder)
            rows += ours(model, paths, TARGETS, folder)
            if model != "digits":
                for target in ("raspberry-pi-4", "generic-x86-64"):
                    rows += ours(model, paths, (target,), folder)[:1]
                if options.peers:
                    rows += [_peer(peer, model, paths, options.envs, folder) for peer in PEERS]
    emit(rows, COLUMNS, options.json)


def ours(model: str, paths: tuple[Path, Path, Path], targets: tuple[str, ...], folder: Path) -> list[dict[str, Any]]:
    """Time the command with an empty cache, then with the cache that it filled."""
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(dir=folder)
    source, calibration, holdout = map(str, paths)
    words = ["build", source, "--calibration", calibration, "--holdout", holdout, "--engines", "first"]
    words += [word for target in targets for word in ("--target", target)]
    words += ["--key", str(folder / "keys/default.key.pem"), "--out", str(folder / "bundle.edgert")]
    if model != "digits":  # with random weights, the result of the accuracy gate does not matter
        words += ["--max-drop", "1", "--metric", "cosine"]
    rows = []
    for cache in ("cold", "warm"):
        print(f"{model}, {len(targets)} targets, {cache}", file=sys.stderr)
        began, used = time.perf_counter(), children_cpu_s()
        edgert(*words)
        taken = time.perf_counter() - began, children_cpu_s() - used
        note = f"{len(os.sched_getaffinity(0))} cores"
        rows.append(_row(model, "edgert build", ", ".join(targets), cache, taken, note))
    return rows


def _model(name: str, folder: Path) -> tuple[Path, Path, Path]:
    if name == "digits":
        return DIGITS / "digits.onnx", DIGITS / "calibration.npz", DIGITS / "holdout.npz"
    return write_model(name, folder, calibration=SAMPLES, holdout=SAMPLES)


def _row(
    model: str, what: str, targets: str, cache: str, taken: tuple[float, float] | None, note: str
) -> dict[str, Any]:
    seconds, cpu_s = (None, None) if taken is None else (round(taken[0], 1), round(taken[1], 1))
    named = {"model": model, "what": what, "targets": targets, "cache": cache}
    return {**named, "seconds": seconds, "cpu_s": cpu_s, "note": note}


def _peer(name: str, model: str, paths: tuple[Path, Path, Path], environments: Path, folder: Path) -> dict[str, Any]:
    target, command = PEERS[name]
    try:
        python = environment(environments, name)
        words = command(python, paths, folder)
    except OSError as error:
        return _row(model, name, target, "", None, f"does not install: {str(error)[:200]}")
    print(f"{model}, {name}", file=sys.stderr)
    # The peers start tools from the folder of their Python.
    variables = {**os.environ, "PATH": f"{python.parent}:{os.environ['PATH']}", "OLIVE_DISABLE_TELEMETRY": "1"}
    began, used = time.perf_counter(), children_cpu_s()
    try:
        done = subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, timeout=PEER_S_MAX)
    except subprocess.TimeoutExpired:
        return _row(model, name, target, "", None, f"not done within {PEER_S_MAX:.0f} s")
    taken = time.perf_counter() - began, children_cpu_s() - used
    made = sorted(path.name for path in (folder / name).rglob("*") if path.suffix in (".tflite", ".onnx"))
    note = f"writes {', '.join(made) or 'nothing'}"
    if done.returncode:
        said = [line.strip() for line in done.stderr.splitlines() if "Error" in line]
        note += f"; fails: {(said or ['no message'])[-1][:160]}"
    return _row(model, name, target, "", taken, note)


def _onnx2tf(python: Path, paths: tuple[Path, Path, Path], folder: Path) -> list[str]:
    """Return the command for INT8 with the same samples and a batch of 1, as onnx2tf's documentation advises."""
    import onnx

    proto = onnx.load(paths[0])
    for value in (*proto.graph.input, *proto.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = 1
    onnx.save(proto, folder / "fixed.onnx")
    np.save(folder / "nhwc.npy", np.load(paths[1])["x"].transpose(0, 2, 3, 1))
    words = [str(python.parent / "onnx2tf"), "-i", "fixed.onnx", "-o", "onnx2tf", "-oiqt"]
    return [*words, "-cind", "x", "nhwc.npy", "[[[[0,0,0]]]]", "[[[[1,1,1]]]]"]


OLIVE_SAMPLES = """
import numpy
from olive.data.registry import Registry

class Samples:
    def __init__(self, path):
        self.x = numpy.load(path)["x"]
    def __len__(self):
        return len(self.x)
    def __getitem__(self, i):
        return {"x": self.x[i]}, 0

@Registry.register_dataset()
def samples(data_dir, **rest):
    return Samples(data_dir)
"""


def _olive(python: Path, paths: tuple[Path, Path, Path], folder: Path) -> list[str]:
    """Return the command for static INT8 (Q/DQ, for each channel, with min-max calibration) with the same samples."""
    (folder / "samples.py").write_text(OLIVE_SAMPLES)
    data = {
        "name": "samples",
        "type": "DataContainer",
        "user_script": "samples.py",
        "load_dataset_config": {"type": "samples", "data_dir": str(paths[1])},
        "pre_process_data_config": {"type": "skip_pre_process"},
        "post_process_data_config": {"type": "skip_post_process"},
        "dataloader_config": {"type": "default_dataloader", "batch_size": 1},
    }
    quantize = {
        "type": "OnnxStaticQuantization",
        "data_config": "samples",
        "quant_format": "QDQ",
        "per_channel": True,
        "calibrate_method": "MinMax",
    }
    workflow = {
        "input_model": {"type": "ONNXModel", "model_path": str(paths[0])},
        "data_configs": [data],
        "passes": {"quantize": quantize},
        "output_dir": "olive",
        "cache_dir": "olive-cache",
    }
    (folder / "olive.json").write_text(json.dumps(workflow))
    return [str(python.parent / "olive"), "run", "--config", "olive.json"]


# The name of a peer -> (its target, the function that returns its command line).
PEERS: dict[str, tuple[str, Callable[[Path, tuple[Path, Path, Path], Path], list[str]]]] = {
    "onnx2tf": ("raspberry-pi-4", _onnx2tf),
    "olive": ("generic-x86-64", _olive),
}


if __name__ == "__main__":
    main()
