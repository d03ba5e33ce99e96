"""Packed histograms keep every count."""

from __future__ import annotations

from edgert.telemetry import stages
from edgert.telemetry.sketch import Sketch
from edgert_deploy.fleet.packed_histograms import (
    WINDOW_FORM,
    DenseHistogram,
    HistogramPool,
    StageCounts,
    cells_of,
    pack,
)


def test_packed_histograms_are_unpacked_unchanged() -> None:
    buckets = {640: 1, -320: 2**40, 7: 3}
    dense = DenseHistogram()
    dense.add(pack(buckets))
    assert dense.packed() == pack(buckets)
    pool = HistogramPool(2)
    pool.add([1, 1], [pack(buckets), pack({7: 1})])
    pool.add_scalars([1, 1], [[2, 0], [2**40 + 6, 0], [5.0, 0.0], [0.001, 0.0], [9.0, 0.0]])
    assert pool.sketch(1).buckets == {640: 1, -320: 2**40, 7: 4}
    assert pool.sketch(0) == Sketch()


def test_packed_stages_of_a_window_and_of_sums_of_windows_keep_every_count() -> None:
    cells, counts = [0, 1, 961, 962, stages.CELLS_END - 1], [2**31, 1, 2, 3, 4]
    both = StageCounts([cells_of(stages.pack(cells, counts), WINDOW_FORM)] * 2)
    assert [part.tolist() for part in cells_of(both.packed())] == [cells, [2 * count for count in counts]]
    again = StageCounts([cells_of(both.packed()), cells_of(b"")])
    assert again.packed() == both.packed()
    assert StageCounts().packed() == b""
    found = again.sketches()
    assert {name: sketch.count for name, sketch in found.items()} == {"decode": 2**32 + 6, "preprocess": 6, "encode": 8}
    assert (found["decode"].zero, found["decode"].buckets) == (2**32, {-320: 2, 640: 4})
