"""The labels of files in a folder: from a table `labels.csv`, or from the names of their folders."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from edgert.errors import CalibrationInvalid
from edgert.printable import counted
from edgert_deploy.packager.samples.lengths import Arrays
from edgert_deploy.packager.samples.sample_files import (
    LABELS,
    LABELS_TABLE,
    TRANSCRIPTS,
    read_label_spans,
    read_label_table,
    read_transcripts,
)

LABELS_NAMED_MAX = 5
OTHER_TABLES = ("metadata.csv", "metadata.jsonl")  # in Hugging Face's folders of images and sound

T = TypeVar("T")


class Timing(NamedTuple):
    """The times of windows, in seconds: the first start, the step between two starts, and the length."""

    begin_s: float
    step_s: float
    length_s: float


@dataclass(frozen=True)
class Labelling:
    """The rules for reading the labels of files.

    Without `class_names`, the order of the classes is alphabetical. With `transcripts`, the labels are texts, because
    the model writes text.
    """

    class_names: Sequence[str]
    transcripts: bool


def labels_of(folder: Path, files: Sequence[Path], labelling: Labelling) -> Arrays:
    """Return the class of each file as LABELS, or its text as TRANSCRIPTS.

    If there is a table, the table has the classes. If not, a file's class is the name of the file's folder. Texts are
    only in the table. The result is empty if there is no table and no file is in a subfolder. Raises
    CalibrationInvalid, for example if the labels are in a table of another name.
    """
    path, class_names = folder / LABELS_TABLE, labelling.class_names
    has_table = os.path.lexists(path)
    if labelling.transcripts:
        texts = _of_files(path, files, read_transcripts(path)) if has_table else None
        return {} if texts is None else {TRANSCRIPTS: np.array(texts, np.str_)}
    if has_table:
        return {LABELS: np.array(_of_files(path, files, read_label_table(path, class_names)), np.int64)}
    classes = _by_folder(folder, files, class_names)
    if classes is None and (others := [folder / name for name in OTHER_TABLES if (folder / name).exists()]):
        raise CalibrationInvalid(
            f"EdgeRT does not read {others[0]}, and the folder has no other labels. If the columns of this table are "
            f"file_name,label, copy it to {path}. Otherwise write {path} with a line `file,label` for each file. If you need "
            "no labels, remove the table"
        )
    return {} if classes is None else {LABELS: classes}


def labels_of_windows(
    folder: Path, files: Sequence[Path], labelling: Labelling, counts: Sequence[int], timing: Timing
) -> Arrays:
    """Return the class of each window of the recordings `files` as LABELS. Raises CalibrationInvalid.

    A window has the class of its recording, unless the table labels a part of the recording. The label of a part
    applies to a window if the part and the window overlap by at least half of the shorter one.

    Args:
        folder: The folder of the recordings and of the table.
        counts: The number of windows of each recording.
        timing: The times of the windows in a recording.
    """
    path = folder / LABELS_TABLE
    if not os.path.lexists(path):
        of_files = labels_of(folder, files, labelling)
        return {name: np.repeat(array, counts) for name, array in of_files.items()}
    whole, spans = read_label_spans(path, labelling.class_names)
    labels = np.repeat(np.array(_of_files(path, files, whole), np.int64), counts)
    first = dict(zip([file.relative_to(folder).as_posix() for file in files], np.cumsum([0, *counts]), strict=False))
    number = {name: i for i, name in enumerate(first)}
    for span in spans:
        if span.file not in first:
            raise CalibrationInvalid(
                f"{path} has a line for {span.file}, which is not a recording in {folder}: correct or remove the line"
            )
        begins = timing.begin_s + timing.step_s * np.arange(counts[number[span.file]])
        shared = np.minimum(begins + timing.length_s, span.end_s) - np.maximum(begins, span.begin_s)
        shows = np.flatnonzero(shared >= min(timing.length_s, span.end_s - span.begin_s) / 2)
        labels[first[span.file] + shows] = span.label
    return {LABELS: labels}


def _of_files(path: Path, files: Sequence[Path], table: Mapping[str, T]) -> list[T]:
    listed = [file.relative_to(path.parent).as_posix() for file in files]
    if missing := [name for name in listed if name not in table]:
        raise CalibrationInvalid(
            f"{path} has no line for {missing[0]} ({len(missing)} of {len(files)} files): add a line `file,label` for each file"
        )
    return [table[name] for name in listed]


def _by_folder(folder: Path, files: Sequence[Path], class_names: Sequence[str]) -> NDArray[np.int64] | None:
    names = [file.parent.name for file in files if file.parent != folder]
    if not names:
        return None
    if len(names) != len(files):
        raise CalibrationInvalid(
            f"{folder} has files both in and beside folders of classes: move all files into folders"
        )
    number = {name: i for i, name in enumerate(class_names or sorted(set(names)))}
    if unknown := sorted(set(names) - set(number)):
        raise CalibrationInvalid(
            f"the name of folder {folder / unknown[0]} is not one of the {counted(len(number), 'label')} "
            f"({', '.join(list(number)[:LABELS_NAMED_MAX])}{', ...' if len(number) > LABELS_NAMED_MAX else ''}): name folders like "
            f"the labels of --labels, or write {folder / LABELS_TABLE}"
        )
    return np.array([number[name] for name in names], np.int64)
