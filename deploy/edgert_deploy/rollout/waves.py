"""In which order a fleet gets a release: some devices first, then growing shares; and when to stop. Pure."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Any

from edgert.errors import ConfigInvalid

PARALLEL = 8
PARALLEL_MAX = 256
WAVES_MAX = 100


@dataclass(frozen=True)
class Share:
    """So many devices, or so much of all of them: exactly one of the two is given."""

    count: int | None = None
    part: float | None = None

    @classmethod
    def parse(cls, text: str) -> Share:
        """`3`, `10%` or `2.5%`. Raises ConfigInvalid."""
        match = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?)%", text.strip())
        if match and match[1]:
            return cls(count=int(match[1]))
        if match and float(match[2]) <= 100:
            return cls(part=float(match[2]) / 100)
        raise ConfigInvalid(f"{text!r} is no number of devices: give a count (3) or a share (10%)")

    def of(self, total: int) -> int:
        """How many of `total` devices, rounded up: 10 % of three devices is one."""
        if self.part is not None:
            return math.ceil(round(self.part * total, 9))
        return min(self.count or 0, total)

    def exceeded(self, failed: int, begun: int) -> bool:
        """Whether so many failures are more than this allows of the devices of the waves that have begun."""
        return failed > (self.count or 0) if self.part is None else failed > self.part * begun

    def __str__(self) -> str:
        return str(self.count) if self.part is None else f"{self.part * 100:g}%"


@dataclass(frozen=True)
class Strategy:
    """`canary` devices go first; then the waves, each the share of all that has the release when it is over.

    Between two waves the rollout waits `pause_s`. It stops where more than `failures_max` of the devices of the waves
    that have begun failed; None never stops. `parallel` devices are worked on at a time.
    """

    canary: int = 0
    waves: tuple[Share, ...] = ()
    failures_max: Share | None = None
    parallel: int = PARALLEL
    pause_s: float = 0.0

    @classmethod
    def parse(cls, canary: int, waves: str, failures_max: str | None, parallel: int, pause_s: float) -> Strategy:
        """Raises ConfigInvalid. A rollout in steps stops at the first failure unless told otherwise."""
        shares = tuple(Share.parse(word) for word in waves.split(",") if word.strip())
        if len(shares) > WAVES_MAX:
            raise ConfigInvalid(f"{len(shares)} waves; at most {WAVES_MAX} are taken")
        limit = None if failures_max is None else Share.parse(failures_max)
        if limit is None and (canary or shares):
            limit = Share(count=0)
        return cls(canary, shares, limit, parallel, pause_s)

    def split(self, total: int) -> list[range]:
        """The waves as ranges of the devices' numbers, none of them empty; the last one ends with the last device."""
        ends = [min(self.canary, total), *(share.of(total) for share in self.waves), total]
        waves, begin = [], 0
        for end in ends:
            if end > begin:
                waves.append(range(begin, end))
                begin = end
        return waves

    def as_json(self) -> dict[str, Any]:
        return {
            "canary": self.canary,
            "waves": [str(share) for share in self.waves],
            "max_failures": None if self.failures_max is None else str(self.failures_max),
            "parallel": self.parallel,
            "pause_s": self.pause_s,
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> Strategy:
        """Raises ConfigInvalid, KeyError or TypeError where it was not written by `as_json`."""
        limit = value["max_failures"]
        return cls(
            int(value["canary"]),
            tuple(Share.parse(str(word)) for word in value["waves"]),
            None if limit is None else Share.parse(str(limit)),
            int(value["parallel"]),
            float(value["pause_s"]),
        )
