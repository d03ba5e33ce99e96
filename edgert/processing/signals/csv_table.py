"""CSV files of sensor values: one line for each moment, one column for each channel."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgert.errors import InputError

LINE_LENGTH_MAX = 64 * 1024
_ADVICE = "give a line for each moment, and on it a number for each channel, with commas between"


def read_csv(path: Path) -> NDArray[np.float32]:
    """Return FP32 [lines, columns]; an empty cell is NaN. A first line of names is left out.

    Raises InputError where the file is no table of numbers, OSError where it cannot be read.
    """
    with path.open("rb") as file:
        first = file.readline(LINE_LENGTH_MAX).decode("utf-8", "replace")
    named = any(cell.strip() and not _is_number(cell) for cell in first.split(","))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of an empty file
            table = np.genfromtxt(path, np.float32, delimiter=",", skip_header=int(named), ndmin=2, encoding="utf-8")
    except (ValueError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} is not a table of numbers: {' '.join(str(error).split())[:200]}; {_ADVICE}"
        ) from error
    if not table.size or np.isnan(table).all():
        raise InputError(f"{path} is not a table of numbers; {_ADVICE}")
    return np.asarray(table)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
