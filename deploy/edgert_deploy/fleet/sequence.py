"""Which messages of a stream are new, and which never came, by the `seq` that grows by one with each."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

GAPS_MAX = 1_000  # of one stream, in memory; a number that comes from an older one counts as repeated
# A jump this far is a counter begun anew after a lost spool, not as many lost messages.
SEQ_JUMP_MAX = 2**31


def begun_anew(seq: int, last: int) -> bool:
    """Whether `seq`, heard after `last`, is of another spool. Numbers are drawn at random then, so either may be larger."""
    return abs(seq - last) > SEQ_JUMP_MAX


def in_order(seqs: Sequence[int]) -> list[int]:
    """`seqs`, all different, as they were sent: ascending, and of several spools the one that came first."""
    came = {seq: n for n, seq in enumerate(seqs)}
    spools: list[list[int]] = []
    for seq in sorted(seqs):
        if not spools or begun_anew(seq, spools[-1][-1]):
            spools.append([])
        spools[-1].append(seq)
    return [seq for spool in sorted(spools, key=lambda spool: min(came[seq] for seq in spool)) for seq in spool]


class SeqTracker:
    """Tells new messages of one stream and boot from repeated ones, and counts what never came.

    Counting begins with the first message seen: what was sent before is not held against anyone. `late` of the
    numbers before it are still new should they come, as where several listeners put their parts together.
    """

    __slots__ = ("_before", "_first", "_gaps", "_last", "_late", "missing", "restarts")

    def __init__(self, late: int = 0) -> None:
        self.restarts = self.missing = 0
        self._last: int | None = None
        self._late, self._first, self._before = late, 0, 0
        # First and end of each stretch that has not come, ascending. Most streams never have one, and an empty list
        # takes memory.
        self._gaps: list[tuple[int, int]] | None = None

    @property
    def lost_min(self) -> int:
        """How many were lost at least: a spool that was lost held nobody knows how many, and counts as one."""
        return self.missing + self.restarts

    def is_new(self, seq: int) -> bool:
        """Whether `seq` was not seen before; remembers it."""
        last = self._last
        if last is not None and seq == last + 1:
            self._last = seq
            return True
        if last is None or begun_anew(seq, last):
            self.restarts += last is not None
            self._last = self._first = seq
            self._gaps = None
            self._before = (1 << self._late) - 1  # bit n: the number n + 1 before the first has not come
            return True
        if seq > last:
            self._add_gap(last + 1, seq)
            self._last = seq
            return True
        return self._fills_a_gap(seq) or self._came_before_the_first(seq)

    def _came_before_the_first(self, seq: int) -> bool:
        bit = 1 << (self._first - seq - 1) if 0 < self._first - seq <= self._late else 0
        new = bool(self._before & bit)
        self._before &= ~bit
        return new

    def _add_gap(self, first: int, end: int) -> None:
        gaps = self._gaps = self._gaps or []
        gaps.append((first, end))
        self.missing += end - first
        del gaps[:-GAPS_MAX]

    def _fills_a_gap(self, seq: int) -> bool:
        gaps = self._gaps or []
        at = bisect_right(gaps, seq, key=lambda gap: gap[0]) - 1
        if at < 0 or seq >= gaps[at][1]:
            return False
        first, end = gaps[at]
        gaps[at : at + 1] = [gap for gap in ((first, seq), (seq + 1, end)) if gap[0] < gap[1]]
        self.missing -= 1
        del gaps[:-GAPS_MAX]
        return True
