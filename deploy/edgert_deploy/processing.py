"""What the user says about pre- and post-processing: `preprocess.toml` and `labels.txt`, read and checked."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

from edgert.errors import ConfigInvalid
from edgert.manifest import LABELS_MAX, Classify, Preprocess
from edgert.tensors import TensorSpec
from edgert_deploy.source import SourceModel

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE_BYTES_MAX = 16 * 1024**2
KEYS = ("input", "scale", "mean", "std", "layout")


def read_preprocess(path: Path, source: SourceModel) -> Preprocess:
    """Read `input`, `scale`, `mean`, `std` and `layout` (each may be left out but `input`). Raises ConfigInvalid."""
    try:
        values = tomllib.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ConfigInvalid(f"{path} is not TOML: {error}") from error
    if unknown := sorted(set(values) - set(KEYS)):
        raise ConfigInvalid(f"{path} has unknown keys {', '.join(unknown)}; known: {', '.join(KEYS)}")
    spec = next((spec for spec in source.inputs if spec.name == values.get("input")), None)
    if spec is None:
        names = ", ".join(spec.name for spec in source.inputs)
        raise ConfigInvalid(f"{path}: input = {values.get('input')!r} names no input of the model; it has: {names}")
    if spec.datatype != "FP32":
        raise ConfigInvalid(f"{path}: input {spec.name!r} is {spec.datatype}; preprocessing gives FP32")
    preprocess = Preprocess(
        input=spec.name,
        scale=_numbers(path, "scale", values.get("scale", 1.0))[0],
        mean=_numbers(path, "mean", values.get("mean", 0.0)),
        std=_numbers(path, "std", values.get("std", 1.0)),
        layout=str(values.get("layout", "model")),
    )
    _check(path, preprocess, spec)
    return preprocess


def read_classify(path: Path, source: SourceModel) -> Classify:
    """Labels, one a line, for the first output of class scores that they fit. Raises ConfigInvalid."""
    labels = tuple(line.strip() for line in _read(path).splitlines() if line.strip())
    if not 1 <= len(labels) <= LABELS_MAX:
        raise ConfigInvalid(f"{path} has {len(labels)} labels; give 1 to {LABELS_MAX}, one a line")
    scores = [spec for spec in source.outputs if len(spec.shape) == 2 and spec.dtype.kind == "f"]
    for spec in scores:
        if spec.shape[1] == len(labels):
            return Classify(spec.name, labels)
    found = ", ".join(f"{spec.name} has {spec.shape[1]}" for spec in scores) or "it has no output of class scores"
    raise ConfigInvalid(f"{path} has {len(labels)} labels, which fit no output of the model ({found})")


def _read(path: Path) -> str:
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise ConfigInvalid(f"{path} has {path.stat().st_size} bytes; at most {FILE_BYTES_MAX}")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigInvalid(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigInvalid(f"{path} is not UTF-8 text") from error


def _numbers(path: Path, key: str, value: Any) -> tuple[float, ...]:
    values = value if isinstance(value, list) else [value]
    if not values or not all(
        isinstance(v, int | float) and not isinstance(v, bool) and math.isfinite(v) for v in values
    ):
        raise ConfigInvalid(f"{path}: {key} = {value!r} should be a number, or a list with one a channel")
    return tuple(float(v) for v in values)


def _check(path: Path, preprocess: Preprocess, spec: TensorSpec) -> None:
    if preprocess.layout not in ("model", "nhwc"):
        raise ConfigInvalid(f'{path}: layout = {preprocess.layout!r}; known: "model", "nhwc"')
    if preprocess.layout == "nhwc" and len(spec.shape) != 4:
        raise ConfigInvalid(f'{path}: layout = "nhwc" needs an input of four axes; {spec.name!r} has {len(spec.shape)}')
    channels = spec.shape[1] if len(spec.shape) > 1 else 1
    for key, values in (("mean", preprocess.mean), ("std", preprocess.std)):
        if len(values) not in (1, channels):
            raise ConfigInvalid(f"{path}: {key} has {len(values)} numbers; give 1, or {channels}, one a channel")
    if 0.0 in preprocess.std:
        raise ConfigInvalid(f"{path}: std holds 0; every std must differ from 0")
