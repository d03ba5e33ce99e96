"""Stage times keep every count in a report, and invalid reports are refused."""

from __future__ import annotations

import base64
import struct
import zlib

import numpy as np
import pytest

from edgert.errors import ProtocolError
from edgert.telemetry import messages, stages
from edgert.telemetry.messages import PAYLOAD_BYTES_MAX, HistMessage
from edgert.telemetry.sketch import INDEX_MAX, INDEX_MIN, RELATIVE_ERROR_MAX, Sketch
from edgert.telemetry.span_counter import SpanCounter
from edgert.telemetry.spans import STAGES, RequestSpan
from edgert.tensors import StageTimes

SHARES = (0.5, 0.9, 0.99, 0.999)
REQUESTS = 2003  # no share of them is a whole number, so NumPy takes the same ranks


def text_of_records(records: bytes) -> str:
    return base64.b64encode(zlib.compress(records)).decode()


def text(*pairs: tuple[int, int]) -> str:
    """Return the text of cells, given by their distances, and of counts."""
    distances, counts = zip(*pairs, strict=True)
    return text_of_records(struct.pack(f"<{len(pairs)}H{len(pairs)}I", *distances, *counts))


def unpacked(packed: bytes) -> tuple[list[int], list[int]]:
    """Return the cells and counts, read as docs/telemetry.md describes."""
    records = zlib.decompress(packed)
    n = len(records) // 6
    cells = np.cumsum(np.frombuffer(records, "<u2", n)) - 1
    counts = np.frombuffer(records, "<u4", n, offset=2 * n)
    return cells.tolist(), counts.tolist()


def test_every_stage_of_a_request_has_a_fixed_number() -> None:
    assert set(stages.NUMBERED) == set(STAGES)
    assert stages.NUMBERED[:7] == ("decode", "preprocess", "cache", "queue", "engine", "postprocess", "encode")


def test_percentiles_of_a_report_equal_those_of_numpy_for_the_raw_times() -> None:
    dice, counter = np.random.default_rng(5), SpanCounter("digits", lambda: 0.0)
    raw = {name: np.rint(dice.lognormal(4 + n, 1.5, REQUESTS)).astype(int) for n, name in enumerate(STAGES)}
    raw["cache"][:1500] = 0
    for row in zip(*raw.values(), strict=True):
        *times, encode = map(int, row)
        counter.record(RequestSpan("ok", sum(row), StageTimes(*times), encode, batch=1))
    fields = messages.hist_fields(counter.end_window(now=60.0), model_version="r7")
    payload = messages.dump({**messages.envelope(ts_ms=1, boot="b1", seq=3), **fields})
    found = stages.sketches(*unpacked(HistMessage.from_json(payload).stages))
    assert tuple(found) == stages.NUMBERED
    for name, times_us in raw.items():
        assert found[name].count == REQUESTS
        assert found[name].sum == pytest.approx(times_us.sum() / 1000, rel=RELATIVE_ERROR_MAX)
        for share in (*SHARES, 1.0):
            expected = np.percentile(times_us, share * 100, method="inverted_cdf") / 1000
            assert found[name].quantile(share) == pytest.approx(expected, rel=RELATIVE_ERROR_MAX), (name, share)


def test_a_window_without_requests_has_no_stages() -> None:
    fields = messages.hist_fields(SpanCounter("digits", lambda: 0.0).end_window(now=60.0), model_version="r7")
    assert b"stages" not in messages.dump(fields)


def test_the_largest_histograms_fit_into_the_payload() -> None:
    dice, every = np.random.default_rng(3), range(INDEX_MIN, INDEX_MAX + 1)
    full = {name: Sketch.of_counts({index: int(dice.integers(2**19)) + 1 for index in every}, 1) for name in STAGES}
    text = stages.text_of(full)
    assert text is not None
    assert len(text) < 32_000, "as the schema says"
    assert len(text) + len(full["decode"].encode()) + 2000 < PAYLOAD_BYTES_MAX
    huge = Sketch.of_counts({0: 2**32}, 0)
    assert stages.text_of({**dict.fromkeys(STAGES, Sketch()), "engine": huge}) is None


def test_a_stage_of_a_later_version_is_left_out() -> None:
    packed = stages.packed_of(text((1, 2), (stages.CELLS_END, 7), (1, 7)))
    assert unpacked(packed) == ([0], [2])


@pytest.mark.parametrize(
    "broken",
    [
        "", "?", "é", "AAAA", text((1, 0)), text((0, 1)), text((1, 1), (0, 1)), text((1, 2**32 - 1), (1, 1)),
        text((1, 1))[:-8], text_of_records(b"1234567"), text_of_records(bytes(10**7)),
        base64.b64encode(zlib.compress(bytes([1, 0, 1, 0, 0, 0])) + b"more").decode(),
    ],
)  # fmt: skip
def test_broken_stages_are_refused_but_not_their_report(broken: str) -> None:
    with pytest.raises(ProtocolError, match="stages are"):
        stages.packed_of(broken)
    counter = SpanCounter("digits", lambda: 0.0)
    counter.record(RequestSpan("ok", 9_000))
    fields = messages.hist_fields(counter.end_window(now=60.0), model_version="r7")
    envelope = messages.envelope(ts_ms=1, boot="b1", seq=3)
    read = HistMessage.from_json(messages.dump({**envelope, **fields, "stages": broken}))
    assert (read.sketch.count, read.stages) == (1, b"")
    assert read.stages_fault.startswith("stages are")
