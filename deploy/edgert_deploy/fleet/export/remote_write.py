"""Prometheus remote write: every report, even a late report, is a point at its own time.

A scrape shows the reports that arrived since the previous scrape. If a device delivers hours of reports at once, a
scrape shows them as a burst. With remote write, each report is a point of its device's own series, at the time of the
report. The series are the exporter's series by device, with `job` "edgert-reports". If a report is not newer than the
last point of its series, its counts become part of the next point.
(https://prometheus.io/docs/concepts/remote_write_spec/, version 1.0)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from edgert.telemetry.messages import HistMessage, MetricsMessage, Topic
from edgert.telemetry.sketch import Sketch
from edgert_deploy.fleet.export.exporter import COUNTERS, Exporter, Labels
from edgert_deploy.fleet.export.families import LATENCY
from edgert_deploy.fleet.export.post import PushFailed, post
from edgert_deploy.fleet.export.prometheus import fill_native, message, varint
from edgert_deploy.fleet.store.batch import Origin, report_time_ms

JOB = "edgert-reports"
BY = ("site", "device", "model", "version", "profile")
WAITING_MAX = 100_000
POINTS_AT_ONCE = 2_000
BATCHES_MAX = 50  # the maximum number of batches that one flush sends
REFUSED_AT_ONCE = 16
HEADERS = {
    "Content-Type": "application/x-protobuf",
    "Content-Encoding": "snappy",
    "X-Prometheus-Remote-Write-Version": "0.1.0",
}
_LITERAL_MAX = 65_536


@dataclass(frozen=True)
class _Point:
    """A value of one series at `at_ms` (ms since 1970): a counter, or a serialized histogram."""

    name: str
    labels: Labels
    at_ms: int
    value: float | bytes


class RemoteWriter(Exporter):
    """`apply` collects points, and `flush` sends them. `wall_clock` returns seconds since 1970."""

    def __init__(self, url: str, *, wall_clock: Callable[[], float]) -> None:
        super().__init__("remote-write", BY, wall_clock=wall_clock)
        self.url = url
        self.written = self.dropped = 0
        self._points: deque[_Point] = deque()
        self._refusal: PushFailed | None = None
        self._last_ms: dict[tuple[str, Labels], int] = {}

    def on_hist(self, topic: Topic, hist: HistMessage | None, now: float) -> None:
        repeated = self.counting.duplicates
        super().on_hist(topic, hist, now)
        if hist is not None and self.counting.duplicates == repeated:
            labels = self._labels(topic, hist.model_version, now)
            self._add(LATENCY, labels, self._at_ms(topic, hist), hist.window_s, self.groups[labels].latency)

    def on_metrics(self, topic: Topic, metrics: MetricsMessage, now: float) -> None:
        repeated = self.counting.duplicates
        super().on_metrics(topic, metrics, now)
        if self.counting.duplicates == repeated:
            labels = self._labels(topic, metrics.model_version, now)
            at_ms = self._at_ms(topic, metrics)
            for name, value in zip(COUNTERS, self.groups[labels].counters, strict=True):
                self._add(name, labels, at_ms, metrics.window_s, value)

    def flush(self) -> None:
        """Send the waiting points, the oldest first. Raises PushFailed.

        If the server may accept the points later, they still wait. Points that the server refuses are dropped.
        """
        for _ in range(BATCHES_MAX):
            with self.lock:
                points = [self._points[i] for i in range(min(len(self._points), POINTS_AT_ONCE))]
            if not points:
                return
            self._refusal = None
            in_time = sorted(points, key=lambda point: point.at_ms)
            # One bad point makes a server refuse a whole request. Prometheus accepts late counters, but no late
            # histograms. So counters and histograms are separate requests.
            histograms = [point for point in in_time if isinstance(point.value, bytes)]
            counters = [point for point in in_time if not isinstance(point.value, bytes)]
            refused = self._send(counters) + self._send(histograms)
            with self.lock:
                for _ in points:
                    self._points.popleft()
                self.dropped += refused
                self.written += len(points) - refused
            if self._refusal is not None:
                raise self._refusal

    def _send(self, points: list[_Point]) -> int:
        """Send points; return how many were refused. A refused request is divided until few are left."""
        if not points:
            return 0
        try:
            post(self.url, packed(request(points)), HEADERS)
        except PushFailed as error:
            if error.retryable:
                raise
            if len(points) <= REFUSED_AT_ONCE:
                self._refusal = error
                return len(points)
            middle = len(points) // 2
            return self._send(points[:middle]) + self._send(points[middle:])
        return 0

    def _at_ms(self, topic: Topic, report: HistMessage | MetricsMessage) -> int:
        return report_time_ms(Origin(topic.site, topic.device, int(self._wall_clock() * 1000)), report)

    def _add(self, name: str, labels: Labels, at_ms: int, window_s: float, value: Sketch | int) -> None:
        last_ms = self._last_ms.get((name, labels))
        if last_ms is not None and at_ms <= last_ms:
            return
        if last_ms is None:  # the series begins with 0, so that a rate includes the first report
            self._keep(name, labels, at_ms - max(1, int(window_s * 1000)), Sketch() if isinstance(value, Sketch) else 0)
        self._keep(name, labels, at_ms, value)
        self._last_ms[name, labels] = at_ms

    def _keep(self, name: str, labels: Labels, at_ms: int, value: Sketch | int) -> None:
        if len(self._points) >= WAITING_MAX:
            self._points.popleft()
            self.dropped += 1
        point = _histogram(value, at_ms) if isinstance(value, Sketch) else float(value)
        self._points.append(_Point(name, labels, at_ms, point))

    def _forget(self, now: float) -> None:
        super()._forget(now)
        for key in [key for key in self._last_ms if key[1] not in self.groups]:
            del self._last_ms[key]


def request(points: list[_Point]) -> bytes:
    """Return a WriteRequest. The points of one series are together, ordered by time."""
    series: dict[tuple[str, Labels], Any] = {}
    for point in points:
        entry = series.get((point.name, point.labels))
        if entry is None:
            named = {"__name__": point.name, "job": JOB, **dict(zip(BY, point.labels, strict=True))}
            labels = [message("LabelPair", name=name, value=value) for name, value in sorted(named.items())]
            entry = series[point.name, point.labels] = message("TimeSeries", label=labels)
        if isinstance(point.value, bytes):
            entry.histogram.add().ParseFromString(point.value)
        else:
            entry.sample.add(value=point.value, timestamp=point.at_ms)
    body: bytes = message("WriteRequest", timeseries=list(series.values())).SerializeToString()
    return body


def packed(body: bytes) -> bytes:
    """Return `body` as a Snappy block of literals, which is not smaller but needs no library."""
    return b"".join((varint(len(body)), *_literals(body)))


def _literals(body: bytes) -> Iterator[bytes]:
    for start in range(0, len(body), _LITERAL_MAX):
        part = body[start : start + _LITERAL_MAX]
        yield b"\xf4" + (len(part) - 1).to_bytes(2, "little") + part  # tag 61: a length of two bytes follows


def _histogram(sketch: Sketch, at_ms: int) -> bytes:
    histogram = message("WrittenHistogram", timestamp=at_ms)
    fill_native(histogram, sketch)
    body: bytes = histogram.SerializeToString()
    return body
