"""The classes of files in a folder: by a table `labels.csv`, or by the names of their folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgert.errors import CalibrationInvalid
from edgert_deploy.packager.samples.sample_files import LABELS_TABLE, read_label_table

LABELS_NAMED_MAX = 5


def labels_of(folder: Path, files: Sequence[Path], class_names: Sequence[str]) -> NDArray[np.int64] | None:
    """Return the class of each file by the table, else by its folder; None where no file is in a folder of a class."""
    if (folder / LABELS_TABLE).is_file():
        table = read_label_table(folder / LABELS_TABLE, class_names)
        listed = [file.relative_to(folder).as_posix() for file in files]
        if missing := [name for name in listed if name not in table]:
            raise CalibrationInvalid(
                f"{folder / LABELS_TABLE} has no line for {missing[0]} ({len(missing)} of {len(files)} files): "
                "add `file,label` for each"
            )
        return np.array([table[name] for name in listed], np.int64)
    names = [file.parent.name for file in files if file.parent != folder]
    if not names:
        return None
    if len(names) != len(files):
        raise CalibrationInvalid(f"{folder} has files both in and beside folders of classes: move all into folders")
    number = {name: i for i, name in enumerate(class_names or sorted(set(names)))}
    if unknown := sorted(set(names) - set(number)):
        raise CalibrationInvalid(
            f"the name of folder {folder / unknown[0]} is not one of the {len(number)} labels "
            f"({', '.join(list(number)[:LABELS_NAMED_MAX])}{', ...' if len(number) > LABELS_NAMED_MAX else ''}): name folders like "
            f"the labels of --labels, or write {folder / LABELS_TABLE}"
        )
    return np.array([number[name] for name in names], np.int64)
