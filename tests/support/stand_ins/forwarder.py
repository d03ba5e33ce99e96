"""A device without a daemon, with the real spool and forwarder, and a subscriber of its messages."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from pathlib import Path

from edgert.stop import Stop
from edgert.telemetry.forwarder import Forwarder, ForwarderSettings
from edgert.telemetry.messages import Topics
from edgert.telemetry.mqtt import BrokerUnreachable, Connection, MqttSettings
from edgert.telemetry.spool import Spool
from tests.support.devices import WAIT_S_MAX

TOPICS = Topics("plant-a", "pi-07")
HIST = TOPICS.hist("digits")


class ForwardingDevice:
    """A spool and its forwarder in a thread, with short pauses between retries."""

    def __init__(
        self,
        folder: Path,
        settings: MqttSettings,
        rate_per_s: float = 200.0,
        home_assistant: str = "",
        topics: Topics = TOPICS,
        clock: Callable[[], float] = time.monotonic,
        hint_topic: str = "",
    ) -> None:
        self.spool = Spool(folder / "telemetry.db")
        self.said: list[str] = []
        self.hints = 0
        self._stop = Stop()
        self.forwarder = Forwarder(
            ForwarderSettings(
                settings,
                topics,
                "b1",
                info={"edgert_version": "0.1.0"},
                home_assistant=home_assistant,
                hint_topic=hint_topic,
                rate_per_s=rate_per_s,
                retry_pauses_s=(0.05, 0.2),
            ),
            self.spool,
            sys_fields=lambda: {"temp_c": 40.5},
            on_hint=self._hinted,
            clock=clock,
            log=self.said.append,
        )
        self._thread = threading.Thread(target=lambda: self.forwarder.run(self._stop), daemon=True)

    def _hinted(self) -> None:
        self.hints += 1

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(WAIT_S_MAX)
        assert not self._thread.is_alive()

    def append(self, count: int = 1) -> None:
        append_to(self.spool, count)


def append_to(spool: Spool, count: int) -> None:
    for _ in range(count):
        spool.append("hist/digits", HIST, lambda seq: {"v": 1, "seq": seq}, 1, "hist")


class Listener:
    """A subscriber of everything; `heard` holds (topic, payload, retained) in order of arrival."""

    def __init__(self, settings: MqttSettings, *topics: str) -> None:
        topics = topics or ("edgert/v1/#",)
        self.heard: list[tuple[str, bytes, bool]] = []
        self._connection = Connection(settings, on_message=lambda *message: self.heard.append(message))
        self._connection.open()
        self._connection.subscribe(topics, qos=1)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._connection.pump(0.05)
            self._connection.close()
        except BrokerUnreachable:
            pass  # the test stopped the broker

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(WAIT_S_MAX)

    def payloads(self, topic: str) -> list[bytes]:
        return [payload for heard, payload, _ in self.heard if heard == topic]

    def seqs(self) -> list[int]:
        """Return the numbers of the reports. The first report that arrived has the number 1."""
        numbers = [json.loads(payload)["seq"] for payload in self.payloads(HIST)]
        return [number - numbers[0] + 1 for number in numbers]
