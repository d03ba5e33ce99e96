"""A limit on the streams of a device, because invented names could fill memory, disk or Prometheus."""

from __future__ import annotations

from edgert.errors import ProtocolError

# Enough for a device with a few models that restarts every ten seconds; the events of such a device are important. Each
# stream takes some kilobytes of a store, as long as the store keeps rows of hours.
STREAMS_MAX = 1_000
WINDOW_S = 3600.0


class StreamLimit:
    """Counts the streams of each device within an hour. `now` is monotonic seconds."""

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
