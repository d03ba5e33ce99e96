"""The build cache: artifacts, keyed by the content of everything that determines them.

A key is a SHA-256 of all inputs. These are the source graph, the calibration samples, precision and options, the
profile's fields that a builder may read, the versions of the libraries, and the packager's own code. An entry is a
folder with the artifact's files and `entry.json`, which has the SHA-256 of each file. `put` writes an entry to a
temporary folder and then renames the folder. `get` verifies an entry at each read. The least recently used entry is
evicted first. A damaged entry, a full disk or a read-only folder is a cache miss, so the artifact is built again.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from edgert import __version__
from edgert.environment import code_digest
from edgert.toml_file import about
from edgert_deploy.common.folders import cache_folder
from edgert_deploy.common.quantities import size_bytes
from edgert_deploy.packager.builders import Artifact, BuildSpec, builder_for
from edgert_deploy.packager.builders.qdq import Recipe
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import SourceModel

FORMAT = 2
CODE = Path(__file__).parent  # the code that may change an artifact
BYTES_MAX = 4 * 10**9
ENTRY = "entry.json"
ENTRY_BYTES_MAX = 1024**2
# A write that is unfinished after this time was interrupted.
ABANDONED_AFTER_S = 24 * 3600.0
# Fields of a profile that describe a device, not its artifact; every other field is part of the key.
NOT_BUILT_FROM = frozenset({"name", "description", "engines", "precision", "python", "glibc", "memory_mb", "socket"})
# Fields of a source that describe the file, not the model.
ABOUT_THE_FILE = frozenset({"path", "sha256", "size_bytes"})


@dataclass(frozen=True)
class BuildCache:
    """Artifacts in `folder`: at most `bytes_max` in total after each `put`."""

    folder: Path
    bytes_max: int = BYTES_MAX

    def get(self, key: str, out_dir: Path) -> Artifact | None:
        """Copy the artifact of `key` into `out_dir` and return it; None if the entry is absent or damaged."""
        entry = self.folder / key
        try:
            if (entry / ENTRY).stat().st_size > ENTRY_BYTES_MAX:
                raise ValueError(f"{ENTRY} is larger than {ENTRY_BYTES_MAX} bytes")
            record = json.loads((entry / ENTRY).read_bytes())
            for name, digest in record["files"].items():
                if Path(name).name != name or _copy(entry / name, out_dir / name) != digest:
                    raise ValueError(f"{name} is not the file that was stored")
            artifact = Artifact.from_json(record["artifact"], out_dir)
            if not {path.name for path in (artifact.path, *artifact.companions)} <= set(record["files"]):
                raise ValueError("the entry lacks files that it names")
            os.utime(entry / ENTRY)
            return artifact
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            shutil.rmtree(entry, ignore_errors=True)  # a damaged entry would fail again
            for path in out_dir.iterdir():
                path.unlink()
            return None

    def has(self, key: str) -> bool:
        """Whether there is an entry for `key`. Only `get` verifies the entry."""
        return (self.folder / key / ENTRY).is_file()

    def put(self, key: str, artifact: Artifact) -> None:
        """Store a copy of `artifact` under `key`. Errors of the disk are ignored."""
        with contextlib.suppress(OSError):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            beside = Path(tempfile.mkdtemp(prefix=".new-", dir=self.folder))
            try:
                digests = {path.name: _copy(path, beside / path.name) for path in (artifact.path, *artifact.companions)}
                record = {"artifact": artifact.as_json(), "files": digests}
                (beside / ENTRY).write_text(json.dumps(record, sort_keys=True))
                beside.rename(self.folder / key)
            finally:
                # The folder still exists only if the writing failed, or if another build stored this key first.
                shutil.rmtree(beside, ignore_errors=True)
            self._evict()

    def _evict(self) -> None:
        """Remove the least recently used entries until the rest fits, and remove interrupted writes."""
        entries = sorted(self._entries(), key=lambda entry: entry[1], reverse=True)
        total = 0
        for path, _, size in entries:
            total += size
            if total > self.bytes_max:
                shutil.rmtree(path, ignore_errors=True)
        for path in self.folder.glob(".new-*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > ABANDONED_AFTER_S:
                    shutil.rmtree(path, ignore_errors=True)

    def _entries(self) -> Iterator[tuple[Path, float, int]]:
        """Yield each entry, the time of its last use, and its bytes."""
        for path in self.folder.iterdir():
            with contextlib.suppress(OSError):
                if re.fullmatch(r"[0-9a-f]{64}", path.name):
                    size = sum(file.stat().st_size for file in path.iterdir())
                    yield path, (path / ENTRY).stat().st_mtime, size


def default_cache() -> BuildCache:
    """Return the cache in $XDG_CACHE_HOME, else in ~/.cache. Raises ConfigInvalid.

    $EDGERT_CACHE is the largest size of the cache.
    """
    limit = os.environ.get("EDGERT_CACHE", "")
    with about("EDGERT_CACHE"):
        bytes_max = size_bytes(limit) if limit else BYTES_MAX
    return BuildCache(cache_folder() / "build", bytes_max)


def cache_key(spec: BuildSpec, source: SourceModel, calibration: CalibrationSet, recipe: Recipe | None = None) -> str:
    """Return the digest of all inputs that determine an artifact, or the harm of layers.

    Args:
        spec: The artifact.
        source: The model.
        calibration: The samples that determine the INT8 ranges.
        recipe: With a recipe, return the key of the layers' harm by this recipe. With None, return the artifact's key.
    """
    stated = {
        "format": FORMAT,
        "engine": "sensitivity" if recipe else spec.engine,
        "precision": spec.precision,
        "float_layers": _plain(spec.float_layers),
        "recipe": _plain(recipe) if recipe else spec.recipe,
        "profile": {k: v for k, v in asdict(spec.profile).items() if k not in NOT_BUILT_FROM},
        "source": _plain({f.name: getattr(source, f.name) for f in fields(source) if f.name not in ABOUT_THE_FILE}),
        "calibration": arrays_digest({**calibration.inputs, "/lengths": calibration.lengths}),
        "edgert": [__version__, code_digest(CODE)],
        "libraries": {name: _version(name) for name in builder_for(spec.engine).libraries},
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    return hashlib.sha256(json.dumps(stated, sort_keys=True).encode()).hexdigest()


def arrays_digest(arrays: Mapping[str, NDArray[Any] | None]) -> str:
    """Return the digest of names, dtypes, shapes and values."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        if array is not None:
            digest.update(json.dumps([name, array.dtype.str, array.shape]).encode())
            for row in array:  # row by row, because `tobytes` makes a copy
                digest.update(row.tobytes())
    return digest.hexdigest()


def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _plain(value: Any) -> Any:
    """Return `value` as JSON, with digests of bytes. A new type of option must be added here."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if hasattr(value, "SerializeToString"):  # a protobuf message
        value = value.SerializeToString(deterministic=True)
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    assert value is None or isinstance(value, str | int | float | bool), f"{type(value)} cannot be part of a cache key"
    return value


def _copy(source: Path, target: Path) -> str:
    """Copy a file and return the SHA-256 of its content."""
    digest = hashlib.sha256()
    with source.open("rb") as reader, target.open("xb") as writer:
        while chunk := reader.read(1024**2):
            digest.update(chunk)
            writer.write(chunk)
    return digest.hexdigest()
