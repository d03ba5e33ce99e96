"""Samples from a function of the user: `module:function`, run in this interpreter.

The function is called once, without arguments, and returns or yields samples. A sample is one item: an array if the
model has one input, else {input: array}, each in the input's dtype and shape, without the batch axis or with one of
length 1. `(sample, label)` adds its class. With preprocessing, the manifest's rule is applied to a UINT8 frame. The
function's output goes to stderr. The module is searched in the working folder first.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.errors import CalibrationInvalid, RequestError
from edgert.processing.preprocess import Preprocessor
from edgert.tensors import TensorSpec, fits
from edgert_deploy.packager.samples.sample_files import SAMPLES_BYTES_MAX, Arrays, check_form

NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
SAMPLES_MAX = 100_000
_END = object()


def is_function(text: str) -> bool:
    """Whether `text` is `module:function` and not a file."""
    return bool(NAME.fullmatch(text)) and not Path(text).exists()


def read_function(
    name: str, specs: Sequence[TensorSpec], preprocessors: dict[str, Preprocessor]
) -> tuple[Arrays, NDArray[np.int64] | None]:
    """Return all samples of the function `name`, and their labels.

    Raises CalibrationInvalid, which names the wrong sample, or what the function raised and where.
    """
    rows: dict[str, list[NDArray[Any]]] = {spec.name: [] for spec in specs}
    labels: list[int] = []
    size = 0
    for i, given in enumerate(_samples(name)):
        if i == SAMPLES_MAX:
            raise CalibrationInvalid(f"{name} returns more than {SAMPLES_MAX} samples; return fewer")
        sample, label = given if isinstance(given, tuple) and len(given) == 2 else (given, None)
        where = f"sample {i} of {name}"
        for spec, array in zip(specs, _by_input(where, specs, sample), strict=True):
            rows[spec.name].append(_item(where, spec, array, preprocessors.get(spec.name)))
            size += rows[spec.name][-1].nbytes
        if size > SAMPLES_BYTES_MAX:
            raise CalibrationInvalid(f"{name} returns more than {SAMPLES_BYTES_MAX} bytes of samples; return fewer")
        if label is not None:
            labels.append(_label(where, label))
        if labels and len(labels) != i + 1:
            raise CalibrationInvalid(
                f"{where} has {'no' if label is None else 'a'} label, unlike those before; return labels for all or none"
            )
    arrays = {spec.name: np.stack(rows[spec.name]) if rows[spec.name] else _none(spec) for spec in specs}
    return arrays, np.array(labels, np.int64) if labels else None


def _samples(name: str) -> Iterator[Any]:
    """Yield the function's samples; its errors become CalibrationInvalid."""
    at = 0
    try:
        with contextlib.redirect_stdout(sys.stderr):
            samples = iter(_function(name)())
        while True:
            with contextlib.redirect_stdout(sys.stderr):
                sample = next(samples, _END)
            if sample is _END:
                return
            yield sample
            at += 1
    except (CalibrationInvalid, GeneratorExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # the user's code may raise anything, SystemExit as well
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise CalibrationInvalid(
            f"{name} failed at sample {at} with {type(error).__name__}: {str(error)[:300]} "
            f"({Path(frame.filename).name}, line {frame.lineno})"
        ) from error


def _function(name: str) -> Callable[[], Any]:
    module, _, attribute = name.partition(":")
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in (module, module.partition(".")[0]):
            raise CalibrationInvalid(
                f"{name}: its module imports {error.name}, which is not installed for {sys.executable}; install it"
            ) from error
        raise CalibrationInvalid(
            f"{name}: no module {module!r} in {here} or in this Python; check the name, or change the folder"
        ) from error
    finally:
        sys.path.remove(here)
    for part in attribute.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        raise CalibrationInvalid(f"{name}: module {module!r} has no function {attribute!r}; check the name")
    return found  # type: ignore[no-any-return]  # checked just above


def _by_input(where: str, specs: Sequence[TensorSpec], sample: Any) -> list[Any]:
    if isinstance(sample, dict):
        names = [spec.name for spec in specs]
        if set(sample) != set(names):
            raise CalibrationInvalid(
                f"{where} has {', '.join(map(repr, sample)) or 'nothing'}; the model's inputs are {', '.join(map(repr, names))}"
            )
        return [sample[name] for name in names]
    if len(specs) != 1:
        raise CalibrationInvalid(
            f"{where} is a {type(sample).__name__}; the model has {len(specs)} inputs: return a dictionary, input: array"
        )
    return [sample]


def _item(where: str, spec: TensorSpec, array: Any, preprocessor: Preprocessor | None) -> NDArray[Any]:
    """Return one item in the model's form, without the batch axis."""
    if not isinstance(array, np.ndarray):
        raise CalibrationInvalid(f"{where} has a {type(array).__name__} for input {spec.name!r}; return a NumPy array")
    batched = array if array.ndim == len(spec.shape) else array[None]
    if preprocessor is not None and batched.dtype == np.uint8 and fits(preprocessor.frames, "UINT8", batched.shape):
        try:
            batched, _ = preprocessor(np.ascontiguousarray(batched))
        except RequestError as error:
            raise CalibrationInvalid(f"{where}: {error.message}") from error
    check_form(where, spec, batched.shape, batched.dtype)
    if len(batched) != 1:
        raise CalibrationInvalid(f"{where} holds {len(batched)} items; return one at a time")
    return np.array(batched[0])  # a copy: the function may fill the same array again


def _label(where: str, label: Any) -> int:
    if isinstance(label, bool) or not isinstance(label, int | np.integer) or int(label) < 0:
        raise CalibrationInvalid(f"{where} has label {str(label)[:80]!r}; return the number of the class, from 0")
    return int(label)


def _none(spec: TensorSpec) -> NDArray[Any]:
    return np.empty((0, *spec.item_shape), spec.dtype)
