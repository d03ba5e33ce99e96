"""Prometheus' exposition formats: native histograms in protobuf, classic histograms as text.

The protobuf format is a sequence of MetricFamily messages, each after its length
(https://github.com/prometheus/client_model/blob/master/io/prometheus/client/metrics.proto). The message types are
declared below, with the fields that EdgeRT uses. EdgeRT's buckets and the buckets of Prometheus' schema 5 are the same.
An index of schema 5 stands for the bucket's upper bound, so it is one higher than EdgeRT's index. The text format has
one classic bucket for each octave. The bounds of classic buckets are also bounds of EdgeRT's buckets, so their counts
are exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from edgert.http.metrics import labels_text
from edgert.telemetry.sketch import INDEX_MIN, PER_OCTAVE, SCALE, Sketch
from edgert_deploy.fleet.export.exporter import Exporter, Labels
from edgert_deploy.fleet.export.families import Family, Histograms, families, histograms

PROTOBUF = "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"
OCTAVES_END = 18  # the last classic bound is 2**17 ms (131 s)
ZERO_THRESHOLD = math.pow(2, INDEX_MIN / PER_OCTAVE)
_METRIC_TAG = b"\x22"  # field 4 of MetricFamily, length-delimited


class Exposition:
    """Renders an exporter. Keeps each rendered histogram until it changes, because most do not change."""

    def __init__(self, exporter: Exporter) -> None:
        self._exporter = exporter
        self._drawn: dict[tuple[str, Labels], tuple[int, bytes]] = {}

    def protobuf(self) -> bytes:
        with self._exporter.lock:
            parts, drawn = list[bytes](), dict[tuple[str, Labels], tuple[int, bytes]]()
            for each in histograms(self._exporter):
                parts.append(_delimited(_family(each.name, each.help, _HISTOGRAM), self._cached_native(each, drawn)))
            self._drawn = drawn
            for family in families(self._exporter):
                kind = _COUNTER if family.type == "counter" else _GAUGE
                parts.append(_delimited(_family(family.name, family.help, kind), _samples(family)))
        return b"".join(parts)

    def text(self) -> str:
        with self._exporter.lock:
            lines = []
            for each in histograms(self._exporter):
                lines += [f"# HELP {each.name} {each.help}", f"# TYPE {each.name} histogram"]
                for labels, sketch, _ in each.samples:
                    lines += _classic(each, dict(zip(each.names, labels, strict=True)), sketch)
            for family in families(self._exporter):
                lines += [f"# HELP {family.name} {family.help}", f"# TYPE {family.name} {family.type}"]
                for values, value in family.samples:
                    named = dict(zip(family.names, values, strict=True))
                    lines.append(f"{family.name}{labels_text(named)} {value!r}")
        return "\n".join(lines) + "\n"

    def _cached_native(self, family: Histograms, drawn: dict[tuple[str, Labels], tuple[int, bytes]]) -> Iterator[bytes]:
        for labels, sketch, changed in family.samples:
            key = family.name, labels
            cached = self._drawn.get(key)
            if cached is None or cached[0] != changed:
                cached = (changed, _native(family.names, labels, sketch))
            drawn[key] = cached
            yield cached[1]


def _native(names: tuple[str, ...], labels: Labels, sketch: Sketch) -> bytes:
    metric = _Metric(label=_labels(names, labels))
    fill_native(metric.histogram, sketch)
    drawn: bytes = metric.SerializeToString()
    return drawn


def fill_native(histogram: Any, sketch: Sketch) -> None:
    """Fill a Histogram or a WrittenHistogram with the counts of a sketch."""
    histogram.sample_count, histogram.sample_sum = sketch.count, sketch.sum
    histogram.schema, histogram.zero_threshold, histogram.zero_count = SCALE, ZERO_THRESHOLD, sketch.zero
    previous_index, previous_count, deltas = 0, 0, list[int]()
    for index, count in sorted(sketch.buckets.items()):
        upper = index + 1
        if not deltas or upper != previous_index + 1:
            # The first offset is relative to 0. Each other offset is relative to the end of the previous span.
            offset = upper - (previous_index + 1) if deltas else upper
            span = histogram.positive_span.add(offset=offset, length=0)
        span.length += 1
        deltas.append(count - previous_count)
        previous_index, previous_count = upper, count
    histogram.positive_delta.extend(deltas)
    if not deltas:  # an empty span marks an empty native histogram
        histogram.positive_span.add(offset=0, length=0)


def _classic(family: Histograms, labels: dict[str, str], sketch: Sketch) -> Iterator[str]:
    name, counts, cumulative = family.name, sorted(sketch.buckets.items()), sketch.zero
    position = 0
    for octave in range(family.octave, OCTAVES_END):
        while position < len(counts) and counts[position][0] < octave * PER_OCTAVE:
            cumulative += counts[position][1]
            position += 1
        yield f"{name}_bucket{labels_text(labels | {'le': repr(math.pow(2, octave))})} {cumulative}"
    yield f"{name}_bucket{labels_text(labels | {'le': '+Inf'})} {sketch.count}"
    yield f"{name}_sum{labels_text(labels)} {sketch.sum!r}"
    yield f"{name}_count{labels_text(labels)} {sketch.count}"


def _samples(family: Family) -> Iterator[bytes]:
    for values, value in family.samples:
        metric = _Metric(label=_labels(family.names, values))
        if family.type == "counter":
            metric.counter.value = value
        else:
            metric.gauge.value = value
        yield metric.SerializeToString()


def _labels(names: tuple[str, ...], values: Labels) -> list[Any]:
    return [_Label(name=name, value=value) for name, value in zip(names, values, strict=True)]


def _family(name: str, text: str, kind: int) -> bytes:
    head: bytes = _Family(name=name, help=text, type=kind).SerializeToString()
    return head


def _delimited(head: bytes, metrics: Iterator[bytes]) -> bytes:
    """Return a length, then the family and its metrics of this length; b"" if there are no metrics."""
    parts = [part for metric in metrics for part in (_METRIC_TAG, varint(len(metric)), metric)]
    if not parts:
        return b""
    body = head + b"".join(parts)
    return varint(len(body)) + body


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


# --- the message types, with the fields that EdgeRT uses ------------------------------------

_COUNTER, _GAUGE, _HISTOGRAM = 0, 1, 4
_F = descriptor_pb2.FieldDescriptorProto
# Message -> field -> (number, type, repeated).
_MESSAGES: dict[str, dict[str, tuple[int, Any, bool]]] = {
    "LabelPair": {"name": (1, _F.TYPE_STRING, False), "value": (2, _F.TYPE_STRING, False)},
    "Gauge": {"value": (1, _F.TYPE_DOUBLE, False)},
    "Counter": {"value": (1, _F.TYPE_DOUBLE, False)},
    "BucketSpan": {"offset": (1, _F.TYPE_SINT32, False), "length": (2, _F.TYPE_UINT32, False)},
    "Histogram": {
        "sample_count": (1, _F.TYPE_UINT64, False),
        "sample_sum": (2, _F.TYPE_DOUBLE, False),
        "schema": (5, _F.TYPE_SINT32, False),
        "zero_threshold": (6, _F.TYPE_DOUBLE, False),
        "zero_count": (7, _F.TYPE_UINT64, False),
        "positive_span": (12, "BucketSpan", True),
        "positive_delta": (13, _F.TYPE_SINT64, True),
    },
    "Metric": {
        "label": (1, "LabelPair", True),
        "gauge": (2, "Gauge", False),
        "counter": (3, "Counter", False),
        "histogram": (7, "Histogram", False),
    },
    # The next types are from remote write (https://github.com/prometheus/prometheus/blob/main/prompb/types.proto).
    "WrittenHistogram": {
        "sample_count": (1, _F.TYPE_UINT64, False),
        "sample_sum": (3, _F.TYPE_DOUBLE, False),
        "schema": (4, _F.TYPE_SINT32, False),
        "zero_threshold": (5, _F.TYPE_DOUBLE, False),
        "zero_count": (6, _F.TYPE_UINT64, False),
        "positive_span": (11, "BucketSpan", True),
        "positive_delta": (12, _F.TYPE_SINT64, True),
        "timestamp": (15, _F.TYPE_INT64, False),
    },
    "Sample": {"value": (1, _F.TYPE_DOUBLE, False), "timestamp": (2, _F.TYPE_INT64, False)},
    "TimeSeries": {
        "label": (1, "LabelPair", True),
        "sample": (2, "Sample", True),
        "histogram": (4, "WrittenHistogram", True),
    },
    "WriteRequest": {"timeseries": (1, "TimeSeries", True)},
    "MetricFamily": {
        "name": (1, _F.TYPE_STRING, False),
        "help": (2, _F.TYPE_STRING, False),
        "type": (3, _F.TYPE_INT32, False),  # an enumeration, encoded as a number
        "metric": (4, "Metric", True),
    },
}


def message(name: str, /, **fields: Any) -> Any:
    """Return a message of one of these types."""
    return _CLASSES[name](**fields)


def _declare() -> dict[str, Any]:
    package = "edgert.prometheus"  # not the original name, because another library may have declared that name
    file = descriptor_pb2.FileDescriptorProto(name="edgert_prometheus.proto", package=package, syntax="proto2")
    for name, declared in _MESSAGES.items():
        message_type = file.message_type.add(name=name)
        for field_name, (number, kind, repeated) in declared.items():
            field = message_type.field.add(name=field_name, number=number)
            field.label = _F.LABEL_REPEATED if repeated else _F.LABEL_OPTIONAL
            if isinstance(kind, str):
                field.type, field.type_name = _F.TYPE_MESSAGE, f".{package}.{kind}"
            else:
                field.type = kind
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}")) for name in _MESSAGES
    }


_CLASSES = _declare()
_Label, _Metric, _Family = _CLASSES["LabelPair"], _CLASSES["Metric"], _CLASSES["MetricFamily"]
