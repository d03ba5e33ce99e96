"""Samples that calibrate the quantization of a model, or judge the artifacts (hold-out)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.buckets import Buckets
from edgert.bundle.rules import Preprocess
from edgert.bundle.signal_rules import Series, Sound
from edgert.bundle.state import State
from edgert.bundle.text_rules import Text
from edgert.errors import CalibrationInvalid
from edgert.printable import counted
from edgert.processing.images.preprocess import Preprocessor
from edgert.processing.preprocessors import InputRule
from edgert.tensors import TensorSpec
from edgert_deploy.packager.samples.file_labels import Labelling, labels_of
from edgert_deploy.packager.samples.lengths import Arrays, in_buckets
from edgert_deploy.packager.samples.sample_files import (
    LABELS,
    RECORDINGS,
    TRANSCRIPTS,
    as_recording,
    check_form,
    check_size,
    files_in,
    has_npy,
    read_npy,
    read_npy_folder,
    read_npz,
)
from edgert_deploy.packager.samples.sample_function import read_function
from edgert_deploy.packager.samples.signal_samples import features_of, read_signal_files, sample_specs
from edgert_deploy.packager.samples.stateful_samples import with_state
from edgert_deploy.packager.samples.text_samples import SUFFIX, read_texts, tokens_of
from edgert_deploy.packager.sources.source_model import SourceModel
from edgert_deploy.packager.user_function import is_function

CALIBRATION_SAMPLES_MIN = 10  # the hold-out needs only as many samples as a bundle has golden samples
LENGTHS = "lengths"
SLICES = "slice"
BOXES = "boxes"
# Arrays with one element per sample: the accepted kinds of dtype, the final dtype, and the elements' name in messages.
PER_SAMPLE: dict[str, tuple[str, Any, str]] = {
    LABELS: ("iu", np.int64, "one integer per sample"),
    SLICES: ("iuU", np.str_, "one name (text or an integer) per sample"),
    TRANSCRIPTS: ("U", np.str_, "one text per sample"),
    RECORDINGS: ("iu", np.int64, "the number of each window's recording"),
}
NAMES = (*PER_SAMPLE, BOXES)
CLASSES_END = 2**31
SIZE_RATIO_MAX = 10  # if the mean values of two sets differ by a larger factor, the sets were prepared differently
RANGE_MARGIN = 0.1  # values farther outside than this share of the calibration's range cause a warning
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png")
IMAGE_BYTES_MAX = 64 * 1024**2
RUN_BYTES_MAX = 2 * 1024**2  # for the inputs that run at once; their activations are hundreds of times larger


@dataclass(frozen=True)
class CalibrationSet:
    """Samples for calibration or for the hold-out.

    Attributes:
        inputs: The samples of each input along axis 0, in the model's dtype and item shape.
        labels: One class index (int64) per sample.
        slices: For each sample, the name of its origin in the field, such as a camera or a time of day.
        boxes: A detector's true boxes [samples, M, 5] (mean_average_precision.py).
        raw: The windows of signals [samples, length(, channels)], or the texts UINT8 [samples, bytes], from which the
            inputs were made.
        lengths: The length (int64) of each sample without padding, for a model with buckets.
        buckets: The model's buckets. Every row of `inputs` is padded to the largest bucket.
        transcripts: The text that the model should write for each sample.
        recordings: The number of each window's recording. Consecutive equal numbers mark the windows of one signal, in
            order.
    """

    inputs: dict[str, NDArray[Any]]
    labels: NDArray[Any] | None
    slices: NDArray[Any] | None = None
    boxes: NDArray[Any] | None = None
    raw: NDArray[Any] | None = None
    lengths: NDArray[np.int64] | None = None
    buckets: Buckets | None = None
    transcripts: NDArray[np.str_] | None = None
    recordings: NDArray[np.int64] | None = None
    state: tuple[State, ...] = ()

    def __len__(self) -> int:
        return len(next(iter(self.inputs.values())))

    @property
    def run_max(self) -> int:
        """The largest number of samples that may run at once. The limit saves the host's memory."""
        item_bytes = sum(array[:1].nbytes for array in self.inputs.values())
        return max(1, RUN_BYTES_MAX // max(1, item_bytes))

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The bucket of each sample."""
        assert self.buckets is not None
        assert self.lengths is not None
        return np.array([self.buckets.size_for(int(length)) for length in self.lengths], np.int64)

    def rows(self, index: Any) -> CalibrationSet:
        """Return inputs and lengths of the samples that `index` (a slice, a mask or numbers) selects."""
        lengths = None if self.lengths is None else self.lengths[index]
        inputs = {name: array[index] for name, array in self.inputs.items()}
        return CalibrationSet(inputs, None, lengths=lengths, buckets=self.buckets)

    def cut(self, length: int) -> CalibrationSet:
        """Return the inputs cut to `length` along the axis of the buckets."""
        assert self.buckets is not None
        inputs = dict(self.inputs)
        for place in self.buckets.inputs:
            inputs[place.name] = np.ascontiguousarray(inputs[place.name].take(range(length), axis=place.axis))
        return CalibrationSet(inputs, None)

    def served(self, row: int) -> dict[str, NDArray[Any]]:
        """Return one sample in the form that a device's engine gets: padded to its bucket."""
        single = self.rows(slice(row, row + 1))
        return single.inputs if single.buckets is None else single.cut(int(single.sizes[0])).inputs


def load_samples(
    path: Path,
    source: SourceModel,
    preprocess: InputRule | None = None,
    class_names: Sequence[str] = (),
    *,
    at_least: int,
    transcripts: bool = False,
) -> CalibrationSet:
    """Return samples, with the arrays `labels`, `slice`, `boxes`, `transcript` and `recording` that exist.

    Images, signals and texts are preprocessed by the same code as on devices. Raises CalibrationInvalid.

    Args:
        path: Samples in one of the forms of docs/models.md.
        preprocess: The rule of an image, a signal or a text. If there is no rule, the samples are the model's own
            tensors.
        class_names: The order of the classes; if empty, the order is alphabetical.
        transcripts: Whether the table labels.csv holds texts, because the model writes text.
    """
    files = _Reader(path, source, preprocess, Labelling(class_names, transcripts), at_least)
    arrays, raw = files.read()
    if (signal_rule := files.signal_rule) is not None:
        raw = arrays[signal_rule.input]
        arrays[signal_rule.input] = features_of(path, source.app_inputs, signal_rule, raw, arrays)
    inputs = {spec.name: _checked(path, spec, arrays[spec.name]) for spec in source.app_inputs}
    count = _checked_count(path, inputs, at_least)
    lengths = None
    if source.buckets is not None:
        inputs, lengths = in_buckets(path, inputs, arrays.get(LENGTHS), source.buckets)
    # An input may have the same name as one of the other arrays, such as "boxes". Then the array is that input.
    more = {name: array for name, array in arrays.items() if name not in inputs}
    columns = {name: _checked_column(path, name, more[name], count) for name in PER_SAMPLE if name in more}
    if source.state:
        inputs = with_state(path, source, inputs, columns.get(RECORDINGS))
    return CalibrationSet(
        inputs=inputs,
        labels=columns.get(LABELS),
        slices=columns.get(SLICES),
        boxes=_checked_boxes(path, more[BOXES], count) if BOXES in more else None,
        raw=raw,
        lengths=lengths,
        buckets=source.buckets,
        transcripts=columns.get(TRANSCRIPTS),
        recordings=columns.get(RECORDINGS),
        state=source.state,
    )


@dataclass(frozen=True)
class _Reader:
    """Reads the arrays of samples in any form. The fields are the arguments of `load_samples`."""

    path: Path
    source: SourceModel
    preprocess: InputRule | None
    labelling: Labelling
    at_least: int

    @property
    def image_rule(self) -> Preprocess | None:
        return self.preprocess if isinstance(self.preprocess, Preprocess) else None

    @property
    def signal_rule(self) -> Sound | Series | None:
        return self.preprocess if isinstance(self.preprocess, Sound | Series) else None

    def read(self) -> tuple[Arrays, NDArray[Any] | None]:
        """Return the arrays at `path` by name, and the texts from which tokens were made."""
        path, source, rule = self.path, self.source, self.preprocess
        specs = sample_specs(source.app_inputs, self.signal_rule)
        names = (*NAMES, *source.unread, LENGTHS) if source.buckets is not None else (*NAMES, *source.unread)
        if is_function(str(path)):
            arrays, labels = read_function(str(path), specs, _preprocessors(source, self.image_rule), source.buckets)
            return arrays | ({} if labels is None else {LABELS: labels}), None
        is_text = path.suffix == SUFFIX if path.is_file() else path.is_dir() and not has_npy(path, specs)
        if isinstance(rule, Text) and is_text:
            texts, labels_of_texts = read_texts(path, self.labelling, self.at_least)
            return tokens_of(path, source.app_inputs, rule, texts, source.buckets) | labels_of_texts, texts
        if path.suffix == ".npy" and path.is_file():
            return read_npy(path, specs), None
        if not path.is_dir():
            return read_npz(path, specs, names), None
        if has_npy(path, specs):
            return read_npy_folder(path, specs, names, source.buckets), None
        if self.signal_rule is not None:
            return read_signal_files(path, source.app_inputs, self.signal_rule, self.labelling, self.at_least), None
        return self._images(), None

    def _images(self) -> Arrays:
        """Return the preprocessed images of the folder and their labels. Raises CalibrationInvalid."""
        folder, source, rule = self.path, self.source, self.image_rule
        if rule is None or not rule.decode or len(source.inputs) != 1:
            raise CalibrationInvalid(
                f"{folder} holds no .npy file of the model's inputs. For a folder of images, give a model with one input, and "
                "--preprocess imagenet, --preprocess yolo or a .toml file with decode = true"
            )
        files = files_in(folder, IMAGE_SUFFIXES)
        if len(files) < self.at_least:
            raise CalibrationInvalid(
                f"{folder} and its subfolders have {counted(len(files), 'image')} ({', '.join(IMAGE_SUFFIXES)}); "
                f"at least {self.at_least} are needed: add more"
            )
        labels = labels_of(folder, files, self.labelling)
        preprocessor = Preprocessor(rule, source.inputs[0])
        first = _image(preprocessor, files[0])
        check_size(folder, first.nbytes * len(files))
        arrays = np.empty((len(files), *first.shape[1:]), first.dtype)
        for row, file in zip(arrays, files, strict=True):
            row[...] = _image(preprocessor, file)[0]
        return {source.inputs[0].name: arrays, **labels}


def _checked_count(path: Path, inputs: Mapping[str, NDArray[Any]], at_least: int) -> int:
    """Return the number of samples. Raises CalibrationInvalid if it is too small or differs by input."""
    counts = {name: len(array) for name, array in inputs.items()}
    if len(set(counts.values())) > 1:
        raise CalibrationInvalid(
            f"the inputs of {path} have different numbers of samples: {counts}; give each input the same number"
        )
    count = next(iter(counts.values()))
    if count < at_least:
        raise CalibrationInvalid(f"{path} has {counted(count, 'sample')}; at least {at_least} are needed: add more")
    return count


def constant_inputs(samples: CalibrationSet) -> list[str]:
    """Return the inputs that hold the same values in all samples.

    An integer input may be a setting, such as a sampling rate. So the result has integer inputs only if all inputs hold
    the same values in all samples.
    """
    if len(samples) < 2:
        return []
    alike = [name for name, array in samples.inputs.items() if all((row == array[0]).all() for row in array[1:])]
    if len(alike) == len(samples.inputs):
        return alike
    return [name for name in alike if samples.inputs[name].dtype.kind == "f"]


def inputs_of_other_size(one: CalibrationSet, other: CalibrationSet) -> list[str]:
    """Return the float inputs whose values differ in size, such as 0 to 1 and 0 to 255."""
    apart = []
    for name, array in one.inputs.items():
        if array.dtype.kind == "f":
            sizes = sorted(float(np.abs(each).mean(dtype=np.float64)) for each in (array, other.inputs[name]))
            if 0.0 < sizes[0] * SIZE_RATIO_MAX < sizes[1]:
                apart.append(name)
    return apart


def inputs_out_of_range(calibration: CalibrationSet, holdout: CalibrationSet) -> list[str]:
    """Return the float inputs whose hold-out values are clearly outside the calibration's range."""
    out = []
    for name, array in calibration.inputs.items():
        if array.dtype.kind == "f":
            low, high = float(array.min()), float(array.max())
            margin = RANGE_MARGIN * (high - low)
            other = holdout.inputs[name]
            if margin and not low - margin <= float(other.min()) <= float(other.max()) <= high + margin:
                out.append(name)
    return out


def _preprocessors(source: SourceModel, rule: Preprocess | None) -> dict[str, Preprocessor]:
    return {
        spec.name: Preprocessor(rule, spec) for spec in source.inputs if rule is not None and spec.name == rule.input
    }


def _image(preprocessor: Preprocessor, path: Path) -> NDArray[Any]:
    with as_recording(path, IMAGE_BYTES_MAX, "give a smaller image"):
        array, _ = preprocessor(np.frombuffer(path.read_bytes(), np.uint8)[None])
    return array


def _checked(path: Path, spec: TensorSpec, array: NDArray[Any]) -> NDArray[Any]:
    check_form(str(path), spec, array.shape, array.dtype)
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        bad = np.flatnonzero(~np.isfinite(array.reshape(len(array), -1)).all(axis=1))
        raise CalibrationInvalid(
            f"array {spec.name!r} of {path} has NaN or infinity in sample {bad[0]} ({len(bad)} of {len(array)} samples): "
            "remove these samples, or correct the code that prepares the samples"
        )
    return np.ascontiguousarray(array, spec.dtype)


def _checked_column(path: Path, name: str, array: NDArray[Any], count: int) -> NDArray[Any]:
    kinds, dtype, wanted = PER_SAMPLE[name]
    if array.shape != (count,) or array.dtype.kind not in kinds:
        raise CalibrationInvalid(
            f"array {name!r} of {path} is {array.dtype} of shape {list(array.shape)}; give {wanted}: [{count}]"
        )
    if name == LABELS and array.size and (int(array.min()) < 0 or int(array.max()) >= CLASSES_END):
        wrong = int(array.min() if array.min() < 0 else array.max())
        raise CalibrationInvalid(
            f"array 'labels' of {path} includes {wrong}, which is not a class: give numbers that count from 0"
        )
    return array.astype(dtype)


def _checked_boxes(path: Path, boxes: NDArray[Any], count: int) -> NDArray[Any]:
    if boxes.ndim != 3 or boxes.shape[0] != count or boxes.shape[2] != 5 or boxes.dtype.kind not in "iuf":
        raise CalibrationInvalid(
            f"array 'boxes' of {path} is {boxes.dtype} of shape {list(boxes.shape)}; give class, left, top, right, bottom of "
            f"each box: [{count}, boxes, 5], class -1 for padding"
        )
    if not np.isfinite(boxes).all():
        raise CalibrationInvalid(
            f"array 'boxes' of {path} has NaN or infinity; give finite numbers, and pad with class -1"
        )
    return boxes.astype(np.float32)
