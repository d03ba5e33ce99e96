"""Samples that a model is quantised with (calibration) and judged by (hold-out)."""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.errors import CalibrationInvalid, RequestError
from edgert.manifest import Preprocess
from edgert.processing.preprocess import Preprocessor
from edgert.tensors import TensorSpec
from edgert_deploy.source import SourceModel

LABELS = "labels"
SLICES = "slice"
BOXES = "boxes"
SAMPLES_BYTES_MAX = 8 * 1024**3  # unpacked
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png")
IMAGE_BYTES_MAX = 64 * 1024**2


@dataclass(frozen=True)
class CalibrationSet:
    """`inputs[name]` has all samples of that input along axis 0, in the model's dtype and item shape.

    `labels`, where given, holds one class index (int64) a sample; `slices` the name of the part of the field that a
    sample stands for (a camera, a time of day); `boxes` [samples, M, 5] a detector's truth (detection_metric.py).
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
    """Read an .npz whose arrays are named as the model's inputs, plus `labels`, `slice` and `boxes` where there are any.

    A folder is read as images instead, which `preprocess` turns into what the model takes by the code that the
    device runs; images in folders of their own are labelled by the folder's name, counted in the order of
    `class_names`, or in that of the alphabet where there are none.

    Raises CalibrationInvalid: unreadable, an input missing, an array of another name, wrong dtype or item shape, fewer
    than `at_least` samples, NaN or infinity, a label count that differs.
    """
    if path.is_dir():
        return _load_images(path, source, preprocess, class_names, at_least)
    arrays = _read(path)
    inputs = {}
    for spec in source.inputs:
        if spec.name not in arrays:
            found = ", ".join(repr(name) for name in arrays) or "none"
            raise CalibrationInvalid(
                f"{path} has no array {spec.name!r}; name one array after each input (found: {found})"
            )
        inputs[spec.name] = _checked(path, spec, arrays[spec.name])
    known = {*inputs, LABELS, SLICES, BOXES}
    if unknown := sorted(set(arrays) - known):
        raise CalibrationInvalid(
            f"{path} has arrays that are no input of the model: {', '.join(map(repr, unknown))}; "
            f"leave them out (known: {', '.join(sorted(known))})"
        )
    counts = {name: len(array) for name, array in inputs.items()}
    if len(set(counts.values())) > 1:
        raise CalibrationInvalid(f"{path} has differing numbers of samples: {counts}; give each input the same number")
    count = next(iter(counts.values()))
    if count < at_least:
        raise CalibrationInvalid(f"{path} has {count} samples; at least {at_least} are needed: add more")
    # An input of the model may bear one of these names.
    more = {name: array for name, array in arrays.items() if name not in inputs}
    return CalibrationSet(
        inputs,
        _checked_labels(path, more[LABELS], count) if LABELS in more else None,
        _checked_slices(path, more[SLICES], count) if SLICES in more else None,
        _checked_boxes(path, more[BOXES], count) if BOXES in more else None,
    )


def _load_images(
    folder: Path, source: SourceModel, rule: Preprocess | None, class_names: Sequence[str], at_least: int
) -> CalibrationSet:
    if rule is None or not rule.decode or len(source.inputs) != 1:
        raise CalibrationInvalid(
            f"{folder} is a folder of images: give --preprocess imagenet, yolo or a file with decode = true, "
            "for a model with one input"
        )
    files = sorted(p for p in (*folder.glob("*"), *folder.glob("*/*")) if p.suffix.lower() in IMAGE_SUFFIXES)
    if len(files) < at_least:
        raise CalibrationInvalid(f"{folder} has {len(files)} images; at least {at_least} are needed: add more")
    preprocessor = Preprocessor(rule, source.inputs[0])
    first = _image(preprocessor, files[0])
    if first.nbytes * len(files) > SAMPLES_BYTES_MAX:
        raise CalibrationInvalid(
            f"{folder} has {len(files)} images of {first.nbytes} bytes to the model; at most {SAMPLES_BYTES_MAX}: give fewer"
        )
    arrays = np.empty((len(files), *first.shape[1:]), first.dtype)
    for row, file in zip(arrays, files, strict=True):
        row[...] = _image(preprocessor, file)[0]
    return CalibrationSet({source.inputs[0].name: arrays}, _labels_of(folder, files, class_names))


def _image(preprocessor: Preprocessor, path: Path) -> NDArray[Any]:
    try:
        if path.stat().st_size > IMAGE_BYTES_MAX:
            raise CalibrationInvalid(f"{path} has {path.stat().st_size} bytes; at most {IMAGE_BYTES_MAX}")
        array, _ = preprocessor(np.frombuffer(path.read_bytes(), np.uint8)[None])
        return array
    except OSError as error:
        raise CalibrationInvalid(f"cannot read {path}: {error.strerror}") from error
    except RequestError as error:
        raise CalibrationInvalid(f"{path}: {error.message}") from error


def _labels_of(folder: Path, files: Sequence[Path], class_names: Sequence[str]) -> NDArray[np.int64] | None:
    """The class of each file by its folder's name; None where no file has a folder of its own."""
    names = [file.parent.name for file in files if file.parent != folder]
    if not names:
        return None
    if len(names) != len(files):
        raise CalibrationInvalid(f"{folder} has images both in and beside folders of classes: move them all into some")
    number = {name: i for i, name in enumerate(class_names or sorted(set(names)))}
    if unknown := sorted(set(names) - set(number)):
        raise CalibrationInvalid(f"folder {folder / unknown[0]} has the name of none of the {len(number)} labels")
    return np.array([number[name] for name in names], np.int64)


