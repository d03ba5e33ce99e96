"""The keys of artifacts in the cache (common/file_cache.py).

A key is a SHA-256 of all that determines an artifact: the source graph, the calibration samples, precision and options,
the profile's fields that a builder may read, the versions of the libraries, and the packager's own code.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from edgert import __version__
from edgert.environment import code_digest
from edgert_deploy.packager.builders import BuildSpec, builder_for
from edgert_deploy.packager.builders.qdq import Recipe
from edgert_deploy.packager.samples.samples import CalibrationSet
from edgert_deploy.packager.sources.source_model import SourceModel

CODE = Path(__file__).parent  # the code that may change an artifact
# Fields of a profile that do not change an artifact; every other field is part of the key.
DEVICE_FIELDS = frozenset({"name", "description", "engines", "precision", "python", "glibc", "memory_mb", "socket"})
# Fields of a source that do not change its model.
FILE_FIELDS = frozenset({"path", "sha256", "size_bytes"})


def inputs_digest(source: SourceModel, calibration: CalibrationSet) -> str:
    """Return the digest of the model and of the samples that determine the INT8 ranges."""
    content = {
        "source": _as_json({f.name: getattr(source, f.name) for f in fields(source) if f.name not in FILE_FIELDS}),
        "calibration": arrays_digest({**calibration.inputs, "/lengths": calibration.lengths}),
    }
    return _digest(content)


def cache_key(inputs: str, spec: BuildSpec, recipe: Recipe | None = None) -> str:
    """Return the key of an artifact or, with a recipe, of the harm of its layers.

    `inputs` is the build's `inputs_digest`.
    """
    content = {
        "inputs": inputs,
        "engine": "sensitivity" if recipe else spec.engine,
        "precision": spec.precision,
        "float_layers": _as_json(spec.float_layers),
        "recipe": _as_json(recipe) if recipe else spec.recipe,
        "profile": {k: v for k, v in asdict(spec.profile).items() if k not in DEVICE_FIELDS},
        "edgert": [__version__, _own_code()],
        "libraries": {name: _version(name) for name in builder_for(spec.engine).libraries},
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    return _digest(content)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def arrays_digest(arrays: Mapping[str, NDArray[Any] | None]) -> str:
    """Return the digest of names, dtypes, shapes and values."""
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        if array is not None:
            digest.update(json.dumps([name, array.dtype.str, array.shape]).encode())
            for row in array:  # row by row, because `tobytes` makes a copy
                digest.update(row.tobytes())
    return digest.hexdigest()


@cache
def _own_code() -> str:
    """Return the digest of the packager's code. A build asks for dozens of keys, so read the code once."""
    return code_digest(CODE)


@cache
def _version(library: str) -> str:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _as_json(value: Any) -> Any:
    """Return `value` as JSON, with digests of bytes. Add new types of options here."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _as_json(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {str(k): _as_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_as_json(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    if hasattr(value, "SerializeToString"):  # a protobuf message
        value = value.SerializeToString(deterministic=True)
    if isinstance(value, bytes):
        return hashlib.sha256(value).hexdigest()
    assert value is None or isinstance(value, str | int | float | bool), f"{type(value)} cannot be part of a cache key"
    return value
