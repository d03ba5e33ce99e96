"""Samples from files, which are never unpickled: .npz, .npy, a folder of .npy, and a table of labels.

This module checks names, shapes and sizes in the headers before it reads data, because a file of kilobytes may unpack
to gigabytes. It maps .npy files with all samples into memory instead of reading them. docs/models.md has the three
arrangements of a folder of .npy.
"""

from __future__ import annotations

import csv
import math
import os
import re
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.buckets import Buckets
from edgert.errors import CalibrationInvalid, RequestError
from edgert.printable import counted, in_short
from edgert.tensors import TensorSpec
from edgert_deploy.packager.samples.lengths import Arrays, stack_all
from edgert_deploy.packager.sources.formats.git_lfs import pointer_problem

SAMPLES_BYTES_MAX = 8 * 1024**3  # the size after unpacking
LABELS_TABLE = "labels.csv"
COLUMNS = (["file", "label"], ["file_name", "label"])  # Hugging Face's metadata.csv has the second heading
# The names of arrays beside the inputs.
LABELS = "labels"  # the class of each sample
TRANSCRIPTS = "transcript"  # the text of each sample
RECORDINGS = "recording"  # the number of each window's recording
FILES = "/files"  # the path of each recording, for messages
TABLES = (".csv", ".tsv", ".json", ".jsonl", ".parquet", ".xlsx")
TABLE_BYTES_MAX = 64 * 1024**2
FILES_MAX = 1_000_000
# Images, sound and tables in formats that devices do not read.
OTHER_SUFFIXES = frozenset(
    [".webp", ".bmp", ".gif", ".tif", ".tiff", ".heic", ".avif", ".jp2"]
    + [".mp3", ".flac", ".ogg", ".opus", ".m4a", ".aac", ".aif", ".aiff"]
    + [".tsv", ".xlsx", ".parquet"]
)


def check_form(where: str, spec: TensorSpec, shape: tuple[int, ...], dtype: Any) -> None:
    """Raise CalibrationInvalid if an array of `shape` and `dtype` cannot hold samples of `spec`.

    Narrower numbers of the same kind are valid. For example, a model in FP16 is built in FP32, and its samples may be
    in FP16.
    """
    if dtype.kind != spec.dtype.kind or not np.can_cast(dtype, spec.dtype):
        advice = "convert the samples exactly like your application does (scaled and normalized, no raw bytes)"
        if dtype.kind == spec.dtype.kind:
            advice = f"save the array with .astype(numpy.{spec.dtype})"
            if spec.datatype == "FP32":
                advice += ", which keeps 7 digits. From large numbers such as Unix times, subtract a start value first"
        raise CalibrationInvalid(
            f"array {spec.name!r} of {where} is {dtype}, but the model takes {spec.dtype}; {advice}"
        )
    if len(shape) != len(spec.shape) or any(
        n not in (-1, got) for n, got in zip(spec.item_shape, shape[1:], strict=True)
    ):
        want = ", ".join(["samples", *("any" if n == -1 else str(n) for n in spec.item_shape)])
        raise CalibrationInvalid(
            f"array {spec.name!r} of {where} has shape {list(shape)}; the model takes [{want}]"
            f"{_batch_advice(spec, shape) or _order_advice(spec, shape)}"
        )


def _batch_advice(spec: TensorSpec, shape: tuple[int, ...]) -> str:
    """Return the advice for an array with one axis more than the model takes, else ""."""
    if len(shape) != len(spec.shape) + 1 or shape[1] == 1 or shape[2:] != spec.item_shape:
        return ""
    lengths = ",".join(map(str, (1, *shape[1:])))
    return f". If axis 0 of the model's input is not the batch, give --input {spec.name}={lengths}"


def _order_advice(spec: TensorSpec, shape: tuple[int, ...]) -> str:
    """Return the advice to transpose the array if only the order of its axes is wrong, else ""."""
    lengths = list(shape[1:])
    if len(set(lengths)) < len(lengths) - 1 or sorted(lengths) != sorted(spec.item_shape):
        return ""
    order = []
    for length in spec.item_shape:
        order.append(1 + lengths.index(length))
        lengths[order[-1] - 1] = -1
    return (
        f", the same axes in another order: give numpy.transpose({stem(spec.name)}, (0, {', '.join(map(str, order))}))"
    )


def check_size(where: Path, size_bytes: int) -> None:
    if size_bytes > SAMPLES_BYTES_MAX:
        raise CalibrationInvalid(
            f"{where} unpacks to {size_bytes} bytes, and the limit is {SAMPLES_BYTES_MAX}: give fewer samples"
        )