def _read(path: Path) -> dict[str, NDArray[Any]]:
    """Every array of the archive; nothing in it is unpickled."""
    try:
        with zipfile.ZipFile(path) as archive:
            size = sum(info.file_size for info in archive.infolist())
        if size > SAMPLES_BYTES_MAX:
            raise CalibrationInvalid(f"{path} unpacks to {size} bytes; at most {SAMPLES_BYTES_MAX}: give fewer samples")
        with np.load(path, allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except OSError as error:
        raise CalibrationInvalid(f"cannot read {path}: {error.strerror or error}") from error
    except (zipfile.BadZipFile, zlib.error, ValueError, KeyError, EOFError, NotImplementedError, RuntimeError) as error:
        raise CalibrationInvalid(
            f"{path} is not an .npz file of plain arrays ({type(error).__name__}: {str(error)[:200]}); "
            "write it with numpy.savez_compressed(path, input_name=samples, labels=labels)"
        ) from error
    except MemoryError as error:
        raise CalibrationInvalid(
            f"{path} holds an array larger than this machine's memory; give fewer samples"
        ) from error


def _checked(path: Path, spec: TensorSpec, array: Any) -> NDArray[Any]:
    if not isinstance(array, np.ndarray) or array.dtype != spec.dtype:
        raise CalibrationInvalid(
            f"array {spec.name!r} of {path} is {getattr(array, 'dtype', 'no array')}, the model takes {spec.dtype}; "
            "convert the samples exactly as your application does (scaled and normalised, not raw bytes)"
        )
    if array.shape[1:] != spec.item_shape or array.ndim != len(spec.shape):
        want = ", ".join(["samples", *(str(n) for n in spec.item_shape)])
        raise CalibrationInvalid(
            f"array {spec.name!r} of {path} has shape {list(array.shape)}; the model takes [{want}]"
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        bad = int(np.argwhere(~np.isfinite(array.reshape(len(array), -1)).all(axis=1))[0, 0])
        raise CalibrationInvalid(
            f"array {spec.name!r} of {path} has NaN or infinity in sample {bad}; remove that sample"
        )
    return np.ascontiguousarray(array)


def _checked_labels(path: Path, labels: NDArray[Any], count: int) -> NDArray[Any]:
    if labels.shape != (count,) or labels.dtype.kind not in "iu":
        raise CalibrationInvalid(
            f"labels of {path} are {labels.dtype} of shape {list(labels.shape)}; give one whole number a sample: [{count}]"
        )
    if labels.size and int(labels.min()) < 0:
        raise CalibrationInvalid(f"labels of {path} include {int(labels.min())}; classes count from 0")
    return labels.astype(np.int64)


def _checked_slices(path: Path, slices: NDArray[Any], count: int) -> NDArray[Any]:
    if slices.shape != (count,) or slices.dtype.kind not in "iuU":
        raise CalibrationInvalid(
            f"slice of {path} is {slices.dtype} of shape {list(slices.shape)}; give one name (text or a whole number) "
            f"a sample: [{count}]"
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
