"""CSV files of sensor values: one line per moment, one column per channel."""

from __future__ import annotations

import csv
import math
from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgert.errors import InputError
from edgert.printable import counted

_ADVICE = "give one line per moment with one number (such as 1.5) per channel, separated by commas, in UTF-8"


def read_csv(path: Path) -> NDArray[np.float32]:
    """Return the table in a file as FP32 [lines, columns]; an empty cell is NaN.

    A first line of names, empty lines, and lines that start with # are skipped. Raises InputError if the file is not a
    table of numbers, OSError if the file cannot be read.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:  # skip a byte order mark
            table = _table(file)
        if np.isnan(table).all():
            raise ValueError("it has no numbers")
    except (ValueError, csv.Error) as error:
        raise InputError(f"{path} is not a table of numbers: {str(error)[:200]}; {_ADVICE}") from error
    return table


def _table(lines: Iterable[str]) -> NDArray[np.float32]:
    values, columns = array("f"), 0
    reader = csv.reader(lines)
    for cells in reader:
        if not cells or cells[0].startswith("#"):
            continue
        if not columns:
            columns = len(cells)
            if _are_names(cells):
                continue
        for cell in cells:
            if (value := _number(cell)) is None:
                raise ValueError(f"line {reader.line_num} has {cell[:40]!r}, which is not a number")
            values.append(value)
        if len(cells) != columns:
            raise ValueError(
                f"line {reader.line_num} has {counted(len(cells), 'column')}, and the lines before have {columns}"
            )
    return np.array(values, np.float32).reshape(-1, max(columns, 1))


def _are_names(cells: list[str]) -> bool:
    return any(cell.strip() for cell in cells) and all(not cell.strip() or _number(cell) is None for cell in cells)


def _number(cell: str) -> float | None:
    try:
        return float(cell) if cell.strip() else math.nan
    except ValueError:
        return None
