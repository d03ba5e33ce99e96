"""Small bundles without a vendor: models of the null engine, with any fault on request."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.bundle_file import write_bundle
from edgert.bundle.manifest import Accuracy, ArtifactEntry, FileEntry, Manifest, TargetEntry
from edgert.bundle.signing import SigningKey
from edgert.bundle.state import State
from edgert.tensors import TensorSpec

INPUT_NAME, OUTPUT_NAME = "x", "y"
STATE_NAME, NEXT_NAME = "s", "next_s"


def make_null_bundle(
    folder: Path,
    key: SigningKey,
    model: str = "echo",
    release: int = 1,
    profile: str = "this-machine",
    *,
    machines: tuple[str, ...] = (),
    engine: str = "null",
    op: str = "copy",
    delay_s: float = 0.0,
    item_shape: tuple[int, ...] = (4,),
    program: bytes | dict[str, Any] | None = None,
    first: tuple[str, bytes] | None = None,
    reference: dict[str, Any] | None = None,
    reference_engine: str = "null",
    golden_off_by: float = 0.0,
    padding_bytes: int = 0,
    padding: bytes = b"",
    foreign_bytes: int = 0,
    downgrade_from: int = 0,
    expires: str = "",
    signed_at: str = "2019-12-01T08:00:00Z",
    receipt: dict[str, Any] | None = None,
    rules: dict[str, Any] | None = None,
    state_id: str | None = None,
    score: float = 1.0,
) -> Path:
    """Write `folder/<model>-<release>.edgert` and return its path.

    The model takes FP32 `x` and gives FP32 `y`. Both have the shape [-1, *item_shape]. `y` is `x` ("copy"), the sum of
    the item's values ("sum") or 0 ("zeros"). If `program` is bytes, it replaces the artifact's bytes (b"?" does not
    load). If it is a dict, it is added to the artifact's JSON. `first` is the engine and the bytes of an artifact that
    the device tries before this artifact. `reference` is the program of the FP32 reference artifact. `golden_off_by` is
    added to the golden outputs, so that the health check fails. `padding_bytes` of incompressible data make the bundle
    larger; `padding` is given data. `foreign_bytes` belong to no target. `signed_at` matters only if the bundle
    `expires`. `receipt` holds the findings of the build. `rules` are fields of the manifest for pre- and
    postprocessing. With a `state_id` (it may be ""), the model also has the state `s`. With "add", `y` and the next
    state are `x` + `s`. `score` is the score of the source and of its artifacts at the build.
    """
    folder.mkdir(parents=True, exist_ok=True)
    count = 2 * int(np.prod(item_shape))
    golden = np.linspace(-1.0, 1.0, count, dtype=np.float32).reshape(2, *item_shape)
    added = program if isinstance(program, dict) else {}
    artifact = program if isinstance(program, bytes) else json.dumps({"op": op, "delay_s": delay_s, **added}).encode()
    contents = {
        "golden/input-0.npy": _npy(golden),
        "golden/null/output-0.npy": _npy(_answer(op, golden) + np.float32(golden_off_by)),
        "null/model.json": artifact,
    }
    if padding_bytes:
        padding = np.random.default_rng(release).bytes(padding_bytes)
    if padding:
        contents["null/weights.bin"] = padding
    if foreign_bytes:
        contents["elsewhere/weights.bin"] = np.random.default_rng(release).bytes(foreign_bytes)
    if receipt is not None:
        contents["receipt.json"] = json.dumps(receipt).encode()
    engines = {"null": engine}
    if first is not None:
        contents["first/model.json"] = first[1]
        contents["golden/first/output-0.npy"] = contents["golden/null/output-0.npy"]
        engines = {"first": first[0], **engines}
    if reference is not None:
        contents["reference/model.json"] = json.dumps(reference).encode()
        contents["golden/reference/output-0.npy"] = _npy(_answer(reference["op"], golden))
        engines["reference"] = reference_engine
    if state_id is not None:
        contents["golden/input-1.npy"] = _npy(np.zeros_like(golden))
        contents |= {f"golden/{name}/output-1.npy": contents[f"golden/{name}/output-0.npy"] for name in engines}
    manifest = _manifest(model, release, profile, machines, engines, item_shape, contents)
    signed_at = signed_at if expires else ""
    manifest = replace(manifest, downgrade_from=downgrade_from, expires=expires, signed_at=signed_at, **rules or {})
    accuracy = replace(manifest.artifacts[0].accuracy, fp32=score, artifact=score)
    manifest = replace(manifest, artifacts=tuple(replace(each, accuracy=accuracy) for each in manifest.artifacts))
    if state_id is not None:
        manifest = replace(manifest, state=(State(STATE_NAME, NEXT_NAME),), state_id=state_id)
    path = folder / f"{model}-{release}.edgert"
    write_bundle(path, manifest, _laid_out(folder / f".{model}-{release}", contents), key)
    return path


def flip_bit(path: Path, offset: int = -1600) -> Path:
    """Write a copy beside the file with one bit flipped at `offset` (from the end if negative)."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    flipped = path.with_name(f"flipped-{path.name}")
    flipped.write_bytes(data)
    return flipped


def _manifest(
    model: str,
    release: int,
    profile: str,
    machines: tuple[str, ...],
    engines: dict[str, str],
    item_shape: tuple[int, ...],
    contents: dict[str, bytes],
) -> Manifest:
    program = contents["null/model.json"]
    inputs = tuple(sorted(path for path in contents if path.startswith("golden/input-")))
    shape = (-1, *item_shape)
    return Manifest(
        model=model,
        release=release,
        inputs=tuple(TensorSpec(name, "FP32", shape) for name in (INPUT_NAME, STATE_NAME)[: len(inputs)]),
        outputs=tuple(TensorSpec(name, "FP32", shape) for name in (OUTPUT_NAME, NEXT_NAME)[: len(inputs)]),
        files=tuple(FileEntry(p, len(data), hashlib.sha256(data).hexdigest()) for p, data in contents.items()),
        artifacts=tuple(
            ArtifactEntry(
                id=name,
                engine=engine,
                precision="fp32",
                entry=f"{name}/model.json",
                files=tuple(p for p in contents if p.startswith(f"{name}/")),
                golden_outputs=tuple(f"golden/{name}/output-{i}.npy" for i in range(len(inputs))),
                golden_atol=(1e-6,) * len(inputs),
                accuracy=Accuracy("top1", samples=2, fp32=1.0, artifact=1.0, max_drop=0.01),
                tools={"null": "1"},
            )
            for name, engine in engines.items()
        ),
        targets=(
            TargetEntry(
                profile,
                machines,
                tuple(name for name in engines if name != "reference"),
                "reference" if "reference" in engines else "",
            ),
        ),
        golden_inputs=inputs,
        source_sha256=hashlib.sha256(program).hexdigest(),
        source_size_bytes=len(program),
    )


def _answer(op: str, golden: NDArray[np.float32]) -> NDArray[np.float32]:
    if op in ("copy", "add"):
        return golden
    if op == "zeros":
        return np.zeros_like(golden)
    sums = golden.reshape(len(golden), -1).sum(axis=1)
    return np.broadcast_to(sums.reshape(-1, *(1 for _ in golden.shape[1:])), golden.shape).astype(np.float32)


def _npy(array: NDArray[Any]) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def _laid_out(folder: Path, contents: dict[str, bytes]) -> dict[str, Path]:
    paths = {name: folder / name for name in contents}
    for name, path in paths.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents[name])
    return paths