def read_npz(path: Path, specs: Sequence[TensorSpec], more: Collection[str]) -> Arrays:
    """Return the arrays of `specs`, and of `more` if the archive has them. Raises CalibrationInvalid."""
    if path.suffix.lower() in TABLES and path.is_file():
        raise CalibrationInvalid(
            f"{path} is a table, but samples must be arrays: {_NPZ_ADVICE}, or give a function that reads the table, as module:function"
        )
    with _as_samples(path, ".npz file of plain arrays", _NPZ_ADVICE), zipfile.ZipFile(path) as archive:
        members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        _check_names(path, members, specs, more)
        check_size(path, sum(info.file_size for info in members.values()))
        by_name = {spec.name: spec for spec in specs}
        for name, member in members.items():
            with archive.open(member) as file:
                shape, dtype = _header(file)
            if (promised := math.prod(shape) * dtype.itemsize) > member.file_size:
                raise ValueError(f"array {name!r} should have {promised} bytes and has {member.file_size}")
            if name in by_name:
                check_form(str(path), by_name[name], shape, dtype)
        with np.load(path, allow_pickle=False) as arrays:
            # NumPy and `members` ignore the suffix .npy of a name.
            return {name: np.asarray(arrays[info.filename.removesuffix(".npy")]) for name, info in members.items()}


def read_npy(path: Path, specs: Sequence[TensorSpec]) -> Arrays:
    """Return the samples of one .npy, for a model with one input. Raises CalibrationInvalid."""
    if len(specs) > 1:
        names = [spec.name for spec in specs]
        raise CalibrationInvalid(
            f"{path} holds one array, and the model has {len(specs)} inputs: {', '.join(map(repr, names))}. Give an .npz "
            f"with an array for each input, or a folder with {', '.join(f'{stem(name)}.npy' for name in names)}"
        )
    return {specs[0].name: _mapped(path, specs[0])}


def has_npy(folder: Path, specs: Sequence[TensorSpec]) -> bool:
    """Return whether `folder` holds .npy files in any of the three arrangements."""
    return any(folder.glob("*.npy")) or any(any((folder / stem(spec.name)).glob("*.npy")) for spec in specs)


def read_npy_folder(
    folder: Path, specs: Sequence[TensorSpec], more: Collection[str], buckets: Buckets | None = None
) -> Arrays:
    """Return the samples in a folder, and the arrays of `more` that it has. Raises CalibrationInvalid.

    Buckets allow samples of different lengths.
    """
    beside = {name: folder / f"{name}.npy" for name in more}
    stacked = {spec.name: folder / f"{stem(spec.name)}.npy" for spec in specs}
    if all(map(os.path.lexists, stacked.values())):
        arrays = {spec.name: _mapped(stacked[spec.name], spec) for spec in specs}
    elif buckets is None:
        arrays = {spec.name: _one_by_one(spec, files) for spec, files in _files_of(folder, specs, beside)}
    else:
        listed = list(_files_of(folder, specs, beside))
        check_size(folder, sum(path.stat().st_size for _, files in listed for path in files))
        rows = [[_read_item(spec, path) for path in files] for spec, files in listed]
        arrays = stack_all(str(folder), [spec for spec, _ in listed], rows, buckets)
    return arrays | {
        name: _mapped(path) for name, path in beside.items() if name not in arrays and os.path.lexists(path)
    }


def stem(name: str) -> str:
    """Return the name of an input's file or folder, with `_` in place of characters unfit for file names."""
    return re.sub(r"[^\w.-]", "_", name)


def files_in(folder: Path, suffixes: Sequence[str]) -> list[Path]:
    """Return the files with `suffixes`, in lower or upper case, in a folder and its subfolders.

    Hidden files are omitted.

    Raises CalibrationInvalid for images, sound or tables in other formats, because the build must not omit them without
    a message.
    """
    found = sorted((*folder.glob("[!.]*"), *folder.glob("[!.]*/[!.]*")))
    if others := [path for path in found if path.suffix.lower() in OTHER_SUFFIXES]:
        raise CalibrationInvalid(
            f"{folder} has {counted(len(others), 'file')} in formats that are not read, such as {others[0]}: "
            f"convert them to {' or '.join(suffixes)}, or remove them"
        )
    return [path for path in found if path.suffix.lower() in suffixes]


class Span(NamedTuple):
    """The part of the recording `file` from `begin_s` to `end_s` that shows the class `label`."""

    file: str
    label: int
    begin_s: float
    end_s: float


