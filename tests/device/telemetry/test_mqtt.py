"""Connections to brokers: how each refusal reads, which protocol is spoken, which settings are refused."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from edgert.errors import ConfigInvalid
from edgert.telemetry.mqtt import BrokerRefused, BrokerTlsFailed, BrokerUnreachable, Connection, MqttSettings
from tests.support.devices import WAIT_S_MAX
from tests.support.servers.brokers import Broker
from tests.support.servers.ports import free_port


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    with Broker.in_folder(tmp_path / "broker") as running:
        yield running


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker.in_folder(tmp_path_factory.mktemp("secured"), secured=True) as running:
        yield running


def test_a_wrong_password_is_refused_with_the_next_step(tmp_path: Path, secured: Broker) -> None:
    wrong = tmp_path / "password"
    wrong.write_text("wrong\n")
    with pytest.raises(BrokerRefused, match="password file"):
        Connection(replace(secured.settings, password_file=str(wrong))).open()


def test_a_certificate_of_an_unknown_authority_is_refused(secured: Broker) -> None:
    with pytest.raises(BrokerTlsFailed, match="not trusted"):
        Connection(replace(secured.settings, ca="")).open()


def test_tls_to_a_port_without_it_is_an_error_that_says_so(broker: Broker) -> None:
    with pytest.raises((BrokerTlsFailed, BrokerUnreachable), match="TLS"):
        Connection(replace(broker.settings, tls=True)).open()


def test_no_tls_to_a_port_with_it_is_an_error_that_says_so(secured: Broker) -> None:
    plain = MqttSettings("127.0.0.1", secured.port)
    with pytest.raises(BrokerUnreachable, match="TLS or not"):
        Connection(plain).open()


def test_a_port_where_nothing_listens_is_unreachable() -> None:
    with pytest.raises(BrokerUnreachable, match="no broker answers"):
        Connection(MqttSettings("127.0.0.1", free_port())).open()


@pytest.mark.parametrize("answer", [b"\x20\x02\x00\x01", b""], ids=["refuses-the-version", "hangs-up"])
def test_a_broker_of_3_1_1_only_is_spoken_to_in_3_1_1(answer: bytes) -> None:
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


def test_one_protocol_can_be_asked_for(broker: Broker) -> None:
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
    with pytest.raises(ConfigInvalid, match="nowhere"):
        MqttSettings("h", username="u", password_file=str(tmp_path / "nowhere")).password()
