"""Sends a device's reports from the spool to the broker, through one connection at a time.

Several processes write to the spool, and none of them notifies the forwarder. So the forwarder checks the spool for
changes once a second. A check costs about 0.1 ms of processor time.
"""

from __future__ import annotations

import contextlib
import random
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from edgert.backoff import Backoff, doubling
from edgert.errors import EdgeRTError, StorageFailed
from edgert.names import checked_id
from edgert.stop import Stop
from edgert.telemetry import messages
from edgert.telemetry.broker_connection import CONNECTED, REFUSED, STOPPED, write_broker_connection
from edgert.telemetry.held_back import HeldBack
from edgert.telemetry.home_assistant import discovery, discovery_topic
from edgert.telemetry.messages import Topics
from edgert.telemetry.mqtt import (
    IN_FLIGHT_MAX,
    KEEPALIVE_S,
    BrokerRefused,
    BrokerUnreachable,
    Connection,
    MqttSettings,
    Will,
)
from edgert.telemetry.spool import Spool, Spooled, SpoolStats

RATE_PER_S = 200.0
BURST_MAX = 50
ACK_TIMEOUT_S = 60.0
REFUSED_RETRY_S = 300.0
SPOOL_CHECK_S = 1.0  # the pause between two checks of the spool
RETRY_PAUSES_S = doubling(1.0, 60.0)
STABLE_AFTER_S = 10.0
PUBLISH_BYTES = 16  # the maximum number of bytes of a packet besides its topic and payload
# After this time, a broker has certainly dropped a cut connection (1.5 keepalives, MQTT 3.1.2.10) and published `lost`.
# One broker does this before it accepts the new connection. The nodes of a broker cluster may do it after `online`.
ONLINE_AGAIN_S = 2 * KEEPALIVE_S
DRAIN_ON_STOP_S = 0.7
GOODBYE_S = 0.4
SYS_INTERVAL_S = 60.0
HINT_BYTES_MAX = 64
HINT_PAUSE_S = 2.0  # the shortest time between two hints that are passed on: the daemon's answer may delay the reports


@dataclass(frozen=True)
class ForwarderSettings:
    """The broker, and the device's messages to it.

    Attributes:
        info: The fields of the retained message about the device.
        home_assistant: The prefix of the discovery message; "" for no such message.
        hint_topic: The topic of hints, which are not trusted; "" for no hints.
    """

    broker: MqttSettings
    topics: Topics
    boot: str
    info: Mapping[str, object]
    sys_interval_s: float = SYS_INTERVAL_S
    home_assistant: str = ""
    hint_topic: str = ""
    rate_per_s: float = RATE_PER_S
    retry_pauses_s: Sequence[float] = RETRY_PAUSES_S

    def __post_init__(self) -> None:
        checked_id("boot", self.boot)


