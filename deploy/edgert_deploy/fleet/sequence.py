"""Finds new and missing messages of a stream. Their `seq` grows by one with each message."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

BOOTS_KEPT_MAX = 16
GAPS_MAX = 1_000  # the maximum number of gaps of a stream in memory; a message from an older gap is treated as repeated
# A longer jump does not mean lost messages. It means that the device lost its spool, and began a new spool.
SEQ_JUMP_MAX = 2**31


def is_new_spool(seq: int, last: int) -> bool:
    """Return whether `seq` is from another spool than `last`. A spool begins with a random number."""
    return abs(seq - last) > SEQ_JUMP_MAX


def in_order(seqs: Sequence[int]) -> list[int]:
    """Return each number once, in the order in which the numbers were sent.

    The numbers of a spool ascend. The spools are in the order of their first numbers in `seqs`.
    """
    came = {seq: n for n, seq in enumerate(seqs)}
    spools: list[list[int]] = []
    for seq in sorted(seqs):
        if not spools or is_new_spool(seq, spools[-1][-1]):
            spools.append([])
        spools[-1].append(seq)
    return [seq for spool in sorted(spools, key=lambda spool: min(came[seq] for seq in spool)) for seq in spool]


class SeqTracker:
    """Finds new and repeated messages of one stream and boot, and counts missing messages.

    Counting starts after `before`, or with the first message. Earlier numbers are neither new nor missing.
    """

    __slots__ = ("_before", "_gaps", "last", "lost_spools", "missing")

    def __init__(self, before: int | None = None) -> None:
        """`before` is the last number of the previous boot; None if it is unknown."""
        self.lost_spools = self.missing = 0
        self.last: int | None = None
        self._before = before
        # The first number and the end of each gap, in ascending order. It is None until the first gap, to save memory.
        self._gaps: list[tuple[int, int]] | None = None

    @property
    def lost_min(self) -> int:
        """The minimum number of lost reports. A lost spool counts as one report."""
        return self.missing + self.lost_spools

    def is_new(self, seq: int) -> bool:
        """Remember `seq`. Return whether it is new."""
        begins, last = self.last is None, self._before if self.last is None else self.last
        if last is not None and is_new_spool(seq, last):
            self.lost_spools += 1
            self._gaps = None
        elif last is not None and seq > last:
            if seq > last + 1:
                self._add_gap(last + 1, seq)
        elif not begins:
            return self.fill(seq)
        self.last = seq
        return True

    def _add_gap(self, first: int, end: int) -> None:
        gaps = self._gaps = self._gaps or []
        gaps.append((first, end))
        self.missing += end - first
        del gaps[:-GAPS_MAX]

    def fill(self, seq: int) -> bool:
        """Remove `seq` from the gap that contains it; return whether there is such a gap."""
        gaps = self._gaps or []
        at = bisect_right(gaps, seq, key=lambda gap: gap[0]) - 1
        if at < 0 or seq >= gaps[at][1]:
            return False
        first, end = gaps[at]
        gaps[at : at + 1] = [gap for gap in ((first, seq), (seq + 1, end)) if gap[0] < gap[1]]
        self.missing -= 1
        del gaps[:-GAPS_MAX]
        return True


class StreamTracker:
    """Finds new, repeated and missing messages of one stream, over several boots of a device.

    It remembers the last BOOTS_KEPT_MAX boots.

    A boot continues the numbers of the previous boot, so a gap between two boots also means missing reports. After a
    power cut, a boot may use the last numbers of the previous boot again.
    """

    __slots__ = ("_lost", "_trackers")

    def __init__(self) -> None:
        self._trackers: dict[str, SeqTracker] = {}
        self._lost = 0  # the lost reports of boots that are no longer remembered

    @property
    def lost_min(self) -> int:
        return self._lost + sum(tracker.lost_min for tracker in self._trackers.values())

    def is_new(self, boot: str, seq: int) -> bool:
        """Remember `seq` of this boot. Return whether it is new."""
        tracker = self._trackers.get(boot)
        others = [each for each in self._trackers.values() if each is not tracker]
        late = any(each.fill(seq) for each in others)  # a broker may delay a report beyond the next boot
        if tracker is None:
            lasts = [each.last for each in others if each.last is not None]
            near = [last for last in lasts if not is_new_spool(seq, last)]
            tracker = self._trackers[boot] = SeqTracker(max(near or lasts, default=None))
            while len(self._trackers) > BOOTS_KEPT_MAX:
                self._lost += self._trackers.pop(next(iter(self._trackers))).lost_min
        if not late:
            return tracker.is_new(seq)
        tracker.last = seq if tracker.last is None else max(seq, tracker.last)
        return True
