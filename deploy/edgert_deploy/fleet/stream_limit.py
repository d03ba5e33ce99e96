"""How many streams each device began lately, so that one that makes up names fills nobody's memory, disk or Prometheus."""

from __future__ import annotations

from edgert.errors import ProtocolError

# Room for a device with a few models that starts anew every ten seconds, whose events are wanted more than any. Each
# stream costs a store some kilobytes for as long as it keeps hours.
STREAMS_MAX = 1_000
FORGOTTEN_AFTER_S = 3600.0


class Begun:
    """The streams that each device spoke of within the hour. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._streams: dict[tuple[str, str], set[tuple[str, ...]]] = {}
        self._since = float("-inf")

    def check(self, site: str, device: str, stream: tuple[str, ...], now: float) -> None:
        """Raises ProtocolError for one too many."""
        if now - self._since > FORGOTTEN_AFTER_S:
            self._streams, self._since = {}, now
        streams = self._streams.get((site, device))
        if streams is None:
            streams = self._streams[site, device] = set()
        if stream in streams:
            return
        if len(streams) >= STREAMS_MAX:
            raise ProtocolError(
                f"device {device} speaks of more than {STREAMS_MAX} boots, models, versions and events within an hour"
            )
        streams.add(stream)
