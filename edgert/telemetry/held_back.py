"""The messages that a broker does not accept, and that must not block other messages.

A broker may limit the size of a message. With MQTT 5, a broker may state the limit. Other brokers end the connection,
and would end the next connection at the same message. So the forwarder holds a message back if several connections in a
row end at this message soon after their start. After the second end, the forwarder sends messages one at a time, to
identify the message. A held-back message stays in the spool.

The connections may also have ended for another reason, such as a bad link. So the forwarder sends a held-back message
again once the broker has accepted a message of the same topic that is not shorter. If the connections end at the
message again, the forwarder sends it when the device connects a day later, or after the device's next start.
"""

from __future__ import annotations

from collections.abc import Iterable

HANG_UPS_MAX = 4
SOON_S = 10.0
RETRY_S = 86_400.0
HELD_MAX = 50_000  # a spool has no more messages


class HeldBack:
    """Identifies messages by their id in the spool. `now` is monotonic seconds."""

    def __init__(self) -> None:
        self._ids: dict[int, tuple[str, int]] = {}  # the held-back messages, each with its topic and size
        self._released: set[int] = set()  # messages that were sent again
        self._stuck_at = 0  # the message at which the last connections ended
        self._hang_ups = 0  # the number of these connections
        self._connected_at = self._held_since = 0.0

    def __contains__(self, message_id: int) -> bool:
        return message_id in self._ids

    @property
    def one_at_a_time(self) -> bool:
        return self._hang_ups > 1

    def add(self, message_id: int, topic: str, size_bytes: int) -> bool:
        """Hold a message back; return whether no other message is held back."""
        if not self._ids:
            self._held_since = self._connected_at
        self._ids[message_id] = topic, size_bytes
        if len(self._ids) > HELD_MAX:  # a full spool has dropped the oldest message
            del self._ids[next(iter(self._ids))]
        return len(self._ids) == 1

    def connected(self, now: float) -> None:
        self._connected_at = now
        if now - self._held_since > RETRY_S:
            self._ids.clear()
            self._released.clear()

    def acknowledged(self, message_id: int, topic: str, size_bytes: int) -> bool:
        """Note that the broker accepted a message; return whether held-back messages must be sent again."""
        if message_id == self._stuck_at:
            self._hang_ups = 0
        alike = {held for held, (of, size) in self._ids.items() if of == topic and size <= size_bytes}
        again = alike - self._released
        for held in again:
            del self._ids[held]
        self._released |= again
        return bool(again)

    def note_lost_connection(self, in_flight: Iterable[int], now: float) -> int | None:
        """Note that a connection ended; return the message to hold back, if there is enough evidence."""
        first = min(in_flight, default=None)
        if first is None or now - self._connected_at > SOON_S:
            return None
        self._hang_ups = self._hang_ups + 1 if first == self._stuck_at else 1
        self._stuck_at = first
        if self._hang_ups < HANG_UPS_MAX:
            return None
        self._hang_ups = 0
        return first
