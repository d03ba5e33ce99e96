"""Samples from a function of the user: `module:function`, run in this interpreter.

The function is called once, without arguments, and returns or yields samples. A sample is one item: an array for a
model with one input, else {input: array}. Each array has the dtype and shape of its input, without the batch axis or
with a batch axis of length 1. A pair `(sample, label)` also gives the class of the sample. With preprocessing, the
build applies the manifest's rule to a UINT8 frame. Text that the function prints goes to stderr.
"""

from __future__ import annotations

import contextlib
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.buckets import Buckets
from edgert.errors import CalibrationInvalid, ConfigInvalid, RequestError
from edgert.printable import in_short
from edgert.processing.images.preprocess import Preprocessor
from edgert.tensors import TensorSpec, fits
from edgert_deploy.packager.samples.lengths import Arrays, stack_all
from edgert_deploy.packager.samples.sample_files import SAMPLES_BYTES_MAX, check_form
from edgert_deploy.packager.user_function import user_function

SAMPLES_MAX = 100_000
_END = object()


def read_function(
    name: str, specs: Sequence[TensorSpec], preprocessors: dict[str, Preprocessor], buckets: Buckets | None = None
) -> tuple[Arrays, NDArray[np.int64] | None]:
    """Return the samples of the function `name`, and their labels.

    `preprocessors` has the preprocessors of UINT8 frames, by input. Buckets allow samples of different lengths. Raises
    CalibrationInvalid, which names the wrong sample, or the function's error and its line.
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
                f"{where} has {'no' if label is None else 'a'} label, unlike the samples before: return labels for all samples, or for none"
            )
    if buckets is None:
        arrays = {spec.name: np.stack(rows[spec.name]) if rows[spec.name] else _no_samples(spec) for spec in specs}
    else:
        arrays = stack_all(name, specs, [rows[spec.name] for spec in specs], buckets)
    return arrays, np.array(labels, np.int64) if labels else None


def _samples(name: str) -> Iterator[Any]:
    """Yield the function's samples. An error of the function becomes CalibrationInvalid."""
    at = 0
    try:
        with contextlib.redirect_stdout(sys.stderr):
            returned = user_function(name)()
            if not isinstance(returned, Iterable):
                raise CalibrationInvalid(f"{name} returns a {type(returned).__name__}: yield samples, or return a list")
            samples = iter(returned)
        while True:
            with contextlib.redirect_stdout(sys.stderr):
                sample = next(samples, _END)
            if sample is _END:
                return
            yield sample
            at += 1
    except ConfigInvalid as error:  # `user_function` raised it
        raise CalibrationInvalid(error.message) from error
    except (CalibrationInvalid, GeneratorExit, KeyboardInterrupt):
        raise
    except BaseException as error:  # the user's code may raise anything, SystemExit as well
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise CalibrationInvalid(
            f"{name} failed at sample {at} with {in_short(error)} ({Path(frame.filename).name}, line {frame.lineno})"
        ) from error


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
            f"{where} is a {type(sample).__name__}; the model has {len(specs)} inputs: return a dictionary {{input: array}}"
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
        raise CalibrationInvalid(f"{where} holds {len(batched)} items; return one item at a time")
    return np.array(batched[0])  # a copy: the function may fill the same array again


def _label(where: str, label: Any) -> int:
    if isinstance(label, bool) or not isinstance(label, int | np.integer) or int(label) < 0:
        raise CalibrationInvalid(f"{where} has label {str(label)[:80]!r}; return the number of the class, from 0")
    return int(label)


def _no_samples(spec: TensorSpec) -> NDArray[Any]:
    return np.empty((0, *spec.item_shape), spec.dtype)
