"""The model file: a TOML file beside a model, read into the options of `edgert build`.

Its keys are the options' names, with `_` for `-`. Paths are relative to the file's folder.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from edgert.errors import ConfigInvalid
from edgert.toml_file import read_toml
from edgert_deploy.packager.samples.processing import POSTPROCESS_PRESETS, PREPROCESS_PRESETS
from edgert_deploy.packager.user_function import in_folder, is_function

SUFFIX = ".toml"


def _path(folder: Path, text: str) -> str:
    return str(folder / Path(text).expanduser())


def _samples(folder: Path, text: str) -> str:
    return in_folder(folder, text) if is_function(text) else _path(folder, text)


def _processing(folder: Path, text: str) -> str:
    return text if text in (*PREPROCESS_PRESETS, *POSTPROCESS_PRESETS) else _path(folder, text)


TEXT_KEYS: dict[str, Callable[[Path, str], str]] = {
    "model": _path,
    "calibration": _samples,
    "holdout": _samples,
    "preprocess": _processing,
    "postprocess": _processing,
    "labels": _path,
    "metric": in_folder,
    **dict.fromkeys(
        ("name", "precision", "engines", "licence", "notes", "expires", "buckets"), lambda folder, text: text
    ),
}


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, str) for item in value)


# Each line has some keys, the check of their values, and the description of a valid value in messages.
CHECKS: tuple[tuple[Collection[str], Callable[[Any], bool], str], ...] = (
    (TEXT_KEYS, lambda value: isinstance(value, str) and bool(value), "text"),
    (("max_drop", "max_class_drop"), lambda value: type(value) in (int, float), "a number"),
    (("release",), lambda value: type(value) is int, "a whole number"),
    (("allow_overlap", "fold_preprocess", "with_reference"), lambda value: type(value) is bool, "true or false"),
    (("targets", "inputs", "pads"), _is_list, 'a list of text, as ["one", "two"]'),
)
KEYS = tuple(key for keys, _, _ in CHECKS for key in keys)


def read_model_file(path: Path) -> dict[str, Any]:
    """Return the options in the file by their keys. Raises ConfigInvalid."""
    values = {key: _value(path, key, value) for key, value in read_toml(path).items()}
    if "model" not in values:
        raise ConfigInvalid(f'{path} does not name its model: add model = "FILE.onnx"')
    return values


def _value(path: Path, key: str, value: Any) -> Any:
    for keys, is_right, expected in CHECKS:
        if key in keys:
            if not is_right(value):
                raise ConfigInvalid(f"{path}: {key} = {value!r} must be {expected}")
            return TEXT_KEYS[key](path.parent, value) if key in TEXT_KEYS else value
    near = difflib.get_close_matches(key, KEYS, n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"the keys are {', '.join(sorted(KEYS))}"
    raise ConfigInvalid(f"{path} has an unknown key {key!r}; {hint}")
