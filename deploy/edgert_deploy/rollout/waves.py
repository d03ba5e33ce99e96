"""Waves: the order in which devices get a release, and the number of failures that stops a rollout.

This module does no I/O: `roll_out` applies the order and the limit.
"""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import dataclass

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
    """The order and the limits of a rollout. Raises ConfigInvalid for a text that is no CountOrShare.

    Attributes:
        canary: The number of devices in the first wave; 0 means that there is no canary wave.
        waves: For each further wave, the share of all devices that have been tried when the wave ends.
        max_failures: The rollout stops if more than this share of the devices in the waves so far failed. With None,
            failures never stop it.
    """

    canary: int = 0
    waves: tuple[str, ...] = ()
    max_failures: str | None = None
    parallel: int = AT_ONCE_DEFAULT
    pause_s: float = 0.0

    def __post_init__(self) -> None:
        if len(self.waves) > WAVES_MAX:
            raise ConfigInvalid(f"{len(self.waves)} waves are too many: give at most {WAVES_MAX}")
        for share, following in itertools.pairwise(map(CountOrShare.parse, self.waves)):
            if (share.part or 0) >= (following.part or 0) and (share.count or 0) >= (following.count or 0):
                raise ConfigInvalid(
                    f"wave {following} adds no device after {share}: each wave names the share of all devices that have been "
                    "tried when the wave ends, so give rising shares, such as 10%,50%,100%"
                )
        CountOrShare.parse(self.max_failures or "0")

    @classmethod
    def parse(cls, canary: int, waves: str, max_failures: str | None, parallel: int, pause_s: float) -> Strategy:
        """Parse the options. Waves stop at the first failure by default. Raises ConfigInvalid."""
        shares = tuple(word.strip() for word in waves.split(",") if word.strip())
        if max_failures is None and (canary or shares):
            max_failures = "0"
        return cls(canary, shares, max_failures, parallel, pause_s)

    def too_many_failed(self, failed: int, begun: int) -> bool:
        return self.max_failures is not None and CountOrShare.parse(self.max_failures).exceeded(failed, begun)

    def split(self, total: int) -> list[range]:
        """Return the waves as ranges of device indexes. No range is empty, and together they have all devices."""
        ends = [min(self.canary, total), *(CountOrShare.parse(share).of(total) for share in self.waves), total]
        waves, begin = [], 0
        for end in ends:
            if end > begin:
                waves.append(range(begin, end))
                begin = end
        return waves
