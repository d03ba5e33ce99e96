"""Samples that quantise a model (calibration) and judge it (hold-out)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.rules import Preprocess
from edgert.errors import CalibrationInvalid, RequestError
from edgert.processing.preprocess import Preprocessor
from edgert.tensors import TensorSpec
from edgert_deploy.packager.samples.sample_files import (
    LABELS_TABLE,
    Arrays,
    check_form,
    check_size,
    has_npy,
    read_label_table,
    read_npy,
    read_npy_folder,
    read_npz,
)
from edgert_deploy.packager.samples.sample_function import is_function, read_function
from edgert_deploy.packager.sources.git_lfs import pointer_problem
from edgert_deploy.packager.sources.source_model import SourceModel

LABELS = "labels"
SLICES = "slice"
BOXES = "boxes"
NAMES = (LABELS, SLICES, BOXES)
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png")
LABELS_NAMED_MAX = 5
IMAGE_BYTES_MAX = 64 * 1024**2


@dataclass(frozen=True)
class CalibrationSet:
    """Samples: `inputs[name]` has those of one input along axis 0, in the model's dtype and item shape.

    `labels` holds one class index (int64) per sample; `slices` the name of the part of the field that the sample is
    from (a camera, a time of day); `boxes` [samples, M, 5] a detector's truth (detection_metric.py).
    """

    inputs: dict[str, NDArray[Any]]
    labels: NDArray[Any] | None
    slices: NDArray[Any] | None = None
    boxes: NDArray[Any] | None = None

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))


def load_samples(
    path: Path,
    source: SourceModel,
    preprocess: Preprocess | None = None,
    class_names: Sequence[str] = (),
    *,
    at_least: int,
) -> CalibrationSet:
    """Read samples, with `labels`, `slice` and `boxes` where there are any.

    `path` is an .npz with an array for each input, one .npy for a model with one input, a folder of .npy
    (sample_files.py), a folder of images, or `module:function` (sample_function.py). Images are preprocessed by the code that devices run. A table `labels.csv`
    gives their classes, or the names of their folders do, in the order of `class_names` or else of the alphabet.

    Raises CalibrationInvalid: unreadable, an input missing, an array of another name, wrong dtype or item shape, fewer
    than `at_least` samples, NaN or infinity, a different number of labels.
    """
    if is_function(str(path)):
        arrays, labels = read_function(str(path), source.inputs, _preprocessors(source, preprocess))
        arrays |= {} if labels is None else {LABELS: labels}
    elif path.suffix == ".npy" and path.is_file():
        arrays = read_npy(path, source.inputs)
    elif not path.is_dir():
        arrays = read_npz(path, source.inputs, NAMES)
    elif has_npy(path, source.inputs):
        arrays = read_npy_folder(path, source.inputs, NAMES)
    else:
        arrays = _images(path, source, preprocess, class_names, at_least)
    inputs = {spec.name: _checked(path, spec, arrays[spec.name]) for spec in source.inputs}
    counts = {name: len(array) for name, array in inputs.items()}
    if len(set(counts.values())) > 1:
        raise CalibrationInvalid(
            f"the inputs of {path} have different numbers of samples: {counts}; give each the same number"
        )
    count = next(iter(counts.values()))
    if count < at_least:
        raise CalibrationInvalid(f"{path} has {count} samples; at least {at_least} are needed: add more")
    # An input of the model may have one of these names.
    more = {name: array for name, array in arrays.items() if name not in inputs}
    return CalibrationSet(
        inputs,
        _checked_labels(path, more[LABELS], count) if LABELS in more else None,
        _checked_slices(path, more[SLICES], count) if SLICES in more else None,
        _checked_boxes(path, more[BOXES], count) if BOXES in more else None,
    )


def constant_inputs(samples: CalibrationSet) -> list[str]:
    """Return the inputs that hold the same values in all samples.

    An integer input may be a setting, such as a sampling rate: it counts only where no input differs.
    """
    if len(samples) < 2:
        return []
    alike = [name for name, array in samples.inputs.items() if _is_constant(array)]
    if len(alike) == len(samples.inputs):
        return alike
    return [name for name in alike if samples.inputs[name].dtype.kind == "f"]


def _is_constant(array: NDArray[Any]) -> bool:
    return all((row == array[0]).all() for row in array[1:])


def _preprocessors(source: SourceModel, rule: Preprocess | None) -> dict[str, Preprocessor]:
    return {
        spec.name: Preprocessor(rule, spec) for spec in source.inputs if rule is not None and spec.name == rule.input
    }


def _images(
    folder: Path, source: SourceModel, rule: Preprocess | None, class_names: Sequence[str], at_least: int
) -> Arrays:
    if rule is None or not rule.decode or len(source.inputs) != 1:
        raise CalibrationInvalid(
            f"{folder} holds no .npy file of the model's inputs. For a folder of images give --preprocess imagenet, yolo "
            "or a file with decode = true, and a model with one input"
        )
    files = sorted(p for p in (*folder.glob("*"), *folder.glob("*/*")) if p.suffix.lower() in IMAGE_SUFFIXES)
    if len(files) < at_least:
        raise CalibrationInvalid(f"{folder} has {len(files)} images; at least {at_least} are needed: add more")
    labels = _labels_of(folder, files, class_names)
    preprocessor = Preprocessor(rule, source.inputs[0])
    first = _image(preprocessor, files[0])
    check_size(folder, first.nbytes * len(files))
    arrays = np.empty((len(files), *first.shape[1:]), first.dtype)
    for row, file in zip(arrays, files, strict=True):
        row[...] = _image(preprocessor, file)[0]
    return {source.inputs[0].name: arrays} | ({} if labels is None else {LABELS: labels})


def _image(preprocessor: Preprocessor, path: Path) -> NDArray[Any]:
    if problem := pointer_problem(path):
        raise CalibrationInvalid(problem)
    try:
        if path.stat().st_size > IMAGE_BYTES_MAX:
            raise CalibrationInvalid(
                f"{path} has {path.stat().st_size} bytes, and the limit is {IMAGE_BYTES_MAX}: give a smaller image"
            )
        array, _ = preprocessor(np.frombuffer(path.read_bytes(), np.uint8)[None])
        return array
    except OSError as error:
        raise CalibrationInvalid(f"cannot read {path}: {error.strerror}") from error
    except RequestError as error:
        raise CalibrationInvalid(f"{path}: {error.message}") from error


def _labels_of(folder: Path, files: Sequence[Path], class_names: Sequence[str]) -> NDArray[np.int64] | None:
    """Return the class of each file by the table, else by its folder; None where no file is in a folder of a class."""
    if (folder / LABELS_TABLE).is_file():
        table = read_label_table(folder / LABELS_TABLE, class_names)
        listed = [file.relative_to(folder).as_posix() for file in files]
        if missing := [name for name in listed if name not in table]:
            raise CalibrationInvalid(
                f"{folder / LABELS_TABLE} has no line for {missing[0]} ({len(missing)} of {len(files)} images): "
                "add `file,label` for each"
            )
        return np.array([table[name] for name in listed], np.int64)
    names = [file.parent.name for file in files if file.parent != folder]
    if not names:
        return None
    if len(names) != len(files):
        raise CalibrationInvalid(f"{folder} has images both in and beside folders of classes: move all into folders")
    number = {name: i for i, name in enumerate(class_names or sorted(set(names)))}
    if unknown := sorted(set(names) - set(number)):
        raise CalibrationInvalid(
            f"the name of folder {folder / unknown[0]} is not one of the {len(number)} labels "
            f"({', '.join(list(number)[:LABELS_NAMED_MAX])}{', ...' if len(number) > LABELS_NAMED_MAX else ''}): name folders like "
            f"the labels of --labels, or write {folder / LABELS_TABLE}"
        )
    return np.array([number[name] for name in names], np.int64)


def _checked(path: Path, spec: TensorSpec, array: NDArray[Any]) -> NDArray[Any]:
    check_form(str(path), spec, array.shape, array.dtype)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        bad = np.flatnonzero(~np.isfinite(array.reshape(len(array), -1)).all(axis=1))
        raise CalibrationInvalid(
            f"array {spec.name!r} of {path} has NaN or infinity in sample {bad[0]} ({len(bad)} of {len(array)} samples): "
            "remove them, or correct what prepares them"
        )
    return np.ascontiguousarray(array)


def _checked_labels(path: Path, labels: NDArray[Any], count: int) -> NDArray[Any]:
    if labels.shape != (count,) or labels.dtype.kind not in "iu":
        raise CalibrationInvalid(
            f"labels of {path} are {labels.dtype} of shape {list(labels.shape)}; give one integer per sample: [{count}]"
        )
    if labels.size and int(labels.min()) < 0:
        raise CalibrationInvalid(f"labels of {path} include {int(labels.min())}; classes count from 0")
    return labels.astype(np.int64)


def _checked_slices(path: Path, slices: NDArray[Any], count: int) -> NDArray[Any]:
    if slices.shape != (count,) or slices.dtype.kind not in "iuU":
        raise CalibrationInvalid(
            f"slice of {path} is {slices.dtype} of shape {list(slices.shape)}; give one name (text or an integer) "
            f"per sample: [{count}]"
        )
    return slices.astype(np.str_)


def _checked_boxes(path: Path, boxes: NDArray[Any], count: int) -> NDArray[Any]:
    if boxes.ndim != 3 or boxes.shape[0] != count or boxes.shape[2] != 5 or boxes.dtype.kind not in "iuf":
        raise CalibrationInvalid(
            f"boxes of {path} are {boxes.dtype} of shape {list(boxes.shape)}; give class, left, top, right, bottom of "
            f"each: [{count}, boxes, 5], class -1 for padding"
        )
    if not np.isfinite(boxes).all():
        raise CalibrationInvalid(f"boxes of {path} have NaN or infinity; pad with class -1")
    return boxes.astype(np.float32)
