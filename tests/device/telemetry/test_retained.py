"""A real broker retains and clears messages, or the error has the reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgert.telemetry.mqtt import BrokerRefused, BrokerUnreachable, MqttSettings
from edgert.telemetry.retained import retain
from tests.support.fleet import retained
from tests.support.servers.brokers import Broker
from tests.support.servers.ports import free_port

TOPICS = ("edgert/v1/plant-a/pi-07/info", "edgert/v1/plant-a/pi-07/status")


def test_retained_messages_are_set_and_cleared(tmp_path: Path) -> None:
    with Broker.in_folder(tmp_path) as broker:
        retain(broker.settings, dict.fromkeys(TOPICS, b"{}"))
        assert set(TOPICS) <= set(retained(broker))
        retain(broker.settings, {TOPICS[0]: b""})
        assert set(TOPICS) & set(retained(broker)) == {TOPICS[1]}
        retain(broker.settings, {})


def test_a_message_that_the_broker_refuses_is_reported_with_the_next_step(tmp_path: Path) -> None:
    access = tmp_path / "access"
    access.write_text(f"topic readwrite {TOPICS[0]}\n")
    with (
        Broker.in_folder(tmp_path / "broker", extra=(f"acl_file {access}",)) as broker,
        pytest.raises(BrokerRefused, match=r"refuses the messages.*let this user write"),
    ):
        retain(broker.settings, dict.fromkeys(TOPICS, b"{}"))


def test_a_broker_that_is_down_is_unreachable() -> None:
    with pytest.raises(BrokerUnreachable):
        retain(MqttSettings("127.0.0.1", free_port()), {TOPICS[0]: b""})
