"""Topics and payloads agree with docs/telemetry.md, on the device and at subscribers."""

from __future__ import annotations

import json
import os
from collections.abc import Callable

import pytest

from edgert.errors import ConfigInvalid, ProtocolError
from edgert.telemetry import messages
from edgert.telemetry.messages import HistMessage, MetricsMessage, Topic, Topics, parse_topic
from edgert.telemetry.span_counter import SpanCounter
from edgert.telemetry.spans import RequestSpan, WindowReport
from edgert.tensors import StageTimes

TOPICS = Topics("plant-a", "pi-07")


def report() -> WindowReport:
    counter = SpanCounter("digits", lambda: 0.0)
    counter.record(RequestSpan("ok", 9_000, StageTimes(engine_us=8_000, queue_us=30), batch=2))
    counter.record(RequestSpan("ok", 40, cache_hit=True))
    counter.record(RequestSpan("error", 5))
    return counter.end_window(now=60.0)


def hist_payload(**changes: object) -> bytes:
    envelope = messages.envelope(ts_ms=1, boot="b1", seq=3)
    return messages.dump({**envelope, **messages.hist_fields(report(), model_version="r7"), **changes})


@pytest.mark.parametrize(
    ("topic", "parsed"),
    [
        (TOPICS.status, Topic("plant-a", "pi-07", "status")),
        (TOPICS.info, Topic("plant-a", "pi-07", "info")),
        (TOPICS.sys, Topic("plant-a", "pi-07", "sys")),
        (TOPICS.event, Topic("plant-a", "pi-07", "event")),
        (TOPICS.deploy, Topic("plant-a", "pi-07", "deploy")),
        (TOPICS.metrics("digits"), Topic("plant-a", "pi-07", "metrics", "digits")),
        (TOPICS.hist("digits"), Topic("plant-a", "pi-07", "hist", "digits")),
    ],
)
def test_a_topic_is_parsed_into_the_parts_that_it_was_built_from(topic: str, parsed: Topic) -> None:
    assert topic.startswith("edgert/v1/plant-a/pi-07/")
    assert topic.count("/") <= 6
    assert parse_topic(topic) == parsed


@pytest.mark.parametrize(
    "topic",
    [
        "",
        "edgert/v1",
        "edgert/v2/a/b/status",
        "edgert/v1/a/b/nothing",
        "edgert/v1/a/b/m/digits/status",
        "edgert/v1//b/sys",
    ],
)
def test_a_foreign_topic_is_refused(topic: str) -> None:
    with pytest.raises(ProtocolError):
        parse_topic(topic)


@pytest.mark.parametrize("bad", ["", "a/b", "a+", "#", "a b", "é", "-a", "a" * 65, "a\n"])
def test_an_id_that_cannot_be_a_topic_level_is_refused(bad: str) -> None:
    with pytest.raises(ConfigInvalid):
        Topics("plant-a", bad)


@pytest.mark.parametrize("number", ["7", "1.10", "1e5", "0x1f", "nan", "inf", "1_000"])
def test_an_id_that_reads_as_a_number_is_refused_with_a_proposal(number: str) -> None:
    with pytest.raises(ConfigInvalid, match=f"'d{number}'"):
        Topics("plant-a", number)


@pytest.mark.parametrize("good", ["d7", "3rd-floor", "pi_07", "a.b", "A", "1.10-rc"])
def test_an_id_with_a_letter_is_accepted(good: str) -> None:
    assert parse_topic(Topics(good, good).hist(good)).model == good


def test_the_payload_of_metrics_is_flat_and_has_every_field_of_the_contract() -> None:
    facts = {"clock_synced": True, "rss_bytes": 5, "temp_c": 41.5, "throttled": None}
    fields = messages.metrics_fields(report(), up=True, model_version="r7", facts=facts)
    payload = json.loads(messages.dump({**messages.envelope(ts_ms=17, boot="b1", seq=1), **fields}))
    names = (
        "v ts boot seq window_s up clock_synced req_total err_total shed_total cache_hit_total lat_p50_ms "
        "lat_p95_ms lat_p99_ms lat_p999_ms lat_max_ms lat_sum_ms_total lat_le_10ms_total lat_le_1000ms_total "
        "queue_p99_ms preprocess_p99_ms engine_p99_ms postprocess_p99_ms batch_mean rss_bytes temp_c model_version"
    )
    assert set(names.split()) <= payload.keys()
    assert "throttled" not in payload  # a fact that this machine does not know is omitted
    assert (payload["up"], payload["clock_synced"], payload["v"]) == (1, 1, 1)
    assert (payload["req_total"], payload["err_total"], payload["cache_hit_total"]) == (3, 1, 1)
    assert (payload["lat_le_1ms_total"], payload["lat_le_10ms_total"]) == (1, 2)
    assert not any(isinstance(value, (list, dict, bool)) for value in payload.values())


