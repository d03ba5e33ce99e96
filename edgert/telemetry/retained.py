"""Sets and clears retained messages at the broker, so that no subscriber sees a removed device."""

from __future__ import annotations

import time
from collections.abc import Mapping

from edgert.telemetry.mqtt import BrokerRefused, BrokerUnreachable, Connection, MqttSettings

ANSWERS_WITHIN_S = 10.0


def retain(settings: MqttSettings, payloads: Mapping[str, bytes], client_id: str = "") -> None:
    """Let the broker retain a payload for each topic; b"" clears a retained message.

    With MQTT 3.1.1, a broker does not report that its access list refuses a message. Raises BrokerRefused,
    BrokerUnreachable, BrokerTlsFailed.
    """
    waiting: set[int] = set()
    refusals: list[str] = []

    def acknowledged(number: int, refused_because: str | None) -> None:
        waiting.discard(number)
        refusals.extend([] if refused_because is None else [refused_because])

    connection = Connection(settings, client_id, on_acknowledged=acknowledged)
    connection.open()
    try:
        for topic, payload in payloads.items():
            number = connection.publish(topic, payload, 1, retain=True)
            if number is not None:
                waiting.add(number)
        until = time.monotonic() + ANSWERS_WITHIN_S
        while waiting and time.monotonic() < until:
            connection.pump(0.05)
    finally:
        connection.close()
    if waiting:
        raise BrokerUnreachable(f"the broker {settings.address} acknowledged nothing for {ANSWERS_WITHIN_S:.0f} s")
    if refusals:
        raise BrokerRefused(
            f"the broker {settings.address} refuses the messages: {refusals[0]}; let this user write them "
            "(an access list: docs/telemetry.md)"
        )
