"""A forwarder at a real broker: no appended message is lost, and the status is always true."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import paho.mqtt.client as paho
import pytest
from paho.mqtt.enums import CallbackAPIVersion

from edgert.telemetry.broker_connection import REFUSED, read_broker_connection
from edgert.telemetry.forwarder import BURST_MAX, ONLINE_AGAIN_S
from edgert.telemetry.held_back import HANG_UPS_MAX
from edgert.telemetry.messages import Topics
from edgert.telemetry.mqtt import (
    BrokerRefused,
    BrokerTlsFailed,
    BrokerUnreachable,
    Connection,
    MqttSettings,
    Will,
)
from edgert.telemetry.spool import Spool
from tests.support.devices import wait_until
from tests.support.fleet import retained
from tests.support.paths import ROOT
from tests.support.servers.brokers import Broker
from tests.support.servers.ports import free_port
from tests.support.stand_ins.forwarder import HIST, TOPICS, ForwardingDevice, Listener, append_to


@pytest.fixture
def listen(broker: Broker) -> Iterator[Callable[..., Listener]]:
    started: list[Listener] = []

    def start(*topics: str) -> Listener:
        started.append(Listener(broker.settings, *topics))
        return started[-1]

    yield start
    for listener in started:
        listener.stop()


@pytest.fixture
def device(tmp_path: Path, broker: Broker) -> Iterator[ForwardingDevice]:
    running = ForwardingDevice(tmp_path, broker.settings)
    yield running
    running.stop()


def test_a_device_sends_online_and_its_description_and_reports_and_offline_at_its_stop(
    device: ForwardingDevice, listen: Callable[[], Listener]
) -> None:
    listener = listen()
    device.append(3)
    device.spool.retain(TOPICS.deploy, {"v": 1, "digits_active": "r1"})
    device.start()
    wait_until(lambda: len(listener.seqs()) == 3, "three reports")
    wait_until(lambda: listener.payloads(TOPICS.sys), "a sys message")
    device.stop()
    wait_until(lambda: listener.payloads(TOPICS.status) == [b"online", b"offline"], "online, then offline")
    info, sys_said = (json.loads(listener.payloads(topic)[0]) for topic in (TOPICS.info, TOPICS.sys))
    assert (info["boot"], info["edgert_version"]) == ("b1", "0.1.0")
    assert (sys_said["temp_c"], sys_said["spool_lost_total"]) == (40.5, 0)
    assert listener.payloads(TOPICS.deploy) == [b'{"v":1,"digits_active":"r1"}']
    assert device.spool.stats().rows == 0

    later = listen()
    wait_until(lambda: len(later.heard) == 3, "the retained messages")
    assert {(topic, retained) for topic, _, retained in later.heard} == {
        (TOPICS.status, True),
        (TOPICS.info, True),
        (TOPICS.deploy, True),
    }


def test_no_report_is_lost_when_the_broker_stops_and_returns_twice(tmp_path: Path) -> None:
    # The broker keeps a session during its own restarts. The session gets the messages of that time later.
    store = ("persistence true", f"persistence_location {tmp_path}/")
    broker = Broker.in_folder(tmp_path / "broker", extra=store)
    broker.start()
    heard = heard_in_session(broker)  # before the first report
    broker.stop()
    device = ForwardingDevice(tmp_path, broker.settings)
    device.append(50)
    device.start()
    wait_until(lambda: device.said, "the log says that the broker is down")
    for _ in range(2):
        broker.start()
        heard += heard_in_session(broker)
        wait_until(lambda: device.spool.stats().rows == 0, "the spool is empty")
        broker.stop()
        wait_until(lambda: "stay on disk" in device.said[-1], "the log says that the broker is down again")
        device.append(50)
        time.sleep(0.3)  # several attempts fail meanwhile
    broker.start()
    wait_until(lambda: device.spool.stats().rows == 0, "the spool is empty")
    device.stop()

    def all_are_heard() -> bool:
        heard.extend(heard_in_session(broker))
        return set(heard) == set(range(min(heard), min(heard) + 150))

    wait_until(all_are_heard, "every report has arrived")
    broker.stop()
    # The log has one line per change (down and up, three times) and the end, for any number of attempts.
    assert len(device.said) == 7, device.said


def test_reports_continue_after_an_unreadable_spool_was_replaced(
    device: ForwardingDevice, listen: Callable[..., Listener], tmp_path: Path
) -> None:
    listener, worker = listen(), Spool(tmp_path / "telemetry.db")
    device.start()
    append_to(worker, 30)
    worker.retain(TOPICS.deploy, {"v": 1, "digits_state": "on trial"})
    wait_until(lambda: len(listener.seqs()) == 30, "the first reports arrived")
    wait_until(lambda: len(listener.payloads(TOPICS.deploy)) == 1, "and the last word on the slots")
    for file in tmp_path.glob("telemetry.db*"):
        if file.suffix != ".lock":
            with file.open("r+b") as spoilt:
                spoilt.write(b"\xa5" * file.stat().st_size)
    worker.retain(TOPICS.deploy, {"v": 1, "digits_state": "live"})
    append_to(worker, 20)
    wait_until(lambda: len(listener.seqs()) == 50, "and so did those after them")
    wait_until(lambda: len(listener.payloads(TOPICS.deploy)) == 2, "and the last word on the slots")
    wait_until(lambda: device.spool.stats().rows == 0, "the spool is empty")
    worker.close()


def test_a_device_whose_spool_cannot_be_used_still_describes_its_machine(
    tmp_path: Path, broker: Broker, listen: Callable[[], Listener]
) -> None:
    """With a full disk, its `sys` message shows the cause."""
    listener, folder = listen(), tmp_path / "spool"
    folder.mkdir()
    device = ForwardingDevice(folder, broker.settings)
    device.spool.close()
    shutil.rmtree(folder)
    device.start()
    wait_until(lambda: listener.payloads(TOPICS.sys), "a sys message")
    device.stop()
    (said,) = map(json.loads, listener.payloads(TOPICS.sys))
    assert (said["temp_c"], said["spool_rows"], said["spool_lost_total"]) == (40.5, 0, 0)
    assert any("the telemetry spool" in line for line in device.said)


def test_a_rate_limits_the_speed_of_the_backlog(tmp_path: Path, broker: Broker) -> None:
    device = ForwardingDevice(tmp_path, broker.settings, rate_per_s=20)
    device.append(200)
    began = time.monotonic()
    device.start()
    wait_until(lambda: device.spool.stats().rows < 200, "the backlog begins to go")
    time.sleep(0.5)
    device.stop()
    assert 200 - device.spool.stats().rows <= BURST_MAX + 20 * (time.monotonic() - began)


def test_a_broker_with_tls_and_password_is_served(tmp_path: Path, secured: Broker) -> None:
    listener = Listener(secured.settings)
    device = ForwardingDevice(tmp_path, secured.settings)
    device.append(30)
    device.start()
    wait_until(lambda: set(listener.seqs()) == set(range(1, 31)), "thirty reports over TLS")
    device.stop()
    listener.stop()
    assert "MQTT 5" in device.said[0]


def test_a_broker_that_requires_certificates_accepts_the_certificate_of_a_device(tmp_path: Path) -> None:
    folder = tmp_path / "broker"
    access = tmp_path / "access"
    access.write_text(f"user {TOPICS.device}\ntopic write edgert/v1/plant-a/{TOPICS.device}/#\n")
    wants = (
        f"cafile {folder}/ca.pem",
        "require_certificate true",
        "use_identity_as_username true",
        f"acl_file {access}",
    )
    with Broker.in_folder(folder, secured=True, extra=wants) as broker:
        plain = replace(broker.settings, username="", password_file="")
        with pytest.raises((BrokerTlsFailed, BrokerRefused, BrokerUnreachable), match="certificate"):
            Connection(plain).open()
        own = replace(plain, cert=f"{folder}/client.pem", key=f"{folder}/client.key")
        device = ForwardingDevice(tmp_path, own)
        device.append(5)
        device.start()
        wait_until(lambda: device.spool.stats().rows == 0, "the spool is empty")
        device.stop()
    assert not any("refuses" in line for line in device.said), device.said


def test_a_report_that_the_broker_refuses_stays_on_disk_and_does_not_delay_others(tmp_path: Path) -> None:
    access = tmp_path / "access"
    access.write_text(f"topic readwrite edgert/v1/+/+/status\ntopic readwrite {HIST}\n")
    with Broker.in_folder(tmp_path / "broker", extra=(f"acl_file {access}",)) as broker:
        device = ForwardingDevice(tmp_path, broker.settings)
        device.spool.append("event", TOPICS.event, lambda seq: {"v": 1}, 1, "event")
        device.append(5)
        device.start()
        wait_until(lambda: device.spool.stats().rows == 1, "all but the event has gone")
        wait_until(lambda: len(device.said) == 2, "the refusal is said once")
        connection = read_broker_connection(device.spool.path.parent)
        device.stop()
    assert device.spool.take(1)[0].kind == "event"
    assert "refuses messages" in device.said[1]
    # `edgert doctor` reports both.
    assert (connection.state, f"telemetry: {connection.text}") == (REFUSED, device.said[1])


def test_the_shipped_access_list_allows_every_message_of_a_device(tmp_path: Path) -> None:
    access = Path(shutil.copy(ROOT / "examples/telemetry/mosquitto.acl", tmp_path / "access"))
    with Broker.in_folder(tmp_path / "broker", secured=True, extra=(f"acl_file {access}",)) as broker:
        device = ForwardingDevice(tmp_path, broker.settings)
        device.append(5)
        device.spool.append("event", TOPICS.event, lambda seq: {"v": 1}, 1, "event")
        device.start()
        wait_until(lambda: device.spool.stats().rows == 0, "the spool is empty")
        device.stop()
    assert not any("refuses" in line for line in device.said), device.said


def test_a_device_that_moved_to_another_site_sends_its_backlog_and_clears_the_former_site(
    tmp_path: Path, broker: Broker
) -> None:
    former = Topics("plant-z", TOPICS.device)
    before = ForwardingDevice(tmp_path, broker.settings, topics=former)
    before.spool.retain(former.deploy, {"v": 1, "digits_state": "steady"})
    before.start()
    wait_until(lambda: former.deploy in retained(broker), "the slots at the former site")
    before.stop()
    before.spool.append("hist", former.hist("digits"), lambda seq: {"v": 1}, 1, "hist")
    listener = Listener(broker.settings)
    moved = ForwardingDevice(tmp_path, broker.settings)
    moved.spool.retain(TOPICS.deploy, {"v": 1, "digits_state": "steady"})
    moved.start()
    wait_until(lambda: TOPICS.deploy in retained(broker), "the slots at the new site")
    wait_until(lambda: moved.spool.stats().rows == 0, "all is acknowledged")
    moved.stop()
    listener.stop()
    assert listener.payloads(former.hist("digits")) == [b'{"v":1}']
    assert listener.payloads(former.status) == [b"offline"]
    assert len(listener.payloads(former.deploy)) == 1  # the broker retains one message


def test_a_device_announces_itself_to_home_assistant_if_configured(
    tmp_path: Path, broker: Broker, listen: Callable[..., Listener]
) -> None:
    device = ForwardingDevice(tmp_path, broker.settings, home_assistant="homeassistant")
    device.spool.retain(TOPICS.deploy, {"v": 1, "digits_state": "steady", "faces_state": "trial"})
    device.start()
    topic = "homeassistant/device/edgert_plant-a_pi-07/config"
    listener = listen("homeassistant/#")
    wait_until(lambda: listener.payloads(topic), "the discovery message")
    device.spool.retain(TOPICS.deploy, {"v": 1, "digits_state": "steady"})
    wait_until(lambda: len(listener.payloads(topic)) == 2, "a second one")
    device.stop()
    both, one = (json.loads(payload) for payload in listener.payloads(topic))
    assert {name.partition("_")[0] for name in both["components"]} - {
        name.partition("_")[0] for name in one["components"]
    } == {"faces"}
    p99 = both["components"]["faces_lat_p99_ms"]
    assert (p99["state_topic"], p99["value_template"]) == (
        TOPICS.metrics("faces"),
        "{{ value_json.get('lat_p99_ms') }}",
    )
    assert both["availability_topic"] == TOPICS.status


def test_a_device_is_online_again_although_the_broker_sent_lost_for_its_old_connection(
    tmp_path: Path, broker: Broker, listen: Callable[..., Listener]
) -> None:
    later = [0.0]
    device = ForwardingDevice(tmp_path, broker.settings, clock=lambda: time.monotonic() + later[0])
    listener = listen()
    old = Connection(broker.settings, "edgert-plant-a-pi-07", will=Will(TOPICS.status, b"lost"))
    old.open()
    device.start()
    wait_until(lambda: listener.payloads(TOPICS.status) == [b"online"], "online")
    old.abandon()
    wait_until(lambda: listener.payloads(TOPICS.status) == [b"online", b"lost"], "the old connection's will")
    later[0] = ONLINE_AGAIN_S
    device.append()  # this wakes the forwarder
    wait_until(lambda: listener.payloads(TOPICS.status) == [b"online", b"lost", b"online"], "online again")
    device.stop()


def heard_in_session(broker: Broker) -> list[int]:
    """Return the messages of a subscriber with a session, which the first call starts."""
    heard: list[int] = []
    subscribed = threading.Event()
    client = paho.Client(CallbackAPIVersion.VERSION2, client_id="auditor", clean_session=False)
    client.on_message = lambda _client, _data, message: heard.append(json.loads(message.payload)["seq"])
    client.on_subscribe = lambda *_: subscribed.set()
    client.connect("127.0.0.1", broker.port)
    client.subscribe(HIST, qos=1)
    wait_until(lambda: client.loop(0.05) or subscribed.is_set(), "the broker knows the session")
    quiet_until = time.monotonic() + 0.3
    while time.monotonic() < quiet_until:
        before = len(heard)
        client.loop(0.05)
        if len(heard) > before:
            quiet_until = time.monotonic() + 0.3
    client.disconnect()
    return heard


def test_a_hint_is_passed_on_once_although_the_broker_sends_it_at_each_connection(
    tmp_path: Path, broker: Broker
) -> None:
    device = ForwardingDevice(tmp_path, broker.settings, hint_topic="edgert/hint/stable")
    publisher = Connection(broker.settings)
    device.start()
    try:
        for number in (1, 2):
            publisher.open()
            publisher.publish("edgert/hint/stable", b"%d" % number, 0, retain=True)
            publisher.close()
            wait_until(lambda: device.hints == number, f"hint {number}")  # noqa: B023
        broker.stop()
        broker.start()
        publisher.open()
        publisher.publish("edgert/hint/stable", b"2", 0, retain=True)
        publisher.close()
        wait_until(lambda: "connected" in device.said[-1] and len(device.said) >= 3, "it is connected again")
        assert device.hints == 2
    finally:
        device.stop()


def test_a_flood_of_hints_is_passed_on_as_a_few_hints(tmp_path: Path, broker: Broker) -> None:
    device = ForwardingDevice(tmp_path, broker.settings, hint_topic="edgert/hint/stable")
    publisher = Connection(broker.settings)
    device.start()
    try:
        wait_until(lambda: device.said and "connected" in device.said[-1], "it is connected")
        publisher.open()
        for number in range(400):
            publisher.publish("edgert/hint/stable", b"%d" % number, 0)
            publisher.pump(0.0)
        device.append(1)
        wait_until(lambda: device.hints > 0 and not device.spool.stats().rows, "a hint is passed on, a report is sent")
        assert device.hints < 100
    finally:
        publisher.close()
        device.stop()


@pytest.mark.parametrize("protocol", ["5", "3.1.1"])
@pytest.mark.parametrize("limit", ["max_packet_size", "message_size_limit"])
def test_a_message_that_is_too_large_for_the_broker_does_not_delay_others(
    tmp_path: Path, limit: str, protocol: str
) -> None:
    with Broker.in_folder(tmp_path / "broker", extra=(f"{limit} 2000",)) as broker:
        device = ForwardingDevice(tmp_path, replace(broker.settings, protocol=protocol))
        device.append(3)
        device.spool.append("hist/digits", HIST, lambda seq: {"v": 1, "seq": seq, "x": "y" * 3000}, 1, "hist")
        device.append(30)
        listener = Listener(broker.settings)
        device.start()
        wait_until(lambda: set(listener.seqs()) == {*range(1, 35)} - {4}, "all but the large one")
        wait_until(lambda: device.spool.stats().rows <= 1, "they are acknowledged")
        device.stop()
        listener.stop()
    lost = (limit, protocol) == ("message_size_limit", "3.1.1")  # the broker acknowledges it and drops it
    assert device.spool.stats().rows == (0 if lost else 1)
    assert sum("does not accept a message of 30" in line for line in device.said) == (0 if lost else 1), device.said


def test_a_message_that_was_held_back_for_a_bad_link_arrives_after_the_next_message(
    tmp_path: Path, broker: Broker
) -> None:
    device, listener = ForwardingDevice(tmp_path, broker.settings), Listener(broker.settings)
    device.append(3)
    (first,) = device.spool.take(1)
    device.forwarder._hold(first)
    device.start()
    try:
        wait_until(lambda: device.spool.stats().rows == 0, "all are acknowledged")
        wait_until(lambda: len(listener.payloads(HIST)) == 3, "all have arrived")
        assert first.payload in listener.payloads(HIST)
    finally:
        device.stop()
        listener.stop()


def test_a_message_that_a_full_spool_lost_meanwhile_is_not_held_back(tmp_path: Path) -> None:
    device = ForwardingDevice(tmp_path, MqttSettings("127.0.0.1", free_port()), clock=lambda: 0.0)
    device.append(2)
    first, second = device.spool.take(2)
    device.spool.delete_acknowledged([first.id])
    for lost in (first, replace(second, id=second.id + 1)):
        for _ in range(HANG_UPS_MAX):
            device.forwarder._in_flight = {1: lost}
            device.forwarder._hold_back_suspect()
    assert device.said == []
