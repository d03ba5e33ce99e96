"""MQTT: one connection to a broker. The only file that imports paho.

Theory of operation: paho is only a codec with a socket, and the owner of the `Connection` calls it. Paho runs no thread
and stores nothing. Each attempt to connect creates a new paho client, so that paho never repeats a message by itself.
The forwarder repeats messages, because the spool still has every unacknowledged message. A Connection tries MQTT 5
first and then MQTT 3.1.1, because only the PUBACK of MQTT 5 names the reason of a refusal.

A subscriber may let the broker keep its session. The broker then keeps messages of QoS 1 while the subscriber is not
connected. With 3.1.1, the broker's own time limit applies (mosquitto: persistent_client_expiration). Only a call of
`acknowledge` acknowledges received messages; the broker sends all other messages again.
"""

from __future__ import annotations

import select
import ssl
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion, MQTTErrorCode, MQTTProtocolVersion
from paho.mqtt.packettypes import PacketTypes
from paho.mqtt.properties import Properties
from paho.mqtt.reasoncodes import ReasonCode

from edgert.bundle.expiry import time_text
from edgert.config import BrokerLogin
from edgert.errors import ConfigInvalid, EdgeRTError
from edgert.printable import endpoint
from edgert.toml_file import refuse_pipe

KEEPALIVE_S = 30
CONNECT_TIMEOUT_S = 5.0
QUEUED_MAX = 100  # paho's own limit is 65,535 messages, 165 MB
IN_FLIGHT_MAX = 20
PACKETS_AT_ONCE = 100
# The maximum number of messages that a broker may send to a session before the first acknowledgement. With 3.1.1 the
# broker alone decides (mosquitto 20, RabbitMQ 10).
UNACKNOWLEDGED_MAX = 5_000
# The largest message that a broker may send (a report has at most 64 KiB). With 3.1.1 the broker's own limit
# applies (mosquitto: message_size_limit), else 256 MB.
PACKET_BYTES_MAX = 1024 * 1024
PACKET_BYTES_END = 2**28  # every MQTT packet is smaller
TAKEN_OVER = "Session taken over"
SOON_S = 10.0
_BY_THE_CLOCK = (9, 10)  # OpenSSL's codes for a certificate that is not yet valid, or has expired
# The reason of a broker's refusal -> the permission that is missing.
_ADVICE = {
    "Retain not supported": "devices need retained messages: allow them there (mosquitto: retain_available true)",
    "QoS not supported": "reports need QoS 1: allow it there (mosquitto: max_qos 1)",
}

PROTOCOLS = {"5": MQTTProtocolVersion.MQTTv5, "3.1.1": MQTTProtocolVersion.MQTTv311}


class BrokerUnreachable(EdgeRTError, code="telemetry.broker_unreachable", exit_code=6, retryable=True):
    """No MQTT broker answers at the address, or the connection broke."""


class BrokerRefused(EdgeRTError, code="telemetry.broker_refused", exit_code=4):
    """The broker refused the connection or an operation: credentials, rights, protocol or quota."""


class BrokerTlsFailed(EdgeRTError, code="telemetry.broker_tls_failed", exit_code=4):
    """The TLS handshake failed: unknown authority, wrong name, expired certificate, or a port without TLS."""


class _UnsupportedProtocol(EdgeRTError):
    """The broker does not support the protocol version that was tried."""


@dataclass(frozen=True)
class MqttSettings(BrokerLogin):
    """The broker's address and the login. The password always comes from a file."""

    host: str
    port: int = 1883

    def __post_init__(self) -> None:
        if not self.host:
            raise ConfigInvalid("mqtt.host is empty; give the broker's name or address")
        if not 0 < self.port < 65536:
            raise ConfigInvalid(f"mqtt.port is {self.port}; give 1 to 65535")
        if self.protocol not in ("auto", *PROTOCOLS):
            raise ConfigInvalid(f"mqtt.protocol is {self.protocol!r}; known: auto, {', '.join(PROTOCOLS)}")
        if (self.ca or self.cert or self.key) and not self.tls:
            raise ConfigInvalid("a CA, a certificate and a key are for TLS: turn it on (tls = true, or --tls)")

    def password(self) -> str | None:
        """Return the first line of the password file; None if no file is named. Raises ConfigInvalid."""
        if not self.password_file:
            return None
        try:
            refuse_pipe(Path(self.password_file))
            return Path(self.password_file).read_text("utf-8-sig").split("\n")[0].rstrip("\r")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise ConfigInvalid(
                f"the broker's password file {self.password_file} cannot be read: {reason}; check its path and its mode"
            ) from error

    def tls_context(self) -> ssl.SSLContext | None:
        """Return a context that verifies the broker; None if the connection has no TLS. Raises ConfigInvalid."""
        if not self.tls:
            return None
        try:
            for name in filter(None, (self.ca, self.cert, self.key)):
                refuse_pipe(Path(name))
            context = ssl.create_default_context(cafile=self.ca or None)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            if self.cert:
                context.load_cert_chain(self.cert, self.key or None)
        except (OSError, ssl.SSLError) as error:
            named = ", ".join(name for name in (self.ca, self.cert, self.key) if name)
            raise ConfigInvalid(f"the broker's TLS files ({named}) cannot be used: {error}") from error
        return context

    @property
    def address(self) -> str:
        return endpoint(self.host, self.port)


