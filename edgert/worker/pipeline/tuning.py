"""The latency tuner: changes the batch cap and the linger to keep a model's p95 under a target.

The tuner decides once per DECISION_ANSWERS, with additive increase and multiplicative decrease. Above the target, cap
and linger shrink by a quarter; well below the target, they grow by a step. If there are too many requests, smaller
batches make requests wait longer. So a cut that does not lower the p95 is reverted, and not repeated for a while;
`state` is then `overloaded`.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from edgert.checks.status import TunerStatus

DECISION_ANSWERS = 100
SETTLING_ANSWERS = 32  # ignored after a change, because their requests were queued before the change
SHRINK = 0.75
GROW_BELOW = 0.9  # the share of the target below which cap and linger grow
HELPS_BELOW = 0.98  # a cut helped if the p95 fell below this share of the p95 before the cut
HOLD_DECISIONS = 20
LINGER_SHARE = 0.1
LINGER_STEP = 0.01


class LatencyTuner:
    """Decides the batch cap and the linger for a target of `p95_ms`. Many threads may call `add`."""

    def __init__(self, p95_ms: float, cap_max: int) -> None:
        assert p95_ms > 0, "the tuner needs a target"
        self.target_ms = p95_ms
        self.cap, self.linger_share = cap_max, LINGER_SHARE
        self.p95_ms: float | None = None
        self.state = "measuring"
        self._cap_max = cap_max
        self._mutex = threading.Lock()
        self._latencies_ns: list[int] = []
        self._settling = 0
        self._cut_from: tuple[int, float, float] | None = None  # cap, linger and p95 before the last cut
        self._hold = 0

    def add(self, latencies_ns: Iterable[int]) -> None:
        """Count latencies of answers; after each DECISION_ANSWERS, `cap` and `linger_share` may change."""
        with self._mutex:
            for latency_ns in latencies_ns:
                if self._settling:
                    self._settling -= 1
                else:
                    self._latencies_ns.append(latency_ns)
            if len(self._latencies_ns) >= DECISION_ANSWERS:
                window, self._latencies_ns = sorted(self._latencies_ns), []
                self.p95_ms = window[(95 * len(window) + 99) // 100 - 1] / 1e6
                self._decide(self.p95_ms)

    def status(self) -> TunerStatus:
        p95_ms = None if self.p95_ms is None else round(self.p95_ms, 3)
        return TunerStatus(self.target_ms, p95_ms, self.state, self.cap, round(self.linger_share, 3))

    def _decide(self, p95_ms: float) -> None:
        cut_from, self._cut_from = self._cut_from, None
        if p95_ms <= self.target_ms:
            self.state, self._hold = "holds", 0
            if p95_ms <= GROW_BELOW * self.target_ms:
                self._set(self.cap + 1, self.linger_share + LINGER_STEP)
        elif cut_from is not None and p95_ms > HELPS_BELOW * cut_from[2]:
            self.state, self._hold = "overloaded", HOLD_DECISIONS
            self._set(cut_from[0], cut_from[1])
        elif self._hold:
            self._hold -= 1
        elif self.cap > 1:
            self.state = "shrinking"
            self._cut_from = (self.cap, self.linger_share, p95_ms)
            linger = SHRINK * self.linger_share
            self._set(int(SHRINK * self.cap), linger if linger > LINGER_STEP else 0.0)
        else:
            self.state = "overloaded"

    def _set(self, cap: int, linger_share: float) -> None:
        before = (self.cap, self.linger_share)
        self.cap = max(1, min(cap, self._cap_max))
        self.linger_share = min(linger_share, LINGER_SHARE)
        if (self.cap, self.linger_share) != before:
            self._settling = SETTLING_ANSWERS
