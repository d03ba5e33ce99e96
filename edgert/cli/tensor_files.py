"""Tensors in files and on the terminal: the input and output of `edgertd infer` and `edgert infer`."""

from __future__ import annotations

import contextlib
import os
import stat
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert import Client
from edgert.durable import replacing, storing
from edgert.errors import InputError, RequestError
from edgert.processing.answers.ctc import text_of
from edgert.processing.signals.csv_table import read_csv
from edgert.processing.text import text_in_file
from edgert.protocol.arrays import FILE_STARTS

INPUT_BYTES_MAX = 1024**3
SHOWN_VALUES_MAX = 64

# Further arrays in a file of samples, which only the build reads.
BUILD_ONLY = ("labels", "slice", "boxes", "transcript", "recording")

Arrays = dict[str, NDArray[Any]]


def read_inputs(source: Path) -> NDArray[Any] | Arrays:
    """Return the array of an .npy file, or the arrays of an .npz file by name.

    A JPEG, PNG or WAV file becomes an array of its bytes, UINT8 [bytes], for a model with `decode`. A CSV file becomes
    FP32 [lines, columns], and a .txt file becomes UINT8 [bytes]. The function unpickles nothing. Raises InputError.
    """
    advice = "give a .npy array (numpy.save), an .npz with one array per input (numpy.savez), or a JPEG, PNG, WAV, CSV or .txt file"
    try:
        size = source.stat().st_size
        if size > INPUT_BYTES_MAX:
            raise InputError(f"{source} has {size} bytes; at most {INPUT_BYTES_MAX} are allowed")
        if not size:
            raise InputError(f"{source} is empty: {advice}")
        if source.suffix == ".txt":
            text = text_in_file(source)
            if not text.strip():
                raise InputError(f"{source} contains no text: give a file with text")
            return np.frombuffer(text, np.uint8)
        if source.suffix == ".csv":
            return read_csv(source)
        with source.open("rb") as file:
            if file.read(max(map(len, FILE_STARTS))).startswith(FILE_STARTS):
                return np.fromfile(source, np.uint8)
        loaded = np.load(source, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except OSError as error:
        raise InputError(f"{source} cannot be read: {error.strerror or error}; {advice}") from error
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile) as error:
        with contextlib.suppress(InputError):
            return read_csv(source)
        # Do not use NumPy's own message, which is about pickles and headers.
        raise InputError(f"{source} contains no arrays: {advice}") from error


def ask(client: Client, model: str, inputs: NDArray[Any] | Arrays, *, is_text: bool) -> tuple[Arrays, Arrays]:
    """Return the outputs of `model`, and the names of their classes.

    Arrays of `inputs` that only the build reads are not sent, unless the model has inputs of these names. Raises
    RequestError, also if `is_text` is set and the model takes no text.
    """
    metadata = client.metadata(model)
    if is_text and "text" not in metadata.get("preprocess", {}):
        wants = ", ".join(f"{each['name']} {each['datatype']} {each['shape']}" for each in metadata["inputs"])
        raise RequestError(
            f"model {model} takes no text; it takes {wants}: give --input with such an array or file, or build the model with a "
            "tokenizer ([text] in the --preprocess file)"
        )
    if isinstance(inputs, dict):
        names = {each["name"] for each in metadata["inputs"]}
        inputs = {name: array for name, array in inputs.items() if name in names or name not in BUILD_ONLY}
    outputs = client.infer(model, inputs)
    return outputs, class_names(outputs, metadata.get("labels", ()))


def write_outputs(path: Path, outputs: Arrays) -> None:
    """Write the outputs as .npz: replace a file whole or not at all, or write to a pipe or a device.

    Raises StorageFailed.
    """
    # /dev/stdout is a link to a file if a shell redirects the output, so a link is never replaced.
    in_place = path.is_symlink() or (path.exists() and not path.is_file())
    with (
        storing(f"cannot write {path}"),
        path.open("wb") if in_place else replacing(path, mode=_mode(path), shared=True) as file,
    ):
        np.savez(file, **outputs)  # type: ignore[arg-type]  # NumPy's stub mistakes the names for an option of its own


def _mode(path: Path) -> int:
    """Return the mode of the file `path`, or of a new file of this process."""
    if path.exists():
        return stat.S_IMODE(path.stat().st_mode)
    os.umask(mask := os.umask(0o077))
    return 0o666 & ~mask


def class_names(outputs: Arrays, labels: Sequence[str]) -> Arrays:
    """Return the names of the classes in each output that contains classes, by the output's name.

    The name of class -1, no class, is "". Without `labels` the result is empty.
    """
    classes = {name: array for name, array in outputs.items() if name.endswith("_classes") and array.dtype == np.int64}
    if not labels or any((array >= len(labels)).any() for array in classes.values()):
        return {}
    names = np.array([*labels, ""], dtype=object)
    return {name: names[array.clip(min=-1)] for name, array in classes.items()}


def as_json(model: str, outputs: Arrays, names: Arrays, *, values: bool = True) -> dict[str, Any]:
    """Return the output of --json, without `values` if they are in a file; `names` is from `class_names`.

    JSON has no NaN and no infinity, so the values have the texts "NaN", "Infinity" and "-Infinity", which NumPy reads.
    """

    def described(name: str, array: NDArray[Any]) -> dict[str, Any]:
        shape = {"shape": list(array.shape), "dtype": array.dtype.name}
        if not values:
            return shape
        return {**shape, "values": _values(array), **({"labels": names[name].tolist()} if name in names else {})}

    return {"model": model, "outputs": {name: described(name, array) for name, array in outputs.items()}}


def _values(array: NDArray[Any]) -> Any:
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return array.tolist()
    values = array.astype(object)
    values[np.isnan(array)] = "NaN"
    values[np.isposinf(array)], values[np.isneginf(array)] = "Infinity", "-Infinity"
    return values.tolist()


def as_text(outputs: Arrays, names: Arrays) -> str:
    return "\n".join(_line(name, array, names.get(name)) for name, array in outputs.items())


def _line(name: str, array: NDArray[Any], names: NDArray[Any] | None) -> str:
    if name.endswith("_text") and array.dtype == np.uint8:
        return f"{name}  {', '.join(repr(text_of(row)) for row in np.atleast_2d(array))}"
    shown = [each[..., 0] if each.shape[1:] == (1,) else each for each in (array, names) if each is not None]
    values = [np.array2string(each, threshold=SHOWN_VALUES_MAX, precision=4, suppress_small=True) for each in shown]
    return "\n".join([f"{name}  {array.dtype.name} {list(array.shape)}", *values])
