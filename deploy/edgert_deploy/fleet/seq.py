"""Which messages of a stream are new, and which never came, by the `seq` that grows by one with each."""

from __future__ import annotations

HOLES_MAX = 10_000
# A jump this far is a counter begun anew after a lost spool, not as many lost messages.
SEQ_JUMP_MAX = 2**31


class SeqTracker:
    """Tells new messages of one stream and boot from repeated ones, and counts what never came.

    Counting begins with the first message seen: what was sent before is not held against anyone. `late` of the
    numbers before it are still new should they come, as where several listeners put their parts together.
    """

    __slots__ = ("_before", "_first", "_holes", "_holes_forgotten", "_last", "_late", "restarts")

    def __init__(self, late: int = 0) -> None:
        self.restarts = 0
        self._last: int | None = None
        self._late, self._first, self._before = late, 0, 0
        self._holes: set[int] | None = None  # most streams never have one, and an empty set takes 216 bytes
        self._holes_forgotten = 0

    @property
    def missing(self) -> int:
        return len(self._holes or ()) + self._holes_forgotten

    def is_new(self, seq: int) -> bool:
        """Whether `seq` was not seen before; remembers it."""
        last = self._last
        if last is not None and seq == last + 1:
            self._last = seq
            return True
        if last is None or abs(seq - last) > SEQ_JUMP_MAX:
            self.restarts += last is not None
            self._last = self._first = seq
            self._before = (1 << self._late) - 1  # bit n: the number n + 1 before the first has not come
            return True
        if seq > last:
            self._add_holes(last + 1, seq)
            self._last = seq
            return True
        if self._holes and seq in self._holes:
            self._holes.remove(seq)
            return True
        return self._came_before_the_first(seq)

    def _came_before_the_first(self, seq: int) -> bool:
        bit = 1 << (self._first - seq - 1) if 0 < self._first - seq <= self._late else 0
        new = bool(self._before & bit)
        self._before &= ~bit
        return new

    def _add_holes(self, first: int, end: int) -> None:
        holes = self._holes = self._holes or set()
        room = HOLES_MAX - len(holes)
        self._holes_forgotten += max(0, end - first - room)
        holes.update(range(max(first, end - room), end))
