"""Bundles for benchmarks: a model with one input and one output, made without the packager."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.bundle_file import write_bundle
from edgert.bundle.manifest import Accuracy, ArtifactEntry, FileEntry, Manifest, TargetEntry
from edgert.bundle.signing import SigningKey
from edgert.engines import engine_by_name
from edgert.tensors import DATATYPES, TensorSpec

CHANGED_SHARE = 50
MOVED_SHARE = 0.05


def make_bundle(
    folder: Path,
    key: SigningKey,
    model: str,
    engine: str,
    program: bytes,
    item: NDArray[Any],
    answer: NDArray[Any],
    *,
    precision: str = "fp32",
    release: int = 1,
    output: str = "y",
) -> Path:
    """Make a signed bundle for this machine from the engine's `program`: `x` to `output`, any batch.

    `item` and `answer` (both of batch 1) give shapes and datatypes, and are the golden sample.
    """
    files = folder / f"{model}-{release}-files"
    files.mkdir(parents=True)
    entry = "model.onnx" if engine == "onnxruntime" else "model.json"
    (files / entry).write_bytes(program)
    np.save(files / "input.npy", item)
    np.save(files / "output.npy", answer)
    paths = {path.name: path for path in sorted(files.iterdir())}
    entries = {
        name: FileEntry(name, path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest())
        for name, path in paths.items()
    }
    manifest = Manifest(
        model=model,
        release=release,
        inputs=(_spec("x", item),),
        outputs=(_spec(output, answer),),
        files=tuple(entries.values()),
        artifacts=(
            ArtifactEntry(
                id=engine,
                engine=engine,
                precision=precision,
                entry=entry,
                files=(entry,),
                golden_outputs=("output.npy",),
                golden_atol=(float(np.ptp(answer)) * 0.01 + 1e-6,),
                accuracy=Accuracy("top1", samples=1, fp32=1.0, artifact=1.0, max_drop=0.01),
                tools={engine: engine_by_name(engine).version()},
            ),
        ),
        targets=(TargetEntry("this-machine", (), (engine,)),),
        golden_inputs=("input.npy",),
        source_sha256=entries[entry].sha256,
        source_size_bytes=entries[entry].size_bytes,
    )
    bundle = folder / f"{model}-{release}.edgert"
    write_bundle(bundle, manifest, paths, key)
    return bundle


def make_zeros_bundle(
    folder: Path, key: SigningKey, model: str, item: NDArray[Any], *, delay_s: float = 0.0, release: int = 1
) -> Path:
    """Make a null-engine model that returns ten zeros unread: only the daemon's time remains."""
    program = json.dumps({"op": "zeros", "delay_s": delay_s}).encode()
    answer = np.zeros((1, 10), np.float32)
    return make_bundle(folder, key, model, "null", program, item, answer, release=release)


def int8_weights(release: int, size_bytes: int) -> bytes:
    """Return INT8 weights: from release 2 on the last fiftieth differs, in release 3 a twentieth by one."""
    drawn = np.random.default_rng(0).normal(0, 30, size_bytes)
    if release > 1:
        changed = size_bytes // CHANGED_SHARE
        drawn[-changed:] = np.random.default_rng(2).normal(0, 30, changed)
    whole = np.rint(drawn)
    if release > 2:
        chance = np.random.default_rng(3)
        whole += chance.choice([-1, 1], size_bytes) * (chance.random(size_bytes) < MOVED_SHARE)
    return bytes(np.clip(whole, -128, 127).astype(np.int8).tobytes())


def _spec(name: str, array: NDArray[Any]) -> TensorSpec:
    return TensorSpec(name, DATATYPES[array.dtype.name], (-1, *array.shape[1:]))
