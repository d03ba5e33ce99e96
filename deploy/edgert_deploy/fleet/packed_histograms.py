"""Packed histograms, as the store keeps them: (index, count) records, merged in bulk by addition.

A count of a window has 32 bits. A count of a merged row has 64 bits, because the row may hold an hour of a whole fleet.
The records are little-endian on every machine, so any machine can read a store.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from edgert.telemetry import stages
from edgert.telemetry.sketch import INDEX_MAX, INDEX_MIN, Sketch

WINDOW_FORM = np.dtype([("index", "<i2"), ("count", "<u4")])
MERGED_FORM = np.dtype([("index", "<i2"), ("count", "<u8")])
_CELL = np.dtype([("distance", "<u2"), ("count", "<u8")])  # a cell of stage times
WINDOW_COUNT_MAX = 2**32 - 1
_WIDTH = INDEX_MAX - INDEX_MIN + 1

Cells = tuple[NDArray[np.int64], NDArray[np.int64]]


class DamagedData(ValueError):
    """Packed values cannot be read: the database's file is damaged, which SQLite does not always notice."""


@contextmanager
def _read() -> Iterator[None]:
    try:
        yield
    except (IndexError, TypeError, ValueError, zlib.error) as error:
        raise DamagedData(f"packed values cannot be read: {error}") from error


def pack(buckets: Mapping[int, int], form: np.dtype[np.void] = MERGED_FORM) -> bytes:
    """Pack the buckets in ascending order. Every count must fit into `form`."""
    records = np.empty(len(buckets), form)
    pairs = np.array(sorted(buckets.items()), np.int64).reshape(-1, 2)
    records["index"], records["count"] = pairs[:, 0], pairs[:, 1]
    return records.tobytes()


class DenseHistogram:
    """A histogram with a counter for every index, which makes adding fast."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: NDArray[np.int64] = np.zeros(_WIDTH, np.int64)

    def add(self, blob: bytes, form: np.dtype[np.void] = MERGED_FORM) -> None:
        """Add a packed histogram, which must have each index at most once."""
        with _read():
            records = np.frombuffer(blob, form)
            self._counts[records["index"] - INDEX_MIN] += records["count"].astype(np.int64)

    def merge(self, other: DenseHistogram) -> None:
        self._counts += other._counts

    def packed(self) -> bytes:
        (filled,) = np.nonzero(self._counts)
        records = np.empty(len(filled), MERGED_FORM)
        records["index"], records["count"] = filled + INDEX_MIN, self._counts[filled]
        return records.tobytes()


def cells_of(blob: bytes, form: np.dtype[np.void] = MERGED_FORM) -> Cells:
    """Return the filled cells of packed stage times (each cell once) and the count of each cell.

    A window has the form of its report (edgert.telemetry.stages). A merged row stores the same records byte by byte:
    the first bytes of all records, then the second bytes, and so on. In this order, zlib compresses the records faster,
    and the result has two thirds of the size.
    """
    with _read():
        records = zlib.decompress(blob) if blob else b""
        if form == WINDOW_FORM:
            length = len(records) // form.itemsize
            distances, counts = np.frombuffer(records, "<u2", length), np.frombuffer(records, "<u4", offset=2 * length)
        else:
            bytewise = np.frombuffer(records, np.uint8).reshape(_CELL.itemsize, -1)
            whole = np.ascontiguousarray(bytewise.T).view(_CELL)[:, 0]
            distances, counts = whole["distance"], whole["count"]
    return np.cumsum(distances, dtype=np.int64) - 1, counts.astype(np.int64)


class StageCounts:
    """Stage times with a counter for every cell, which makes adding fast."""

    __slots__ = ("_counts",)

    def __init__(self, parts: Iterable[Cells] = ()) -> None:
        self._counts: NDArray[np.int64] = np.zeros(stages.CELLS_END, np.int64)
        for cells in parts:
            self.add(cells)

    def add(self, cells: Cells) -> None:
        with _read():
            self._counts[cells[0]] += cells[1]

    def packed(self) -> bytes:
        (filled,) = (self._counts != 0).nonzero()  # with the comparison, `nonzero` takes half the time
        records = np.empty(len(filled), _CELL)
        records["distance"], records["count"] = filled + 1, self._counts[filled]
        records["distance"][1:] -= filled[:-1].astype(np.uint16) + 1
        bytewise = records.view(np.uint8).reshape(-1, _CELL.itemsize)
        return zlib.compress(bytewise.T.tobytes(), 1) if len(filled) else b""

    def sketches(self) -> dict[str, Sketch]:
        """Return the sketch of each stage that has times."""
        (filled,) = np.nonzero(self._counts)
        return stages.sketches(filled.tolist(), self._counts[filled].tolist())


class HistogramPool:
    """Histograms of several groups, merged exactly. Groups are numbered from 0."""

    def __init__(self, groups: int) -> None:
        self._counts: NDArray[np.int64] = np.zeros((groups, _WIDTH), np.int64)
        self._whole: NDArray[np.int64] = np.zeros((groups, 2), np.int64)  # the columns zero and count
        self._sum = np.zeros(groups)
        self._least, self._most = np.full(groups, np.inf), np.full(groups, -np.inf)

    def add(self, groups: Sequence[int], blobs: Sequence[bytes], form: np.dtype[np.void] = MERGED_FORM) -> None:
        """Add the buckets of `blobs[i]` to group `groups[i]`, all at once."""
        with _read():
            lengths = np.fromiter((len(blob) // form.itemsize for blob in blobs), np.int64, len(blobs))
            records = np.frombuffer(b"".join(blobs), form)
            cells = np.repeat(np.asarray(groups, np.int64) * _WIDTH, lengths) + records["index"] - INDEX_MIN
            np.add.at(self._counts.reshape(-1), cells, records["count"].astype(np.int64))

    def add_scalars(self, groups: Sequence[int], columns: Sequence[Sequence[float]]) -> None:
        """Add the figures of histograms besides the buckets, all at once.

        Args:
            groups: The group of each histogram.
            columns: The columns zero, count, sum, least and most. Each has a value for each histogram.
        """
        at, (zero, count, total, least, most) = np.asarray(groups, np.int64), columns
        with _read():
            whole = np.column_stack((np.asarray(zero, np.int64), np.asarray(count, np.int64)))
            np.add.at(self._whole, at, whole)
            np.add.at(self._sum, at, np.asarray(total, np.float64))
            filled = whole[:, 1] > 0  # an empty histogram has no extremes
            np.minimum.at(self._least, at[filled], np.asarray(least, np.float64)[filled])
            np.maximum.at(self._most, at[filled], np.asarray(most, np.float64)[filled])

    def sketch(self, group: int) -> Sketch:
        """Return the group as a sketch, which has percentiles."""
        sketch = Sketch()
        (filled,) = np.nonzero(self._counts[group])
        sketch.buckets = {int(cell) + INDEX_MIN: int(self._counts[group, cell]) for cell in filled}
        sketch.zero, sketch.count = self._whole[group].tolist()
        sketch.sum = float(self._sum[group])
        if sketch.count:
            sketch.min, sketch.max = float(self._least[group]), float(self._most[group])
        return sketch