def read_label_table(path: Path, class_names: Sequence[str]) -> dict[str, int]:
    """Return {file name: class} of the table of files and labels. Raises CalibrationInvalid."""
    return {row[0]: _class_number(path, i, row[1], class_names) for i, row in _table_rows(path, (2,))}


def read_label_spans(path: Path, class_names: Sequence[str]) -> tuple[dict[str, int], list[Span]]:
    """Return {file name: class}, and the parts of files with their own class. Raises CalibrationInvalid."""
    whole: dict[str, int] = {}
    spans: list[Span] = []
    for i, row in _table_rows(path, (2, 4)):
        name, label = row[0], _class_number(path, i, row[1], class_names)
        if len(row) == 2:
            whole[name] = label
            continue
        try:
            begin_s, end_s = map(float, row[2:])
        except ValueError:
            begin_s = end_s = math.nan
        if not 0 <= begin_s < end_s < math.inf:
            raise CalibrationInvalid(f"line {i} of {path}: give seconds with 0 <= begin_s < end_s")
        spans.append(Span(name, label, begin_s, end_s))
    return whole, spans


def read_transcripts(path: Path) -> dict[str, str]:
    """Return {file name: text} of the table of files and texts. Raises CalibrationInvalid."""
    return {row[0]: row[1] for _, row in _table_rows(path, (2,))}


def _class_number(path: Path, line: int, text: str, class_names: Sequence[str]) -> int:
    label = text.strip()
    if label in class_names:
        return class_names.index(label)
    if not re.fullmatch(r"[0-9]{1,9}", label):
        known = f"not one of the {counted(len(class_names), 'label')}, and " if class_names else ""
        names = "; if line 1 is a heading, write `file,label`" if line == 1 else ""
        raise CalibrationInvalid(f"line {line} of {path}: label {label[:80]!r} is {known}not a class number{names}")
    return int(label)


def _table_rows(path: Path, columns: Collection[int]) -> Iterator[tuple[int, list[str]]]:
    """Yield the number and the cells of each line that has content.

    The first cell is a path below the folder. `columns` are the allowed numbers of cells. Raises CalibrationInvalid.
    """
    labels: dict[str, str] = {}
    with _as_samples(path, "table of labels", "write a line `file,label` for each sample"):
        if path.stat().st_size > TABLE_BYTES_MAX:
            raise CalibrationInvalid(
                f"{path} has {path.stat().st_size} bytes, and the limit is {TABLE_BYTES_MAX}: split the samples"
            )
        with path.open(newline="", encoding="utf-8-sig") as file:  # spreadsheets write a byte order mark
            for i, row in enumerate(csv.reader(file), start=1):
                if not row or (i == 1 and [cell.strip().lower() for cell in row[:2]] in COLUMNS):
                    continue
                if len(row) == max(columns) and not any(cell.strip() for cell in row[2:]):
                    del row[2:]  # a line about a whole file, in a table with columns for times
                if len(row) not in columns:
                    columns_needed = "two: file,label" + (", or four: file,label,begin_s,end_s" if 4 in columns else "")
                    raise CalibrationInvalid(
                        f"line {i} of {path} has {counted(len(row), 'column')}; give {columns_needed}. Put a text with a comma in quotes"
                    )
                row[0] = row[0].strip().replace("\\", "/").removeprefix("./")
                if len(row) == min(columns) and labels.setdefault(row[0], row[1]) != row[1]:
                    raise CalibrationInvalid(
                        f"line {i} of {path} names {row[0]} again, with another label: keep one of the lines"
                    )
                yield i, row


_NPZ_ADVICE = "write it with numpy.savez_compressed(path, input_name=samples, labels=labels)"
_NPY_ADVICE = "write it with numpy.save(path, samples)"
_open_memmap: Callable[..., NDArray[Any]] = np.lib.format.open_memmap


def _check_names(path: Path, names: Collection[str], specs: Sequence[TensorSpec], more: Collection[str]) -> None:
    for spec in specs:
        if spec.name not in names:
            listed = ", ".join(repr(name) for name in names) or "none"
            raise CalibrationInvalid(
                f"{path} has no array {spec.name!r}; name an array after each input (found: {listed})"
            )
    known = {*(spec.name for spec in specs), *more}
    if unknown := sorted(set(names) - known):
        raise CalibrationInvalid(
            f"{path} has arrays that are not inputs of the model: {', '.join(map(repr, unknown))}; "
            f"remove them (known: {', '.join(sorted(known))})"
        )


