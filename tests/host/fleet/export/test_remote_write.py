"""Reports become points at their own times. They wait while the server is down; only refused points are dropped."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from edgert_deploy.fleet.export.exporter import COUNTERS
from edgert_deploy.fleet.export.post import PushFailed
from edgert_deploy.fleet.export.prometheus import message
from edgert_deploy.fleet.export.remote_write import RemoteWriter, packed
from tests.support.fleet import NOW_MS, Pi, feed
from tests.support.servers.prometheus import receiver


@contextmanager
def a_server(codes: list[int]) -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """Run a server that answers with these codes, then with 200. It records the requests."""
    with receiver(codes) as (port, heard):
        yield f"http://127.0.0.1:{port}/api/v1/write", heard


def unpacked(block: bytes) -> bytes:
    """Read a Snappy block of literals, by its format description."""
    at, size, shift, out = 0, 0, 0, b""
    while True:
        byte = block[at]
        at, size, shift = at + 1, size | (byte & 0x7F) << shift, shift + 7
        if byte < 0x80:
            break
    while at < len(block):
        assert block[at] == 61 << 2
        length = int.from_bytes(block[at + 1 : at + 3], "little") + 1
        out, at = out + block[at + 3 : at + 3 + length], at + 3 + length
    assert len(out) == size
    return out


def a_writer(url: str) -> RemoteWriter:
    return RemoteWriter(url, wall_clock=lambda: NOW_MS / 1000)


def counter(heard: list[tuple[str, bytes]], name: str) -> list[tuple[int, float]]:
    """Return the points of one series that were received."""
    found = []
    for _, body in heard:
        asked = message("WriteRequest")
        asked.ParseFromString(unpacked(body))
        for series in asked.timeseries:
            labels = {label.name: label.value for label in series.label}
            assert list(labels) == sorted(labels)
            if labels["__name__"] == name:
                found += [(sample.timestamp, sample.value) for sample in series.sample]
    return found


def test_points_begin_at_0_and_grow_and_are_never_older_than_the_previous_point() -> None:
    pi = Pi("pi-1")
    windows = [
        pi.window(NOW_MS - minute * 60_000, [1.0] * 5, uptime_s=60.0 * (9 - minute)) for minute in range(8, 0, -1)
    ]
    with a_server([]) as (url, heard):
        writer = a_writer(url)
        feed(writer, pi.info() + windows[0] + windows[0] + windows[2] + windows[1] + windows[3])
        writer.flush()
        points = counter(heard, next(iter(COUNTERS)))
        assert [at_ms for at_ms, _ in points] == [NOW_MS - minute * 60_000 for minute in (9, 8, 6, 5)]
        assert [value for _, value in points] == [0, 5, 15, 20]
        assert writer.dropped == 0


def test_a_server_gets_reports_of_an_outage_later_and_reports_that_it_refuses_are_dropped() -> None:
    pi = Pi("pi-1")
    with a_server([503, 429, 204, 400]) as (url, heard):
        writer = a_writer(url)
        feed(writer, pi.window(NOW_MS - 60_000, [1.0], uptime_s=60))
        for _ in range(2):
            with pytest.raises(PushFailed):
                writer.flush()
        assert (writer.written, writer.dropped) == (0, 0)
        with pytest.raises(PushFailed, match="400"):
            writer.flush()
        assert (writer.written, writer.dropped) == (2 * len(COUNTERS), 2)  # the refused points are the histograms
        feed(writer, pi.window(NOW_MS, [1.0], uptime_s=120))
        writer.flush()
        assert writer.written == 3 * len(COUNTERS) + 1
        assert counter(heard[-2:], next(iter(COUNTERS))) == [(NOW_MS, 2.0)]


def test_only_the_refused_part_of_a_request_is_dropped() -> None:
    pi = Pi("pi-1")
    with a_server([204, 400, 400, 400, 204, 204]) as (
        url,
        _,
    ):  # accepts the counters, and refuses a quarter of the oldest histograms
        writer = a_writer(url)
        for minute in range(63, 0, -1):
            feed(writer, pi.window(NOW_MS - minute * 60_000, [1.0], uptime_s=60))
        with pytest.raises(PushFailed, match="400"):
            writer.flush()
        assert (writer.written, writer.dropped) == (64 * len(COUNTERS) + 48, 16)


@pytest.mark.parametrize("size", [0, 1, 127, 128, 65_535, 65_536, 65_537, 300_000])
def test_a_block_of_any_size_is_valid(size: int) -> None:
    body = bytes(range(256)) * (size // 256 + 1)
    assert unpacked(packed(body[:size])) == body[:size]
