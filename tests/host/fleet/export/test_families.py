"""The exported series follow Prometheus' data model, and contain only present devices."""

from __future__ import annotations

import re

import pytest

from edgert_deploy.fleet.export.exporter import BY_DEFAULT, COUNTERS, GAUGES, Exporter, Labels
from edgert_deploy.fleet.export.families import Family, Histograms, families, histograms
from tests.support.fleet import NOW_MS, Pi, changed, feed, without

# https://prometheus.io/docs/concepts/data_model/
NAME = re.compile(r"[a-z_][a-z0-9_]*")
BY_DEVICE = ("site", "device", "model")


def an_exporter(by: tuple[str, ...] = BY_DEFAULT) -> Exporter:
    return Exporter("b1", by, wall_clock=lambda: NOW_MS / 1000)


def series(exporter: Exporter, name: str) -> dict[Labels, float]:
    """Return the value of each series of a family, by the values of its labels; {} if there is no such family."""
    return {labels: value for family in families(exporter) if family.name == name for labels, value in family.samples}


def all_labels(exporter: Exporter) -> set[str]:
    """Return every value of every label."""
    own = {value for family in families(exporter) for labels, _ in family.samples for value in labels}
    return own | {value for each in histograms(exporter) for labels, *_ in each.samples for value in labels}


def a_full_fleet(exporter: Exporter) -> None:
    for name, profile in (("pi-1", "pi"), ("pi-2", "nuc")):
        pi = Pi(name, profile=profile)
        feed(exporter, pi.info() + changed(pi.deploy(NOW_MS, "temp_c"), alarms="channel_stale"))
        hist, metrics = pi.window(NOW_MS, [1.0, 2.0], errors=1, uptime_s=60, engine=[0.5, 0.6])
        feed(exporter, [hist, *changed([metrics], temp_c=61.5, throttled=0, rss_bytes=2**31)])
        pi.seq += 2
        feed(exporter, pi.window(NOW_MS, [3.0]) + pi.rolled_back(2, "p99_ms is 9 ms"))
    feed(exporter, [("edgert/v1/plant-a/pi-1/status", b"garbage")])


@pytest.mark.parametrize("by", [BY_DEFAULT, BY_DEVICE, ("model",), ()])
def test_names_and_labels_are_valid_and_no_series_exists_twice(by: tuple[str, ...]) -> None:
    exporter = an_exporter(by)
    a_full_fleet(exporter)
    shown: list[Family | Histograms] = [*families(exporter), *histograms(exporter)]
    names = [family.name for family in shown]
    assert len(set(names)) == len(names)
    for family in shown:
        assert NAME.fullmatch(family.name), family.name
        assert family.help.endswith("."), family.name
        labels = [sample[0] for sample in family.samples]
        assert len(set(labels)) == len(labels), family.name
        assert {len(values) for values in labels} <= {len(family.names)}, family.name
        assert len(set(family.names)) == len(family.names), family.name
    for family in families(exporter):
        assert (family.type == "counter") == family.name.endswith("_total"), family.name


def test_an_exporter_without_reports_has_only_its_own_series() -> None:
    exporter = an_exporter()
    shown = {family.name for family in families(exporter) if family.samples}
    assert shown
    assert all(name.startswith("edgert_exporter_") for name in shown)
    assert [each.samples for each in histograms(exporter)] == [[], []]
    assert series(exporter, "edgert_exporter_refused_total") == {(): 0.0}


def test_counters_have_the_sums_of_the_devices_counts() -> None:
    exporter = an_exporter(("model",))
    a_full_fleet(exporter)
    assert [series(exporter, name) for name in COUNTERS] == [
        {("digits",): 8.0}, {("digits",): 2.0}, {("digits",): 0.0}, {("digits",): 0.0},
    ]  # fmt: skip
    (latency, _) = histograms(exporter)
    assert [(labels, sketch.count) for labels, sketch, _ in latency.samples] == [(("digits",), 6)]
    assert series(exporter, "edgert_events_total") == {("plant-a", "digits", "rolled_back"): 2.0}


