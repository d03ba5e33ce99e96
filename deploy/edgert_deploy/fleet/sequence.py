"""Which messages of a stream are new and which never came, by their `seq`, which grows by one."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

GAPS_MAX = 1_000  # of one stream, in memory; a number from an older gap counts as repeated
# A longer jump is a counter that restarted after a lost spool, not that many lost messages.
SEQ_JUMP_MAX = 2**31


def begun_anew(seq: int, last: int) -> bool:
    """Return whether `seq`, which came after `last`, is of another spool. A new spool draws its first number at random."""
    return abs(seq - last) > SEQ_JUMP_MAX


def in_order(seqs: Sequence[int]) -> list[int]:
    """Return `seqs`, all different, in the order they were sent: ascending, and the spool that came first before others."""
    came = {seq: n for n, seq in enumerate(seqs)}
    spools: list[list[int]] = []
    for seq in sorted(seqs):
        if not spools or begun_anew(seq, spools[-1][-1]):
            spools.append([])
        spools[-1].append(seq)
    return [seq for spool in sorted(spools, key=lambda spool: min(came[seq] for seq in spool)) for seq in spool]


class SeqTracker:
    """Tells new messages of one stream and boot from repeated ones, and counts what never came.

    Counting begins with the first message: numbers before it are neither new nor missing.
    """

    __slots__ = ("_gaps", "_last", "missing", "restarts")

    def __init__(self) -> None:
        self.restarts = self.missing = 0
        self._last: int | None = None
        # First and end of each gap, ascending. Most streams never have one, and an empty list takes memory.
        self._gaps: list[tuple[int, int]] | None = None

    @property
    def lost_min(self) -> int:
        """How many were lost at least. A lost spool held an unknown number, and counts as one."""
        return self.missing + self.restarts

    def is_new(self, seq: int) -> bool:
        """Return whether `seq` did not come before; remembers it."""
        last = self._last
        if last is not None and seq == last + 1:
            self._last = seq
            return True
        if last is None or begun_anew(seq, last):
            self.restarts += last is not None
            self._last = seq
            self._gaps = None
            return True
        if seq > last:
            self._add_gap(last + 1, seq)
            self._last = seq
            return True
        return self._fills_a_gap(seq)

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
