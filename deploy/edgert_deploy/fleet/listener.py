"""A listener: decodes every message of a fleet once, and counts refused messages.

`Fleet` (live_fleet.py), the recorder and the exporter are listeners. Devices are not trusted: a listener refuses and
counts messages that break the contract (docs/telemetry.md), and messages of streams beyond the limit of a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from edgert.errors import ProtocolError
from edgert.telemetry import messages
from edgert.telemetry.messages import HistMessage, MetricsMessage, Scalar, Topic, parse_topic
from edgert_deploy.fleet import message_schemas
from edgert_deploy.fleet.reports import KINDS, EventMessage, Report, parse_report, stream_of

RETAINED = ("status", "info", "deploy")
DESCRIBED_MAX = 60_000  # the maximum number of topics whose newest time is kept
# Enough for a device with a few models that restarts every ten seconds; the events of such a device are important. Each
# stream takes some kilobytes of a store, as long as the store keeps rows of hours.
STREAMS_MAX = 1_000
WINDOW_S = 3600.0


class FleetListener:
    """Calls a method for each kind of message. A method may raise ProtocolError to refuse the message.

    `now` is monotonic seconds.
    """

    decodes_hist = True  # with False, `on_hist` receives None, which saves most of the decoding

    def __init__(self, wall_ms: Callable[[], int]) -> None:
        self.refused = 0
        self.last_refusal = ""
        self._limit = StreamLimit()
        self._wall_ms = wall_ms
        self._described: dict[Topic, tuple[str, int]] = {}  # the boot and the time of the newest description

    def apply(self, topic: str, payload: bytes, retained: bool, now: float) -> None:
        """Decode one message and call its method. Count the message if it is refused."""
        try:
            parsed = parse_topic(topic)
            if not payload and parsed.kind in RETAINED:
                self._described.pop(parsed, None)
                return self.on_cleared(parsed)
            fault = self._decode(parsed, payload, now)
            self.on_message(parsed, retained, now)
            if fault:
                raise ProtocolError(fault)
        except ProtocolError as error:
            self.refused += 1
            self.last_refusal = f"{topic[:120]}: {error.message}"

    def on_message(self, topic: Topic, retained: bool, now: float) -> None:
        """Handle an accepted message of any kind."""

    def on_cleared(self, topic: Topic) -> None:
        """Handle a cleared retained message: the device was removed."""

    def on_status(self, topic: Topic, status: str, now: float) -> None:
        """Handle the device's status: `online`, `offline` or `lost`."""

    def on_fields(self, topic: Topic, fields: Mapping[str, Scalar], now: float) -> None:
        """Handle the device's description of itself: `info`, `sys` or `deploy`."""

    def on_hist(self, topic: Topic, hist: HistMessage | None, now: float) -> None:
        """Handle a model's latencies of one window. `hist` is None if `decodes_hist` is False."""

    def on_metrics(self, topic: Topic, metrics: MetricsMessage, now: float) -> None:
        """Handle a model's figures of one window."""

    def on_event(self, topic: Topic, event: EventMessage, now: float) -> None:
        """Handle an event of the device."""

    def _decode(self, topic: Topic, payload: bytes, now: float) -> str:
        """Call the method of a message. Return the fault of an ignored part of the message, or ""."""
        if topic.kind == "status":
            self.on_status(topic, messages.parse_status(payload), now)
        elif topic.kind not in KINDS:
            fields = messages.load(payload)
            message_schemas.check(topic.kind, fields)
            if not self._is_late(topic, fields):
                self.on_fields(topic, fields, now)
        elif topic.kind == "hist" and not self.decodes_hist:
            self.on_hist(topic, None, now)
        else:
            return self._report(topic, parse_report(topic, payload), now)
        return ""

    def _is_late(self, topic: Topic, fields: Mapping[str, Scalar]) -> bool:
        """Return whether the device sent a newer message of this topic before.

        A stored time that is ahead of this host's clock is ignored, because the device's clock was wrong then.
        """
        boot, ts_ms = fields.get("boot", ""), fields.get("ts")
        if not isinstance(ts_ms, int):
            return False
        last_boot, last_ms = self._described.get(topic, ("", 0))
        if boot == last_boot and ts_ms < last_ms <= self._wall_ms():
            return True
        if topic not in self._described and len(self._described) >= DESCRIBED_MAX:
            self._described.clear()
        self._described[topic] = str(boot), ts_ms
        return False

    def _report(self, topic: Topic, report: Report, now: float) -> str:
        if not isinstance(report, HistMessage):  # HistMessage checks its own fields
            message_schemas.check(topic.kind, report.fields)
        self._limit.check(topic.site, topic.device, stream_of(topic, report), now)
        if isinstance(report, HistMessage):
            self.on_hist(topic, report, now)
            return report.stages_fault
        if isinstance(report, MetricsMessage):
            self.on_metrics(topic, report, now)
        else:
            self.on_event(topic, report, now)
        return ""


class StreamLimit:
    """A limit on the streams of each device, because invented names could fill memory, disk or Prometheus."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, str], set[tuple[str, ...]]] = {}
        self._since = float("-inf")

    def check(self, site: str, device: str, stream: tuple[str, ...], now: float) -> None:
        """Count `stream` once. Raises ProtocolError if the device has too many streams."""
        if now - self._since > WINDOW_S:
            self._streams, self._since = {}, now
        streams = self._streams.setdefault((site, device), set())
        if stream in streams:
            return
        if len(streams) >= STREAMS_MAX:
            raise ProtocolError(
                f"device {device} reports more than {STREAMS_MAX} boots, models, versions and events within an hour"
            )
        streams.add(stream)
