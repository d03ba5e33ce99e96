"""A listener decodes each message of the contract once. It refuses and counts all other messages."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from edgert.errors import ProtocolError
from edgert.telemetry import messages
from edgert.telemetry.messages import PAYLOAD_BYTES_MAX, HistMessage, MetricsMessage, Scalar, Topic
from edgert_deploy.fleet import listener as listener_module
from edgert_deploy.fleet.listener import FleetListener
from edgert_deploy.fleet.reports import EventMessage
from tests.support.fleet import NOW_MS, Pi, Sent, changed, feed


class Heard(FleetListener):
    """A listener that records its calls. Its wall clock always shows NOW_MS."""

    def __init__(self, *, decodes_hist: bool = True) -> None:
        super().__init__(lambda: NOW_MS)
        self.decodes_hist = decodes_hist
        self.calls: list[tuple[str, object]] = []
        self.accepted: list[tuple[str, bool]] = []

    def on_message(self, topic: Topic, retained: bool, now: float) -> None:
        self.accepted.append((topic.kind, retained))

    def on_cleared(self, topic: Topic) -> None:
        self.calls.append(("cleared", topic.kind))

    def on_status(self, topic: Topic, status: str, now: float) -> None:
        self.calls.append(("status", status))

    def on_fields(self, topic: Topic, fields: Mapping[str, Scalar], now: float) -> None:
        self.calls.append((topic.kind, fields.get("ts")))

    def on_hist(self, topic: Topic, hist: HistMessage | None, now: float) -> None:
        self.calls.append(("hist", None if hist is None else hist.sketch.count))

    def on_metrics(self, topic: Topic, metrics: MetricsMessage, now: float) -> None:
        self.calls.append(("metrics", metrics.number("req_total")))

    def on_event(self, topic: Topic, event: EventMessage, now: float) -> None:
        if event.event == "too_many":
            raise ProtocolError("one too many")
        self.calls.append(("event", event.event))


def described(kind: str, ts_ms: int, *, device: str = "pi-1", boot: str | None = "b1") -> Sent:
    fields = {"v": 1, "ts": ts_ms, "boot": boot}
    return [(f"edgert/v1/plant-a/{device}/{kind}", messages.dump(fields))]


def test_each_kind_of_message_goes_to_its_method() -> None:
    heard, pi = Heard(), Pi("pi-1")
    feed(heard, pi.info() + pi.window(NOW_MS, [1.0] * 3), retained=True)
    feed(heard, pi.rolled_back(2, "p99_ms is 9 ms"))
    assert heard.calls == [
        ("info", NOW_MS), ("status", "online"), ("hist", 3), ("metrics", 3), ("event", "rolled_back"),
    ]  # fmt: skip
    assert heard.accepted == [*((kind, True) for kind in ("info", "status", "hist", "metrics")), ("event", False)]
    assert (heard.refused, heard.last_refusal) == (0, "")


def test_a_listener_that_decodes_no_histograms_is_told_about_each_even_if_it_is_broken() -> None:
    heard, pi = Heard(decodes_hist=False), Pi("pi-1")
    feed(heard, [pi.window(NOW_MS, [1.0])[0], (pi.topics.hist("digits"), b"garbage")])
    assert heard.calls == [("hist", None), ("hist", None)]
    assert heard.refused == 0


@pytest.mark.parametrize(
    ("topic", "payload", "reason"),
    [
        ("edgert/v1/plant-a/pi-1", b"online", "is not one of edgert/v1/SITE/DEVICE"),
        ("edgert/v2/plant-a/pi-1/status", b"online", "is not one of edgert/v1/SITE/DEVICE"),
        ("edgert/v1/plant-a/pi-1/m/metrics", b"{}", "is not one of edgert/v1/SITE/DEVICE"),
        ("edgert/v1/plant-ä/pi-1/status", b"online", "is not one of edgert/v1/SITE/DEVICE"),
        (f"edgert/v1/plant-a/{'n' * 65}/status", b"online", "is not one of edgert/v1/SITE/DEVICE"),
        ("edgert/v1/plant-a/pi-1/status", b"Online", "known: online, offline, lost"),
        ("edgert/v1/plant-a/pi-1/status", b"online\n", "known: online, offline, lost"),
        ("edgert/v1/plant-a/pi-1/status", b"\xff", "known: online, offline, lost"),
        ("edgert/v1/plant-a/pi-1/info", b'{"v":2}', "update it"),
        ("edgert/v1/plant-a/pi-1/info", b'{"v":1,"profile":7}', "profile is 7"),
        ("edgert/v1/plant-a/pi-1/info", b'{"v":1,"ts":-1}', "ts is -1"),
        ("edgert/v1/plant-a/pi-1/sys", b"[]", "not a flat JSON object"),
        ("edgert/v1/plant-a/pi-1/sys", b"", "not JSON"),
        ("edgert/v1/plant-a/pi-1/sys", b" " * (PAYLOAD_BYTES_MAX + 1), "the limit is"),
        ("edgert/v1/plant-a/pi-1/event", b"", "not JSON"),
        ("edgert/v1/plant-a/pi-1/m/digits/hist", b"", "not JSON"),
        (
            "edgert/v1/plant-a/pi-1/event",
            b'{"v":1,"ts":1,"boot":"b1","seq":1,"event":"too_many"}',
            "one too many",
        ),
    ],
)
def test_a_message_that_breaks_the_contract_is_refused_and_is_not_a_sign_of_life(
    topic: str, payload: bytes, reason: str
) -> None:
    heard = Heard()
    heard.apply(topic, payload, False, 0.0)
    assert (heard.refused, heard.calls, heard.accepted) == (1, [], [])
    assert reason in heard.last_refusal
    assert heard.last_refusal.startswith(topic[:120])
    heard.apply("edgert/v1/plant-a/pi-1/status", b"online", False, 0.0)
    assert (heard.refused, heard.calls) == (1, [("status", "online")])


def test_a_refusal_is_of_limited_length() -> None:
    heard = Heard()
    heard.apply("t" * 60_000, b"x" * 60_000, False, 0.0)
    heard.apply("edgert/v1/plant-a/pi-1/info", b'{"v":1,"' + b"n" * 60_000 + b'":null}', False, 0.0)
    assert heard.refused == 2
    assert len(heard.last_refusal) < 500


@pytest.mark.parametrize("kind", ["status", "info", "deploy"])
def test_an_empty_retained_message_removes_the_device(kind: str) -> None:
    heard = Heard()
    heard.apply(f"edgert/v1/plant-a/pi-1/{kind}", b"", False, 0.0)
    assert (heard.calls, heard.accepted, heard.refused) == ([("cleared", kind)], [], 0)


def test_stages_that_cannot_be_read_are_refused_and_the_latencies_of_the_report_count() -> None:
    heard, (hist, _) = Heard(), Pi("pi-1").window(NOW_MS, [1.0] * 4, engine=[0.5] * 4)
    feed(heard, changed([hist], stages="garbage"))
    assert (heard.calls, heard.accepted, heard.refused) == ([("hist", 4)], [("hist", False)], 1)


@pytest.mark.parametrize("kind", ["info", "sys", "deploy"])
@pytest.mark.parametrize("boot", ["b1", "None", None])
def test_an_older_description_never_replaces_a_newer_one(kind: str, boot: str | None) -> None:
    heard = Heard()
    for ts_ms in (NOW_MS - 10, NOW_MS - 20, NOW_MS - 10, NOW_MS - 5):
        feed(heard, described(kind, ts_ms, boot=boot))
    assert [ts_ms for _, ts_ms in heard.calls] == [NOW_MS - 10, NOW_MS - 10, NOW_MS - 5]
    assert (len(heard.accepted), heard.refused) == (4, 0), "a late one is still a sign of life"


def test_a_description_is_late_only_compared_with_the_same_kind_and_device_and_boot() -> None:
    heard = Heard()
    feed(heard, described("info", NOW_MS))
    feed(heard, described("deploy", NOW_MS - 10))
    feed(heard, described("info", NOW_MS - 10, device="pi-2"))
    feed(heard, described("info", NOW_MS - 10, boot="b2"))
    assert len(heard.calls) == 4


def test_a_device_whose_clock_was_ahead_is_accepted_again_once_its_clock_is_right() -> None:
    heard = Heard()
    feed(heard, described("info", NOW_MS + 1) + described("info", NOW_MS))
    assert [ts_ms for _, ts_ms in heard.calls] == [NOW_MS + 1, NOW_MS]


def test_a_device_that_was_removed_may_come_back_with_an_older_time() -> None:
    heard = Heard()
    feed(heard, described("info", NOW_MS))
    feed(heard, [("edgert/v1/plant-a/pi-1/info", b"")])
    feed(heard, described("info", NOW_MS - 10))
    assert heard.calls == [("info", NOW_MS), ("cleared", "info"), ("info", NOW_MS - 10)]


def test_late_descriptions_are_refused_in_a_fleet_as_large_as_the_table_of_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(listener_module, "DESCRIBED_MAX", 3)
    heard = Heard()
    for device in ("pi-1", "pi-2", "pi-3"):
        feed(heard, described("info", NOW_MS - 1, device=device))
    feed(heard, described("info", NOW_MS, device="pi-1"))
    feed(heard, described("info", NOW_MS - 2, device="pi-2") + described("info", NOW_MS - 1, device="pi-1"))
    assert [ts_ms for _, ts_ms in heard.calls] == [NOW_MS - 1] * 3 + [NOW_MS]
