"""A subscriber: passes the messages of a broker to listeners, such as a recorder or an exporter."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from edgert.backoff import Backoff, doubling
from edgert.errors import EdgeRTError
from edgert.telemetry import messages
from edgert.telemetry.mqtt import BrokerUnreachable, Connection, MqttSettings

RETRY_PAUSES_S = doubling(1.0, 15.0)
STABLE_AFTER_S = 10.0
CONNECTED_AGAIN = "connected again"
QUIET_S = 0.02
PUMP_S_MAX = 60.0  # a system call refuses very long waits


class Listener(Protocol):
    """Receives the messages of a subscriber."""

    def apply(self, topic: str, payload: bytes, retained: bool, now: float) -> object: ...


class FleetSubscriber:
    """Passes every message of a fleet to each listener.

    The first connection must succeed. After a loss, the subscriber connects again.
    """

    def __init__(
        self,
        settings: MqttSettings,
        listeners: Sequence[Listener],
        site: str | None = None,
        *,
        client_id: str = "",
        session_s: int | None = None,
        handled: Callable[[], int] = lambda: 0,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        """Prepare a connection; `open` connects.

        Args:
            site: The site whose messages are received; None for every site.
            client_id: The client's name at the broker; "" lets the broker choose.
            session_s: The time for which the broker keeps messages after a lost connection; None for no session.
            handled: Returns how many messages, counted from the first, are handled: the broker may drop them.
            log: Receives a line about each loss and each new connection.
        """
        self._listeners = listeners
        self._filters = messages.subscriptions(site)
        self._log = log
        self._connection = Connection(settings, client_id, session_s=session_s, on_message=self._received)
        self._handled = handled
        self._backoff, self._again_at = Backoff(RETRY_PAUSES_S, STABLE_AFTER_S), 0.0
        self._connected = False

    def open(self) -> None:
        """Connect and subscribe. Raises BrokerUnreachable, BrokerRefused, BrokerTlsFailed or ConfigInvalid."""
        self._backoff.started()
        self._connection.open()
        self._connection.subscribe(self._filters, qos=1)
        self._connected = True

    def listen(self, seconds: float) -> None:
        """Apply the messages that arrive within `seconds`. Connect again if the connection is lost.

        Returns early if the broker waits for acknowledgements before it sends more messages.
        """
        ends_at, began = time.monotonic() + seconds, self._connection.received
        while (left := ends_at - time.monotonic()) > 0:
            try:
                if not self._connected and (pause_s := self._again_at - time.monotonic()) > 0:
                    time.sleep(min(left, pause_s))
                    continue
                if not self._connected:
                    self.open()
                    self._log(CONNECTED_AGAIN)
                if self._pump(left, began):
                    return
            except EdgeRTError as error:
                self._lost(error)

    def close(self) -> None:
        if self._connected:
            self._connection.acknowledge(self._handled())
        self._connection.close()

    def _pump(self, left_s: float, began: int) -> bool:
        """Serve the network once. Return whether unacknowledged messages keep the broker from sending more.

        `began` is the number of messages that had arrived before.
        """
        connection, before = self._connection, self._connection.received
        connection.pump(min(left_s, QUIET_S if connection.unacknowledged else PUMP_S_MAX))
        connection.acknowledge(self._handled())
        return connection.unacknowledged > 0 and connection.received == before > began

    def _lost(self, error: EdgeRTError) -> None:
        self._connection.abandon()
        if self._connected or not isinstance(error, BrokerUnreachable):
            self._log(f"{error.message}; retrying")
        self._connected = False
        self._again_at = time.monotonic() + self._backoff.failed()

    def _received(self, topic: str, payload: bytes, retained: bool) -> None:
        now = time.monotonic()
        for listener in self._listeners:
            listener.apply(topic, payload, retained, now)
