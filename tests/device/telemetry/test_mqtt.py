"""Connections to brokers: the message of each refusal, the protocol, and refused settings."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from edgert.errors import ConfigInvalid
from edgert.telemetry.mqtt import BrokerRefused, BrokerTlsFailed, BrokerUnreachable, Connection, MqttSettings, Will
from tests.support.devices import WAIT_S_MAX
from tests.support.servers.brokers import Broker
from tests.support.servers.ports import free_port


def test_a_wrong_password_is_refused_with_the_next_step(tmp_path: Path, secured: Broker) -> None:
    wrong = tmp_path / "password"
    wrong.write_text("wrong\n")
    with pytest.raises(BrokerRefused, match="password file"):
        Connection(replace(secured.settings, password_file=str(wrong))).open()


def test_the_refusal_of_a_login_without_a_user_name_asks_for_a_user_name(secured: Broker) -> None:
    with pytest.raises(BrokerRefused, match=r"without a user name.*give a user name and a password file"):
        Connection(replace(secured.settings, username="", password_file="")).open()


def test_a_certificate_of_an_unknown_authority_is_refused(secured: Broker) -> None:
    with pytest.raises(BrokerTlsFailed, match="not trusted"):
        Connection(replace(secured.settings, ca="")).open()


def test_the_error_about_a_certificate_that_is_not_yet_valid_names_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of a board without a battery starts in 1970."""
    monkeypatch.setattr("tests.support.servers.brokers.BEGUN", timedelta(days=-1))
    with (
        Broker.in_folder(tmp_path / "broker", secured=True) as early,
        pytest.raises(BrokerTlsFailed, match=r"not yet valid; this machine's clock says 20.*Z: set it"),
    ):
        Connection(early.settings).open()


def test_the_error_of_tls_to_a_port_without_tls_names_tls(broker: Broker) -> None:
    with pytest.raises((BrokerTlsFailed, BrokerUnreachable), match="TLS"):
        Connection(replace(broker.settings, tls=True)).open()


def test_the_error_of_plain_mqtt_to_a_port_with_tls_names_tls(secured: Broker) -> None:
    plain = MqttSettings("127.0.0.1", secured.port)
    with pytest.raises(BrokerUnreachable, match="whether the port speaks TLS"):
        Connection(plain).open()


def test_a_port_where_nothing_listens_is_unreachable() -> None:
    with pytest.raises(BrokerUnreachable, match="no broker answers"):
        Connection(MqttSettings("127.0.0.1", free_port())).open()


@pytest.mark.parametrize("answer", [b"\x20\x02\x00\x01", b""], ids=["refuses-the-version", "hangs-up"])
def test_a_client_speaks_mqtt_3_1_1_to_a_broker_that_does_not_know_mqtt_5(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        levels: list[int] = []

        def serve() -> None:
            for reply in (answer, b"\x20\x02\x00\x00"):
                client, _ = server.accept()
                levels.append(client.recv(1024)[8])  # the byte after the name `MQTT` is the protocol level
                client.sendall(reply)
                if reply != b"\x20\x02\x00\x00":
                    client.close()
            client.recv(1024)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        connection = Connection(MqttSettings("127.0.0.1", server.getsockname()[1]))
        connection.open()
        assert connection.protocol == "3.1.1"
        connection.close()
        thread.join(WAIT_S_MAX)
    assert levels == [5, 4]


def test_the_error_of_tls_to_a_port_that_waits_names_tls() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        pytest.raises(BrokerUnreachable, match=r"did not answer the TLS handshake within 0.3 s; .*speaks TLS"),
    ):
        Connection(MqttSettings("127.0.0.1", server.getsockname()[1], tls=True)).open(0.3)


def test_the_settings_can_demand_one_version_of_mqtt(broker: Broker) -> None:
    connection = Connection(replace(broker.settings, protocol="3.1.1"))
    connection.open()
    assert connection.protocol == "3.1.1"
    connection.close()


@pytest.mark.parametrize(
    "settings", [{"host": ""}, {"host": "h", "port": 0}, {"host": "h", "protocol": "4"}, {"host": "h", "ca": "ca.pem"}]
)
def test_settings_that_cannot_be_used_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ConfigInvalid):
        MqttSettings(**settings)  # type: ignore[arg-type]  # wrong values on purpose


def test_a_password_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="nowhere cannot be read: No such file or directory; check its path"):
        MqttSettings("h", username="u", password_file=str(tmp_path / "nowhere")).password()


