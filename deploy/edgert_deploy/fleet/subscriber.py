"""A subscriber: feeds whoever listens, a `FleetState`, a recorder or an exporter, from a broker.

`status` and `info` are retained and read through a plain subscription: mosquitto before 2.0.13 hands
retained messages to shared subscriptions only some of the time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from edgert.errors import EdgeRTError
from edgert.telemetry import messages
from edgert.telemetry.mqtt import QUEUED_MAX, BrokerUnreachable, Connection, MqttSettings, Session

RETRY_MIN_S = 0.5
RETRY_MAX_S = 15.0
CONNECTED_AGAIN = "connected again"
QUIET_S = 0.02


class Listener(Protocol):
    """What a subscriber feeds."""

    def apply(self, topic: str, payload: bytes, retained: bool, now: float) -> object: ...


class FleetSubscriber:
    """Feeds a FleetState, a recorder or an exporter from a broker, for as long as it is asked to.

    It hears everything of `site`, or its share of it, and the topic filters `also`. The first connection must
    succeed; one that is lost later is made again, and `log` says so. With a `session` the broker keeps what comes
    meanwhile, and forgets a message once `settled` says that the first so many applied are dealt with.
    """

    def __init__(
        self,
        settings: MqttSettings,
        state: Listener,
        site: str | None = None,
        *,
        client_id: str = "",
        share: str | None = None,
        also: tuple[str, ...] = (),
        session: Session | None = None,
        settled: Callable[[], int] = lambda: 0,
        on_reconnected: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._state = state
        self._filters = (*messages.subscriptions(site, share), *also)
        self._clock, self._sleep, self._log = clock, sleep, log
        self._connection = Connection(
            settings, client_id, session=session, on_message=self._heard, on_acknowledged=self._arrived
        )
        self._settled, self._on_reconnected = settled, on_reconnected
        self._shares_by_mqtt_3 = share is not None
        self._under_way = 0
        self._failures = 0
        self._connected = False

    def open(self) -> None:
        """Connect and subscribe. Raises BrokerUnreachable, BrokerRefused, BrokerTlsFailed or ConfigInvalid."""
        self._under_way = 0
        self._connection.open()
        self._connection.subscribe(self._filters, qos=1)
        self._connected, self._failures = True, 0
        if self._shares_by_mqtt_3 and self._connection.protocol != "5":
            self._shares_by_mqtt_3 = False  # said once
            self._log(
                "the broker speaks MQTT 3.1.1, which knows no shared subscriptions: some brokers (RabbitMQ) grant "
                "them and deliver nothing; then leave --share out, and divide by --site"
            )

    def listen(self, seconds: float) -> None:
        """Apply what arrives within `seconds`, connecting again where the connection is lost.

        It returns early where the broker may hand out no more before something of what came is settled.
        """
        ends_at, began = self._clock() + seconds, self._connection.taken
        while (left := ends_at - self._clock()) > 0:
            try:
                if not self._connected:
                    self.open()
                    self._log(CONNECTED_AGAIN)
                    self._on_reconnected()
                if self._pump(left, began):
                    return
            except EdgeRTError as error:
                self._lost(error)
                self._sleep(max(0.0, min(ends_at - self._clock(), self._retry_delay_s())))

    @property
    def room(self) -> int:
        """How many messages may be published now, until others have arrived."""
        return max(0, QUEUED_MAX - self._under_way) if self._connected else 0

    def publish(self, topic: str, payload: bytes) -> None:
        """Send a message at QoS 1, where there is `room`. One that was lost is told by `on_reconnected`."""
        if self._connected:
            try:
                self._under_way += self._connection.publish(topic, payload, 1) is not None
            except EdgeRTError as error:
                self._lost(error)

    def close(self) -> None:
        if self._connected:
            self._connection.acknowledge(self._settled())
        self._connection.close()

    def _pump(self, left_s: float, began: int) -> bool:
        """Serve the network once; whether something came since `began`, waits to be settled, and no more comes."""
        connection, taken = self._connection, self._connection.taken
        connection.pump(min(left_s, QUIET_S) if connection.unacknowledged else left_s)
        connection.acknowledge(self._settled())
        return connection.unacknowledged > 0 and connection.taken == taken > began

    def _lost(self, error: EdgeRTError) -> None:
        self._connection.abandon()
        if self._connected or not isinstance(error, BrokerUnreachable):
            self._log(f"{error.message}; trying again")
        self._connected = False
        self._failures += 1

    def _retry_delay_s(self) -> float:
        return min(RETRY_MAX_S, RETRY_MIN_S * 2.0 ** min(self._failures, 10))

    def _arrived(self, _message_id: int, _refused_because: str | None) -> None:
        self._under_way -= 1

    def _heard(self, topic: str, payload: bytes, retained: bool) -> None:
        self._state.apply(topic, payload, retained, self._clock())
