"""The families of series that an exporter exports, for Prometheus and for OTLP."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from edgert.telemetry.sketch import Sketch
from edgert_deploy.fleet.export.exporter import COUNTERS, GAUGES, Exporter, Labels

Type = Literal["counter", "gauge"]
LATENCY = "edgert_latency_milliseconds"
_DEVICE = ("site", "device")


@dataclass(frozen=True)
class Family:
    """The series of one name. A sample is (label values, value); label values are in the order of `names`."""

    name: str
    help: str
    type: Type
    names: tuple[str, ...]
    samples: Sequence[tuple[Labels, float]]


@dataclass(frozen=True)
class Histograms:
    """The histograms of one name. A sample is (label values, sketch, number of changes so far).

    The text format has one bucket for each octave, from 2**`octave` ms on.
    """

    name: str
    help: str
    names: tuple[str, ...]
    octave: int
    samples: Sequence[tuple[Labels, Sketch, int]]


def histograms(exporter: Exporter) -> Iterator[Histograms]:
    """Yield the families of histograms. The caller holds the exporter's lock."""
    groups = exporter.groups.items()
    text = "Latency of the requests answered without an error, measured in the daemon."
    yield Histograms(LATENCY, text, exporter.by, -4, [(key, group.latency, group.changed) for key, group in groups])
    text = "Time of the requests in each stage; not exported for series by device."
    stages = [((*key, name), sketch, group.changed) for key, group in groups for name, sketch in group.stages.items()]
    yield Histograms("edgert_stage_milliseconds", text, (*exporter.by, "stage"), -10, stages)


def families(exporter: Exporter) -> Iterator[Family]:
    """Yield all families except the histograms. The caller holds the exporter's lock."""
    for number, (name, text) in enumerate(COUNTERS.items()):
        counted = [(labels, float(group.counters[number])) for labels, group in exporter.groups.items()]
        yield Family(name, text, "counter", exporter.by, counted)
    for name, (_, text) in GAUGES.items():
        shown = [(labels, group.gauges[name]) for labels, group in exporter.groups.items() if name in group.gauges]
        if shown:
            yield Family(name, text, "gauge", exporter.by, shown)
    events = [(labels, float(count)) for labels, count in exporter.events.items()]
    yield Family("edgert_events_total", "Events that devices reported.", "counter", ("site", "model", "event"), events)
    yield from _device_families(exporter)
    yield from _exporter_families(exporter)


def _device_families(exporter: Exporter) -> Iterator[Family]:
    devices = list(exporter.devices.items())
    up = [(key, float(device.status == "online")) for key, device in devices]
    yield Family("edgert_device_online", "1 where the device's status is online.", "gauge", _DEVICE, up)
    heard = [(key, device.heard_at) for key, device in devices if device.heard_at]
    yield Family("edgert_device_heard_timestamp_seconds", "Time of the device's last report.", "gauge", _DEVICE, heard)
    # The exporter keeps the sequence numbers of a removed device, because the device may come back. A removed device
    # has no row here.
    lacking = exporter.counting.missing_by_device().items()
    missing = [(key, float(count)) for key, count in lacking if key in exporter.devices]
    text = "Histograms and events that the device sent and that never arrived; only for devices with missing reports."
    yield Family("edgert_missing_reports", text, "gauge", _DEVICE, missing)
    alarms = [
        ((*key, model, alarm), 1.0)
        for key, device in devices
        for model, names in device.alarms.items()
        for alarm in names
    ]
    text = "1 for each present alarm of a model, or of a device (then `model` is empty)."
    yield Family("edgert_alarm", text, "gauge", (*_DEVICE, "model", "alarm"), alarms)
    info = [((*key, device.profile), 1.0) for key, device in devices]
    yield Family("edgert_device_info", "1 for each device, with its profile.", "gauge", (*_DEVICE, "profile"), info)


def _exporter_families(exporter: Exporter) -> Iterator[Family]:
    heard = [((kind,), float(count)) for kind, count in sorted(exporter.messages.items())]
    yield Family("edgert_exporter_messages_total", "Messages received.", "counter", ("kind",), heard)
    figures: tuple[tuple[str, str, Type, float], ...] = (
        ("edgert_exporter_duplicates_total", "Repeated reports, which were not counted.", "counter", exporter.counting.duplicates),
        ("edgert_exporter_refused_total", "Messages that were not understood or exceeded a limit.", "counter", exporter.refused),
        ("edgert_exporter_missing_reports", "Histograms and events that were sent and never arrived.", "gauge", exporter.counting.missing),
        ("edgert_exporter_streams", "Streams of reports.", "gauge", exporter.counting.streams),
        ("edgert_exporter_cpu_seconds_total", "Processor time of this exporter.", "counter", time.process_time()),
    )  # fmt: skip
    for name, text, kind, value in figures:
        yield Family(name, text, kind, (), [((), float(value))])
