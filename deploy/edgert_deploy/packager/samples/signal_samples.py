"""Samples of sound and of sensor series, cut into windows and converted to features as on a device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgert.bundle.signal_rules import Series, Sound
from edgert.errors import CalibrationInvalid, InputError, RequestError
from edgert.printable import counted
from edgert.processing.signals.csv_table import read_csv
from edgert.processing.signals.preprocess import SignalPreprocessor
from edgert.tensors import TensorSpec
from edgert_deploy.packager.samples.file_labels import Labelling, Timing, labels_of, labels_of_windows
from edgert_deploy.packager.samples.lengths import Arrays
from edgert_deploy.packager.samples.sample_files import (
    FILES,
    LABELS_TABLE,
    RECORDINGS,
    as_recording,
    check_form,
    check_size,
    files_in,
)

FILE_BYTES_MAX = 256 * 1024**2
_ROWS = 64  # the number of windows whose features are computed at once

Rule = Sound | Series


def sample_specs(inputs: Sequence[TensorSpec], rule: Rule | None) -> tuple[TensorSpec, ...]:
    """Return the specs of the samples. For the rule's input, the samples are windows of the signal."""
    return tuple(_window_spec(spec, rule) if rule is not None and spec.name == rule.input else spec for spec in inputs)


def features_of(
    path: Path, inputs: Sequence[TensorSpec], rule: Rule, windows: NDArray[np.float32], arrays: Arrays | None = None
) -> NDArray[Any]:
    """Return the model's tensor for `windows`. Raises CalibrationInvalid with the name of the sample.

    If `arrays` has FILES and RECORDINGS, a message names the file of the window, else `path`.
    """
    spec = next(spec for spec in inputs if spec.name == rule.input)
    check_form(str(path), _window_spec(spec, rule), windows.shape, windows.dtype)
    preprocessor = SignalPreprocessor(rule, spec)
    batches = []
    for begin in range(0, len(windows), _ROWS):
        block = np.ascontiguousarray(windows[begin : begin + _ROWS])
        try:
            batches.append(preprocessor.features(block))
        except RequestError:
            _name_refused(path, preprocessor, block, begin, arrays or {})
            raise
    return np.concatenate(batches) if batches else np.empty((0, *spec.item_shape), np.float32)


def _name_refused(
    path: Path, preprocessor: SignalPreprocessor, block: NDArray[np.float32], begin: int, arrays: Arrays
) -> None:
    """Raise CalibrationInvalid for the first window of `block` whose features cannot be computed."""
    for row in range(begin, begin + len(block)):
        try:
            preprocessor.features(block[row - begin : row - begin + 1])
        except RequestError as error:
            place = f"sample {row} of {path}"
            if FILES in arrays:
                number = int(arrays[RECORDINGS][row])
                window = row - int(np.flatnonzero(arrays[RECORDINGS] == number)[0])
                place = f"{arrays[FILES][number]}, window {window}"
            raise CalibrationInvalid(f"{place}: {error.message}") from error


def read_signal_files(
    folder: Path, inputs: Sequence[TensorSpec], rule: Rule, labelling: Labelling, at_least: int
) -> Arrays:
    """Return the windows of WAV or CSV files, with RECORDINGS and labels. Raises CalibrationInvalid."""
    suffix = ".wav" if isinstance(rule, Sound) else ".csv"
    if len(inputs) != 1:
        raise CalibrationInvalid(f"{folder} holds {suffix} files, which fit only a model with one input: give an .npz")
    files = [path for path in files_in(folder, (suffix,)) if path != folder / LABELS_TABLE]
    if not files:
        raise CalibrationInvalid(f"{folder} holds neither .npy nor {suffix} files; give one file for each recording")
    texts = labels_of(folder, files, labelling) if labelling.transcripts else {}
    preprocessor = SignalPreprocessor(rule, inputs[0])
    of_files = [_windows(preprocessor, rule, file) for file in files]
    count = sum(map(len, of_files))
    if count < at_least:
        raise CalibrationInvalid(
            f"{folder} has {counted(count, 'window')} in {counted(len(files), 'file')}; at least {at_least} are needed: add more"
        )
    check_size(folder, sum(windows.nbytes for windows in of_files))
    counts = [len(windows) for windows in of_files]
    if texts and (several := [file for file, n in zip(files, counts, strict=True) if n > 1]):
        raise CalibrationInvalid(
            f"{several[0]} has several windows, and {LABELS_TABLE} has one text for all of them ({len(several)} of {len(files)} files): "
            "give recordings of one window each"
        )
    timing = Timing(*(value / rule.rate_hz for value in (-rule.lead, rule.step, rule.length)))
    labels = texts if labelling.transcripts else labels_of_windows(folder, files, labelling, counts, timing)
    recordings = {RECORDINGS: np.repeat(np.arange(len(files)), counts), FILES: np.array([str(file) for file in files])}
    return {rule.input: np.concatenate(of_files), **recordings, **labels}


def _window_spec(spec: TensorSpec, rule: Rule) -> TensorSpec:
    channels = () if isinstance(rule, Sound) else (rule.channels,)
    return TensorSpec(spec.name, "FP32", (-1, rule.length, *channels))


def _windows(preprocessor: SignalPreprocessor, rule: Rule, path: Path) -> NDArray[np.float32]:
    with as_recording(path, FILE_BYTES_MAX, "cut it"):
        if isinstance(rule, Sound):
            return preprocessor.windows(np.frombuffer(path.read_bytes(), np.uint8)[None])[0]
        try:
            table = read_csv(path)
        except InputError as error:
            raise CalibrationInvalid(error.message) from error
        if table.shape[1] != rule.channels:
            raise CalibrationInvalid(
                f"{path} has {counted(table.shape[1], 'column')}, and the rule has {counted(rule.channels, 'channel')}: "
                "remove columns that are no channel, such as the time, or change `channels`"
            )
        return preprocessor.windows(table[None])[0]
