"""Prometheus' own client reads the text form, and its buckets are exact."""

from __future__ import annotations

import json
import random

from prometheus_client.parser import text_string_to_metric_families

from edgert.telemetry import messages
from edgert_deploy.fleet.export.prometheus import Exposition
from tests.support.fleet import NOW_MS, Pi, an_exporter, feed


def test_the_client_of_prometheus_reads_the_text_and_the_buckets_are_exact() -> None:
    exporter, pi = an_exporter(), Pi("pi-1", profile="pi-5")
    latencies = [random.Random(5).lognormvariate(1, 1) for _ in range(500)]
    own = messages.envelope(ts_ms=NOW_MS, boot="b1") | {"alarms": "channel_stale"}
    feed(exporter, pi.info() + pi.window(NOW_MS, latencies, errors=2, uptime_s=60))
    feed(exporter, [(pi.topics.deploy, messages.dump(own))])
    read = {family.name: family for family in text_string_to_metric_families(Exposition(exporter).text())}
    buckets = {
        float(sample.labels["le"]): sample.value
        for sample in read["edgert_latency_milliseconds"].samples
        if sample.name.endswith("_bucket")
    }
    for bound, value in buckets.items():
        assert value == sum(latency <= bound for latency in latencies)
    (errors,) = read["edgert_errors"].samples
    assert (errors.value, errors.labels["profile"]) == (2, "pi-5")
    assert read["edgert_device_online"].samples[0].value == 1
    (alarm,) = read["edgert_alarm"].samples
    assert (alarm.labels["model"], alarm.labels["alarm"]) == ("", "channel_stale")


def test_stages_are_exported_as_histograms_of_all_devices_and_as_gauges_of_each_device() -> None:
    exporter, by_device = an_exporter(), an_exporter("device,model")
    for name, ms in (("pi-1", 0.25), ("pi-2", 4.0)):
        hist, (topic, metrics) = Pi(name).window(NOW_MS, [9.0] * 10, engine=[ms] * 10, decode=[0.0] * 10)
        sent = [hist, (topic, messages.dump({**json.loads(metrics), "engine_p99_ms": ms}))]
        for each in (exporter, by_device):
            feed(each, sent)
    read = {family.name: family for family in text_string_to_metric_families(Exposition(exporter).text())}
    samples = read["edgert_stage_milliseconds"].samples
    engine = {each.labels.get("le"): each.value for each in samples if each.labels["stage"] == "engine"}
    assert (engine["0.125"], engine["0.25"], engine["2.0"], engine["4.0"], engine["+Inf"]) == (0, 10, 10, 20, 20)
    assert {each.labels["stage"] for each in samples} == {"decode", "engine"}
    assert Exposition(exporter).protobuf().count(b"engine") == 1
    text = Exposition(by_device).text()
    assert "edgert_stage_milliseconds_bucket" not in text
    assert 'edgert_engine_p99_milliseconds{device="pi-2",model="digits"} 4.0' in text


def test_one_device_with_an_odd_profile_does_not_keep_the_others_from_being_scraped() -> None:
    exporter, odd = an_exporter(), b"half a character \\ud800\\u0000" + b"x" * 30_000
    for pi in (Pi("pi-1"), Pi("pi-2", profile="odd")):
        said = [(topic, payload.replace(b"odd", odd)) for topic, payload in pi.info()]
        feed(exporter, said + pi.window(NOW_MS, [1.0], uptime_s=60))
    assert exporter.refused == 1  # the schema requires an id
    text = Exposition(exporter).text().encode()
    assert b'device="pi-1"' in text
    assert max(map(len, text.splitlines())) < 1000
    assert Exposition(exporter).protobuf()