@dataclass(frozen=True)
class Will:
    """The message that the broker publishes, retained, if this client disappears."""

    topic: str
    payload: bytes


class Connection:
    """A connection to one broker, opened and lost any number of times. Use it in one thread only.

    Args:
        client_id: The MQTT client id; "" lets the broker choose an id.
        session_s: The time for which the broker keeps a session while this client is not connected; None for no
            session. A session needs a `client_id`, and only `acknowledge` acknowledges its messages.
        on_message: `pump` calls on_message(topic, payload, retained) for each message.
        on_acknowledged: `pump` calls on_acknowledged(message_id, refused_because) for each acknowledgement;
            `refused_because` is None for a success.
    """

    def __init__(
        self,
        settings: MqttSettings,
        client_id: str = "",
        *,
        will: Will | None = None,
        session_s: int | None = None,
        on_message: Callable[[str, bytes, bool], None] = lambda topic, payload, retained: None,
        on_acknowledged: Callable[[int, str | None], None] = lambda message_id, refused_because: None,
    ) -> None:
        self.protocol = settings.protocol
        self._settings = settings
        self._client_id = client_id
        self._will = will
        self._session_s = session_s
        self._on_message = on_message
        self._on_acknowledged = on_acknowledged
        self._client: paho.Client | None = None
        self._answered: dict[int, str] = {}  # a subscription -> why the broker refused it, or ""
        self._opened_at = 0.0
        self._end_reason = ""  # the broker's reason for the end of the connection (MQTT 5)
        self.packet_bytes_max = PACKET_BYTES_END  # the longest message that this broker accepts (MQTT 5)
        self.received = 0  # messages received so far
        self._unacknowledged: deque[tuple[int, int]] = deque()  # (`received` at its receipt, message id)

    def open(self, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
        """Connect and log in. Raises BrokerUnreachable, BrokerRefused, BrokerTlsFailed or ConfigInvalid."""
        candidates = list(PROTOCOLS) if self.protocol == "auto" else [self.protocol]
        for protocol in candidates:
            try:
                self._open(protocol, timeout_s)
            except _UnsupportedProtocol as error:
                # The next attempt tries all versions again, because the broker may have been replaced.
                self.protocol = self._settings.protocol
                if protocol == candidates[-1]:
                    raise BrokerUnreachable(error.message) from error
            else:
                self.protocol = protocol
                return

    def publish(self, topic: str, payload: bytes, qos: int, *, retain: bool = False) -> int | None:
        """Send a message; return the id that the broker will acknowledge, or None if it will acknowledge none."""
        assert self._client is not None
        info = self._client.publish(topic, payload, qos, retain)
        if info.rc != paho.MQTT_ERR_SUCCESS:
            raise self._gone(info.rc)
        return None if info.is_published() else info.mid

    @property
    def unacknowledged(self) -> int:
        """The number of received messages of this session that are not acknowledged."""
        return len(self._unacknowledged)

    def acknowledge(self, up_to: int) -> None:
        """Acknowledge the first `up_to` received messages; the broker sends all other messages again."""
        assert self._client is not None
        while self._unacknowledged and self._unacknowledged[0][0] <= up_to:
            self._client.ack(self._unacknowledged.popleft()[1], 1)

    def subscribe(self, topic_filters: tuple[str, ...], qos: int) -> None:
        """Subscribe, and wait for the broker's consent. Raises BrokerRefused or BrokerUnreachable."""
        assert self._client is not None
        code, message_id = self._client.subscribe([(topic_filter, qos) for topic_filter in topic_filters])
        if code != paho.MQTT_ERR_SUCCESS:
            raise self._gone(code)
        gives_up_at = time.monotonic() + CONNECT_TIMEOUT_S
        while message_id not in self._answered:
            if time.monotonic() > gives_up_at:
                raise BrokerUnreachable(
                    f"the broker {self._settings.address} did not answer SUBSCRIBE; try again, or check its log"
                )
            self.pump(0.1)
        if reason := self._answered.pop(message_id or 0, ""):
            raise BrokerRefused(
                f"the broker {self._settings.address} refused the subscription to {', '.join(topic_filters)}: {reason}; "
                "let this user read it (an access list: docs/telemetry.md)"
            )

    def pump(self, timeout_s: float, also: Sequence[int] = ()) -> None:
        """Receive and send; wait up to `timeout_s` for the network, or for a readable descriptor of `also`.

        Raises BrokerUnreachable.
        """
        assert self._client is not None
        if also:
            self._wait(self._client, timeout_s, also)
            timeout_s = 0.0
        client, before = self._client, self.received
        code = client.loop(timeout_s)
        # paho reads one packet per call. This loop reads further packets without a `select` for each.
        for _ in range(PACKETS_AT_ONCE):
            if code != paho.MQTT_ERR_SUCCESS or self.received == before or self._client is not client:
                break
            before = self.received
            code = client.loop_read()
        if code not in (paho.MQTT_ERR_SUCCESS, paho.MQTT_ERR_AGAIN):
            raise self._gone(code)

    def close(self) -> None:
        """Disconnect normally, so that the broker drops the will. Does nothing if not connected."""
        if self._client is not None:
            self._client.disconnect()
            self.abandon()

    def abandon(self) -> None:
        """Close the socket without a DISCONNECT: the broker publishes the will."""
        client, self._client = self._client, None
        if client is not None and (socket := client.socket()) is not None:
            socket.close()

    def _wait(self, client: paho.Client, timeout_s: float, also: Sequence[int]) -> None:
        socket = client.socket()
        if socket is None or (isinstance(socket, ssl.SSLSocket) and socket.pending()):
            # `select` does not see data in the buffer of TLS
            return
        own = socket.fileno()
        select.select([own, *also], [own] if client.want_write() else [], [], timeout_s)

    def _open(self, protocol: str, timeout_s: float) -> None:
        client = self._new_client(protocol)
        self._unacknowledged.clear()  # the broker sends these messages again
        self._end_reason = ""
        answer: list[tuple[ReasonCode, Properties]] = []
        client.on_connect = lambda _client, _data, _flags, reason, said: answer.append((reason, said))
        client.connect_timeout = timeout_s
        address = self._settings.address
        try:
            client.connect(self._settings.host, self._settings.port, KEEPALIVE_S, **self._connect_properties(protocol))
        except ssl.SSLError as error:
            raise BrokerTlsFailed(_tls_advice(address, error)) from error
        except ConnectionResetError as error:
            # Most brokers close the connection after a TLS handshake on a port without TLS.
            advice = "check that this port speaks TLS (usually 8883)" if self._settings.tls else "check the port"
            raise BrokerUnreachable(f"{address} closed the connection at once: {error}; {advice}") from error
        except (OSError, ValueError) as error:
            if self._settings.tls and "handshake" in str(error):  # the broker waits for a CONNECT without TLS
                raise BrokerUnreachable(
                    f"{address} did not answer the TLS handshake within {timeout_s:g} s; check that this port speaks TLS "
                    "(usually 8883)"
                ) from error
            raise BrokerUnreachable(
                f"no broker answers at {address}: {getattr(error, 'strerror', None) or error}; check that the broker runs, "
                "and check host, port and firewall"
            ) from error
        code, gives_up_at = paho.MQTT_ERR_SUCCESS, time.monotonic() + timeout_s
        while not answer and code == paho.MQTT_ERR_SUCCESS and time.monotonic() < gives_up_at:
            code = client.loop(0.1)
        if not answer:
            # A broker without MQTT 5 may close the connection on a CONNECT of MQTT 5.
            advice = "check the port, and whether the port speaks TLS"
            if self._settings.tls and not self._settings.cert:
                advice += "; if the broker requires a client certificate, set mqtt.cert and mqtt.key"
            if self._will is not None and protocol == "3.1.1":  # 3.1.1 gives no reason
                advice += (
                    "; let the broker accept retained messages of QoS 1 (mosquitto: retain_available true, max_qos 1)"
                )
            raise _UnsupportedProtocol(f"{address} answers, but not as an MQTT {protocol} broker; {advice}")
        reason, said = answer[0]
        if reason.is_failure:
            raise self._refusal(reason)
        self.packet_bytes_max = getattr(said, "MaximumPacketSize", PACKET_BYTES_END)
        # paho's own method refuses this change while connected. The change is safe, because nothing was sent yet.
        client._max_inflight_messages = min(IN_FLIGHT_MAX, getattr(said, "ReceiveMaximum", IN_FLIGHT_MAX))
        self._client = client
        self._opened_at = time.monotonic()

    def _new_client(self, protocol: str) -> paho.Client:
        client = paho.Client(
            CallbackAPIVersion.VERSION2,
            client_id=self._client_id,
            clean_session=None if protocol == "5" else self._session_s is None,
            protocol=PROTOCOLS[protocol],
            reconnect_on_failure=False,
            manual_ack=self._session_s is not None,
        )
        client.max_queued_messages_set(QUEUED_MAX)
        client.max_inflight_messages_set(IN_FLIGHT_MAX)
        if self._settings.username:
            client.username_pw_set(self._settings.username, self._settings.password())
        if context := self._settings.tls_context():
            client.tls_set_context(context)
        if self._will:
            client.will_set(self._will.topic, self._will.payload, qos=1, retain=True)
        client.on_message = self._received
        client.on_publish = self._published
        client.on_subscribe = self._subscribed
        client.on_disconnect = self._ended
        return client

    def _connect_properties(self, protocol: str) -> dict[str, Any]:
        if protocol != "5":
            return {}
        properties = Properties(PacketTypes.CONNECT)  # type: ignore[no-untyped-call]  # paho's own is not annotated
        properties.MaximumPacketSize = PACKET_BYTES_MAX
        if self._session_s is None:
            return {"properties": properties}
        properties.SessionExpiryInterval = self._session_s
        properties.ReceiveMaximum = UNACKNOWLEDGED_MAX
        return {"clean_start": False, "properties": properties}

    def _received(self, _client: paho.Client, _data: object, message: paho.MQTTMessage) -> None:
        self.received += 1
        if self._session_s is not None and message.qos:
            self._unacknowledged.append((self.received, message.mid))
        try:
            topic = message.topic
        except UnicodeDecodeError as error:  # the listener refuses this topic
            topic = error.object.decode(errors="replace")
        self._on_message(topic, bytes(message.payload), message.retain)

    def _published(
        self, _client: paho.Client, _data: object, message_id: int, reason: ReasonCode, _properties: Properties
    ) -> None:
        self._on_acknowledged(message_id, str(reason) if reason.is_failure else None)

    def _subscribed(
        self, _client: paho.Client, _data: object, message_id: int, reasons: list[ReasonCode], _properties: Properties
    ) -> None:
        self._answered[message_id] = next((str(reason) for reason in reasons if reason.is_failure), "")

    def _ended(
        self,
        _client: paho.Client,
        _data: object,
        flags: paho.DisconnectFlags,
        reason: ReasonCode,
        _properties: Properties | None,
    ) -> None:
        if flags.is_disconnect_packet_from_server:
            self._end_reason = str(reason)

    def _gone(self, code: MQTTErrorCode) -> BrokerUnreachable:
        event = (
            f"ended the connection: {self._end_reason}" if self._end_reason else "is gone: " + paho.error_string(code)
        )
        # Two clients with one id end each other's connections; not every broker gives this reason.
        soon = bool(self._client_id) and time.monotonic() - self._opened_at < SOON_S
        advice = ""
        if self._end_reason == TAKEN_OVER or (soon and not self._end_reason):
            advice = (
                "; if this repeats, another client has the same id: give each device and each --session its own name"
            )
            # With 3.1.1, some brokers end the connection of a client whose message they refuse.
            advice += "" if self._end_reason else "; or the broker refuses a message: let this user write its topics"
        return BrokerUnreachable(f"the broker {self._settings.address} {event.rstrip('.')}{advice}")

    def _refusal(self, reason: ReasonCode) -> EdgeRTError:
        address, user = self._settings.address, self._settings.username
        if reason.getName() == "Unsupported protocol version":
            return _UnsupportedProtocol(f"the broker {address} refused the protocol version: {reason}")
        if reason.getName() in ("Bad user name or password", "Not authorized"):
            who = f"as {user!r}" if user else "without a user name"
            advice = "check the user name and the password file" if user else "give a user name and a password file"
            return BrokerRefused(f"the broker {address} refused the login {who}: {reason}; {advice}")
        advice = _ADVICE.get(reason.getName(), "check the broker's log and its limits")
        return BrokerRefused(f"the broker {address} refused the connection: {reason}; {advice}")


def _tls_advice(address: str, error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        advice = "give the CA that signed it (ca), and the host name in the certificate"
        if error.verify_code in _BY_THE_CLOCK:
            advice = f"this machine's clock says {time_text(time.time())}: set it, or renew the certificate"
        return f"the broker {address} has a certificate that is not trusted: {error.verify_message}; {advice}"
    return f"TLS with the broker {address} failed: {error}; check that this port speaks TLS (usually 8883)"