def _header(file: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and dtype of an .npy file. Raises ValueError for anything but plain values.

    The format must be 1.0. Its header has at most 64 KiB, and NumPy writes no other format for plain values. A header
    of format 2.0 may unpack to gigabytes.
    """
    npy: Any = np.lib.format  # NumPy before 2.3 has no types for it
    version = npy.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"format {version} is not the format of plain values")
    shape, _, dtype = npy.read_array_header_1_0(file)
    if dtype.hasobject:
        raise ValueError("it holds Python objects, which are never unpickled")
    return tuple(int(n) for n in shape), dtype


def _mapped(path: Path, spec: TensorSpec | None = None) -> NDArray[Any]:
    """Return the array of a file with all samples, mapped into memory.

    NumPy's `load` is not used, because its message about a file in another format advises to unpickle the file.
    """
    with _as_samples(path, ".npy file of plain values", _NPY_ADVICE):
        array = np.asarray(_open_memmap(path, mode="r"))
        if spec is not None:
            check_form(str(path), spec, array.shape, array.dtype)
        return array


def _files_of(
    folder: Path, specs: Sequence[TensorSpec], beside: dict[str, Path]
) -> Iterator[tuple[TensorSpec, list[Path]]]:
    folders = [folder / stem(spec.name) for spec in specs]
    if not all(path.is_dir() for path in folders):
        if len(specs) > 1:
            file_names = ", ".join(f"{stem(spec.name)}.npy" for spec in specs)
            raise CalibrationInvalid(
                f"{folder} needs a file or a folder for each input of the model: {file_names} with all samples along axis 0, "
                "or folders of these names with one sample per file"
            )
        folders = [folder]
    listed = [sorted(set(path.glob("*.npy")) - set(beside.values())) for path in folders]
    names = [[file.name for file in files] for files in listed]
    if any(other != names[0] for other in names):
        raise CalibrationInvalid(
            f"the inputs of {folder} have different files; give the files of a sample the same name in the folders of all inputs"
        )
    if len(names[0]) > FILES_MAX:
        raise CalibrationInvalid(f"{folder} has {len(names[0])} samples, and the limit is {FILES_MAX}: give fewer")
    yield from zip(specs, listed, strict=True)


def _one_by_one(spec: TensorSpec, files: Sequence[Path]) -> NDArray[Any]:
    """Return the samples of `files` as one array. Each file holds one sample."""
    item = int(np.prod(spec.item_shape, dtype=object)) * spec.dtype.itemsize
    if files:
        check_size(files[0].parent, item * len(files))
    array = np.empty((len(files), *spec.item_shape), spec.dtype)
    for row, path in zip(array, files, strict=True):
        row[...] = _read_item(spec, path)
    return array


def _read_item(spec: TensorSpec, path: Path) -> NDArray[Any]:
    """Return the item in a file of one sample. The file may have a batch axis of length 1."""
    with _as_samples(path, ".npy file of plain values", _NPY_ADVICE):
        array = _open_memmap(path, mode="r")
        shape = array.shape if len(array.shape) == len(spec.shape) else (1, *array.shape)
        if shape[:1] != (1,):
            raise CalibrationInvalid(
                f"{path} holds {counted(shape[0], 'sample')}; give one sample per file, or all samples in {stem(spec.name)}.npy"
            )
        check_form(str(path), spec, shape, array.dtype)
        return np.asarray(array.reshape(shape[1:]))


@contextmanager
def as_recording(path: Path, size_bytes_max: int, advice: str) -> Iterator[None]:
    """Raise CalibrationInvalid for an image, signal or text that is too large or cannot be decoded."""
    if problem := pointer_problem(path):
        raise CalibrationInvalid(problem)
    try:
        if (size_bytes := path.stat().st_size) > size_bytes_max:
            raise CalibrationInvalid(f"{path} has {size_bytes} bytes, and the limit is {size_bytes_max}: {advice}")
        yield
    except OSError as error:
        raise CalibrationInvalid(f"cannot read {path}: {error.strerror}") from error
    except RequestError as error:
        raise CalibrationInvalid(f"{path}: {error.message}") from error


@contextmanager
def _as_samples(path: Path, what: str, advice: str) -> Iterator[None]:
    if problem := pointer_problem(path):
        raise CalibrationInvalid(problem)
    try:
        yield
    except CalibrationInvalid:
        raise
    except FileNotFoundError as error:
        raise CalibrationInvalid(f"there is no {path}: {advice}") from error
    except OSError as error:
        raise CalibrationInvalid(f"cannot read {path}: {error.strerror or error}") from error
    except MemoryError as error:
        raise CalibrationInvalid(
            f"{path} holds an array larger than this machine's memory; give fewer samples"
        ) from error
    except Exception as error:
        raise CalibrationInvalid(f"{path} is no {what} ({in_short(error)}); {advice}") from error