def test_a_named_pipe_as_a_file_of_the_login_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    pipe = str(tmp_path / "pipe")
    with pytest.raises(ConfigInvalid, match="use a regular file"):
        MqttSettings("h", username="u", password_file=pipe).password()
    for settings in (MqttSettings("h", tls=True, ca=pipe), MqttSettings("h", tls=True, cert=pipe, key=pipe)):
        with pytest.raises(ConfigInvalid, match="use a regular file"):
            settings.tls_context()


def test_a_password_file_of_an_editor_on_windows_is_read(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("pässwörd\r\n", "utf-8-sig", newline="")
    assert MqttSettings("h", username="u", password_file=str(tmp_path / "password")).password() == "pässwörd"


@contextlib.contextmanager
def answered_by(connack: bytes) -> Iterator[tuple[Connection, socket.socket]]:
    """A connection to a broker that answers CONNECT with `connack`, and the broker's end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends: list[socket.socket] = []

        def serve() -> None:
            ends.append(server.accept()[0])
            ends[0].recv(1024)
            ends[0].sendall(connack)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        connection = Connection(MqttSettings("127.0.0.1", server.getsockname()[1], protocol="5"))
        connection.open()
        thread.join(WAIT_S_MAX)
        with ends[0] as broker:
            broker.settimeout(0.2)
            yield connection, broker
        connection.abandon()


def test_the_number_of_unacknowledged_messages_stays_within_the_limit_of_the_broker() -> None:
    with answered_by(b"\x20\x06\x00\x00\x03\x21\x00\x02") as (connection, broker):  # Receive Maximum 2
        for _ in range(5):
            connection.publish("abc", b"12345678", 1)
        for left in (3, 2, 1, 0):
            connection.pump(0.05)
            packets = [broker.recv(18)]
            with contextlib.suppress(TimeoutError):
                while True:
                    packets.append(broker.recv(18))
            assert len(packets) == (2 if left == 3 else 1)
            broker.sendall(b"\x40\x02" + packets[0][7:9])


def test_the_reason_with_which_a_broker_ends_a_connection_is_reported() -> None:
    with answered_by(b"\x20\x03\x00\x00\x00") as (connection, broker):
        broker.sendall(b"\xe0\x02\x8e\x00")

        def serve() -> None:
            for _ in range(1000):
                connection.pump(0.1)

        with pytest.raises(
            BrokerUnreachable, match="Session taken over; if this repeats, another client has the same id"
        ):
            serve()


def test_a_broker_that_has_gone_did_not_refuse_the_subscription() -> None:
    with answered_by(b"\x20\x03\x00\x00\x00") as (connection, broker):
        broker.close()
        connection.publish("a", b"", 1)
        with pytest.raises(BrokerUnreachable, match="is gone"):
            connection.subscribe(("hint",), 1)


def test_the_error_of_a_refused_subscription_names_the_reason_of_the_broker() -> None:
    with answered_by(b"\x20\x03\x00\x00\x00") as (connection, broker):
        broker.sendall(b"\x90\x04\x00\x01\x00\xa2")
        with pytest.raises(
            BrokerRefused, match=r"the subscription to edgert/v1/#: Wildcard subscription not supported"
        ):
            connection.subscribe(("edgert/v1/#",), 1)


def test_a_client_that_another_client_with_the_same_id_replaced_names_this_cause(broker: Broker) -> None:
    first, second = Connection(broker.settings, "pi"), Connection(broker.settings, "pi")
    first.open()
    second.open()

    def serve() -> None:
        for _ in range(1000):
            first.pump(0.1)

    with pytest.raises(BrokerUnreachable, match="another client has the same id"):
        serve()
    second.close()


def test_the_error_of_a_broker_without_retained_messages_or_qos_1_names_the_setting(tmp_path: Path) -> None:
    for setting in ("retain_available true", "max_qos 1"):
        word, value = setting.split()
        wrong = f"{word} {'false' if value == 'true' else 0}"
        with Broker.in_folder(tmp_path / word, extra=(wrong,)) as broker:
            connection = Connection(broker.settings, "pi", will=Will("edgert/v1/s/d/status", b"lost"))
            with pytest.raises(BrokerRefused, match=setting):
                connection.open()
            older = Connection(
                replace(broker.settings, protocol="3.1.1"), "pi", will=Will("edgert/v1/s/d/status", b"lost")
            )
            with pytest.raises(BrokerUnreachable, match=setting):  # the broker hangs up without a reason
                older.open()