class Forwarder:
    """Sends one device's reports from the spool to the broker and updates the device's `status` message.

    An unreachable broker is no error. `run` tries again until it must stop. The pause before each attempt grows and has
    jitter. `run` logs each change once. `sys_fields` returns the machine's fields of the `sys` message. `on_hint` is
    called when the hint has changed, at most once in HINT_PAUSE_S.
    """

    def __init__(
        self,
        settings: ForwarderSettings,
        spool: Spool,
        *,
        sys_fields: Callable[[], Mapping[str, object]] = dict,
        on_hint: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._settings = settings
        self._topics = settings.topics
        self._spool = spool
        self._sys_fields = sys_fields
        self._on_hint = on_hint
        self._hint = b""
        self._hint_changed = False
        self._hint_due_at = clock()
        self._backoff = Backoff(settings.retry_pauses_s, STABLE_AFTER_S, clock)
        self._clock = clock
        self._log = log
        self._address = settings.broker.address
        self._state = ""
        self._held = HeldBack()
        self._connection = Connection(
            settings.broker,
            self._topics.client_id,
            will=Will(self._topics.status, b"lost"),
            on_message=self._note_hint,
            on_acknowledged=self._acknowledged,
        )
        self._reset()

    def run(self, stop: Stop) -> None:
        """Forward until `stop` is set; then return within DRAIN_ON_STOP_S + GOODBYE_S.

        An attempt to connect delays the return. The forwarder sleeps until the broker sends something, or until the
        next check of the spool or the next message is due.
        """
        while not stop.is_set():
            self._backoff.started()
            try:
                self._connection.open()
                self._announce()
                self._forward_until(stop)
                self._end()
            except EdgeRTError as error:
                self._connection.abandon()
                self._hold_back_suspect()
                self._note(error.code, f"{error.message}; reports stay on disk until the next connection")
                # Two devices with the same id disconnect each other at once, so a pause is also needed after a
                # connection. Half of the pause is random, so that a fleet does not reconnect in one wave.
                select.select([stop], [], [], self._backoff.failed() * random.uniform(0.5, 1.0))

    def _reset(self) -> None:
        """Forget the messages in flight on the last connection; the spool still has these messages."""
        self._last_id = 0
        self._slots_version = 0
        self._file = self._spool.file_id
        self._in_flight: dict[int, Spooled | None] = {}  # None: a message that is not in the spool
        self._acknowledged_ids: list[int] = []
        self._refused_at: float | None = None  # the time of a refusal; None once the refused messages are sent again
        self._refused = False  # whether the broker refuses messages; False once it accepts one of them
        self._progress_at = self._refilled_at = self._clock()
        self._tokens = float(BURST_MAX)
        self._sys_due_at = self._clock()
        self._online_again_at: float | None = None

    def _hold_back_suspect(self) -> None:
        """Hold a message back if the broker closed several connections after this message."""
        in_flight = (message.id for message in self._in_flight.values() if message is not None)
        message_id = self._held.note_lost_connection(in_flight, self._clock())
        self._in_flight = {}
        if message_id is not None:
            with contextlib.suppress(StorageFailed):
                for message in self._spool.take(1, message_id - 1):
                    if message.id == message_id:  # a full spool may have dropped it
                        self._hold(message)

    def _hold(self, message: Spooled) -> None:
        if self._held.add(message.id, message.topic, len(message.payload)):
            self._log(
                f"telemetry: the broker {self._address} does not accept a message of {len(message.payload)} bytes; such "
                "messages stay on disk, and are sent again a day later: let the broker accept 64 KiB "
                "(mosquitto: max_packet_size, message_size_limit) and this user's topics, then restart the daemon"
            )

    def _announce(self) -> None:
        self._reset()
        self._held.connected(self._clock())
        self._connection.publish(self._topics.info, self._payload(self._settings.info), 1, retain=True)
        self._connection.publish(self._topics.status, b"online", 1, retain=True)
        self._online_again_at = self._clock() + ONLINE_AGAIN_S
        if self._settings.hint_topic:
            try:
                self._connection.subscribe((self._settings.hint_topic,), 1)
            except BrokerRefused as error:  # without hints, the device reads its channel at its interval
                self._log(f"telemetry: {error.message}")

    def _note_hint(self, topic: str, payload: bytes, retained: bool) -> None:
        """Note a new hint. The broker sends the retained hint again at each connection."""
        if topic == self._settings.hint_topic and payload[:HINT_BYTES_MAX] != self._hint:
            self._hint = payload[:HINT_BYTES_MAX]
            self._hint_changed = True

    def _pass_on_hint(self) -> None:
        """Pass on that the hint has changed. A flood of hints must not delay the reports."""
        if self._hint_changed and self._clock() >= self._hint_due_at:
            self._hint_changed = False
            self._on_hint()
            self._hint_due_at = self._clock() + HINT_PAUSE_S

    def _forward_until(self, stop: Stop) -> None:
        while not stop.is_set():
            self._pass_on_hint()
            more = self._step()
            idle_s = max(0.0, min(SPOOL_CHECK_S, self._sys_due_at - self._clock()))
            self._connection.pump(1 / self._settings.rate_per_s if more else idle_s, (stop.fileno(),))
        gives_up_at = self._clock() + DRAIN_ON_STOP_S
        while self._clock() < gives_up_at and (self._step() or self._in_flight):
            self._connection.pump(0.02)

    def _step(self) -> bool:
        """Send the messages that are due; return True if only the rate limit prevents further messages.

        A disk error does not end the connection: without a spool, the device still reports that it is online.
        """
        try:
            more = self._send_due()
        except StorageFailed as error:
            self._note(error.code, error.message)
            return False
        if not self._refused:
            self._note(CONNECTED, f"connected to {self._address} (MQTT {self._connection.protocol})")
        return more

    def _send_due(self) -> bool:
        now = self._clock()
        if now >= self._sys_due_at:
            self._sys_due_at = now + self._settings.sys_interval_s
            self._connection.publish(self._topics.sys, self._payload(self._sys_now()), 0)
        if self._online_again_at is not None and now >= self._online_again_at:
            self._online_again_at = None
            self._connection.publish(self._topics.status, b"online", 1, retain=True)
        if self._acknowledged_ids:
            self._spool.delete_acknowledged(self._acknowledged_ids)
            self._acknowledged_ids = []
        self._send_slots()
        if self._in_flight and now - self._progress_at > ACK_TIMEOUT_S:
            raise BrokerUnreachable(f"the broker {self._address} has acknowledged nothing for {ACK_TIMEOUT_S:.0f} s")
        if self._refused_at is not None and now - self._refused_at > REFUSED_RETRY_S:
            self._refused_at = None
            self._last_id = 0
        return self._send(now)

    def _send_slots(self) -> None:
        slots = self._spool.retained(self._topics.deploy, self._slots_version)
        if self._spool.file_id != self._file:
            self._file = self._spool.file_id
            self._last_id = self._slots_version = 0
            slots = self._spool.retained(self._topics.deploy)
        if slots is None:
            return
        self._slots_version = slots.version
        self._connection.publish(self._topics.deploy, slots.payload, 1, retain=True)
        if prefix := self._settings.home_assistant:
            models, window_s = messages.models_of(slots.payload), self._settings.sys_interval_s
            topic, payload = discovery(self._topics, prefix, models, self._settings.info, window_s)
            self._connection.publish(topic, payload, 1, retain=True)

    def _send(self, now: float) -> bool:
        self._tokens = min(BURST_MAX, self._tokens + (now - self._refilled_at) * self._settings.rate_per_s)
        self._refilled_at = now
        free = (1 if self._held.one_at_a_time else IN_FLIGHT_MAX) - len(self._in_flight)
        allowed = min(free, int(self._tokens))
        if allowed < 1:
            return free > 0
        in_flight = {message.id for message in self._in_flight.values() if message is not None}
        batch = self._spool.take(allowed, self._last_id)
        for message in batch:
            self._last_id = message.id
            if message.id in in_flight or message.id in self._held:
                continue
            if len(message.topic) + len(message.payload) + PUBLISH_BYTES > self._connection.packet_bytes_max:
                self._hold(message)
                continue
            self._tokens -= 1
            number = self._connection.publish(message.topic, message.payload, message.qos)
            if number is None:
                self._acknowledged_ids.append(message.id)
            else:
                if not self._in_flight:
                    self._progress_at = now
                self._in_flight[number] = message
        return len(batch) == allowed < free

    def _acknowledged(self, number: int, refused_because: str | None) -> None:
        message = self._in_flight.pop(number, None)
        self._progress_at = self._clock()
        if refused_because is None:
            self._refused &= self._refused_at is not None
            if message is not None:  # status, info, sys and retained topics are not in the spool
                self._acknowledged_ids.append(message.id)
                if self._held.acknowledged(message.id, message.topic, len(message.payload)):
                    self._last_id = 0
        elif self._refused_at is None:
            self._refused_at = self._clock()
            self._refused = True
            self._note(
                REFUSED,
                f"the broker {self._address} refuses messages ({refused_because}); they stay on disk and are sent "
                f"again in {REFUSED_RETRY_S:.0f} s; let this user write (an access list: docs/telemetry.md)",
            )

    def _end(self) -> None:
        """Publish `offline`, wait briefly for the acknowledgement, and disconnect."""
        number = self._connection.publish(self._topics.status, b"offline", 1, retain=True)
        if number is not None:
            self._in_flight[number] = None
        gives_up_at = self._clock() + GOODBYE_S
        while number in self._in_flight and self._clock() < gives_up_at:
            self._connection.pump(0.05)
        self._connection.close()
        self._note(STOPPED, "stopped")

    def _sys_now(self) -> dict[str, object]:
        try:
            stats = self._spool.stats()
        except (
            StorageFailed
        ):  # without a spool, no report waits; the other fields may name the cause, such as a full disk
            stats = SpoolStats(0, 0, {})
        lost = {f"spool_lost_{kind}_total": count for kind, count in sorted(stats.lost.items())}
        waiting = {"spool_rows": stats.rows, "spool_bytes": stats.size_bytes, "spool_lost_total": stats.lost_total}
        return {**self._sys_fields(), **waiting, **lost}

    def _payload(self, values: Mapping[str, object]) -> bytes:
        common = messages.envelope(ts_ms=messages.wall_ms(), boot=self._settings.boot)
        return messages.dump({**common, **values})

    def _note(self, state: str, text: str) -> None:
        """Log a change of the connection's state and store the state for `edgertd status`."""
        if state != self._state:
            self._state = state
            write_broker_connection(self._spool.path.parent, state, text)
            self._log(f"telemetry: {text}")


def retained_topics(topics: Topics, home_assistant: str) -> list[str]:
    """Return the topics of a device whose messages the broker retains."""
    retained = [topics.status, topics.info, topics.deploy]
    return [*retained, discovery_topic(topics, home_assistant)] if home_assistant else retained