def test_a_path_that_is_not_utf8_does_not_prevent_an_event() -> None:
    reason = os.fsdecode(b"cannot load /models/caf\xe9/model.onnx")
    assert messages.dump({"reason": reason}) == b'{"reason":"cannot load /models/caf?/model.onnx"}'


def test_a_window_without_requests_leaves_out_every_figure_of_requests() -> None:
    counter = SpanCounter("digits", clock=lambda: 0.0)
    counter.record(RequestSpan("error", 5))
    fields = messages.metrics_fields(counter.end_window(now=60.0), up=True, model_version="r7", facts={})
    payload = json.loads(messages.dump(fields))
    assert {name for name in payload if name.endswith("_ms") or name == "batch_mean"} == set()
    assert (payload["req_total"], payload["err_total"], payload["lat_le_10ms_total"]) == (1, 1, 0)


def test_metrics_are_read_back_unchanged() -> None:
    fields = messages.metrics_fields(report(), up=False, model_version="r7", facts={})
    read = MetricsMessage.from_json(messages.dump({**messages.envelope(ts_ms=17, boot="b1", seq=4), **fields}))
    assert (read.ts_ms, read.boot, read.seq, read.window_s, read.model_version) == (17, "b1", 4, 60.0, "r7")
    assert read.number("req_total") == 3
    assert read.number("not_there") == 0


def test_a_histogram_is_read_back_as_the_same_sketch() -> None:
    read = HistMessage.from_json(hist_payload())
    assert (read.boot, read.seq, read.window_s) == ("b1", 3, 60.0)
    assert read.sketch == report().latency
    assert read.sketch.sum == pytest.approx(9.04)


def test_an_unknown_field_is_ignored() -> None:
    assert HistMessage.from_json(hist_payload(colour="blue")).seq == 3


@pytest.mark.parametrize(
    "changes",
    [
        {"v": 2},
        {"scale": 6},
        {"unit": "s"},
        {"temporality": "cumulative"},
        {"count": 99},
        {"buckets": "a:b"},
        {"seq": "3"},
        {"boot": 5},
        {"sum": "much"},
    ],
)
def test_a_histogram_that_could_not_be_merged_is_refused(changes: dict[str, object]) -> None:
    with pytest.raises(ProtocolError):
        HistMessage.from_json(hist_payload(**changes))


@pytest.mark.parametrize(
    "payload",
    [b"", b"\xff", b"[]", b"7", b'{"v":1,"a":[1]}', b'{"v":1,"a":{}}', b"{}", b" " * 70_000, b"[" * 60_000],
)
@pytest.mark.parametrize("read", [HistMessage.from_json, MetricsMessage.from_json, messages.load])
def test_bytes_that_are_not_a_payload_are_refused(payload: bytes, read: Callable[[bytes], object]) -> None:
    with pytest.raises(ProtocolError):
        read(payload)


def test_a_status_is_one_bare_word() -> None:
    assert [messages.parse_status(word) for word in (b"online", b"offline", b"lost")] == ["online", "offline", "lost"]
    with pytest.raises(ProtocolError):
        messages.parse_status(b"perhaps")


def test_a_boot_id_that_reads_as_a_number_is_refused() -> None:
    with pytest.raises(ConfigInvalid):
        messages.envelope(ts_ms=1, boot="12345678")


def test_subscriptions_cover_one_site_or_all_sites() -> None:
    assert messages.subscriptions("plant-a") == ("edgert/v1/plant-a/#",)
    assert messages.subscriptions() == ("edgert/v1/+/#",)
