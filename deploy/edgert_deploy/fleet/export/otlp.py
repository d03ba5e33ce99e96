"""OTLP over HTTP: an exporter's series, pushed as exponential histograms, sums and gauges.

Histograms have scale 5, as in the devices' reports: OpenTelemetry's buckets have the same indices. All series are
cumulative, so an endpoint that was down for a while misses points in time, but no counts.
(https://opentelemetry.io/docs/specs/otlp/#otlphttp)
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable, Mapping
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality, ExponentialHistogramDataPoint, Metric

from edgert import __version__
from edgert.telemetry.sketch import SCALE, Sketch
from edgert_deploy.fleet.export.exporter import Exporter
from edgert_deploy.fleet.export.families import families, histograms
from edgert_deploy.fleet.export.post import http_address, post

PATH = "/v1/metrics"
_CUMULATIVE = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE


def endpoint(url: str) -> str:
    """Return the address to post to: `url`, with OTLP's path if `url` has none. Raises ConfigInvalid."""
    return http_address("--otlp", url, PATH, "http://HOST:4318")


def push(url: str, exporter: Exporter, now: float, headers: Mapping[str, str]) -> None:
    """Send all series to `url`. `now` is seconds since 1970. Raises PushFailed."""
    body = gzip.compress(request(exporter, now).SerializeToString(), 1)
    post(url, body, {"Content-Type": "application/x-protobuf", "Content-Encoding": "gzip", **headers})


def request(exporter: Exporter, now: float) -> Any:
    """Return the message with all of the exporter's series at `now`."""
    message = ExportMetricsServiceRequest()
    resource = message.resource_metrics.add()
    service = {"service.name": "edgert-exporter", "service.instance.id": exporter.name}
    resource.resource.attributes.extend(_attributes(service.items()))
    scope = resource.scope_metrics.add()
    scope.scope.name, scope.scope.version = "edgert", __version__
    times = {"start_time_unix_nano": int(exporter.started_at * 1e9), "time_unix_nano": int(now * 1e9)}
    with exporter.lock:
        for each in histograms(exporter):
            metric = scope.metrics.add(name=each.name.removesuffix("_milliseconds"), description=each.help, unit="ms")
            metric.exponential_histogram.aggregation_temporality = _CUMULATIVE
            for labels, sketch, _ in each.samples:
                point = metric.exponential_histogram.data_points.add(**times)
                point.attributes.extend(_attributes(zip(each.names, labels, strict=True)))
                _fill(point, sketch)
        for family in families(exporter):
            metric = scope.metrics.add(name=family.name.removesuffix("_total"), description=family.help)
            points = _points(metric, family.type == "counter")
            for values, value in family.samples:
                point = points.add(as_double=value, **times)
                point.attributes.extend(_attributes(zip(family.names, values, strict=True)))
    return message


def _points(metric: Metric, counter: bool) -> Any:
    if not counter:
        return metric.gauge.data_points
    metric.sum.is_monotonic, metric.sum.aggregation_temporality = True, _CUMULATIVE
    return metric.sum.data_points


def _fill(point: ExponentialHistogramDataPoint, sketch: Sketch) -> None:
    point.scale, point.count, point.sum, point.zero_count = SCALE, sketch.count, sketch.sum, sketch.zero
    if sketch.count:
        point.min, point.max = sketch.min, sketch.max
    if sketch.buckets:
        first, last = min(sketch.buckets), max(sketch.buckets)
        point.positive.offset = first
        point.positive.bucket_counts.extend(sketch.buckets.get(index, 0) for index in range(first, last + 1))


def _attributes(pairs: Iterable[tuple[str, str]]) -> list[KeyValue]:
    return [KeyValue(key=name, value=AnyValue(string_value=value)) for name, value in pairs]
