"""A subscriber passes on the messages of a real broker. It survives the broker's restart and every odd message."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from edgert.telemetry.messages import Topics
from edgert.telemetry.mqtt import PACKET_BYTES_MAX, BrokerRefused, MqttSettings
from edgert_deploy.fleet.live_percentiles import LivePercentiles
from edgert_deploy.fleet.subscriber import RETRY_PAUSES_S, FleetSubscriber
from tests.support.devices import WAIT_S_MAX, wait_until
from tests.support.fleet import Sender, publish
from tests.support.servers.brokers import Broker


def answered(state: LivePercentiles) -> int:
    return sum(row.answered for row in state.rows(0.0) if row.device == "pi-07")


def listen_until(subscriber: FleetSubscriber, true: Callable[[], object], what: str) -> None:
    def heard() -> object:
        subscriber.listen(0.05)
        return true()

    wait_until(heard, what)


def test_a_subscriber_receives_retained_messages_and_reports_and_survives_a_restart_of_the_broker(
    broker: Broker,
) -> None:
    state, pi, said = LivePercentiles(), Sender("pi-07"), list[str]()
    publish(broker, [(pi.topics.status, b"online")], retain=True)
    subscriber = FleetSubscriber(broker.settings, [state], "plant-a", log=said.append)
    subscriber.open()
    publish(broker, [*pi.window([1.0] * 5), (Topics("plant-b", "pi-09").status, b"online")])
    listen_until(subscriber, lambda: answered(state) == 5, "the reports arrive")
    assert [(device.device, device.status) for device in state.devices.values()] == [("pi-07", "online")]

    broker.stop()
    listen_until(subscriber, lambda: said, "the loss is said")
    assert len(said) == 1
    broker.start()
    listen_until(subscriber, lambda: len(said) > 1, "it is connected again")
    assert said[1:] == ["connected again"]
    publish(broker, pi.window([1.0] * 5))
    listen_until(subscriber, lambda: answered(state) == 10, "later reports arrive")
    subscriber.close()


def test_a_lost_broker_is_asked_after_pauses_however_short_the_calls_of_listen(broker: Broker) -> None:
    subscriber, asked = FleetSubscriber(broker.settings, []), list[socket.socket]()
    subscriber.open()
    broker.stop()
    lost_s = time.monotonic()
    subscriber.listen(0.1)
    with socket.create_server(("127.0.0.1", broker.port)) as server:

        def hang_up() -> None:
            with contextlib.suppress(OSError):  # the end of the test
                while True:
                    asked.append(server.accept()[0])
                    asked[-1].close()

        threading.Thread(target=hang_up, daemon=True).start()
        listen_until(subscriber, lambda: asked, "it asks again")
        assert time.monotonic() - lost_s >= RETRY_PAUSES_S[0]
        server.shutdown(socket.SHUT_RDWR)


def test_a_very_long_time_limit_is_not_taken_for_a_lost_broker(broker: Broker) -> None:
    class Ends:
        def apply(self, *_: object) -> None:
            raise KeyboardInterrupt

    publish(broker, [(Sender("pi-07").topics.status, b"online")], retain=True)
    subscriber = FleetSubscriber(broker.settings, [Ends()], log=pytest.fail)
    subscriber.open()
    with pytest.raises(KeyboardInterrupt):
        subscriber.listen(1e17)
    subscriber.close()


def test_a_message_that_is_far_larger_than_a_report_is_not_read(broker: Broker) -> None:
    state, pi = LivePercentiles(), Sender("pi-07")
    subscriber = FleetSubscriber(broker.settings, [state])
    subscriber.open()
    publish(broker, [(pi.topics.hist("digits"), b"7" * (2 * PACKET_BYTES_MAX)), *pi.window([1.0])])
    listen_until(subscriber, lambda: answered(state), "the report behind it arrives")
    subscriber.close()
    assert (answered(state), state.refused) == (1, 0)


@contextlib.contextmanager
def scripted_broker(granted: bytes) -> Iterator[MqttSettings]:
    """Run a broker that accepts one connection, and answers its subscription with `granted` and what follows it."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            client, _ = server.accept()
            with client:
                client.recv(1024)
                client.sendall(b"\x20\x03\x00\x00\x00")
                message_id = client.recv(1024)[2:4]
                client.sendall(b"\x90\x04" + message_id + b"\x00" + granted)
                client.recv(1024)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield MqttSettings("127.0.0.1", server.getsockname()[1])
        thread.join(WAIT_S_MAX)


def test_a_topic_that_is_not_utf8_is_refused_and_the_subscriber_continues() -> None:
    # mosquitto refuses such topics, so this broker follows a script: CONNACK, SUBACK, PUBLISH, all of MQTT 5.
    topic = b"edgert/v1/plant-a/\xff\xfe/status"
    publish_packet = b"\x30" + bytes([2 + len(topic) + 1 + 6]) + len(topic).to_bytes(2, "big") + topic + b"\x00online"
    with scripted_broker(b"\x01" + publish_packet) as settings:
        state = LivePercentiles()
        subscriber = FleetSubscriber(settings, [state])
        subscriber.open()
        listen_until(subscriber, lambda: state.refused, "the topic arrives")
        subscriber.close()
    assert (state.refused, state.devices) == (1, {})
    assert "is not one of edgert/v1" in state.last_refusal


def test_a_subscription_that_the_broker_refuses_is_an_error_with_the_next_step() -> None:
    # mosquitto grants subscriptions that it then ignores, so this broker follows a script: CONNACK, SUBACK with 0x87.
    with scripted_broker(b"\x87") as settings:
        subscriber = FleetSubscriber(settings, [LivePercentiles()])
        with pytest.raises(BrokerRefused, match="let this user read it"):
            subscriber.open()
        subscriber.close()