def test_gauges_exist_only_by_device_and_only_for_values_that_a_device_reports() -> None:
    by_model, by_device = an_exporter(), an_exporter(BY_DEVICE)
    for exporter in (by_model, by_device):
        feed(exporter, changed(Pi("pi-1").window(NOW_MS, [1.0])[1:], temp_c=0.0, throttled=1))
        feed(exporter, Pi("pi-2").window(NOW_MS, [1.0]))
    assert [name for name in GAUGES if series(by_model, name)] == []
    first = ("plant-a", "pi-1", "digits")
    assert series(by_device, "edgert_temperature_celsius") == {first: 0.0}, "0 is a reading"
    assert series(by_device, "edgert_throttled") == {first: 1.0}
    assert "edgert_batch_mean" not in {family.name for family in families(by_device)}


def test_the_histogram_of_stages_has_the_label_stage_and_no_series_by_device() -> None:
    exporter, by_device = an_exporter(("model",)), an_exporter(BY_DEVICE)
    for each in (exporter, by_device):
        a_full_fleet(each)
    _, stages = histograms(exporter)
    assert stages.names == ("model", "stage")
    assert {labels: sketch.count for labels, sketch, _ in stages.samples} == {("digits", "engine"): 4}
    assert list(histograms(by_device))[1].samples == []


def test_a_device_is_online_by_its_status_and_is_heard_only_by_messages_that_are_not_retained() -> None:
    exporter = an_exporter()
    feed(exporter, Pi("pi-1").info(), retained=True)
    feed(exporter, [("edgert/v1/plant-a/pi-2/status", b"lost")])
    feed(exporter, Pi("pi-3").window(NOW_MS, [1.0]))
    first, second, third = (("plant-a", f"pi-{number}") for number in (1, 2, 3))
    assert series(exporter, "edgert_device_online") == {first: 1.0, second: 0.0, third: 0.0}
    heard = series(exporter, "edgert_device_heard_timestamp_seconds")
    assert heard == {second: NOW_MS / 1000, third: NOW_MS / 1000}
    info = series(exporter, "edgert_device_info")
    assert set(info) == {(*first, "pi"), (*second, "unknown"), (*third, "unknown")}


def test_an_alarm_belongs_to_a_model_or_to_the_device_and_ends_with_its_next_description() -> None:
    exporter, pi = an_exporter(), Pi("pi-1")
    feed(exporter, changed(pi.deploy(NOW_MS, "temp_c", "shadow"), alarms="channel_stale"))
    where = ("plant-a", "pi-1")
    standing = {(*where, "digits", "temp_c"), (*where, "digits", "shadow"), (*where, "", "channel_stale")}
    assert set(series(exporter, "edgert_alarm")) == standing
    feed(exporter, pi.deploy(NOW_MS + 1, "shadow"))
    assert set(series(exporter, "edgert_alarm")) == {(*where, "digits", "shadow")}


def test_missing_reports_are_counted_for_their_devices() -> None:
    exporter, pi = an_exporter(), Pi("pi-1")
    sent = [message for _ in range(4) for message in pi.window(NOW_MS, [1.0])]
    feed(exporter, without(sent, 2, 3) + Pi("pi-2").window(NOW_MS, [1.0]))
    assert series(exporter, "edgert_missing_reports") == {("plant-a", "pi-1"): 2.0}
    assert series(exporter, "edgert_exporter_missing_reports") == {(): 2.0}
    feed(exporter, sent)
    assert series(exporter, "edgert_missing_reports") == {}
    assert series(exporter, "edgert_exporter_duplicates_total") == {(): 4.0}


def test_a_removed_device_leaves_no_series() -> None:
    exporter = an_exporter(BY_DEVICE)
    a_full_fleet(exporter)
    assert "pi-1" in all_labels(exporter)
    assert ("plant-a", "pi-1") in series(exporter, "edgert_missing_reports")
    feed(exporter, [("edgert/v1/plant-a/pi-1/deploy", b"")])
    assert "pi-1" not in all_labels(exporter)
    assert ("plant-a", "pi-2") in series(exporter, "edgert_missing_reports")
