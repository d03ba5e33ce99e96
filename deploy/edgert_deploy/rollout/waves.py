"""Waves: the order in which devices get a release, and the number of failures that stops a rollout.

This module does no I/O: `roll_out` applies the order and the limit.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass
from typing import Any

from edgert.errors import ConfigInvalid
from edgert_deploy.common.parallel import AT_ONCE_DEFAULT

PARALLEL_MAX = 256
WAVES_MAX = 100


@dataclass(frozen=True)
class CountOrShare:
    """A number of devices (`count`), or a share of all devices (`part`). Exactly one is not None."""

    count: int | None = None
    part: float | None = None

    @classmethod
    def parse(cls, text: str) -> CountOrShare:
        """Parse `3`, `10%` or `2.5%`. Raises ConfigInvalid."""
        match = re.fullmatch(r"(\d{1,9})|(\d{1,3}(?:\.\d{1,4})?)%", text.strip(), re.ASCII)
        if match and match[1]:
            return cls(count=int(match[1]))
        if match and float(match[2]) <= 100:
            return cls(part=float(match[2]) / 100)
        raise ConfigInvalid(f"{text[:40]!r} is not a number of devices: give a count (3) or a share up to 100% (10%)")

    def of(self, total: int) -> int:
        """Return the number of devices out of `total`, rounded up: 10 % of three devices is one."""
        if self.part is not None:
            return math.ceil(round(self.part * total, 9))
        return min(self.count or 0, total)

    def exceeded(self, failed: int, begun: int) -> bool:
        """Whether `failed` is more than this share of `begun` devices."""
        # Rounded, because 0.29 * 100 is a little less than 29.
        return failed > ((self.count or 0) if self.part is None else round(self.part * begun, 9))

    def __str__(self) -> str:
        return str(self.count) if self.part is None else f"{self.part * 100:g}%"


@dataclass(frozen=True)
class Strategy:
    """The order and the limits of a rollout.

    Attributes:
        canary: The number of devices in the first wave; 0 means that there is no canary wave.
        waves: For each further wave, the share of all devices that have been tried when the wave ends.
        failures_max: The rollout stops if more than this share of the devices in the waves so far failed. With None,
            failures never stop it.
    """

    canary: int = 0
    waves: tuple[CountOrShare, ...] = ()
    failures_max: CountOrShare | None = None
    parallel: int = AT_ONCE_DEFAULT
    pause_s: float = 0.0

    @classmethod
    def parse(cls, canary: int, waves: str, failures_max: str | None, parallel: int, pause_s: float) -> Strategy:
        """Parse the options. Waves stop at the first failure by default. Raises ConfigInvalid."""
        shares = tuple(CountOrShare.parse(word) for word in waves.split(",") if word.strip())
        if len(shares) > WAVES_MAX:
            raise ConfigInvalid(f"{len(shares)} waves are too many: give at most {WAVES_MAX}")
        for share, following in itertools.pairwise(shares):
            if (share.part or 0) >= (following.part or 0) and (share.count or 0) >= (following.count or 0):
                raise ConfigInvalid(
                    f"wave {following} adds no device after {share}: each wave names the share of all devices that have been "
                    "tried when the wave ends, so give rising shares, such as 10%,50%,100%"
                )
        limit = None if failures_max is None else CountOrShare.parse(failures_max)
        if limit is None and (canary or shares):
            limit = CountOrShare(count=0)
        return cls(canary, shares, limit, parallel, pause_s)

    def split(self, total: int) -> list[range]:
        """Return the waves as ranges of device indexes. No range is empty, and together they have all devices."""
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
        """Read the JSON of `as_json`. Raises ConfigInvalid, KeyError or TypeError."""
        limit = value["max_failures"]
        return cls(
            int(value["canary"]),
            tuple(CountOrShare.parse(str(word)) for word in value["waves"]),
            None if limit is None else CountOrShare.parse(str(limit)),
            int(value["parallel"]),
            float(value["pause_s"]),
        )
