"""The stage times of a window, packed: a histogram per stage, in the buckets of the latency sketch.

Theory of operation: the histograms of all stages are one row of cells. Stage number n has the cells from n * CELLS on.
Its first cell counts times below a microsecond, the next cells are the buckets from INDEX_MIN. The packed form lists
the filled cells in ascending order. It has first the distance of each cell from the cell before, as a uint16; the first
distance is the first cell's number plus one. Then it has the count of each cell, as a uint32. The numbers are
little-endian and compressed with zlib. Merging adds the counts of equal cells, so it is exact.
"""

from __future__ import annotations

import base64
import struct
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate

from edgert.errors import ProtocolError
from edgert.telemetry.sketch import INDEX_MAX, INDEX_MIN, Sketch

# Reports and stores contain these numbers, so a new stage gets the last number, even if it runs before others.
NUMBERED = ("decode", "preprocess", "cache", "queue", "engine", "postprocess", "encode")
CELLS = INDEX_MAX - INDEX_MIN + 2
CELLS_END = len(NUMBERED) * CELLS
# The limit of the sum of all counts. It keeps the text of all cells below 32,000 characters.
_COUNTS_END = 2**32
_RECORD_BYTES = 2 + 4


def text_of(stages: Mapping[str, Sketch]) -> str | None:
    """Return a window's stages as text.

    Return None if there are no times, or more times than a report can contain."""
    cells, counts = list[int](), list[int]()
    for number, name in enumerate(NUMBERED):
        sketch, first = stages[name], number * CELLS
        filled = [(0, sketch.zero)] if sketch.zero else []
        filled += [(index - INDEX_MIN + 1, count) for index, count in sorted(sketch.buckets.items())]
        cells += [first + offset for offset, _ in filled]
        counts += [count for _, count in filled]
    return base64.b64encode(pack(cells, counts)).decode() if 0 < sum(counts) < _COUNTS_END else None


def packed_of(text: str) -> bytes:
    """Return the packed stages of a report's text, without unknown stages. Raises ProtocolError."""
    try:
        packed = base64.b64decode(text, validate=True)
        inflater = zlib.decompressobj()
        records = inflater.decompress(packed, CELLS_END * _RECORD_BYTES + 1)
    except (ValueError, zlib.error) as error:
        raise ProtocolError(f"stages are {text[:40]!r}, which is not zlib in base64") from error
    if not inflater.eof or inflater.unused_data or len(records) % _RECORD_BYTES:
        raise ProtocolError(f"stages are {text[:40]!r}, which does not hold {CELLS_END} whole cells or fewer")
    length = len(records) // _RECORD_BYTES
    numbers = struct.unpack(f"<{length}H{length}I", records)
    distances, counts = numbers[:length], numbers[length:]
    if not all(distances) or not all(counts) or sum(counts) >= _COUNTS_END:
        raise ProtocolError(f"stages are {text[:40]!r}; cells ascend, and counts are from 1 to 2^32 together")
    if sum(distances) <= CELLS_END:
        return packed
    cells = [cell - 1 for cell in accumulate(distances)]
    known = bisect_left(cells, CELLS_END)
    return pack(cells[:known], counts[:known])


def pack(cells: Sequence[int], counts: Sequence[int]) -> bytes:
    """Pack filled cells, in ascending order."""
    distances = (cell - before for before, cell in zip((-1, *cells), cells, strict=False))
    return zlib.compress(struct.pack(f"<{len(cells)}H{len(cells)}I", *distances, *counts))


def sketches(cells: Iterable[int], counts: Iterable[int]) -> dict[str, Sketch]:
    """Return the sketch of each stage that has a filled cell."""
    by_stage: dict[str, dict[int, int]] = {}
    for cell, count in zip(cells, counts, strict=True):
        number, offset = divmod(cell, CELLS)
        by_stage.setdefault(NUMBERED[number], {})[offset + INDEX_MIN - 1] = count
    return {name: Sketch.of_counts(buckets, zero=buckets.pop(INDEX_MIN - 1, 0)) for name, buckets in by_stage.items()}
