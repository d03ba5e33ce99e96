"""The fleet's state follows from its messages: repeated ones count once, missing ones show, percentiles are merged."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgert.telemetry import messages
from edgert.telemetry.messages import Topics
from edgert.telemetry.mqtt import PACKET_BYTES_MAX, BrokerRefused, MqttSettings
from edgert.telemetry.sketch import RELATIVE_ERROR_MAX
from edgert_deploy.fleet import sequence as seq
from edgert_deploy.fleet import state as state_module
from edgert_deploy.fleet.sequence import SeqTracker
from edgert_deploy.fleet.state import FleetState, Row
from edgert_deploy.fleet.subscriber import FleetSubscriber
from tests.support.brokers import Broker
from tests.support.fleet import Sender, publish


def feed(state: FleetState, sent: list[tuple[str, bytes]], now: float = 0.0) -> None:
    for topic, payload in sent:
        state.apply(topic, payload, False, now)


def row_of(state: FleetState, device: str | None, now: float = 0.0) -> Row:
    (row,) = (row for row in state.rows(now) if row.device == device)
    return row


def test_a_device_s_windows_become_one_row() -> None:
    state, pi = FleetState(), Sender("pi-07")
    state.apply(pi.topics.status, b"online", True, 0.0)
    feed(state, pi.window([1.0] * 98 + [50.0] * 2, errors=3))
    feed(state, pi.window([1.0] * 20))
    row = row_of(state, "pi-07")
    assert (row.site, row.model, row.state, row.model_version) == ("plant-a", "digits", "online", "r7")
    assert row.rate_per_s == pytest.approx(1.0)
    assert row.p50_ms == pytest.approx(1.0, rel=RELATIVE_ERROR_MAX)
    assert row.p99_ms == pytest.approx(50.0, rel=RELATIVE_ERROR_MAX)
    assert (row.answered, row.errors, row.missing, row.age_s) == (120, 3, 0, 0.0)


def test_a_repeated_message_counts_once() -> None:
    state, pi = FleetState(), Sender("pi-07")
    sent = [message for _ in range(3) for message in pi.window([1.0] * 10)]
    feed(state, sent)
    feed(state, sent[2:])
    row = row_of(state, "pi-07")
    assert (row.answered, row.duplicates, row.missing) == (30, 4, 0)


def test_a_message_that_never_came_is_counted_and_a_late_one_fills_the_hole() -> None:
    state, pi = FleetState(), Sender("pi-07")
    windows = [pi.window([1.0] * 10) for _ in range(5)]
    feed(state, windows[0] + windows[4])
    assert row_of(state, "pi-07").missing == 3
    feed(state, windows[2])
    row = row_of(state, "pi-07")
    assert (row.missing, row.answered) == (2, 30)


def test_the_same_seq_after_a_reboot_is_another_message() -> None:
    state = FleetState()
    feed(state, Sender("pi-07", boot="b1").window([1.0]))
    feed(state, Sender("pi-07", boot="b2").window([1.0]))
    row = row_of(state, "pi-07")
    assert (row.answered, row.duplicates, row.missing) == (2, 0, 0)


def test_fleet_percentiles_are_those_of_the_pooled_sample() -> None:
    state, dice = FleetState(), random.Random(7)
    pooled: list[float] = []
    for number in range(20):
        scale = 100.0 if number == 0 else 1.0
        latencies = [scale * dice.uniform(0.5, 2) for _ in range(200)]
        pooled += latencies
        feed(state, Sender(f"pi-{number:02}").window(latencies))
    fleet = row_of(state, None)
    assert fleet.devices == 20
    assert fleet.rate_per_s == pytest.approx(4000 / 60)
    exact = sorted(pooled)[int(0.99 * 4000) - 1]
    assert fleet.p99_ms == pytest.approx(exact, rel=RELATIVE_ERROR_MAX + 0.002)  # and the whole microseconds
    mean_of_p99 = sum(row.p99_ms or 0 for row in state.rows(0.0) if row.device) / 20
    assert abs(mean_of_p99 - exact) > exact / 2  # which is why nobody averages percentiles


def test_models_are_summed_up_each_by_itself() -> None:
    state = FleetState()
    feed(state, Sender("pi-07", "digits").window([1.0]))
    feed(state, Sender("pi-07", "faces").window([9.0]))
    assert [(row.model, row.answered) for row in state.fleet_rows(0.0)] == [("digits", 1), ("faces", 1)]


def test_only_the_last_windows_count() -> None:
    state, pi = FleetState(horizon_s=100), Sender("pi-07")
    feed(state, pi.window([50.0]), now=0)
    feed(state, pi.window([1.0]), now=90)
    assert row_of(state, "pi-07", now=90).answered == 2
    assert row_of(state, "pi-07", now=110).answered == 1
    assert row_of(state, "pi-07", now=300).p99_ms is None


def test_a_backlog_delivered_at_once_does_not_pass_for_the_last_minutes() -> None:
    state, pi = FleetState(horizon_s=120), Sender("pi-07")
    for _ in range(30):
        feed(state, pi.window([1.0]), now=5.0)
    assert row_of(state, "pi-07", now=5.0).answered == 3


def test_a_device_that_says_online_and_falls_silent_is_stale() -> None:
    state, pi = FleetState(), Sender("pi-07")
    state.apply(pi.topics.status, b"online", False, 0.0)
    feed(state, pi.window([1.0]), now=10.0)
    assert row_of(state, "pi-07", now=155.0).state == "online"
    assert row_of(state, "pi-07", now=161.0).state == "stale"
    state.apply(pi.topics.status, b"lost", False, 162.0)
    assert row_of(state, "pi-07", now=999.0).state == "lost"


def test_a_retained_word_is_no_sign_of_life() -> None:
    state, pi = FleetState(), Sender("pi-07")
    state.apply(pi.topics.status, b"online", True, 0.0)
    state.apply(pi.topics.info, messages.dump({"v": 1, "edgert": "0.1.0"}), True, 0.0)
    row = row_of(state, "pi-07", now=100.0)
    assert (row.age_s, row.state) == (None, "online")
    assert row.model_version == "", "edgert's own version is no model's"
    assert row_of(state, "pi-07", now=200.0).state == "stale"


def test_what_is_not_of_the_contract_is_counted_and_does_no_harm() -> None:
    state, pi = FleetState(), Sender("pi-07")
    feed(state, pi.window([1.0]))
    for topic, payload in [
        ("edgert/v1/plant-a/pi-07/status", b"perhaps"),
        ("edgert/v1/plant-a/pi-07/m/digits/hist", b"{}"),
        ("edgert/v1/plant-a/pi-07/m/digits/hist", b"\xff\x00"),
        ("something/else", b""),
    ]:
        state.apply(topic, payload, False, 0.0)
    assert state.refused == 4
    assert row_of(state, "pi-07").answered == 1


def test_the_number_of_devices_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "DEVICES_MAX", 3)
    state = FleetState()
    for number in range(5):
        feed(state, Sender(f"pi-{number}").window([1.0]))
    assert len(state.devices) == 3
    assert "one site with --site" in state.last_refusal


@given(st.lists(st.integers(min_value=1, max_value=30), min_size=1, max_size=60))
def test_a_tracker_counts_each_seq_once_and_knows_what_is_missing(arrivals: list[int]) -> None:
    tracker = SeqTracker()
    first = arrivals[0]
    new = [seq for seq in arrivals if tracker.is_new(seq)]
    expected = {seq for seq in arrivals if seq >= first}  # what came before the first one seen is not known of
    assert len(new) == len(set(new))
    assert set(new) == expected
    assert tracker.missing == max(arrivals) - first + 1 - len(expected)


def test_a_counter_begun_anew_is_not_taken_for_lost_messages() -> None:
    tracker = SeqTracker()
    assert [tracker.is_new(seq) for seq in (1, 2, 2**40, 2**40 + 1, 2**40)] == [True, True, True, True, False]
    assert (tracker.missing, tracker.restarts) == (0, 1)


def test_every_spool_that_was_lost_shows_as_a_gap() -> None:
    tracker = SeqTracker()
    # The third is drawn lower than the second, and one of its reports never comes.
    assert all(tracker.is_new(seq) for seq in (1, 2, 2**40, 2**40 + 1, 2**35, 2**35 + 2))
    assert (tracker.missing, tracker.lost_min) == (1, 3)
    assert not tracker.is_new(2**35)


def test_a_great_gap_is_counted_in_bounded_memory() -> None:
    tracker = SeqTracker()
    tracker.is_new(1)
    tracker.is_new(1_000_002)
    assert tracker.missing == 1_000_000
    assert [tracker.is_new(number) for number in (2, 500_000, 1_000_001, 500_000)] == [True, True, True, False]
    every_other = range(1_000_004, 1_010_000, 2)
    assert all(tracker.is_new(number) for number in every_other)
    assert tracker.missing == 1_000_000 - 3 + len(every_other)
    assert len(tracker._gaps or ()) == seq.GAPS_MAX


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker.in_folder(tmp_path / "broker") as running:
        yield running


def test_a_subscriber_hears_retained_words_and_reports_and_survives_the_broker_s_restart(broker: Broker) -> None:
    state, pi, said = FleetState(), Sender("pi-07"), list[str]()
    publish(broker, [(pi.topics.status, b"online")], retain=True)
    subscriber = FleetSubscriber(broker.settings, state, "plant-a", log=said.append)
    subscriber.open()
    publish(broker, [*pi.window([1.0] * 5), (Topics("plant-b", "pi-09").status, b"online")])
    subscriber.listen(0.3)
    assert [(device.device, device.status) for device in state.devices.values()] == [("pi-07", "online")]

    broker.stop()
    subscriber.listen(0.1)
    assert len(said) == 1
    broker.start()
    subscriber.listen(1.5)
    assert said[1:] == ["connected again"]
    publish(broker, pi.window([1.0] * 5))
    subscriber.listen(0.3)
    subscriber.close()
    assert sum(row.answered for row in state.rows(0.0) if row.device == "pi-07") == 10


def test_what_is_far_too_large_to_be_a_report_is_not_even_taken_in(broker: Broker) -> None:
    state, pi = FleetState(), Sender("pi-07")
    subscriber = FleetSubscriber(broker.settings, state)
    subscriber.open()
    publish(broker, [(pi.topics.hist("digits"), b"7" * (2 * PACKET_BYTES_MAX)), *pi.window([1.0])])
    subscriber.listen(0.3)
    subscriber.close()
    assert (row_of(state, "pi-07").answered, state.refused) == (1, 0)


def test_a_topic_that_is_not_utf8_is_refused_and_ends_nothing() -> None:
    # mosquitto refuses such topics, so this broker is a scripted one: CONNACK, SUBACK, PUBLISH, all of MQTT 5.
    topic = b"edgert/v1/plant-a/\xff\xfe/status"
    publish_packet = b"\x30" + bytes([2 + len(topic) + 1 + 6]) + len(topic).to_bytes(2, "big") + topic + b"\x00online"
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            client, _ = server.accept()
            with client:
                client.recv(1024)
                client.sendall(b"\x20\x03\x00\x00\x00")
                message_id = client.recv(1024)[2:4]
                client.sendall(b"\x90\x04" + message_id + b"\x00\x01" + publish_packet)
                client.recv(1024)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        state = FleetState()
        subscriber = FleetSubscriber(MqttSettings("127.0.0.1", server.getsockname()[1]), state)
        subscriber.open()
        subscriber.listen(0.3)
        subscriber.close()
        thread.join(5)
    assert (state.refused, state.devices) == (1, {})
    assert "is not one of edgert/v1" in state.last_refusal


def test_a_subscription_that_the_broker_refuses_is_an_error_with_the_next_step() -> None:
    # mosquitto grants what it then withholds, so this broker is a scripted one: CONNACK, SUBACK with 0x87.
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            client, _ = server.accept()
            with client:
                client.recv(1024)
                client.sendall(b"\x20\x03\x00\x00\x00")
                message_id = client.recv(1024)[2:4]
                client.sendall(b"\x90\x04" + message_id + b"\x00\x87")
                client.recv(1024)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        subscriber = FleetSubscriber(MqttSettings("127.0.0.1", server.getsockname()[1]), FleetState())
        with pytest.raises(BrokerRefused, match="let this user read it"):
            subscriber.open()
        subscriber.close()
        thread.join(5)
